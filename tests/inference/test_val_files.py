"""What val.py leaves behind on demand: predictions.json, label files, COCO's own figures, speed alone."""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import val
from tests.common import PROJECT, SHARED, needs_shared
from tests.data.test_label_rules import full_disk
from tests.runs import make_data
from tests.test_val import NAMES, saved, yolov5n
from utils.config.data_yaml import load_data
from utils.config.flags import ValConfig
from utils.config.yaml_files import load_yaml
from utils.core.errors import UserError
from utils.core.image_files import read_image
from utils.inference import val_files
from utils.metrics.evaluation import ImageResult
from utils.torch_utils import process_group

COUNT = 6  # images of the split


class Measured:
    """A validation of trained weights on a few real images, with everything that can be written."""

    def __init__(self, folder: Path) -> None:
        shared = SHARED / "datasets/bccd"
        for kind in ("images", "labels"):
            (folder / kind / "val2017").mkdir(parents=True)
        stems = {path.stem: path for path in sorted((shared / "images/val").iterdir())[:COUNT]}
        for number, (stem, path) in enumerate(stems.items(), start=1):
            (folder / f"images/val2017/{number:06}{path.suffix}").write_bytes(path.read_bytes())
            (folder / f"labels/val2017/{number:06}.txt").write_bytes((shared / f"labels/val/{stem}.txt").read_bytes())
        self.data = folder / "data.yaml"
        self.data.write_text("train: images/val2017\nval: images/val2017\nnames: [RBC, WBC, Platelets]\n")
        model = yolov5n(3, NAMES)
        arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
        model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
        self.weights = saved(folder / "golden.pt", model, imgsz=320)
        self.folder = folder
        self.run_dir = folder / "runs/exp"
        flags = {"weights": str(self.weights), "data": str(self.data), "project": f"{folder}/runs"}
        config = ValConfig(**flags, workers=0, save_json=True, save_txt=True, save_conf=True, noplots=True)  # type: ignore[arg-type]
        with process_group("cpu") as env:
            evaluation = val.run(config, env).evaluation
        assert evaluation is not None
        self.evaluation = evaluation
        self.results = json.loads((self.run_dir / "predictions.json").read_text())

    def annotations(self) -> Path:
        """Write the labels as COCO would; the categories are the class ids."""
        truth: list[dict[str, Any]] = []
        for image in self.evaluation.images:
            for class_id, x1, y1, x2, y2 in image.labels.tolist():
                one = {"image_id": image.index + 1, "category_id": int(class_id), "iscrowd": 0}
                box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
                truth.append({"id": len(truth) + 1, **one, **box})
        content = {
            "info": {},
            "images": [
                {"id": i + 1, "file_name": f"{i + 1:06}.jpg", "width": 640, "height": 480} for i in range(COUNT)
            ],
            "categories": [{"id": i, "name": name} for i, name in enumerate(NAMES)],
            "annotations": truth,
        }
        path = self.folder / "annotations/instances_val2017.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        return path


@pytest.fixture(scope="module")
def bccd(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("bccd"))


@needs_shared
def test_predictions_are_the_detections(bccd: Measured) -> None:
    expected = [
        (image.index + 1, int(row[5]), [row[0], row[1], row[2] - row[0], row[3] - row[1]], row[4])
        for image in sorted(bccd.evaluation.images, key=lambda image: image.index)
        for row in image.detections.tolist()
    ]
    assert len(bccd.results) == len(expected) > 50
    for one, (number, category, box, score) in zip(bccd.results, expected, strict=True):
        assert (one["image_id"], one["category_id"]) == (number, category)
        assert one["bbox"] == pytest.approx(box, abs=0.00051) and one["score"] == pytest.approx(score, abs=0.0000051)
        assert one["bbox"] == [round(value, 3) for value in one["bbox"]]
    assert not [path.name for path in bccd.run_dir.iterdir() if path.name.startswith(".")]


