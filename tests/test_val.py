"""Validation as a whole: the published figures through our own path, sums over a split, mistakes."""

import contextlib
import copy
import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

import val
from models.families import YOLOV5
from models.yolo import DetectionModel
from tests.common import PROJECT, SHARED, copy_shared, needs_shared
from tests.runs import launch, make_data
from utils.config.data_yaml import load_data
from utils.config.flags import ValConfig
from utils.config.recipe import Hyp
from utils.core.errors import UserError
from utils.data.dataset import DetectionDataset
from utils.data.image_cache import ImageCache
from utils.data.loaders import val_loader
from utils.data.splits import open_splits
from utils.metrics.evaluation import Evaluation, ImageResult
from utils.torch_utils import process_group, save_checkpoint

NAMES = ["RBC", "WBC", "Platelets"]
KEYS = ("P", "R", "mAP50", "mAP50-95")


def yolov5n(num_classes: int, names: list[str]) -> DetectionModel:
    torch.manual_seed(0)
    return DetectionModel(yaml.safe_load((PROJECT / "models/yolov5n.yaml").read_text()), num_classes, names)


def saved(path: Path, model: DetectionModel, imgsz: int) -> Path:
    """Write weights as a finished run leaves them."""
    parts = {"spec": model.yaml, "names": model.names, "model": model.state_dict(), "config": {"imgsz": imgsz}}
    save_checkpoint(parts, path)
    return path


def run(config: ValConfig) -> Evaluation:
    with process_group("cpu") as env:
        evaluation = val.run(config, env).evaluation
    assert evaluation is not None
    return evaluation


class Measured(NamedTuple):
    evaluation: Evaluation
    metrics: list[dict[str, Any]]
    said: str


