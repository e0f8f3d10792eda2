"""Archives: good ones come out as they went in, hostile and damaged ones leave nothing anywhere."""

import io
import os
import resource
import stat
import struct
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.servers import gzipped, tar_of, zip_of
from utils.core.errors import UserError
from utils.data import archives
from utils.data.archives import unpack

FILES = {
    "set/images/train/a b.jpg": b"\xff\xd8" * 900,
    "set/labels/train/\u00e9.txt": b"0 0.5 0.5 1 1\n",
    "set/empty": b"",
}


def link(kind: bytes, to: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, to
    return info


def zip_entry(name: str, mode: int, content: bytes) -> bytes:
    """A zip with one entry of a Unix mode."""
    out = io.BytesIO()
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, mode << 16
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(info, content)
    return out.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(content: bytes, tmp_path: Path, words: str = "") -> str:
    """An archive that is refused as a whole: nothing is written, neither inside nor outside of its place."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "x.zip").write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as info:
        unpack(home / "x.zip", home / "data")
    assert words in str(info.value), str(info.value)
    assert str(home / "x.zip") in str(info.value)
    assert sorted(tmp_path.rglob("*")) == before
    return str(info.value)


# Good ones ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        zip_of(FILES),
        zip_of(FILES, zipfile.ZIP_STORED),
        zip_of({"set/": b"", "set/images/": b"", **FILES}),
        tar_of(FILES),
        tar_of(FILES, "w:gz"),
        tar_of({"./": link(tarfile.DIRTYPE, ""), **{f"./{name}": content for name, content in FILES.items()}}),
        tar_of({"pax": link(tarfile.DIRTYPE, ""), **FILES, "long/" + "x" * 150 + "/" + "y" * 200: b"1"}),
    ],
    ids=["zip", "stored", "zip with folders", "tar", "tar.gz", "from a folder", "long names"],
)
def test_what_goes_in_comes_out(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    unpack(tmp_path / "x.bin", tmp_path / "data")
    found = tree(tmp_path / "data")
    assert {name: found[name] for name in FILES} == FILES
    assert len(found) in (len(FILES), len(FILES) + 1)
    assert sorted(os.listdir(tmp_path)) == ["data", "x.bin"]


def test_files_get_no_permissions_of_their_own(tmp_path: Path) -> None:
    info = tarfile.TarInfo()
    info.mode = 0o6777
    for name, content in {"a.tar": tar_of({"run.sh": info}), "a.zip": zip_entry("run.sh", 0o106777, b"")}.items():
        (tmp_path / name).write_bytes(content)
        unpack(tmp_path / name, tmp_path / f"{name}.d")
        mode = (tmp_path / f"{name}.d/run.sh").stat().st_mode
        assert stat.S_IMODE(mode) & 0o6111 == 0, oct(mode)


# Paths that lead out --------------------------------------------------------------------------------------------------

PATHS = [
    "../out.txt",
    "a/../../out.txt",
    "a/..",
    "..",
    "/tmp/lockstep-out.txt",
    "//host/share/x",
    "C:/out.txt",
    "c:out.txt",
    "..\\out.txt",
    "a\\b.txt",
    "\\\\host\\x",
    "a\nb",
    "a\x1b[2Jb",
    "x" * 300,
    "/".join(["abcdefgh"] * 600),
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_lead_out(path: str, tmp_path: Path) -> None:
    """PEP 706's list; the harmless file before it is not written either."""
    words = "File name too long" if len(path) > 255 else "the path"
    refused(zip_of({"good.txt": b"1", path: b"2"}), tmp_path, words)
    refused(tar_of({"good.txt": b"1", path: b"2"}), tmp_path, words)


def test_a_null_byte_in_a_name(tmp_path: Path) -> None:
    content = zip_of({"a_.txt": b"1"}).replace(b"a_.txt", b"a\0.txt")
    refused(content, tmp_path, "the path")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (link(tarfile.SYMTYPE, "/etc/passwd"), "is a link or a device"),
        (link(tarfile.SYMTYPE, "good.txt"), "is a link or a device"),
        (link(tarfile.LNKTYPE, "good.txt"), "is a link or a device"),
        (link(tarfile.CHRTYPE, ""), "is a link or a device"),
        (link(tarfile.BLKTYPE, ""), "is a link or a device"),
        (link(tarfile.FIFOTYPE, ""), "is a link or a device"),
    ],
)
def test_links_and_devices_in_tars(entry: tarfile.TarInfo, words: str, tmp_path: Path) -> None:
    for mode in ("w", "w:gz"):
        refused(tar_of({"good.txt": b"1", "odd": entry}, mode), tmp_path, words)


@pytest.mark.parametrize(
    ("mode", "words"),
    [(stat.S_IFLNK, "is a link"), (stat.S_IFCHR, "is a device"), (stat.S_IFIFO, "is a device")],
)
def test_links_and_devices_in_zips(mode: int, words: str, tmp_path: Path) -> None:
    refused(zip_entry("odd", mode | 0o777, b"/etc/passwd"), tmp_path, words)


def test_a_link_that_a_later_file_goes_through(tmp_path: Path) -> None:
    entries: dict[str, bytes | tarfile.TarInfo]
    entries = {"dir": link(tarfile.SYMTYPE, str(tmp_path)), "dir/out.txt": b"1"}
    refused(tar_of(entries), tmp_path, "'dir' is a link")
    assert not (tmp_path / "out.txt").exists()