@needs_shared
def test_label_files_and_no_pictures(bccd: Measured) -> None:
    for image in bccd.evaluation.images:
        path = bccd.run_dir / f"labels/{image.index + 1:06}.txt"
        rows = np.loadtxt(path, ndmin=2)
        (source,) = (bccd.folder / "images/val2017").glob(f"{path.stem}.*")
        height, width = read_image(str(source)).shape[:2]
        x1, y1, x2, y2, conf, category = image.detections.T
        boxes = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
        np.testing.assert_allclose(rows, np.stack([category, *boxes, conf], 1), atol=2e-6, rtol=1e-5)
    assert sorted(path.name for path in bccd.run_dir.iterdir()) == ["labels", "metrics.json", "predictions.json"]


@needs_shared
@pytest.mark.parametrize("package", ["faster_coco_eval", "pycocotools"])
def test_coco_scores_them(
    bccd: Measured, package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(package)
    monkeypatch.setattr(val_files, "SCORERS", [one for one in val_files.SCORERS if one[0] == package])
    said = score(bccd.annotations(), bccd.results, caplog)
    assert said.startswith(f"{package}, instances_val2017.json: AP 0.")
    figures = dict(part.rsplit(" ", 1) for part in said.split(": ")[1].split(", "))
    # COCO keeps 100 detections an image, ours 300.
    assert float(figures["AP50"]) == pytest.approx(bccd.evaluation.metrics.map50, abs=0.03)
    assert float(figures["AP"]) == pytest.approx(bccd.evaluation.metrics.map, abs=0.03)


def score(annotations: Path, results: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "coco"):
        val_files.score_with_coco(annotations, results, list(range(1, COUNT + 1)), logging.getLogger("coco"))
    (said,) = [record.getMessage() for record in caplog.records if record.name == "coco"]
    return said


@needs_shared
def test_what_coco_cannot_score_is_said(
    bccd: Measured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = bccd.annotations()
    content = json.loads(path.read_text())
    other = bccd.folder / "other.json"
    if any(val_files._scorer() or ()):
        other.write_text("{")
        assert "could not score" in score(other, bccd.results, caplog)
        other.write_text(json.dumps(content | {"categories": [{"id": 7}]}))
        assert "it has no category 0" in score(other, bccd.results, caplog)
        other.write_text(json.dumps(content | {"images": content["images"][1:]}))
        assert "1 images are not in it, such as 1" in score(other, bccd.results, caplog)
        assert "there are no detections" in score(path, [], caplog)
    for name in ("faster_coco_eval", "pycocotools", "pycocotools.coco"):
        monkeypatch.setitem(sys.modules, name, None)
    assert score(path, bccd.results, caplog).endswith("instances_val2017.json: pip install faster-coco-eval")


@needs_shared
def test_annotations_are_found_and_scored(bccd: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, and the speed alone writes nothing."""
    path = bccd.annotations()
    data = load_data(bccd.data)
    assert val_files.annotations_of(data, "val") == path
    data.val = [bccd.folder / "val2017.txt"]
    assert val_files.annotations_of(data, "val") == path
    data.val = [bccd.folder / "a", bccd.folder / "val2017"]
    assert val_files.annotations_of(data, "val") is None

    flags = f"--weights {bccd.weights} --data {bccd.data} --workers 0 --device cpu --project {bccd.folder}/more".split()
    val.main([*flags, "--noplots", "--save-json"])
    assert "instances_val2017.json" in capsys.readouterr().out
    assert sorted(found.name for found in (bccd.folder / "more/exp").iterdir()) == ["metrics.json", "predictions.json"]

    val.main([*flags, "--task", "speed"])
    said = capsys.readouterr().out
    assert "speed per image: prepare " in said and "mAP50" not in said
    assert [found.name for found in (bccd.folder / "more").iterdir()] == ["exp"]


@needs_shared
def test_coco_metrics(bccd: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: of the annotations, their crowds too, if they fit, else of the label files."""
    path = bccd.annotations()
    flags = f"--weights {bccd.weights} --data {bccd.data} --workers 0 --device cpu --project {bccd.folder}/coco".split()
    flags += ["--noplots", "--coco-metrics"]

    def measured(*more: str) -> tuple[dict[str, float], str]:
        val.main([*flags, *more, "--exist-ok"])
        return json.loads((bccd.folder / "coco/exp/coco_metrics.json").read_text()), capsys.readouterr().out

    # The ids are those of the images, categories are told by their names, labels are listed in another order.
    content = json.loads(path.read_text())
    content["categories"] = [{"id": 7 - i, "name": name} for i, name in enumerate(NAMES)]
    for one in content["annotations"]:
        one["category_id"] = 7 - one["category_id"]
    content["annotations"] = [*content["annotations"][::-1], {"image_id": 99, "category_id": 7, "bbox": [0, 0, 9, 9]}]
    path.write_text(json.dumps(content))
    figures, said = measured()
    assert re.search(r"by COCO's rules, instances_val2017\.json: AP 0\.\d{3}, AP50 0\.\d{3}, .*AP large ", said)
    assert "can't be used" not in said
    assert figures["AP50"] == pytest.approx(bccd.evaluation.metrics.map50, abs=0.03)
    assert figures["AP"] == pytest.approx(bccd.evaluation.metrics.map, abs=0.03)

    # Images are told by their names: other ids, all of them those of other images.
    shifted = json.loads(json.dumps(content))
    for one in shifted["images"]:
        one["id"] += 1
    for one in shifted["annotations"]:
        one["image_id"] += 1
    path.write_text(json.dumps(shifted))
    assert measured()[0] == pytest.approx(figures, abs=1e-9)

    path.unlink()
    of_labels, said = measured()
    assert "by COCO's rules, label files: AP 0." in said
    assert of_labels == pytest.approx(figures, abs=1e-9)

    # A crowd where the labels were: nothing is left to be found but the other class.
    for one in content["annotations"]:
        one["iscrowd"] = int(one["category_id"] != 7)
    path.write_text(json.dumps(content))
    assert measured()[0]["AP"] == pytest.approx(val_files.coco_metrics(*first_class(bccd)).figures()["AP"], abs=1e-9)

    content["categories"][0]["name"] = "rbc"
    path.write_text(json.dumps(content))
    figures, said = measured()
    assert "label files are instead; ValueError: its category 'rbc' is no class of the data set" in said
    assert figures == pytest.approx(of_labels, abs=1e-9)
    for spoiled, reason in (("{", "JSONDecodeError"), ("{}", "KeyError"), ('{"images": []}', "6 images are not in it")):
        path.write_text(spoiled)
        figures, said = measured()
        assert reason in said and figures == pytest.approx(of_labels, abs=1e-9)
    with pytest.raises(SystemExit):
        val.parse(ValConfig, [*flags, "--task", "speed"])
    assert "--task speed scores nothing" in capsys.readouterr().err


def first_class(bccd: Measured) -> tuple[Any, Any]:
    """Detections and labels of the first class alone."""
    images = bccd.evaluation.images
    found, truth = val_files.detections_as_found(images), val_files.labels_as_truth(images)
    return found.rows(np.flatnonzero(found.category == 0)), truth.rows(np.flatnonzero(truth.category == 0))


def test_speed_thresholds() -> None:
    both = [val.parse(ValConfig, f"--weights a.pt --task speed {more}".split()) for more in ("", "--conf-thres 0.1")]
    assert [(one.conf_thres, one.iou_thres, one.split) for one in both] == [(0.25, 0.45, "val"), (0.1, 0.45, "val")]


def test_ids() -> None:
    names = list(load_yaml(PROJECT / "data/coco.yaml")["names"].values())
    ids = val_files.category_ids(names)
    spans = ((1, 11), (13, 25), (27, 28), (31, 44), (46, 65), (67, 67), (70, 70), (72, 82), (84, 90))
    assert ids == [number for first, last in spans for number in range(first, last + 1)] and len(ids) == 80
    assert val_files.category_ids(names[:-1]) == list(range(79))
    assert [val_files.image_id(f"a/{name}.jpg") for name in ("000139", "x7", "-7", "\u0663")] == [
        139,
        "x7",
        "-7",
        "\u0663",
    ]


@pytest.mark.parametrize(
    ("paths", "ids"),
    [
        (["/d/000007.jpg", "/d/12.png", "/d/x/y.jpg"], [7, 12, "y"]),
        (["/d/a/x.jpg", "/d/b/x.jpg", "/d/b/7.jpg"], ["a/x.jpg", "b/x.jpg", "b/7.jpg"]),
        (["/d/x.jpg", "/d/x.png"], ["x.jpg", "x.png"]),
        (["/d/a/7.jpg", "/d/a/007.jpg"], ["7.jpg", "007.jpg"]),  # one number
    ],
)
def test_every_image_has_an_id_of_its_own(
    paths: list[str], ids: list[int | str], capsys: pytest.CaptureFixture[str]
) -> None:
    """COCO's, by which its code finds annotations, as long as these tell the images apart; else a loud warning."""

    class Index:
        def __len__(self) -> int:
            return len(paths)

        def path(self, i: int) -> str:
            return paths[i]

    box = np.array([[0, 0, 100, 50, 0.5, 1]], np.float32)
    images = [ImageResult(0, i, box, np.zeros((0, 5), np.float32)) for i in range(len(paths))]
    found = val_files.coco_results(images[::-1], Index(), ["a", "b"])  # type: ignore[arg-type]
    assert [one["image_id"] for one in found] == val_files.image_ids(Index()) == ids  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert said.startswith("WARNING: predictions.json: some images have the same name") == ("." in str(ids))
    assert f"such as {ids[0]}, and COCO's code CAN'T SCORE that" in said or not said


def test_images_of_the_same_name(tmp_path: Path) -> None:
    """The second one's file has a number; without detections there is none, also none of an earlier run."""

    class Index:
        shapes = np.array([[100, 200]] * 3, np.int32)

        def path(self, i: int) -> str:
            return ("a/x.jpg", "b/x.jpg", "a/y.jpg")[i]

    box = np.array([[0, 0, 100, 50, 0.5, 1]], np.float32)
    none = np.zeros((0, 6), np.float32)
    images = [ImageResult(0, i, found, np.zeros((0, 5), np.float32)) for i, found in ((1, box), (0, box), (2, none))]
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/y.txt").write_text("old")
    val_files.write_labels(tmp_path, images, Index(), confidence=False)  # type: ignore[arg-type]
    written = {path.name: path.read_text() for path in (tmp_path / "labels").iterdir()}
    assert written == dict.fromkeys(("x.txt", "x-2.txt"), "1 0.25 0.25 0.5 0.5\n")


def test_json_files_are_whole_or_as_they_were(tmp_path: Path) -> None:
    content = [{"class": "\u732b", "AP": 0.25}] * 50
    path = tmp_path / "metrics.json"
    val_files.write_json(path, content, indent=2)
    assert json.loads(path.read_text()) == content and path.read_text().startswith('[\n  {\n    "class"')
    assert path.read_text().endswith("]\n")
    with pytest.raises(UserError, match=rf"^{path} can't be written: File too large$"), full_disk():
        val_files.write_json(path, content * 2)
    assert json.loads(path.read_text()) == content
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.json"]
    with pytest.raises(UserError, match=r"metrics\.json/predictions\.json can't be written: Not a directory$"):
        val_files.write_predictions(path, [])


def test_label_files_that_cannot_be_written(tmp_path: Path) -> None:
    class Index:
        shapes = np.array([[100, 200]], np.int32)

        def path(self, i: int) -> str:
            return "a/x.jpg"

    image = ImageResult(0, 0, np.array([[0, 0, 100, 50, 0.5, 1]] * 9, np.float32), np.zeros((0, 5), np.float32))
    with pytest.raises(UserError, match=rf"^{tmp_path}/labels/x.txt can't be written: File too large$"), full_disk():
        val_files.write_labels(tmp_path, [image], Index(), confidence=True)  # type: ignore[arg-type]


def test_pictures_by_default(tmp_path: Path) -> None:
    """--noplots is off unless given; nothing else is written then."""
    assert not ValConfig(weights="a.pt").noplots
    data = make_data(tmp_path / "data", count=1, val=2)
    weights = saved(tmp_path / "two.pt", yolov5n(2, ["blue", "red"]), imgsz=64)
    flags = f"--weights {weights} --data {data} --workers 0 --device cpu --project {tmp_path}/runs --noplots"
    val.main(flags.split())
    assert [path.name for path in (tmp_path / "runs/exp").iterdir()] == ["metrics.json"]
