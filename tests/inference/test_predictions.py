"""Detection from Python: what goes in, what comes out, and that it is what detect.py writes."""

import csv
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from lockstep import YOLO
from models.detector import Detector
from models.families import load_model
from tests.common import PROJECT, SHARED, needs_shared
from tests.inference.test_sources import Handler, Server, exif_rotated, make_video, picture, write
from tests.test_detect import NAMES, PHOTOS, checkpoint, label_boxes, load, run
from utils.config.flags import DetectConfig
from utils.core.errors import UserError
from utils.dist.place import ALONE
from utils.inference.predictions import Prediction, predict, predict_config


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "weights.pt", None, NAMES, 128)


@pytest.fixture(scope="module")
def yolo(weights: Path) -> YOLO:
    return YOLO(weights, device="cpu")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real photos of several sizes, drawn ones where there are none, and some odd files."""
    folder = tmp_path_factory.mktemp("photos")
    paths = sorted(PHOTOS.glob("*.jpg"))[:8] or sorted((PROJECT / "data/images").glob("*.jpg"))
    for path in paths:
        (folder / path.name).symlink_to(path)
    image = load(paths[0])
    write(folder / "grey.png", image[..., 1])
    write(folder / "alpha.png", np.dstack([image, image[..., :1]]))
    write(folder / "deep.png", image.astype(np.uint16) * 256)
    exif_rotated(folder / "turned.jpg", image)
    return folder


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A file without loss, of noise: the network sees something in it."""
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    return write(tmp_path / "photo.png", image)


def one(yolo: YOLO, source: Any, **flags: Any) -> Prediction:
    found = yolo.predict(source, max_det=20, **flags)
    assert isinstance(found, list) and len(found) == 1
    return found[0]


def a_prediction(boxes: Any, names: list[str] | None = None, path: str = "", frame: int | None = None) -> Prediction:
    rows = np.array(boxes, np.float32).reshape(-1, 6)
    return Prediction(picture(90, 50, 200), path, frame, names or ["person", "bus", "red"], rows)


# ---- the same as detect.py ----


def test_boxes_are_those_that_detect_writes(weights: Path, yolo: YOLO, photos: Path) -> None:
    flags = ("--save-csv", "--save-txt", "--save-conf", "--max-det", "12", "--classes", "0", "2", "--imgsz", "96")
    run_dir = run(weights, photos, *flags, "--batch-size", "16")
    with (run_dir / "predictions.csv").open(encoding="utf-8", newline="") as file:
        written = [tuple(row.values()) for row in csv.DictReader(file)]
    found = yolo.predict(photos, max_det=12, classes=[0, 2], imgsz=96)
    assert isinstance(found, list) and len(found) == len(list(photos.iterdir())) >= 10
    rows = [
        (Path(p.path).name, NAMES[c], f"{conf:.4f}", str(c), *(f"{x:.2f}" for x in box), "0", str(p.path))
        for p in found
        for box, conf, c in zip(p.xyxy.tolist(), p.conf.tolist(), p.cls.tolist(), strict=True)
    ]
    assert rows == written and len(written) > 50
    for p in found:
        height, width = p.image.shape[:2]
        label = run_dir / f"labels/{Path(p.path).stem}.txt"
        np.testing.assert_allclose(label_boxes(label, width, height), p.boxes, atol=2e-3)
        np.testing.assert_allclose(np.loadtxt(label, ndmin=2)[:, 1:5], p.cxcywhn, atol=2e-6)
        np.testing.assert_array_equal(np.asarray(p.plot()), annotated(run_dir, p, exact=Path(p.path).suffix == ".png"))