def test_names_that_stand_in_each_others_way(tmp_path: Path) -> None:
    refused(zip_of({"a": b"1", "a/b": b"2"}), tmp_path, "can't be unpacked into")
    refused(zip_of({"a/b": b"1", "a": b"2"}), tmp_path, "can't be unpacked into")
    refused(tar_of({"a/b": b"1", "./a/b": b"2"}), tmp_path, "can't be unpacked into")


# Bombs ----------------------------------------------------------------------------------------------------------------

ZEROS = bytes(10_000_000)


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_bombs_are_told_by_their_ratio(kind: str, tmp_path: Path) -> None:
    """Ten million zeros once are harmless, six times they are not."""
    make = zip_of if kind == "zip" else lambda files: tar_of(files, "w:gz")
    (tmp_path / "small").write_bytes(make({"0": ZEROS}))
    unpack(tmp_path / "small", tmp_path / "one")
    content = make({str(number): ZEROS for number in range(6)})
    start = time.monotonic()
    refused(content, tmp_path, "would become more than")
    assert time.monotonic() - start < 5


def test_the_limit_is_of_all_files_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {str(number): os.urandom(1000) for number in range(20)}
    monkeypatch.setattr(archives, "RATIO", 0)
    for number, content in enumerate((zip_of(files), tar_of(files), tar_of(files, "w:gz"))):
        monkeypatch.setattr(archives, "SMALL", 19_999)
        refused(content, tmp_path, "would become more than 19999 bytes")
        monkeypatch.setattr(archives, "SMALL", 20_000)
        (tmp_path / "good").write_bytes(content)
        unpack(tmp_path / "good", tmp_path / str(number))
        assert len(tree(tmp_path / str(number))) == 20


def test_more_than_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "SPARE", 1 << 60)
    refused(zip_of(FILES), tmp_path, "MB of disk")


def test_a_zip_that_says_less_than_it_holds(tmp_path: Path) -> None:
    """Or more; the size in the directory is the one that was checked, and no byte beyond it is written."""
    for size in (10, len(ZEROS) + 10):
        content = bytearray(zip_of({"a": ZEROS}))
        for mark, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
            struct.pack_into("<I", content, content.find(mark) + offset, size)
        refused(bytes(content), tmp_path)


def test_files_that_share_their_bytes(tmp_path: Path) -> None:
    """The bomb of D. Fifield (2019): all entries of the directory point to the same data."""
    single = zip_of({"a": ZEROS})
    start = single.index(b"PK\x01\x02")
    entry, end = single[start : single.index(b"PK\x05\x06")], bytearray(single[single.index(b"PK\x05\x06") :])
    count = 50
    entries = b"".join(entry[:46] + bytes([65 + number]) for number in range(count))
    struct.pack_into("<HHI", end, 8, count, count, len(entries))
    refused(single[:start] + entries + bytes(end), tmp_path, "would become more than")


def test_a_tar_whose_header_claims_all_memory(tmp_path: Path) -> None:
    """A name of 4 GB, and a size below zero, which made tarfile loop for ever (CVE-2025-8194)."""
    for kind, size in ((tarfile.XHDTYPE, 1 << 32), (tarfile.GNUTYPE_LONGNAME, 1 << 32), (tarfile.XHDTYPE, -512)):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, size
        for content in (info.tobuf(tarfile.GNU_FORMAT), gzipped(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))):
            refused(content, tmp_path)
    info = tarfile.TarInfo("x")
    info.size = -1024
    refused(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024), tmp_path)


def test_a_header_of_a_large_tar_is_not_read_as_a_whole(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 400 << 20
    with (tmp_path / "x.tar").open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(1 << 30)  # takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="a header of it is damaged or far too long"):
        unpack(tmp_path / "x.tar", tmp_path / "data")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KB


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [zip_of, tar_of, lambda files: tar_of(files, "w:gz")], ids=["zip", "tar", "tar.gz"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_archives_that_are_cut_short(make, share: float, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    content = make({str(number): os.urandom(5000) for number in range(10)})
    refused(content[: int(len(content) * share)], tmp_path)


def test_a_changed_byte_in_a_zip(tmp_path: Path) -> None:
    content = bytearray(zip_of({"a": bytes(range(256)) * 10}, zipfile.ZIP_STORED))
    content[500] ^= 1
    refused(bytes(content), tmp_path, "'a' is damaged")


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>" * 40, b"PK", b"\x1f\x8b", b"BZh9" + bytes(600)])
def test_other_files(content: bytes, tmp_path: Path) -> None:
    refused(content, tmp_path)


SEEDS = [zip_of(FILES), tar_of(FILES), tar_of(FILES, "w:gz"), tar_of({"p" * 120: b"1", **FILES})]


@settings(max_examples=150, deadline=None)
@given(seed=st.sampled_from(range(len(SEEDS))), changes=st.lists(st.tuples(st.integers(0), st.binary(max_size=8))))
def test_damaged_archives_are_mistakes_not_crashes(seed: int, changes: list[tuple[int, bytes]]) -> None:
    content = bytearray(SEEDS[seed])
    for place, value in changes:
        at = place % len(content)
        content[at : at + len(value)] = value
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x").write_bytes(content)
        try:
            unpack(folder / "x", folder / "data")
        except UserError:
            assert os.listdir(folder) == ["x"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KB


def test_more_names_than_memory_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files have no ratio: a small tar.gz may hold millions of them."""
    monkeypatch.setattr(archives, "MOST_ENTRIES", 3)
    refused(gzipped(tar_of({f"set/{i}": b"" for i in range(4)})), tmp_path, "more than 3 files")