@pytest.fixture(scope="module")
def bccd(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Trained weights on 87 real images, from the checkpoint to the table, at the size they were trained at."""
    folder = tmp_path_factory.mktemp("bccd")
    for kind in ("images", "labels"):
        copy_shared(f"datasets/bccd/{kind}/val", folder / kind / "val")  # caches stay out of there
    data = folder / "bccd.yaml"
    data.write_text("train: images/val\nval: images/val\nnames: [RBC, WBC, Platelets]\n")
    model = yolov5n(3, NAMES)
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    weights = saved(folder / "golden.pt", model, imgsz=320)
    project = folder / "runs"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        evaluation = run(
            ValConfig(weights=str(weights), data=str(data), batch_size=16, workers=0, project=str(project))
        )
    return Measured(evaluation, json.loads((project / "exp/metrics.json").read_text())["rows"], said.getvalue())


@needs_shared
def test_published_figures(bccd: Measured) -> None:
    """Every figure within 0.002, overall and for each class."""
    expected = json.loads((SHARED / "golden/yolov5n_bccd.json").read_text())["val"]
    rows = bccd.evaluation.metrics.rows(NAMES)
    assert rows[0][:3] == ("all", expected["images"], expected["instances"])
    assert [row.name for row in rows] == ["all", *NAMES]
    for row in rows:
        assert row[3:] == pytest.approx([expected[row.name][key] for key in KEYS], abs=0.002), row.name


@needs_shared
def test_what_is_said_and_written(bccd: Measured) -> None:
    rows = bccd.evaluation.metrics.rows(NAMES)
    assert bccd.metrics == [row._asdict() for row in rows]
    table = re.findall(r"^ *(\S+) +(\d+) +(\d+) +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ *$", bccd.said, re.M)
    assert [(name, int(images), int(count)) for name, images, count in table] == [row[:3] for row in rows]
    assert re.search(r"speed per image: prepare [\d.]+ ms, inference [\d.]+ ms, nms [\d.]+ ms", bccd.said)
    assert all(milliseconds > 0 for milliseconds in bccd.evaluation.speed.values())


@needs_shared
def test_pycocotools(bccd: Measured) -> None:
    """The same detections scored by COCO's own code; what the differences come from is said with ours."""
    pytest.importorskip("pycocotools")
    ours = bccd.evaluation.metrics
    theirs = coco_ap(bccd.evaluation.images, 3)  # (3, 10)
    assert ours.map50 == pytest.approx(theirs[:, 0].mean(), abs=0.003)
    assert ours.map == pytest.approx(theirs.mean(), abs=0.003)
    assert ours.per_class.ap[:, 0].tolist() == pytest.approx(theirs[:, 0].tolist(), abs=0.007)
    assert ours.per_class.ap.mean(axis=1).tolist() == pytest.approx(theirs.mean(axis=1).tolist(), abs=0.007)


def coco_ap(images: list[ImageResult], num_classes: int) -> NDArray[np.float64]:
    """AP (num_classes, 10) from pycocotools, with 300 detections an image as our NMS keeps."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, found = [], []
    for image_id, image in enumerate(images, start=1):
        for class_id, x1, y1, x2, y2 in image.labels.tolist():
            box, area = [x1, y1, x2 - x1, y2 - y1], (x2 - x1) * (y2 - y1)
            truth.append({"image_id": image_id, "category_id": int(class_id), "bbox": box, "area": area, "iscrowd": 0})
        for x1, y1, x2, y2, conf, class_id in image.detections.tolist():
            box = [x1, y1, x2 - x1, y2 - y1]
            found.append({"image_id": image_id, "category_id": int(class_id), "bbox": box, "score": conf})
    coco = COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": image_id} for image_id in range(1, len(images) + 1)],
        "categories": [{"id": class_id} for class_id in range(num_classes)],
        "annotations": [{"id": i, **one} for i, one in enumerate(truth, start=1)],
    }
    coco.createIndex()
    evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
    evaluation.params.maxDets = [300]
    evaluation.evaluate()
    evaluation.accumulate()
    precision = evaluation.eval["precision"]  # (T, 101 recalls, classes, areas, maxDets); area 0 is all
    return precision[:, :, :, 0, 0].mean(axis=1).T


def test_losses_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Sums over the split divided by counts over the split; means over batches would weigh the short last one more.

    All images have one shape, so that the batch changes nothing else.
    """
    data = load_data(make_data(tmp_path, count=1, val=7))
    model = yolov5n(2, data.names).eval()
    index = open_splits(data, ["val"])["val"]
    dataset = DetectionDataset(index, ImageCache(), None, 64)
    criterion = YOLOV5.criterion(model, Hyp(), 64, 0.0)
    found = {}
    with process_group("cpu") as env:
        for batch in (1, 3, 7):
            loader = val_loader(dataset, batch, env, 0, stride=model.max_stride)
            evaluation = val.evaluate(model, YOLOV5, loader, index, data.names, env, criterion=criterion)
            assert evaluation is not None
            found[batch] = evaluation
    assert all(loss > 0 for loss in found[7].losses)
    for batch in (1, 3):
        np.testing.assert_allclose(found[batch].losses, found[7].losses, rtol=1e-4)
    for evaluation in found.values():
        assert sorted(image.index for image in evaluation.images) == list(range(7))
    assert found[7].metrics.rows(data.names)[0][:3] == ("all", 7, 6)


def test_losses_are_those_of_one_batch_of_the_whole_split(tmp_path: Path) -> None:
    data = load_data(make_data(tmp_path, count=1, val=5))
    model = yolov5n(2, data.names).eval()
    index = open_splits(data, ["val"])["val"]
    criterion = YOLOV5.criterion(model, Hyp(), 64, 0.0)
    with process_group("cpu") as env:
        loader = val_loader(DetectionDataset(index, ImageCache(), None, 64), 5, env, 0, stride=model.max_stride)
        evaluation = val.evaluate(model, YOLOV5, loader, index, data.names, env, criterion=criterion)
        (batch,) = loader
    assert evaluation is not None
    images = batch.images.float() / 255
    matches = criterion.match(batch.targets, *(images.shape[i] for i in (0, 2, 3)))
    with torch.no_grad():
        items = criterion.items(criterion.sums(model(images), matches), criterion.counts(matches))
    np.testing.assert_allclose(evaluation.losses, items, rtol=1e-5)


def test_half_precision(tmp_path: Path) -> None:
    """Weights and images in fp16, boxes and scores in fp32: the same detections but for rounding (2^-11 of a value)."""
    data = load_data(make_data(tmp_path, count=1, val=3))
    torch.manual_seed(0)
    model = yolov5n(2, data.names).eval()
    index = open_splits(data, ["val"])["val"]
    found = []
    with process_group("cpu") as env:
        loader = val_loader(DetectionDataset(index, ImageCache(), None, 64), 3, env, 0, stride=model.max_stride)
        for network in (model, copy.deepcopy(model).half()):
            evaluation = val.evaluate(network, YOLOV5, loader, index, data.names, env, conf_thres=0.0, max_det=5)
            assert evaluation is not None
            found.append(np.stack([image.detections for image in evaluation.images]))
    single, half = found
    assert half.dtype == np.float32
    assert not np.array_equal(single, half)
    np.testing.assert_allclose(np.sort(single[..., 4]), np.sort(half[..., 4]), rtol=5e-3)


def test_half_precision_without_a_gpu(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", count=1, val=2)
    weights = saved(tmp_path / "two.pt", yolov5n(2, ["blue", "red"]), imgsz=64)
    with pytest.raises(UserError, match=r"^--half computes on a CUDA GPU only, not on cpu; leave it out$"):
        run(ValConfig(weights=str(weights), data=str(data), workers=0, device="cpu", half=True))


def test_mistakes(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", count=1, val=2)
    weights = saved(tmp_path / "three.pt", yolov5n(3, NAMES), imgsz=64)
    project = str(tmp_path / "runs")
    with pytest.raises(UserError, match=r"^--weights .*three.pt knows 3 classes, --data .*data.yaml has 2; use"):
        run(ValConfig(weights=str(weights), data=str(data), workers=0, project=project))
    save_checkpoint({"model": {}}, tmp_path / "bare.pt")
    with pytest.raises(UserError, match=r"bare.pt holds no network: config, names, spec is missing"):
        run(ValConfig(weights=str(tmp_path / "bare.pt"), data=str(data), workers=0, project=project))
    fitting = saved(tmp_path / "two.pt", yolov5n(2, ["blue", "red"]), imgsz=64)
    with pytest.raises(UserError, match="there is no test split"):
        run(ValConfig(weights=str(fitting), data=str(data), task="test", workers=0, project=project))
    assert not Path(project).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--project .*file: the run folder .* can't be made"):
        run(ValConfig(weights=str(fitting), data=str(data), workers=0, project=str(tmp_path / "file")))


def test_mistakes_come_together_and_leave_nothing(tmp_path: Path) -> None:
    done = launch("--weights", "none.pt", "--data", "nowhere.yaml", cwd=tmp_path, script="val.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 problems\n")
    assert "none.pt is not there" in done.stderr and "nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image size that does not fit is rounded up and said; the last batch has what is left."""
    data = make_data(tmp_path / "data", count=1, val=3)
    weights = saved(tmp_path / "two.pt", yolov5n(2, ["blue", "red"]), imgsz=96)
    sizes: list[tuple[int, ...]] = []
    config: dict[str, Any] = {"weights": str(weights), "data": str(data), "workers": 0, "project": f"{tmp_path}/runs"}
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: sizes.append(tuple(inputs[0].shape)) if isinstance(module, DetectionModel) else None
    )
    try:
        run(ValConfig(**config, imgsz=70, batch_size=2))
    finally:
        handle.remove()
    assert [(shape[0], max(shape[2:])) for shape in sizes] == [(2, 128), (1, 128)]
    assert "WARNING: --imgsz 70 is not a multiple of the network's stride 32; 96 is used" in capsys.readouterr().out
