"""Training through the command line: runs, files, resume, early stop, mistakes."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.common import PROJECT

TIMEOUT = 300


def launch(*arguments: str, cwd: Path, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(PROJECT / script), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def make_data(folder: Path, train: int = 10, val: int = 4) -> Path:
    """Draw squares on noise, two classes by color, and return the data YAML."""
    rng = np.random.default_rng(0)
    for split, count in {"train": train, "val": val}.items():
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(count):
            image = rng.integers(0, 80, (48, 64, 3), dtype=np.uint8)
            rows = []
            for _ in range(number % 3):  # some images are empty
                category, x, y, side = (int(rng.integers(*span)) for span in ((0, 2), (0, 40), (0, 24), (12, 24)))
                cv2.rectangle(image, (x, y), (x + side, y + side), ((255, 0, 0), (0, 0, 255))[category], -1)
                box = ((x + side / 2) / 64, (y + side / 2) / 48, side / 64, side / 48)
                rows.append(" ".join(map(str, (category, *np.clip(box, 0, 1)))))
            cv2.imwrite(str(folder / f"images/{split}/{number}.png"), image)
            (folder / f"labels/{split}/{number}.txt").write_text("\n".join(rows))
    path = folder / "data.yaml"
    path.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [blue, red]\n")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def flags(data: Path, **more: object) -> list[str]:
    """Return the flags of a tiny run."""
    settings: dict[str, object] = {"data": data, "img": 64, "batch": 4, "epochs": 3, "workers": 1, "name": "run"} | more
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def whole_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three epochs."""
    folder = tmp_path_factory.mktemp("whole")
    done = launch(*flags(data), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs/train/run"


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def tensors(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """Flatten a nested state into its tensors by path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        return {path: tensor for key, item in value.items() for path, tensor in tensors(item, f"{name}/{key}").items()}
    if isinstance(value, list | tuple):
        return tensors(dict(enumerate(value)), name)
    return {}


def test_run_folder(whole_run: Path) -> None:
    """What the README promises is there, and what it says."""
    for name in ("weights/last.pt", "weights/last.prev.pt", "weights/best.pt", "opt.yaml", "hyp.yaml", "results.csv"):
        assert (whole_run / name).is_file(), name
    assert "train.py" in (whole_run / "environment.json").read_text()
    with (whole_run / "results.csv").open() as file:
        rows = [{key.strip(): value.strip() for key, value in row.items()} for row in csv.DictReader(file)]
    assert list(rows[0]) == [
        *("epoch", "train/box_loss", "train/obj_loss", "train/cls_loss"),
        *("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"),
        *("val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1", "x/lr2"),
    ]
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert all(np.isfinite(float(value)) for row in rows for value in row.values())


def test_checkpoint_holds_everything_that_moves(whole_run: Path) -> None:
    """I4's list, in full precision, loadable without running code (ultralytics/yolov5#13513)."""
    state = load(whole_run / "weights/last.pt")
    needed = {"model", "ema", "optimizer", "scaler", "gradients", "meter", "rng", "state", "config", "hyp", "versions"}
    assert needed <= state.keys()
    assert {"epoch", "batch", "step", "since_step", "best_fitness", "best_epoch", "class_maps"} <= state["state"].keys()
    dtypes = {tensor.dtype for tensor in tensors(state["model"]).values() if tensor.is_floating_point()}
    assert dtypes == {torch.float32}
    best = load(whole_run / "weights/best.pt")
    assert "optimizer" not in best and "ema" not in best and "model" in best


def test_resume_continues_exactly(data: Path, whole_run: Path, tmp_path: Path) -> None:
    """Stopped after an epoch and resumed, the end is bit-identical (ultralytics/yolov5#141, #292, U #23973)."""
    started = subprocess.Popen(
        [sys.executable, str(PROJECT / "train.py"), *flags(data)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    run_dir = tmp_path / "runs/train/run"
    assert started.stdout is not None
    for line in started.stdout:
        if re.match(r"\s+all\s", line) and (run_dir / "weights/last.pt").exists():
            break  # the second validation: epoch 1 is saved, epoch 2 is not yet
    started.kill()
    started.wait()
    epoch = load(run_dir / "weights/last.pt")["state"]["epoch"]
    assert 0 < epoch < 3, "killed too late to test anything"

    resumed = launch("--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert not (tmp_path / "runs/train/run2").exists()  # the same folder (ultralytics/ultralytics#21963)
    expected, found = (tensors(load(folder / "weights/last.pt")) for folder in (whole_run, run_dir))
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, different[:5]
    with (run_dir / "results.csv").open() as file:
        assert [row[0].strip() for row in csv.reader(file)] == ["epoch", "0", "1", "2"]


def test_finished_run_is_not_resumed(data: Path, whole_run: Path) -> None:
    done = launch("--resume", str(whole_run), cwd=whole_run.parent)
    assert done.returncode == 2
    assert "nothing is left to resume" in done.stderr


def test_resume_refuses_other_settings(whole_run: Path) -> None:
    done = launch("--resume", str(whole_run), "--batch", "2", cwd=whole_run.parent)
    assert done.returncode == 2 and "--batch-size" in done.stderr and "Traceback" not in done.stderr


def test_workers_and_cache_change_nothing(data: Path, whole_run: Path, tmp_path: Path) -> None:
    done = launch(*flags(data, workers=0, cache="off"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected, found = (load(folder / "weights/last.pt") for folder in (whole_run, tmp_path / "runs/train/run"))
    assert all(torch.equal(expected["model"][name], found["model"][name]) for name in expected["model"])


def test_val_measures_what_training_measured(data: Path, whole_run: Path, tmp_path: Path) -> None:
    """val.py on best.pt repeats the best epoch's row of results.csv."""
    best = whole_run / "weights/best.pt"
    done = launch(
        "--weights", str(best), "--data", str(data), "--img", "64", "--batch", "4", cwd=tmp_path, script="val.py"
    )
    assert done.returncode == 0, done.stderr
    table_row = re.search(r"^\s+all(.*)$", done.stdout, re.M)
    assert table_row is not None
    figures = [float(word) for word in table_row[1].split()[2:]]
    with (whole_run / "results.csv").open() as file:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]
    best_row = max(rows, key=lambda row: 0.1 * row[6] + 0.9 * row[7])
    np.testing.assert_allclose(figures, best_row[4:8], atol=6e-4)  # the table shows three digits


def test_finetuning_with_other_classes_keeps_all_but_the_head(whole_run: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path / "one")
    text = data.read_text().replace("[blue, red]", "[blue, red, green]")
    data.write_text(text)
    done = launch(*flags(data, epochs=1, weights=whole_run / "weights/best.pt"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tensors taken" in done.stdout


def test_early_stop_save_period_and_freeze(data: Path, tmp_path: Path) -> None:
    """Frozen layers do not move; a run without progress ends after --patience epochs."""
    more = {"epochs": 8, "patience": 1, "save_period": 1, "freeze": 10}
    done = launch(*flags(data, **more), "--hyp", "hyp.no-augmentation.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    weights = tmp_path / "runs/train/run/weights"
    assert "stopping early" in done.stdout
    first, last = load(weights / "epoch1.pt")["model"], load(weights / "last.pt")["model"]
    same = {name.split(".")[1] for name in first if name.endswith("weight") and torch.equal(first[name], last[name])}
    assert same >= {str(layer) for layer in range(10)} and "20" not in same


@pytest.mark.parametrize("mode", ["--rect", "--multi-scale", "--noval", "--nosave", "--cos-lr"])
def test_switches_run(data: Path, tmp_path: Path, mode: str) -> None:
    done = launch(*flags(data, epochs=2), mode, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/train/run/weights/best.pt").exists()


def test_a_nan_batch_is_skipped(data: Path, tmp_path: Path) -> None:
    """A learning rate that explodes never puts NaN into a checkpoint (ultralytics/ultralytics#24615, #24170)."""
    (tmp_path / "wild.yaml").write_text("lr0: 10.0\nwarmup_bias_lr: 10.0\nwarmup_epochs: 0.0\nbox: 1000.0\n")
    done = launch(*flags(data, epochs=3, hyp=tmp_path / "wild.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = load(tmp_path / "runs/train/run/weights/last.pt")
    assert all(tensor.isfinite().all() for tensor in tensors(state["model"]).values())


def test_all_mistakes_at_once_and_nothing_left_behind(tmp_path: Path) -> None:
    done = launch("--data", "nowhere.yaml", "--hyp", "nothing.yaml", "--cfg", "yolov5q.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("nowhere.yaml", "nothing.yaml", "yolov5q.yaml"))
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_a_copy_of_the_folder_resumes_in_place(data: Path, whole_run: Path, tmp_path: Path) -> None:
    """A moved run goes on where it is now; here it is finished, which says that its state was found."""
    moved = shutil.copytree(whole_run, tmp_path / "elsewhere")
    done = launch("--resume", str(moved), cwd=tmp_path)
    assert done.returncode == 2 and str(moved) in done.stderr
