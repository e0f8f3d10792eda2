"""A1: several ranks that miss the same file: one of them fetches it, all go on with it, or all say why not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.families import YOLOV5
from tests import servers
from tests.common import PROJECT
from tests.dist.launch import free_port, torchrun
from tests.runs import CHILD_ENVIRONMENT, make_data
from tests.servers import Server, whole, zip_of
from tests.test_no_network import TINY
from utils.config.yaml_files import load_yaml
from utils.data.downloads import MIRROR
from utils.torch_utils import save_checkpoint


@pytest.fixture
def site() -> Iterator[tuple[Server, str]]:
    with servers.serving() as (server, address):
        yield server, address


def write_run(folder: Path) -> tuple[bytes, list[str]]:
    """A data set as an archive, and the command line of a run that needs it."""
    make_data(folder / "drawn", 4, 2)
    files = {str(p.relative_to(folder / "drawn")): p.read_bytes() for p in (folder / "drawn").glob("*/*/*")}
    (folder / "my.yaml").write_text(
        f"path: {folder}/set\ntrain: images/train\nval: images/val\nnames: [blue, red]\n"
        "download: https://nowhere.invalid/files/d.zip\n"
    )
    (folder / "tiny.yaml").write_text(TINY)
    flags = f"--data {folder}/my.yaml --cfg {folder}/tiny.yaml --epochs 1 --batch 4 --img 64 --device cpu --workers 0"
    return zip_of(files), f"train.py {flags} --noplots --project {folder}/runs --name run".split()


@pytest.mark.slow
def test_ranks_of_a_launcher_fetch_once(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    archive, command = write_run(tmp_path)
    server.answers["/d.zip"] = whole(archive)
    done = torchrun(command, 2, port=free_port(), env={MIRROR: address, "LOCKSTEP_OFFLINE": ""}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert server.asked == ["/d.zip"]
    assert (tmp_path / "runs/run/weights/best.pt").exists()


@pytest.mark.slow
def test_ranks_without_a_network_say_it_once(tmp_path: Path) -> None:
    """A data set and weights that are both missing, in one message, soon."""
    _, command = write_run(tmp_path)
    before = sorted(os.listdir(tmp_path))
    weights = tmp_path / "yolov5n.pt"
    command += ["--weights", str(weights)]
    environment = {"LOCKSTEP_OFFLINE": "1"}
    done = torchrun(command, 2, port=free_port(), env=environment, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert f"--weights {weights} is not there and can't be fetched: LOCKSTEP_OFFLINE is set" in done.stderr
    assert f"https://github.com/ultralytics/yolov5/releases/download/v7.0/yolov5n.pt  ->  {weights}" in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.slow
@pytest.mark.gate
def test_ranks_fetch_data_and_weights_once(site: tuple[Server, str], tmp_path: Path) -> None:
    """With a list of devices: the process that starts the ranks needs them as well, to see what they are of."""
    server, address = site
    archive, command = write_run(tmp_path)
    network = YOLOV5.build(load_yaml(tmp_path / "tiny.yaml"), 2, ["blue", "red"])
    content = {"model": network.state_dict(), "spec": network.yaml, "names": network.names, "config": {"imgsz": 64}}
    save_checkpoint(content, tmp_path / "served.pt", keep_previous=False)
    server.answers |= {"/yolov5n.pt": whole((tmp_path / "served.pt").read_bytes()), "/d.zip": whole(archive)}
    command = [word for word in command if word not in ("--cfg", f"{tmp_path}/tiny.yaml")]
    command += ["--weights", str(tmp_path / "yolov5n.pt"), "--device", "cpu,cpu"]
    done = subprocess.run(
        [sys.executable, str(PROJECT / command[0]), *command[1:]], cwd=tmp_path,
        env=CHILD_ENVIRONMENT | {MIRROR: address, "LOCKSTEP_OFFLINE": ""}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert server.asked == ["/yolov5n.pt", "/d.zip"]
    assert (tmp_path / "runs/run/weights/best.pt").exists()
