"""Run folders: made once, described, cleared of other runs' checkpoints, and found again."""

import json
import os
import threading
from pathlib import Path

import pytest
import yaml

from utils.core.errors import UserError
from utils.run.folder import (
    create_run_dir,
    find_resumable,
    how_to_go_on,
    lockstep_version,
    prepare_weights_dir,
    script,
    versions,
    write_description,
)


def make_run(run_dir: Path, seconds: int, names: tuple[str, ...] = ("last.pt",)) -> Path:
    """A run folder whose checkpoints were written at a time."""
    (run_dir / "weights").mkdir(parents=True)
    (run_dir / "opt.yaml").write_text("")
    for name in names:
        path = run_dir / "weights" / name
        path.write_bytes(b"")
        os.utime(path, (seconds, seconds))
    return run_dir


# Made -----------------------------------------------------------------------------------------------------------------


def test_names_that_are_taken_get_a_number(tmp_path: Path) -> None:
    project = str(tmp_path / "a" / "b")
    made = [create_run_dir(project, "exp") for _ in range(3)]
    assert [path.name for path in made] == ["exp", "exp2", "exp3"]
    made[1].rmdir()
    assert create_run_dir(project, "exp").name == "exp2"
    assert create_run_dir(project, "exp", exist_ok=True).name == "exp"
    assert create_run_dir(project, "v1.5").name == "v1.5"
    assert create_run_dir(project, "v1.5").name == "v1.52"
    assert create_run_dir(project, "sub/x") == tmp_path / "a/b/sub/x"


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    made: list[Path] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait()
        made.append(create_run_dir(str(tmp_path / "runs"), "exp"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8


@pytest.mark.parametrize("exist_ok", [False, True])
def test_folders_that_cannot_be_made(tmp_path: Path, exist_ok: bool) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "unmounted" / "disk")
    for project in ("file", "file/sub", "nowhere"):
        with pytest.raises(UserError, match=rf"^--project .*{project}: .*can't be made \(.*\); choose a folder"):
            create_run_dir(str(tmp_path / project), "exp", exist_ok)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "exp").write_text("")
    assert create_run_dir(str(tmp_path), "exp").name == "exp2"
    with pytest.raises(UserError, match=r"exp can't be made \(File exists\)"):
        create_run_dir(str(tmp_path), "exp", exist_ok=True)


def test_checkpoints_of_another_run_go(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    prepare_weights_dir(weights)
    for name in ("last.pt", "last.prev.pt", "best.pt", "epoch10.pt", "mine.pt", "last.txt"):
        (weights / name).write_text("")
    prepare_weights_dir(weights)
    assert {path.name for path in weights.iterdir()} == {"mine.pt", "last.txt"}


# Described ------------------------------------------------------------------------------------------------------------


def test_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--data", "my data.yaml"])
    config = {"weights": "", "data": "d\u00e4ten.yaml", "freeze": [0], "deterministic": None}
    write_description(tmp_path, config, {"lr0": 0.01, "box": 0.05}, {"global_batch": 16})
    assert yaml.safe_load((tmp_path / "opt.yaml").read_text()) == config
    assert (tmp_path / "hyp.yaml").read_text() == "lr0: 0.01\nbox: 0.05\n"  # in the order given
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert facts["command"].endswith(" train.py --data 'my data.yaml'")
    assert facts["plan"] == {"global_batch": 16}
    assert facts["versions"] == versions()
    assert {"lockstep", "python", "torch", "numpy"} <= versions().keys()
    assert lockstep_version()[0].isdigit()


# Found again ----------------------------------------------------------------------------------------------------------


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    """By its checkpoints, not its folder; runs without one do not count, and equal times lose none."""
    old = make_run(tmp_path / "new name", 1000, ("last.pt", "best.pt"))
    new = make_run(tmp_path / "exp", 3000)
    spare = make_run(tmp_path / "exp2", 2000, ("last.prev.pt",))
    twin = make_run(tmp_path / "exp3", 1000)
    make_run(tmp_path / "exp4", 9000, ("best.pt",))
    (tmp_path / "exp5").mkdir()
    found = find_resumable("", str(tmp_path))
    assert [run for run, _ in found[:2]] == [new, spare]
    assert {run for run, _ in found[2:]} == {old, twin}
    assert all(run is not None and path == run / "weights" / "last.pt" for run, path in found)


def test_a_run_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs" / "exp", 1000, ("last.pt", "epoch3.pt"))
    monkeypatch.chdir(tmp_path)
    assert find_resumable("runs/exp", "elsewhere") == [(run, run / "weights" / "last.pt")]
    assert find_resumable("runs/exp/weights/epoch3.pt", "") == [(run, run / "weights" / "epoch3.pt")]


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--resume: no run with weights/last.pt under .*nothing; name a run folder"):
        find_resumable("", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"^--resume .*exp: no weights/last.pt there"):
        find_resumable(str(tmp_path / "exp"), "runs/train")


def test_a_run_that_has_saved_nothing(tmp_path: Path) -> None:
    """It ended in its first epoch: it is as good as one that never was."""
    run = make_run(tmp_path / "my exp", 1000, ())
    write_description(run, {"weights": ""}, {}, {})
    assert how_to_go_on(run) == []
    with pytest.raises(UserError, match=rf"^--resume {run}: nothing was saved there yet; start the run again$"):
        find_resumable(str(run), "runs")
    (run / "weights/last.prev.pt").touch()
    assert how_to_go_on(run) == [f"go on with: python {script('train.py')} --resume '{run}'"]
    assert find_resumable(str(run), "runs") == [(run, run / "weights" / "last.pt")]
