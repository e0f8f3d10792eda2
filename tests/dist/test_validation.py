"""Validation on several ranks: the same bits as on one, each image once, and one verdict for all (rules I5, I7, R1)."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import val
from tests.common import PROJECT, SHARED, needs_shared
from tests.dist.commands import Case as Command
from tests.dist.commands import run_commands
from tests.dist.evaluations import Case, Part, bits, evaluate_here, evaluate_on_ranks
from tests.dist.launch import free_port, torchrun
from tests.runs import flags, make_data, results
from tests.test_val import NAMES, saved, yolov5n
from utils.checkpoints.files import load_checkpoint
from utils.torch_utils import process_group

LIMIT = 480.0  # seconds; on an idle machine ten are enough
BCCD = "bccd"
SIZES = [(480, 640), (640, 480), (300, 640), (640, 300), (480, 480)]  # [height, width]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of data sets with real images, and a checkpoint that was trained on them."""
    folder = tmp_path_factory.mktemp("golden")
    model = yolov5n(3, NAMES)
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    saved(folder / "golden.pt", model, imgsz=320)
    images = sorted((SHARED / "datasets/bccd/images/val").iterdir())
    copied(images, folder / BCCD)
    copied(images[:3], folder / "three")
    copied(images[:9], folder / "shapes")
    for number, path in enumerate(sorted((folder / "shapes/images").iterdir())):
        height, width = SIZES[number % len(SIZES)]
        image = cv2.imread(str(path))
        assert image is not None
        cv2.imwrite(str(path), cv2.resize(image, (width, height)))
    return folder


def copied(images: list[Path], folder: Path) -> None:
    """Make a data set of some images of SHARED; caches stay out of there."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for image in images:
        shutil.copy(image, folder / "images")
        shutil.copy(SHARED / f"datasets/bccd/labels/val/{image.stem}.txt", folder / "labels")
    (folder / "data.yaml").write_text(f"train: images\nval: images\nnames: {NAMES}\n")


def cases(golden: Path) -> dict[str, Case]:
    settings = {
        BCCD: (BCCD, 16, 0),
        "fewer images than a batch": ("three", 4, 2),  # a single batch: other ranks have none
        "fewer images than ranks": ("three", 1, 0),
        "many shapes": ("shapes", 2, 2),
    }
    return {
        name: Case(golden / "golden.pt", golden / data / "data.yaml", batch, workers)
        for name, (data, batch, workers) in settings.items()
    }


@pytest.fixture(scope="module")
def alone(golden: Path) -> dict[str, Part]:
    with process_group("cpu") as env:
        return {name: evaluate_here(case, env) for name, case in cases(golden).items()}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, marks=(pytest.mark.slow, pytest.mark.gate)),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4)),
    ],
)
def ranks(
    request: pytest.FixtureRequest, golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Part]]:
    """Parts of each case, by rank."""
    folder = tmp_path_factory.mktemp("ranks") / "job"
    wanted = cases(golden)
    return dict(zip(wanted, evaluate_on_ranks(list(wanted.values()), request.param, folder, LIMIT), strict=True))


@needs_shared
def test_every_bit_is_that_of_one_rank(alone: dict[str, Part], ranks: dict[str, list[Part]]) -> None:
    """I5, ultralytics/ultralytics#25575, ultralytics/yolov5#9992: metrics, every detection, and the loss."""
    for name, parts in ranks.items():
        main, *others = parts
        for field in ("losses", "images", "metrics"):
            assert bits(getattr(main, field)) == bits(getattr(alone[name], field)), (name, field)
        assert all(part[1:] == (None, None, None) for part in others), "rank 0 scores, once (ultralytics/yolov5#11474)"


@needs_shared
def test_each_rank_has_its_share(alone: dict[str, Part], ranks: dict[str, list[Part]]) -> None:
    """Each image counts once; a rank has within one batch of n / N (ultralytics/ultralytics#22376, #24536)."""
    for name, parts in ranks.items():
        n, batch = sum(alone[name].batches), max(alone[name].batches)
        assert sorted(size for part in parts for size in part.batches) == sorted(alone[name].batches)
        for part in parts:
            assert abs(sum(part.batches) - n / len(parts)) < batch, (name, part.batches)
        assert sorted(image.index for image in parts[0].images) == list(range(n))


@needs_shared
def test_what_is_measured_is_not_nothing(alone: dict[str, Part]) -> None:
    assert sum(alone[BCCD].batches) == 87
    assert alone[BCCD].metrics.map50 > 0.85
    assert sum(alone["fewer images than ranks"].batches) == 3
    for part in alone.values():
        assert all(loss > 0 for loss in part.losses)
        assert sum(len(image.detections) for image in part.images) > 100
    assert len({image.detections.tobytes() for image in alone["many shapes"].images}) == 9


@needs_shared
@pytest.mark.slow
@pytest.mark.gate
def test_val_py_writes_the_same_files(golden: Path, tmp_path: Path) -> None:
    """One writer (LibreYOLO/libreyolo#604); val.py takes ranks like train.py (ultralytics/ultralytics#22567)."""
    line = ["--weights", golden / "golden.pt", "--data", golden / "shapes/data.yaml", "--project", tmp_path]
    line += ["--batch", 2, "--workers", 0, "--save-json", "--save-txt", "--save-conf", "--noplots", "--device", "cpu"]
    val.main([*map(str, line), "--name", "alone"])
    done = torchrun([PROJECT / "val.py", *line, "--name", "ranks"], 2, port=free_port(), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ranks"]
    assert done.stdout.count("speed per image") == 1
    files = [path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*") if path.is_file()]
    assert {"metrics.json", "predictions.json"} <= {str(file) for file in files}
    assert len(files) >= 2 + 9
    for file in files:
        assert (tmp_path / "ranks" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file
    assert len(json.loads((tmp_path / "ranks/predictions.json").read_text())) > 100


@pytest.mark.slow
def test_all_ranks_stop_in_the_same_epoch(tmp_path: Path) -> None:
    """The verdict is one (ultralytics/yolov5#4576, #8345, #8398): by --patience, and never without a validation.

    The first validation comes after the second epoch, whose figures are then the best; a rank left to itself has seen
    none, and would stop there.
    """
    data = make_data(tmp_path / "data", count=4)
    (tmp_path / "still.yaml").write_text("lr0: 0\nwarmup_bias_lr: 0\n")
    common = f"--hyp {tmp_path}/still.yaml --patience 1 --dist-timeout 100"
    commands = {
        "stopped": Command(flags(data, tmp_path, f"{common} --val-period 2 --epochs 8 --name stopped")),
        "noval": Command(flags(data, tmp_path, f"{common} --noval --epochs 2 --name noval")),
    }
    seen = dict(zip(commands, run_commands(list(commands.values()), 2, tmp_path / "seen", LIMIT), strict=True))
    table = results(tmp_path / "stopped")
    assert table["metrics/recall"].tolist() == pytest.approx([np.nan, 0, np.nan, 0], nan_ok=True)
    assert [len(rank.batches) for rank in seen["stopped"]] == [4, 4]
    assert "no better fitness for 1 epochs (--patience): stopping early" in seen["stopped"][0].said
    state = load_checkpoint(tmp_path / "stopped/weights/last.pt")["state"]
    assert (state["stopped"], state["epoch"], state["best_epoch"]) == (True, 4, 1)

    assert [len(rank.batches) for rank in seen["noval"]] == [2, 2]
    assert results(tmp_path / "noval")["metrics/recall"].notna().tolist() == [False, True]