def annotated(run_dir: Path, found: Prediction, exact: bool) -> np.ndarray:
    """The picture that detect.py wrote; a JPEG file is compared with what JPEG makes of the plot."""
    written = load(run_dir / Path(found.path).name)
    if exact:
        return written
    again = cv2.imdecode(cv2.imencode(".jpg", found.plot())[1], cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(again, written)
    return found.plot()


def test_videos_are_as_detect_sees_them(weights: Path, yolo: YOLO, tmp_path: Path) -> None:
    path = make_video(tmp_path / "clip.mp4", 7)
    run_dir = run(weights, path, "--save-txt", "--save-conf", "--max-det", "4", "--vid-stride", "3")
    found = list(yolo.predict(path, max_det=4, vid_stride=3, stream=True))
    assert [(p.path, p.frame) for p in found] == [(str(path), 1), (str(path), 4), (str(path), 7)]
    for p in found:
        rows = label_boxes(run_dir / f"labels/clip_{p.frame}.txt", 64, 48)
        np.testing.assert_allclose(rows, p.boxes, atol=1e-2)


@needs_shared
def test_real_image_has_the_recorded_detections(tmp_path: Path) -> None:
    """The recorded ones are rounded to whole pixels."""
    recorded = np.load(SHARED / "golden/yolov5n_bccd_forward.npz")
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    yolo = YOLO(checkpoint(tmp_path / "bccd.pt", state, ["RBC", "WBC", "Platelets"], 320), device="cpu")
    image = load(SHARED / "datasets/bccd/images/val" / str(recorded["image_name"]))
    (found,) = yolo.predict(image)
    wanted = recorded["detections_xyxy_conf_cls"]
    assert found.boxes.shape == wanted.shape and found.boxes.dtype == np.float32
    np.testing.assert_array_equal(found.cls, wanted[:, 5])
    np.testing.assert_allclose(found.xyxy, wanted[:, :4], atol=0.52)
    np.testing.assert_allclose(found.conf, wanted[:, 4], atol=1e-3)


# ---- what goes in ----


def test_all_forms_of_an_image_are_one(yolo: YOLO, photo: Path) -> None:
    bgr = load(photo)
    rgb = Image.fromarray(np.ascontiguousarray(bgr[..., ::-1]))
    with Image.open(photo) as opened:
        forms = [str(photo), [photo], (bgr,), np.dstack([bgr, bgr[..., 0]]), bgr[:, ::-1][:, ::-1], rgb, opened]
        forms += [rgb.convert("RGBA"), rgb.convert("CMYK").convert("RGB"), f"{photo.parent}/ph*.png"]
        results = [one(yolo, form) for form in forms]
    wanted = one(yolo, photo)
    assert len(wanted) == 20 and wanted.path == str(photo) and wanted.frame is None
    for found in results:
        np.testing.assert_array_equal(found.image, bgr)
        np.testing.assert_array_equal(found.boxes, wanted.boxes)
    assert [bool(found.path) for found in results] == [True, True, *[False] * 7, True]


def test_gray_and_deep_images(yolo: YOLO, photo: Path, tmp_path: Path) -> None:
    gray = load(photo)[..., 1]
    deep = gray.astype(np.uint16) * 256 + 77
    palette = Image.fromarray(gray).convert("P")
    paths = [write(tmp_path / "gray.png", gray), write(tmp_path / "deep.png", deep)]
    with Image.open(paths[1]) as opened:
        assert opened.mode.startswith("I;16")
        found = yolo.predict([*paths, gray, gray[..., None], Image.fromarray(gray), palette, opened])
    assert len(found) == 7
    for p in found:
        np.testing.assert_array_equal(p.image, np.dstack([gray] * 3))
        np.testing.assert_array_equal(p.boxes, found[0].boxes)


def test_dark_images_of_16_bits_are_named(yolo: YOLO, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ultralytics/yolov5#11840: in a file of 16 bits a picture of 12 bits is black; a PIL image of it no less."""
    deep = [Image.fromarray(load(photo)[..., 1].astype(np.uint16) * factor) for factor in (16, 256)]
    assert [image.mode for image in deep] == ["I;16"] * 2
    yolo.predict(deep[1])
    assert capsys.readouterr().out == ""
    yolo.predict([photo, *deep])
    assert re.fullmatch(
        r"WARNING: images of more than 8 bits look almost black: the brightest value in 1 of the 2 that were looked "
        r"at, such as source\[1\], is \d+ of 65535; multiply their values, for example by 1\d\n",
        capsys.readouterr().out,
    )


def test_photos_are_upright(yolo: YOLO, photo: Path, tmp_path: Path) -> None:
    """Files by their EXIF orientation; boxes of a PIL image are in the pixels that the caller has."""
    wide = load(photo)
    path = exif_rotated(tmp_path / "turned.jpg", wide)
    assert one(yolo, path).image.shape == (90, 60, 3) == one(yolo, np.rot90(wide, -1)).image.shape
    assert one(yolo, path).xyxy[:, 3].max() > 60
    with Image.open(path) as opened:
        assert one(yolo, opened).image.shape == (60, 90, 3)


def test_a_list_keeps_its_order(yolo: YOLO, photos: Path, tmp_path: Path) -> None:
    """Pictures of many shapes and kinds, in batches that end anywhere."""
    clip = make_video(tmp_path / "clip.mp4", 5)
    paths = sorted(photos.iterdir())[:5]
    mixed = [paths[0], load(paths[1]), clip, str(paths[2]), Image.open(paths[3]), paths[4]]
    found = yolo.predict(mixed, batch_size=3, max_det=5)
    assert [p.path for p in found] == [str(paths[0]), "", *[str(clip)] * 5, str(paths[2]), "", str(paths[4])]
    assert [p.frame for p in found if p.frame] == [1, 2, 3, 4, 5]
    for place, path in ((0, paths[0]), (1, paths[1]), (7, paths[2]), (8, paths[3]), (9, paths[4])):
        np.testing.assert_allclose(found[place].boxes, one(yolo, path).boxes[:5], atol=0.05)


def test_nothing_in_nothing_out(yolo: YOLO) -> None:
    assert yolo.predict([]) == []
    assert list(yolo.predict((), stream=True)) == []


def test_keywords_change_what_is_found(yolo: YOLO, photo: Path) -> None:
    every = yolo.predict(photo, conf_thres=0.2, iou_thres=0.9)[0]
    assert 0 < len(yolo.predict(photo, conf_thres=0.6)[0]) < len(every)
    assert yolo.predict(photo, conf_thres=0.6)[0].conf.min() > 0.6
    assert len(yolo.predict(photo, conf_thres=0.2, iou_thres=0.1)[0]) < len(every)
    assert len(yolo.predict(photo, max_det=3)[0]) == 3
    assert set(yolo.predict(photo, classes=1)[0].cls.tolist()) == {1}
    assert len(yolo.predict(photo, agnostic_nms=True)[0]) < len(yolo.predict(photo)[0])
    default = one(yolo, photo)
    np.testing.assert_array_equal(one(yolo, photo, imgsz=None, classes=None, batch=None).boxes, default.boxes)
    for other in (one(yolo, photo, augment=True), one(yolo, photo, imgsz=64), one(yolo, photo, img=(64, 192))):
        assert other.boxes.shape != default.boxes.shape or np.abs(other.boxes - default.boxes).max() > 0.1


def test_a_generator_reads_as_it_is_asked(yolo: YOLO, photo: Path, tmp_path: Path) -> None:
    """The second file comes to be after the first result was taken."""
    second = tmp_path / "second.png"
    second.write_bytes(b"not yet")
    found = yolo.predict([photo, second], stream=True, batch_size=1)
    assert isinstance(found, Iterator) and next(found).path == str(photo)
    write(second, picture(90))
    assert [p.path for p in found] == [str(second)]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_stream_until_the_caller_has_enough(yolo: YOLO, server: Server) -> None:
    server.frames, server.pause = 100_000, 0.02
    address = f"http://me:secret@127.0.0.1:{server.server_port}/cam"
    found = yolo.predict(address, stream=True, stream_timeout=5)
    first, second = next(found), next(found)
    assert first.frame is not None and second.frame is not None and second.frame > first.frame >= 1
    assert first.path == f"http://127.0.0.1:{server.server_port}/cam" and first.image.shape == (48, 64, 3)
    assert any(thread.name.startswith("stream") for thread in threading.enumerate())
    found.close()
    assert not any(thread.name.startswith("stream") for thread in threading.enumerate())


def test_stream_that_does_not_come(yolo: YOLO) -> None:
    found = yolo.predict("http://127.0.0.1:9/x", stream=True, stream_timeout=1)
    with pytest.raises(UserError, match=r"no picture comes from http://127.0.0.1:9/x \(waited 1 s"):
        next(found)


# ---- what comes out ----

BOXES = [[20, 10, 60, 50, 0.9, 0], [0.5, 5, 100.5, 15, 0.75, 1], [100, 0, 200, 50, 0.5, 0]]


def test_forms_of_boxes() -> None:
    found = a_prediction(BOXES)
    np.testing.assert_array_equal(found.xyxy, [[20, 10, 60, 50], [0.5, 5, 100.5, 15], [100, 0, 200, 50]])
    np.testing.assert_array_equal(found.cxcywh, [[40, 30, 40, 40], [50.5, 10, 100, 10], [150, 25, 100, 50]])
    np.testing.assert_allclose(found.xyxyn, [[0.1, 0.2, 0.3, 1], [0.0025, 0.1, 0.5025, 0.3], [0.5, 0, 1, 1]], 1e-6)
    np.testing.assert_allclose(
        found.cxcywhn, [[0.2, 0.6, 0.2, 0.8], [0.2525, 0.2, 0.5, 0.2], [0.75, 0.5, 0.5, 1]], 1e-6
    )
    np.testing.assert_allclose(found.conf, [0.9, 0.75, 0.5])
    np.testing.assert_array_equal(found.cls, [0, 1, 0])
    assert found.cls.dtype == np.int64 and found.cxcywhn.dtype == np.float32


def test_table() -> None:
    found = a_prediction(BOXES)
    table = found.to_pandas()
    assert list(table.columns) == ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    assert table.iloc[1].tolist() == [0.5, 5, 100.5, 15, 0.75, 1, "bus"]
    assert table["name"].tolist() == ["person", "bus", "person"] and table["class"].tolist() == [0, 1, 0]
    table.loc[0, "xmin"] = -1
    assert found.boxes[0, 0] == 20
    empty = a_prediction([]).to_pandas()
    assert empty.shape == (0, 7) and (empty.dtypes == table.dtypes).all()


@pytest.mark.parametrize(
    ("classes", "names", "text"),
    [
        ([0, 0, 1], ["person", "dog"], "2 persons, 1 dog"),
        ([1, 0, 1, 1], ["person", "dog"], "3 dogs, 1 person"),
        ([0, 0], ["bus"], "2 bus"),
        ([0, 0], ["class 7"], "2 class 7"),
        ([0, 0], ["\u732b"], "2 \u732b"),
        ([0], ["person"], "1 person"),
        ([], ["person"], "nothing found"),
    ],
)
def test_summary(classes: list[int], names: list[str], text: str) -> None:
    found = a_prediction([[0, 0, 9, 9, 0.5, c] for c in classes], names)
    assert str(found) == text and len(found) == len(classes)
    assert repr(found) == f"Prediction(200 x 50 pixels: {text})"
    at = a_prediction([[0, 0, 9, 9, 0.5, c] for c in classes], names, "a/clip.mp4", 7)
    assert repr(at) == f"Prediction(a/clip.mp4, frame 7, 200 x 50 pixels: {text})"


def test_plots_and_files(tmp_path: Path) -> None:
    found = a_prediction(BOXES)
    before = found.image.copy()
    drawn = found.plot()
    np.testing.assert_array_equal(found.image, before)
    assert drawn.shape == before.shape and np.count_nonzero((drawn != before).any(2)) > 300
    bare, thick = found.plot(hide_labels=True), found.plot(line_thickness=7)
    assert np.count_nonzero((bare != before).any(2)) < np.count_nonzero((drawn != before).any(2))
    assert not np.array_equal(found.plot(hide_conf=True), drawn) and not np.array_equal(thick, drawn)
    found.save(tmp_path / "a.png")
    np.testing.assert_array_equal(load(tmp_path / "a.png"), drawn)
    np.testing.assert_array_equal(a_prediction([]).plot(), before)
    for name in ("nowhere/a.png", "a.sauce", "a"):
        with pytest.raises(UserError, match="can't be written"):
            found.save(tmp_path / name)


def test_crops() -> None:
    found = a_prediction(BOXES)
    found.image[10:50, 20:60] = 33
    crops = found.crops()
    assert [part.shape for part in crops] == [(40, 40, 3), (10, 101, 3), (50, 100, 3)]
    assert (crops[0] == 33).all()
    assert a_prediction([]).crops() == []


def test_the_caller_keeps_what_it_gave(yolo: YOLO, photo: Path) -> None:
    assert yolo.model is not None
    image = load(photo)
    before, state = image.copy(), {name: value.clone() for name, value in yolo.model.state_dict().items()}
    image.setflags(write=False)
    assert np.shares_memory(one(yolo, image).image, image)
    np.testing.assert_array_equal(image, before)
    after = yolo.model.state_dict()
    assert all(torch.equal(state[name], after[name]) for name in state)


def test_half_precision_is_a_copy(weights: Path) -> None:
    model, family, _ = load_model(weights, ALONE)
    config = DetectConfig(weights="x.pt", half=True)
    detector = Detector(model, family, (64, 64), config, torch.device("cpu"))
    assert next(detector.model.parameters()).dtype == torch.float16
    assert next(model.parameters()).dtype == torch.float32


# ---- mistakes ----


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "source is of type NoneType; give a path"),
        (True, "source is of type bool"),
        (torch.zeros(3, 64, 64), "source is of type Tensor"),
        ([picture(), [picture()]], r"source\[1\] is of type list"),
        (np.zeros((64, 64, 3), np.float32), r"source is an array of float32 with shape \(64, 64, 3\)"),
        ([picture(), np.zeros((3, 64, 64), np.uint8)], r"source\[1\] is an array of uint8 with shape \(3, 64, 64\)"),
        (np.zeros((2, 64, 64, 3), np.uint8), "several of them a list"),
        (np.zeros((0, 64, 3), np.uint8), r"shape \(0, 64, 3\)"),
        (Image.new("F", (4, 4)), "PIL image of mode F"),
        (Image.new("RGB", (0, 4)), "0 x 4 pixels"),
        ("gone.jpg", "--source gone.jpg: there is no such file"),
        ("http://127.0.0.1:9/x", "stream=True"),
        (0, "stream=True"),
    ],
)
def test_sources_that_are_none(yolo: YOLO, source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        yolo.predict(source)


def test_a_picture_full_of_detections(yolo: YOLO, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than 1000 were cut off, and nothing told (ultralytics/yolov5#2479); who asks for fewer knows."""
    found = yolo.predict([photo, photo], imgsz=320, conf=0, iou=1)
    assert [len(one) for one in found] == [1000, 1000]
    assert capsys.readouterr().out.count("WARNING: a picture has 1000 detections, and maybe more: --max-det") == 1
    assert len(one(yolo, photo, imgsz=320, conf=0, iou=1)) == 20 and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"agnostic": True}, r"agnostic is not a keyword of predict\(\); did you mean agnostic_nms\?"),
        ({"save_txt": True}, "save_txt is not a keyword"),
        ({"weights": "other.pt"}, "weights is not a keyword"),
        ({"conf_thres": 2}, "--conf-thres must be between 0 and 1"),
        ({"classes": [0, 3]}, r"--classes 3: weights\.pt knows the classes 0 to 2"),
        ({"imgsz": 16}, "--imgsz 16 is below the network's stride"),
        ({"imgsz": [64, 64, 64]}, "--imgsz takes one number"),
        ({"half": True}, "--half computes on a CUDA GPU only"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_flags_that_make_no_sense(yolo: YOLO, photo: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        yolo.predict(photo, **flags)


def test_mistakes_are_told_together_and_at_once(yolo: YOLO) -> None:
    """Also when a generator is asked for."""
    with pytest.raises(UserError) as error:
        yolo.predict(["gone.jpg", picture(), 1.5], imgsz=16, classes=9, stream=True)
    assert len(error.value.messages) == 4
    with pytest.raises(UserError) as error:
        yolo.predict(picture(), agnostic=True, conf=-1, max_det=0)
    assert len(error.value.messages) == 3
    with pytest.raises(UserError, match="don't go into one list"):
        yolo.predict([picture(), "rtsp://host/x"], stream=True)


def test_files_that_cannot_be_read(yolo: YOLO, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder they are left out; where the caller names them, results would no longer be in the order of names."""
    folder = tmp_path / "some"
    write(folder / "a.png", load(photo))
    broken = folder / "broken.png"
    broken.write_bytes(photo.read_bytes()[:-2000])
    assert [Path(p.path).name for p in yolo.predict(folder)] == ["a.png"]
    assert "broken.png" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"broken\.png: nothing in it can be read"):
        yolo.predict([photo, broken, photo])
    with Image.open(broken) as opened, pytest.raises(UserError, match=r"source\[1\] can't be read"):
        yolo.predict([photo, opened])


def test_without_weights() -> None:
    with pytest.raises(UserError, match="has no weights yet"):
        YOLO("yolov5n.yaml", device="cpu").predict(picture())


def test_functions_below_the_object(weights: Path, yolo: YOLO, photo: Path) -> None:
    assert predict_config({"batch": 3}, weights.name).batch_size == 3
    config = predict_config({"max_det": 20}, weights.name)
    assert (config.max_det, config.batch_size) == (20, 16)
    found = list(predict(photo, *load_model(weights, ALONE), config, torch.device("cpu")))
    np.testing.assert_array_equal(found[0].boxes, one(yolo, photo).boxes)
