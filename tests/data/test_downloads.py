"""A1, fetching: from servers that are good, slow, broken or hostile, by processes that ask at once, or not at all."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import servers
from tests.common import PROJECT, as_nobody, needs_root
from tests.servers import Server
from utils.config.published import ARCHIVES, WEIGHTS, Published
from utils.core.errors import UserError
from utils.data import downloads
from utils.data.downloads import MIRROR, OFFLINE, fetch, fetch_weights, file_name, shown

BODY = os.urandom(100_000)
DIGEST = f"sha256:{hashlib.sha256(BODY).hexdigest()}"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and nothing of the environment of whoever runs the tests."""
    for name in (OFFLINE, MIRROR, "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(downloads, "PAUSE", 0.01)
    monkeypatch.setattr(downloads, "STALL", 0.3)


@pytest.fixture
def site() -> Iterator[tuple[Server, str]]:
    with servers.serving() as (server, address):
        yield server, address


def get(address: str, target: Path, digest: str = "", size: int | None = None, start: bytes = b"") -> list[Path]:
    return fetch({target: Published(address, size=size, digest=digest, start=start)}, "--weights x.pt")


def refused(address: str, target: Path, *words: str, digest: str = "", size: int | None = None) -> str:
    """What is said where a file can't be fetched; nothing is left beside it."""
    with pytest.raises(UserError) as info:
        get(address, target, digest, size)
    message = str(info.value)
    for word in (*words, "--weights x.pt is not there and can't be fetched: ", f"  ->  {target}"):
        assert word in message, message
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    return message


# Good servers ---------------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_to_its_place(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/a/x.zip"] = servers.whole(BODY)
    target = tmp_path / "new" / "folder" / "y.zip"
    assert get(f"{address}/a/x.zip", target, DIGEST, len(BODY)) == [target]
    assert target.read_bytes() == BODY
    assert list(target.parent.iterdir()) == [target]


def test_what_is_there_is_not_asked_for(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    target = tmp_path / "x.zip"
    target.write_bytes(b"mine")
    assert get(f"{address}/x.zip", target, DIGEST) == []
    assert target.read_bytes() == b"mine"
    assert server.asked == []


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_a_length_need_not_be_announced(kind: str, site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/x.zip"] = servers.unannounced(BODY)
    get(f"{address}/x.zip", tmp_path / "x.zip", f"{kind}:{hashlib.new(kind, BODY).hexdigest()}", len(BODY))
    assert (tmp_path / "x.zip").read_bytes() == BODY


def test_a_short_answer_is_told_by_the_published_size(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/x.zip"] = servers.unannounced(BODY[:-1])
    refused(f"{address}/x.zip", tmp_path / "x.zip", "ended after 99999 of 100000 bytes", size=len(BODY))


def test_servers_may_lead_elsewhere(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/x.zip"] = servers.leading_to("/y.zip")
    server.answers["/y.zip"] = servers.whole(BODY)
    get(f"{address}/x.zip", tmp_path / "x.zip", DIGEST)
    assert (tmp_path / "x.zip").read_bytes() == BODY


def test_leftovers_of_a_killed_process_are_removed(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/x.zip"] = servers.whole(BODY)
    (tmp_path / ".x.zip.123.tmp").write_bytes(b"half")
    get(f"{address}/x.zip", tmp_path / "x.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]


# Servers that have a bad moment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        servers.failing(500),
        servers.failing(503),
        servers.failing(429),
        servers.cut(BODY, 50_000),
        servers.whole(BODY[:-1] + b"?"),
        servers.stalling(BODY, 50_000),
        servers.stalling(BODY, 0),
        servers.trickling(BODY),
    ],
    ids=["500", "503", "429", "short", "corrupt", "stalls", "silent", "trickles"],
)
def test_a_second_try(first: servers.Answer, site: tuple[Server, str], tmp_path: Path) -> None:
    """Ultralytics/yolov5#8703: what is cut short or damaged never gets its name."""
    server, address = site
    server.answers["/x.zip"] = servers.in_turn(first, servers.whole(BODY))
    start = time.monotonic()
    get(f"{address}/x.zip", tmp_path / "x.zip", DIGEST)
    assert time.monotonic() - start < servers.PATIENCE - 2  # a server that stalls does so for longer
    assert (tmp_path / "x.zip").read_bytes() == BODY
    assert len(server.asked) == 2


def test_a_broken_connection_goes_on_where_it_was(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/x.zip"] = servers.cut(BODY, 40_000, tag='"one"')
    get(f"{address}/x.zip", tmp_path / "x.zip", DIGEST)
    assert (tmp_path / "x.zip").read_bytes() == BODY
    assert [headers.get("Range") for headers in server.headers] == [None, "bytes=40000-", "bytes=80000-"]


def test_another_version_of_the_file_starts_anew(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    old = servers.cut(bytes(100_000), 40_000, tag='"old"')
    server.answers["/x.zip"] = servers.in_turn(old, servers.cut(BODY, 100_000, tag='"new"'))
    get(f"{address}/x.zip", tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == BODY


# Servers that are no good ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words", "asked"),
    [
        (servers.failing(404), "the server answers 404 Not Found", 1),
        (servers.failing(403), "the server answers 403", 1),
        (servers.failing(500), "the server answers 500", 4),
        (servers.cut(BODY, 50_000), "the connection ended after 50000 of 100000 bytes", 4),
        (servers.whole(BODY[:-1] + b"?"), f"the published file {DIGEST}", 4),
        (servers.whole(BODY[:-1]), "the server's file has 99999 bytes, the published one 100000", 1),
        (servers.unannounced(BODY * 2), "more than the 100000 bytes that were published", 1),
        (servers.stalling(BODY, 50_000), "hardly anything came", 4),
        (servers.leading_to("/x.zip"), "infinite loop", 5),
    ],
    ids=["404", "403", "500", "short", "corrupt", "other size", "endless", "stalls", "loop"],
)
def test_servers_that_are_no_good(
    answer: servers.Answer, words: str, asked: int, site: tuple[Server, str], tmp_path: Path
) -> None:
    server, address = site
    server.answers["/x.zip"] = answer
    refused(f"{address}/x.zip", tmp_path / "x.zip", words, f"{address}/x.zip", digest=DIGEST, size=len(BODY))
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("file:///etc/passwd", "url 'file:///etc/passwd' is not allowed"),
        ("data:,x", "url 'data:,x' is not allowed"),
        ("ftp://127.0.0.1/x", "leads to ftp://127.0.0.1/x, which is no https address"),
    ],
)
def test_servers_never_lead_to_other_kinds_of_addresses(
    target: str, words: str, site: tuple[Server, str], tmp_path: Path
) -> None:
    server, address = site
    server.answers["/x.zip"] = servers.leading_to(target)
    refused(f"{address}/x.zip", tmp_path / "x.zip", words)
    assert len(server.asked) == 1


def test_something_else_is_not_taken_for_weights(site: tuple[Server, str], tmp_path: Path) -> None:
    """What a hotel's network answers to everything."""
    server, address = site
    server.answers["/x.pt"] = servers.whole(b"<!DOCTYPE html><html>Log in, please</html>")
    with pytest.raises(UserError, match=r"sent something else, which begins with b'<!DOCTYPE html"):
        get(f"{address}/x.pt", tmp_path / "x.pt", start=b"PK")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    return servers.make_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


def test_https_stays_https(
    certificate: Path, site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, plain_address = site
    plain.answers["/x.zip"] = servers.whole(BODY)
    target = tmp_path / "to" / "x.zip"
    with servers.serving(certificate) as (server, address):
        server.answers |= {"/good.zip": servers.whole(BODY), "/x.zip": servers.leading_to(f"{plain_address}/x.zip")}
        refused(f"{address}/good.zip", target, "no safe connection")  # nobody vouches for the certificate
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        refused(f"{address}/x.zip", target, f"leads to {plain_address}/x.zip, which is no https address")
        assert plain.asked == []
        get(f"{address}/good.zip", target)
        plain.answers["/up.zip"] = servers.leading_to(f"{address}/good.zip")
        get(f"{plain_address}/up.zip", tmp_path / "up.zip")
    assert target.read_bytes() == (tmp_path / "up.zip").read_bytes() == BODY


def test_the_disk_is_not_filled(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    free = shutil.disk_usage(tmp_path).free
    server.answers["/x.zip"] = lambda request: request.begin(free)
    refused(f"{address}/x.zip", tmp_path / "x.zip", "of disk", "are free")
    assert len(server.asked) == 1


def test_a_full_disk_leaves_nothing(site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the length was not announced: the room is looked at on the way."""
    server, address = site
    server.answers["/x.zip"] = servers.unannounced(BODY)
    monkeypatch.setattr(downloads, "ROOM_EVERY", 1000)
    monkeypatch.setattr(downloads, "SPARE", shutil.disk_usage(tmp_path).total)
    refused(f"{address}/x.zip", tmp_path / "x.zip", "of disk", "are free")


@needs_root
def test_a_folder_that_may_not_be_written(site: tuple[Server, str], tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    words = r"--weights x.pt can't be fetched to .*Permission denied"
    with as_nobody(tmp_path), pytest.raises(UserError, match=words):
        get(f"{site[1]}/x.zip", tmp_path / "x.zip")


def test_a_place_below_a_file(site: tuple[Server, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"--weights x.pt can't be fetched to .*file/x.zip: "):
        get(f"{site[1]}/x.zip", tmp_path / "file" / "x.zip")


# No network -----------------------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("host", [f"127.0.0.1:{closed_port()}", "no-such-host.invalid"], ids=["refused", "unknown"])
def test_without_a_network_it_is_over_at_once(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    refused(f"http://{host}/x.zip", tmp_path / "x.zip", "no connection (", f"http://{host}/x.zip")
    assert time.monotonic() - start < 60  # names are looked up by the system, in its own time
    assert "trying again" not in capsys.readouterr().out


def test_offline_tries_nothing(site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, address = site
    server.answers["/x.zip"] = servers.whole(BODY)
    monkeypatch.setenv(OFFLINE, "1")
    refused(f"{address}/x.zip", tmp_path / "x.zip", "LOCKSTEP_OFFLINE is set")
    assert server.asked == []
    monkeypatch.setenv(OFFLINE, "0")
    get(f"{address}/x.zip", tmp_path / "x.zip")


def test_all_that_is_missing_is_named(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/a.zip"] = servers.whole(BODY)
    files = {tmp_path / f"{name}.zip": Published(f"{address}/{name}.zip") for name in "abc"}
    with pytest.raises(UserError) as info:
        fetch(files, "my.yaml: the data set")
    assert [line.split() for line in str(info.value).splitlines()[1:]] == [
        [f"{address}/{name}.zip", "->", str(tmp_path / f"{name}.zip")] for name in "bc"
    ]


# Mirrors and proxies --------------------------------------------------------------------------------------------------


def test_a_mirror_has_everything(site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, address = site
    server.answers |= {"/pub/yolov5s.pt": servers.whole(b"PK" + BODY), "/pub/data.zip": servers.whole(BODY)}
    monkeypatch.setenv(MIRROR, f"{address}/pub/")
    monkeypatch.chdir(tmp_path)
    fetch_weights(Path("yolov5s.pt"))
    get("https://nowhere.invalid/a/b/data.zip?key=secret", tmp_path / "y.zip")
    assert Path("yolov5s.pt").read_bytes() == b"PK" + BODY
    assert server.asked == ["/pub/yolov5s.pt", "/pub/data.zip"]


@pytest.mark.parametrize("mirror", ["file:///srv/files", "/srv/files", "ftp://host/x", "https://"])
def test_a_mirror_is_a_server(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MIRROR, mirror)
    refused("https://nowhere.invalid/x.zip", tmp_path / "x.zip", "is no https or http address")


def test_proxies_of_the_environment(site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, address = site
    server.answers["http://far.invalid/x.zip"] = servers.whole(BODY)  # as a proxy is asked
    monkeypatch.setenv("http_proxy", address)
    get("http://far.invalid/x.zip", tmp_path / "x.zip", DIGEST)
    assert server.asked == ["http://far.invalid/x.zip"]


# What is published ----------------------------------------------------------------------------------------------------


def test_published_files() -> None:
    """Plain http needs a digest: whoever sits in between could send anything else."""
    sizes = [f"yolov5{size}.pt" for size in ["n", "s", "m", "l", "x", "n6", "s6", "m6", "l6", "x6"]]
    assert sorted(WEIGHTS) == sorted(sizes)
    for name, file in [*WEIGHTS.items(), *ARCHIVES.items()]:
        parts = urlsplit(file.address)
        assert parts.scheme == "https" or (parts.scheme == "http" and file.digest.startswith("sha256:")), name
        kind, _, digits = file.digest.partition(":")
        assert (kind, len(digits)) in (("", 0), ("md5", 32), ("sha256", 64)), name
        assert "AGPL-3.0" in file.license if name in WEIGHTS else "terms" in file.license


def test_only_published_names_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MIRROR, f"http://127.0.0.1:{closed_port()}")
    fetch_weights(tmp_path / "best.pt")
    fetch_weights(tmp_path / "yolov5z.pt")
    with pytest.raises(UserError, match=r"^--weights .*yolov5n6.pt is not there and can't be fetched"):
        fetch_weights(tmp_path / "yolov5n6.pt")


def test_the_license_is_said(
    site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, address = site
    server.answers["/yolov5s.pt"] = servers.whole(b"PK" + BODY)
    monkeypatch.setenv(MIRROR, address)
    fetch_weights(tmp_path / "yolov5s.pt")
    line = f"fetching    {address}/yolov5s.pt to {tmp_path}/yolov5s.pt (YOLOv5's weights: AGPL-3.0, as their publisher"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://h/a/coco128.zip", "coco128.zip"),
        ("https://h/a/b%20c.zip?x=/d.zip", "b_c.zip"),
        ("https://h/..%2f..%2fetc%2fpasswd", "passwd"),
        ("https://h/a/..", "download"),
        ("https://h/", "download"),
        ("https://h/" + "a" * 500 + ".zip", "a" * 96 + ".zip"),
    ],
)
def test_names_of_files(address: str, name: str) -> None:
    assert file_name(address) == name


def test_secrets_are_not_shown() -> None:
    assert shown("https://me:word@host:8/a.zip?key=secret") == "https://host:8/a.zip?..."


# Several at once ------------------------------------------------------------------------------------------------------

ASK = "import sys; sys.path.insert(0, {root!r}); from pathlib import Path; "
ASK += "from utils.data.downloads import fetch_weights; "
ASK += "fetch_weights(Path('yolov5s.pt'))"


@pytest.mark.slow
@pytest.mark.gate
def test_two_runs_fetch_once(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/yolov5s.pt"] = servers.slowly(b"PK" + BODY, 2.0)
    command = [sys.executable, "-c", ASK.format(root=str(PROJECT))]
    environment = {**os.environ, MIRROR: address}
    runs = [subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    said = [run.communicate(timeout=300)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert server.asked == ["/yolov5s.pt"]
    assert sum("waiting     another process fetches" in text for text in said) <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["yolov5s.pt"]


def test_a_killed_process_leaves_no_lock(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/x.pt"] = servers.whole(BODY)
    code = f"import sys, time; sys.path.insert(0, {str(PROJECT)!r}); from pathlib import Path\n"
    code += (
        "from utils.data.downloads import locked\nwith locked(Path('x.pt')): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert (tmp_path / ".x.pt.lock").exists()
    holder.kill()
    holder.communicate()
    get(f"{address}/x.pt", tmp_path / "x.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
