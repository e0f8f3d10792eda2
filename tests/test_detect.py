"""Detection through the command line: pictures in, files out, all of them telling the same."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import detect
from models.detector import fit
from models.yolo import DetectionModel, load_state
from tests.common import PROJECT, SHARED, needs_shared
from tests.inference.test_sources import Handler, Server, exif_rotated, make_video, picture, pipe, write
from utils.config.build import parse
from utils.config.flags import DetectConfig
from utils.config.yaml_files import load_yaml
from utils.core.errors import UserError
from utils.inference import detection_files
from utils.inference.detection_files import DetectionFiles, check_codec
from utils.inference.frames import Frame
from utils.inference.sources import Source, safe_name
from utils.torch_utils import save_checkpoint

NAMES = ["cat", "traffic light", "a/b"]
PHOTOS = SHARED / "datasets/coco128/images/train2017"


def checkpoint(path: Path, state: dict[str, torch.Tensor] | None, names: list[str], imgsz: int) -> Path:
    """Write weights as training leaves them; without a state an untrained network that sees objects everywhere."""
    spec = load_yaml(PROJECT / "models/yolov5n.yaml")
    torch.manual_seed(0)
    model = DetectionModel(spec, len(names), names)
    if state is not None:
        load_state(model, state, strict=True)
    else:
        with torch.no_grad():
            for conv in model.detect.m:
                bias, weight = (conv.get_parameter(name).view(3, 5 + len(names), -1) for name in ("bias", "weight"))
                bias[:, 4], bias[:, 5:] = 1.0, 0.0
                weight[:, 4:] *= 3e5  # an untrained network's maps are nearly flat
    content = {"spec": spec, "names": names, "model": model.state_dict(), "config": {"imgsz": imgsz}}
    save_checkpoint(content, path)
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "weights.pt", None, NAMES, 128)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(weights: Path, source: object, *flags: str) -> Path:
    """Detect and return the run folder."""
    detect.main(["--weights", str(weights), "--source", str(source), "--name", "run", "--device", "cpu", *flags])
    return sorted(Path("runs/detect").iterdir(), key=lambda path: path.stat().st_mtime_ns)[-1]


def table(run_dir: Path) -> dict[str, np.ndarray]:
    """predictions.csv: (K, 6) [x1, y1, x2, y2, confidence, class] by image, in pixels."""
    found: dict[str, list[list[float]]] = {}
    with (run_dir / "predictions.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            numbers = [float(row[key]) for key in ("X1", "Y1", "X2", "Y2", "Confidence", "Class")]
            stem = Path(row["Image Name"]).stem + (f"_{row['Frame']}" if row["Frame"] != "0" else "")
            found.setdefault(stem, []).append(numbers)
    return {name: np.array(rows) for name, rows in found.items()}


def label_boxes(path: Path, width: int, height: int, corners: bool = False) -> np.ndarray:
    """A label file as (K, 6), in pixels."""
    rows = np.loadtxt(path, ndmin=2)
    low, high = (
        (rows[:, 1:3], rows[:, 3:5]) if corners else (rows[:, 1:3] - rows[:, 3:5] / 2, rows[:, 1:3] + rows[:, 3:5] / 2)
    )
    size = np.array([width, height])
    return np.hstack([low * size, high * size, rows[:, 5:], rows[:, :1]])


def load(path: Path) -> np.ndarray:
    image = cv2.imread(str(path))
    assert image is not None, path
    return np.asarray(image, np.uint8)


def read_video(path: Path) -> tuple[list[np.ndarray], float]:
    capture = cv2.VideoCapture(str(path))
    assert capture.isOpened()
    frames = []
    while (got := capture.read())[0]:
        frames.append(got[1])
    return frames, capture.get(cv2.CAP_PROP_FPS)


# ---- the figures ----


@needs_shared
def test_real_image_has_the_recorded_detections(tmp_path: Path) -> None:
    """The recorded ones are rounded to whole pixels; letterboxed to 256 x 320."""
    recorded = np.load(SHARED / "golden/yolov5n_bccd_forward.npz")
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    path = checkpoint(tmp_path / "bccd.pt", state, ["RBC", "WBC", "Platelets"], 320)
    image = SHARED / "datasets/bccd/images/val" / str(recorded["image_name"])
    run_dir = run(path, image, "--save-csv")
    found, wanted = table(run_dir)[image.stem], recorded["detections_xyxy_conf_cls"]
    assert found.shape == wanted.shape and (found[:, 5] == wanted[:, 5]).all()
    assert np.abs(found[:, :4] - wanted[:, :4]).max() < 0.52
    assert np.abs(found[:, 4] - wanted[:, 4]).max() < 1e-3
    pixels = load(image)
    assert fit(pixels, (320, 320), 32).pixels.shape == tuple(recorded["letterboxed_rgb_shape"][[2, 3, 1]])


@pytest.mark.parametrize(
    ("shape", "imgsz", "inner", "outer"),
    [
        ((480, 640), (320, 320), (240, 320), (256, 320)),
        ((641, 427), (640, 640), (640, 426), (640, 448)),  # sides rounded: 426.3
        ((100, 100), (320, 640), (320, 320), (320, 320)),
        ((100, 300), (320, 640), (213, 640), (224, 640)),
        ((10, 3000), (320, 320), (1, 320), (32, 320)),
    ],
)
def test_pictures_keep_their_proportions(
    shape: tuple[int, int], imgsz: tuple[int, int], inner: tuple[int, int], outer: tuple[int, int]
) -> None:
    entry = fit(picture(255, *shape), imgsz, 32)
    assert entry.pixels.shape[:2] == outer
    rows, columns = np.nonzero((entry.pixels == 255).all(2))
    assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == inner
    assert (rows.min(), columns.min()) == (entry.top, entry.left)
    assert entry.top in ((outer[0] - inner[0]) // 2, (outer[0] - inner[0] + 1) // 2)
    assert (entry.pixels[: entry.top] == 114).all()


# ---- what is written ----


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty real photos of many sizes; drawn ones where there are none."""
    folder = tmp_path_factory.mktemp("photos")
    paths = sorted(PHOTOS.glob("*.jpg"))[:20] or sorted((PROJECT / "data/images").glob("*.jpg"))
    for path in paths:
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.lowest
def test_txt_csv_and_crops_agree_with_the_boxes(weights: Path, photos: Path) -> None:
    flags = ("--save-txt", "--save-conf", "--save-csv", "--save-crop", "--max-det", "12")
    run_dir = run(weights, photos, *flags)
    found = table(run_dir)
    images = {path.stem: load(path) for path in photos.iterdir()}
    assert len(found) == len(images) >= 6 and sum(map(len, found.values())) > 50
    assert {path.stem for path in run_dir.glob("*.jpg")} == set(images)
    crops = Counter(path.parent.name for path in run_dir.glob("crops/*/*.jpg"))
    assert crops == Counter(safe_name(NAMES[int(row[5])]) for rows in found.values() for row in rows)
    for name, image in images.items():
        height, width = image.shape[:2]
        rows = label_boxes(run_dir / f"labels/{name}.txt", width, height)
        assert np.abs(rows[:, :4] - found[name][:, :4]).max() < 0.02
        assert np.abs(rows[:, 4] - found[name][:, 4]).max() < 1e-4 and (rows[:, 5] == found[name][:, 5]).all()
        assert rows[:, :4].min() > -0.01 and (rows[:, 2:4].max(0) < [width + 0.01, height + 0.01]).all()
        best = found[name][0]
        (left, top), (right, bottom) = np.floor(best[:2]).astype(int), np.ceil(best[2:4]).astype(int)
        written = load(run_dir / f"crops/{safe_name(NAMES[int(best[5])])}/{name}.jpg")
        assert written.shape == (bottom - top, right - left, 3)
        assert np.abs(written.astype(int) - image[top:bottom, left:right]).mean() < 12  # JPEG
        drawn = load(run_dir / f"{name}.jpg")
        assert drawn.shape == image.shape and np.abs(drawn.astype(int) - image).mean() > 0.3


def test_corner_rows_and_no_pictures(weights: Path, photos: Path) -> None:
    run_dir = run(weights, photos, "--save-txt", "--save-format", "1", "--save-csv", "--nosave", "--max-det", "5")
    found = table(run_dir)
    for path in photos.iterdir():
        height, width = load(path).shape[:2]
        rows = label_boxes(run_dir / f"labels/{path.stem}.txt", width, height, corners=True)
        assert rows.shape[1] == 5  # no confidences unless asked for
        assert np.abs(rows[:, :4] - found[path.stem][:, :4]).max() < 0.02
    assert not list(run_dir.glob("*.jpg"))


def test_batches_change_nothing(weights: Path, photos: Path) -> None:
    """Pictures of many shapes, several in a forward pass, come back in their order with their own boxes."""
    one = table(run(weights, photos, "--save-csv", "--nosave", "--max-det", "10"))
    many = table(run(weights, photos, "--save-csv", "--nosave", "--max-det", "10", "--batch-size", "7"))
    assert list(one) == list(many)
    for name in one:
        assert one[name] == pytest.approx(many[name], abs=0.05)


def test_classes_are_kept_and_all_others_left_out(weights: Path, photos: Path) -> None:
    flags = ("--save-csv", "--nosave", "--conf-thres", "0.5")
    everything = table(run(weights, photos, *flags))
    some = table(run(weights, photos, *flags, "--classes", "2", "0"))
    for name, rows in everything.items():
        assert np.array_equal(some.get(name, np.zeros((0, 6))), rows[rows[:, 5] != 1])
    assert {row[5] for rows in everything.values() for row in rows} == {0, 1, 2}


def overlaps(rows: np.ndarray) -> np.ndarray:
    """IoU of each pair of rows, 0 with itself."""
    low, high = np.maximum(rows[:, None, :2], rows[None, :, :2]), np.minimum(rows[:, None, 2:4], rows[None, :, 2:4])
    common = (high - low).clip(0).prod(2)
    area = (rows[:, 2:4] - rows[:, :2]).prod(1)
    return common / (area[:, None] + area[None] - common) * (1 - np.eye(len(rows)))


def test_agnostic_suppression(weights: Path, photos: Path) -> None:
    """Inside the image no two boxes overlap much, whatever their classes; without the flag some of two classes do."""
    flags = ("--save-csv", "--nosave", "--max-det", "60", "--iou-thres", "0.4")
    image = next(photos.iterdir())
    height, width = load(image).shape[:2]

    def inner(rows: np.ndarray) -> np.ndarray:  # boxes were clipped after the suppression, those at the edge changed
        return rows[(rows[:, :2] > 0).all(1) & (rows[:, 2] < width) & (rows[:, 3] < height)]

    assert overlaps(inner(table(run(weights, image, *flags, "--agnostic-nms"))[image.stem])).max() < 0.41
    assert overlaps(inner(table(run(weights, image, *flags))[image.stem])).max() > 0.5


def test_odd_images(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "odd"
    write(folder / "grey.png", picture(60, 20, 40)[..., 0])
    write(folder / "alpha.png", np.full((20, 40, 4), 80, np.uint8))
    write(folder / "deep.tif", np.full((20, 40, 3), 30000, np.uint16))
    write(folder / "\u732b mit \u00fcber [1] 100%.jpg", picture(90, 30, 50))
    write(folder / "one.png", picture(90, 1, 1))
    write(folder / "line.bmp", picture(90, 2, 700))
    exif_rotated(folder / "turned.jpg", picture(90, 20, 40))
    (folder / "broken.jpg").write_bytes(b"no image")
    run_dir = run(weights, folder, "--save-txt", "--save-csv", "--save-crop", "--max-det", "3", "--batch-size", "3")
    assert {path.name for path in run_dir.iterdir() if path.is_file()} == (
        {path.name for path in folder.iterdir()} - {"broken.jpg"} | {"predictions.csv"}
    )
    assert load(run_dir / "turned.jpg").shape == (40, 20, 3)
    printed = capsys.readouterr().out
    assert "broken.jpg" in printed and "1 of 8 files could not be read" in printed
    assert "in 7 of 7 pictures" in printed and "speed per image: prepare" in printed and "results in runs" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
def test_names_that_are_no_text(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in Latin-1, as old disks have them: OpenCV would end the process. The table has their bytes."""
    folder = os.fsencode(tmp_path / "odd")
    write(tmp_path / "odd/a.png", picture(90, 64, 64))
    make_video(tmp_path / "odd/b.avi", 2)
    os.rename(folder + b"/a.png", folder + b"/caf\xe9.png")
    os.rename(folder + b"/b.avi", folder + b"/caf\xe9.avi")
    run_dir = run(weights, tmp_path / "odd", "--save-csv", "--save-txt", "--save-crop", "--max-det", "1")
    assert {path.name for path in run_dir.glob("*.*")} == {"caf-2.png", "predictions.csv"}
    assert len(list(run_dir.glob("labels/caf-2.txt"))) == len(list(run_dir.glob("crops/*/caf-2.jpg"))) == 1
    (row,) = (run_dir / "predictions.csv").read_bytes().splitlines()[1:]
    assert row.startswith(b"caf-2.png,") and row.endswith(b"/odd/caf\xe9.png")
    said = capsys.readouterr().out
    assert r"caf\udce9.avi: its name is not UTF-8, which OpenCV can't open; left out" in said
    with pytest.raises(UserError, match=r"^--source: http://h/\udce9 is not UTF-8$"):
        run(weights, "http://h/\udce9")


def test_same_names_do_not_overwrite_each_other(weights: Path, tmp_path: Path) -> None:
    for name, value in (("x/a.jpg", 40), ("y/a.jpg", 90), ("y/a.png", 200)):
        write(tmp_path / name, picture(value, 64, 64))
    run_dir = run(weights, tmp_path / "?/a.*", "--save-txt", "--save-crop", "--max-det", "2", "--conf-thres", "0")
    assert {path.name for path in run_dir.glob("*.*g")} == {"a.jpg", "a-2.jpg", "a-3.png"}
    assert {path.name for path in run_dir.glob("labels/*")} == {"a.txt", "a-2.txt", "a-3.txt"}
    assert len(list(run_dir.glob("crops/*/*"))) == 6


def test_a_second_run_into_the_folder_starts_its_files_afresh(weights: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", picture(90, 64, 64))
    flags = ("--save-txt", "--save-csv", "--save-crop", "--exist-ok")
    run_dir = run(weights, path, *flags, "--max-det", "5")
    first = (run_dir / "labels/a.txt").read_text(), (run_dir / "predictions.csv").read_text()
    assert run(weights, path, *flags, "--max-det", "5") == run_dir
    assert ((run_dir / "labels/a.txt").read_text(), (run_dir / "predictions.csv").read_text()) == first
    run(weights, path, *flags, "--conf-thres", "1")
    assert not (run_dir / "labels/a.txt").exists()  # nothing was found
    assert len((run_dir / "predictions.csv").read_text().splitlines()) == 1


def test_drawing_flags(weights: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", picture(90, 200, 300))

    def changed(*flags: str) -> int:
        drawn = load(run(weights, path, "--max-det", "1", *flags) / "a.png")
        return int(np.count_nonzero(drawn.max(2) != 90))

    bare, name_only, both = changed("--hide-labels"), changed("--hide-conf"), changed()
    assert 0 < bare < name_only < both
    assert changed("--hide-labels", "--line-thickness", "9") > 2 * bare


# ---- videos and streams ----


@pytest.mark.lowest
def test_video(weights: Path, tmp_path: Path) -> None:
    """As many frames of the same size at the same speed; a label file for each frame."""
    path = make_video(tmp_path / "my clip.mp4", 12, fps=12.5, size=(66, 50))
    run_dir = run(weights, path, "--save-txt", "--save-csv", "--batch-size", "5", "--max-det", "4")
    frames, fps = read_video(run_dir / "my clip.mp4")
    assert (len(frames), frames[0].shape, fps) == (12, (50, 66, 3), 12.5)
    assert {path.stem for path in run_dir.glob("labels/*.txt")} == {f"my clip_{number}" for number in range(1, 13)}
    rows = label_boxes(run_dir / "labels/my clip_7.txt", 66, 50)
    assert np.abs(rows[:, :4] - table(run_dir)["my clip_7"][:, :4]).max() < 0.02


def fourcc(path: Path) -> str:
    return int(cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little").decode()


def test_videos_are_such_as_browsers_play(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Videos were MPEG-4 part 2, which browsers don't play (ultralytics/yolov5#7738)."""
    path = make_video(tmp_path / "clip.avi", 3)
    played = fourcc(run(weights, path) / "clip.mp4") in ("VP90", "vp09", "avc1", "h264", "H264")
    assert played == ("browsers don't play" not in capsys.readouterr().out)
    assert fourcc(run(weights, path, "--video-codec", "mp4v") / "clip.mp4") == "FMP4"
    assert "browsers" not in capsys.readouterr().out  # who asks for it knows


def test_streams_are_written_quickly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As VP9 most of their frames would be missed (ultralytics/yolov5#7738 is of what browsers play)."""
    picture, nothing = np.zeros((48, 64, 3), np.uint8), np.zeros((0, 6), np.float32)
    for codec in ("auto", "mp4v"):
        files = DetectionFiles(tmp_path, DetectConfig(weights="x.pt", video_codec=codec), NAMES)
        frames = [Frame(Source(kind, "x", f"{kind} {codec}"), picture, 1, 30.0) for kind in ("stream", "video")]
        for frame in frames[: 1 if codec == "auto" else 2]:
            files.write(frame, nothing, picture)
        files.close()
    assert [fourcc(path) for path in sorted(tmp_path.glob("*.mp4"))] == ["FMP4"] * 3
    assert capsys.readouterr().out == ""  # neither that browsers don't play it nor that OpenCV lacks a codec


def test_a_codec_that_opencv_lacks(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error if it was asked for; else the next one is taken, and what that means is said once."""
    with pytest.raises(UserError, match="--video-codec none: this OpenCV can't write it"):
        check_codec("none")
    monkeypatch.setattr(detection_files, "VIDEO_CODECS", ("none", "mp4v"))
    Path("clips").mkdir()
    for name in "ab":
        make_video(Path(f"clips/{name}.avi"), 3)
    assert fourcc(run(weights, "clips") / "b.mp4") == "FMP4"
    assert capsys.readouterr().out.count("browsers don't play") == 1


def test_video_stride_and_images_beside_videos(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    write(folder / "a.jpg", picture(90, 48, 64))
    make_video(folder / "b.avi", 7)
    make_video(folder / "c.mp4", 4)
    run_dir = run(weights, folder, "--save-txt", "--vid-stride", "3", "--batch-size", "4", "--max-det", "3")
    assert {path.name for path in run_dir.glob("*.*")} == {"a.jpg", "b.mp4", "c.mp4"}
    assert {path.stem for path in run_dir.glob("labels/*")} == {"a", "b_1", "b_4", "b_7", "c_1", "c_4"}
    assert (len(read_video(run_dir / "b.mp4")[0]), len(read_video(run_dir / "c.mp4")[0])) == (3, 2)
    assert read_video(run_dir / "b.mp4")[1] == pytest.approx(10 / 3, abs=0.01)


def test_summary_counts_the_frames_of_damaged_videos(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a clip was "30 of 30" (ultralytics/yolov5#2064)."""
    path = make_video(tmp_path / "clip.avi", 60)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run(weights, path, "--nosave", "--save-csv")
    lines = capsys.readouterr().out.splitlines()
    said = [re.fullmatch(r"(\d+) of 60 frames of .*clip.avi were read", line) for line in lines]
    read = next(match[1] for match in said if match)
    assert any(f"of {read} pictures" in line for line in lines)


def test_every_video_is_closed_also_if_some_are_lost(tmp_path: Path) -> None:
    """A video can be played once it was closed; the files of the first two are gone by then."""
    files = DetectionFiles(tmp_path, DetectConfig(weights="x.pt"), NAMES)
    sources = [Source("stream", f"http://host/{name}", name) for name in "abc"]
    for number in range(1, 6):
        for source in sources:
            frame = Frame(source, picture(40 * number, 48, 64), number, 10.0)
            files.write(frame, np.zeros((0, 6), np.float32), frame.image)
    for name in "ab":
        (tmp_path / f"{name}.mp4").unlink()
    with pytest.raises(UserError) as error:
        files.close()
    assert all(f"{tmp_path}/{name}.mp4 could not be written: No such file" in str(error.value) for name in "ab")
    assert len(read_video(tmp_path / "c.mp4")[0]) == 5
    files.close()  # nothing is left to be done


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_http_stream_to_its_end(weights: Path, server: Server) -> None:
    server.frames, server.pause, server.connection_limit = 12, 0.05, 1
    run_dir = run(weights, f"{server.url}/cam", "--save-txt", "--stream-timeout", "1", "--max-det", "3")
    name = f"127.0.0.1_{server.server_port}_cam"
    frames, _ = read_video(run_dir / f"{name}.mp4")
    assert 3 <= len(frames) <= 12 and frames[0].shape == (48, 64, 3)
    assert len(list(run_dir.glob(f"labels/{name}_*.txt"))) == len(frames)


def test_streams_side_by_side(weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "all.streams"
    path.write_text("".join(f"{make_video(tmp_path / name, 5)}\n" for name in ("a.avi", "b.avi")))
    run_dir = run(weights, path, "--save-txt", "--max-det", "3")
    assert [len(read_video(run_dir / f"{name}.mp4")[0]) for name in "ab"] == [5, 5]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.slow
@pytest.mark.gate
def test_stream_that_hangs_in_its_driver_ends_the_run(weights: Path, tmp_path: Path) -> None:
    """Also the process, whose thread hangs on; what came before is in a whole video."""
    whole = make_video(tmp_path / "whole.ts", 60).read_bytes()
    (tmp_path / "hung.streams").write_text("hung.ts\n")
    command = [sys.executable, str(PROJECT / "detect.py"), "--weights", str(weights), "--device", "cpu"]
    with pipe(tmp_path / "hung.ts", whole[: len(whole) * 2 // 3]):
        done = subprocess.run(
            [*command, "--source", "hung.streams", "--stream-timeout", "2"],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=300,
            check=False,
        )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "hung.ts: no frame for 2 s; the stream has ended" in done.stdout
    assert read_video(tmp_path / "runs/detect/exp/hung.mp4")[0]


@pytest.mark.slow
@pytest.mark.gate
def test_ctrl_c_ends_a_stream_with_a_whole_video(weights: Path, server: Server, tmp_path: Path) -> None:
    server.frames, server.pause = 100_000, 0.02
    command = [sys.executable, str(PROJECT / "detect.py"), "--weights", str(weights), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--source", f"{server.url}/cam", "--save-txt", "--max-det", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # A job in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    run_dir = tmp_path / "runs/detect/exp"
    end = time.monotonic() + 150
    while len(list(run_dir.glob("labels/*"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in error and "results in runs" in out
    assert read_video(next(run_dir.glob("*.mp4")))[0]


# ---- defaults and mistakes ----


def test_shipped_pictures_are_the_default(weights: Path) -> None:
    pictures = sorted((PROJECT / "data/images").iterdir())
    assert len(pictures) >= 6 and all(path.stat().st_size < 40_000 for path in pictures)
    detect.main(["--weights", str(weights), "--max-det", "3", "--device", "cpu"])
    assert sorted(path.name for path in Path("runs/detect/exp").iterdir()) == [path.name for path in pictures]


def test_augment_and_two_image_sizes(weights: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", picture(90, 64, 100))
    found = table(run(weights, path, "--augment", "--imgsz", "64", "160", "--save-csv", "--max-det", "3"))
    assert len(found["a"]) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "nowhere.jpg"], "no such file"),
        (["--source", "none"], "holds no image"),
        (["--source", "x*.jpg"], "matches this pattern"),
        (["--source", "broken"], "nothing in it can be read"),
        (["--source", "http://127.0.0.1:9/x", "--stream-timeout", "1"], "no picture comes from"),
        (["--source", "a.png", "--half"], "--half"),
        (["--source", "a.png", "--classes", "0", "3"], "the classes 0 to 2"),
        (["--source", "a.png", "--imgsz", "64", "16"], "--imgsz 16 is below"),
        (["--source", "a.png", "--weights", "a.png"], "not a checkpoint"),
        (["--source", "a.png", "--project", "a.png"], "a.png"),
    ],
)
def test_mistakes_leave_nothing_behind(weights: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    write(tmp_path / "a.png", picture(90, 64, 64))
    (tmp_path / "none").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/a.jpg").write_bytes(b"no image")
    with pytest.raises(UserError) as error:
        detect.main(["--weights", str(weights), "--device", "cpu", *flags])
    assert message in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_names_from_a_data_yaml(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YOLOv5's flag: names for weights that have none; other names than the weights' own are said."""
    for file, names in (("same", NAMES), ("other", ["a", "b", "c"]), ("more", list("abcd"))):
        (tmp_path / f"{file}.yaml").write_text(f"train: .\nval: .\nnames: {json.dumps(names)}\n")
    write(tmp_path / "a.png", picture(90, 64, 64))
    named = run(weights, "a.png", "--save-csv", "--data", "same.yaml")
    assert "WARNING" not in capsys.readouterr().out
    assert predicted(run(weights, "a.png", "--save-csv", "--data", "other.yaml")) == predicted(named) <= set(NAMES)
    assert "other.yaml has other class names than" in capsys.readouterr().out
    nameless = checkpoint(tmp_path / "nameless.pt", None, ["0", "1", "2"], 128)
    assert predicted(run(nameless, "a.png", "--save-csv", "--data", "other.yaml")) <= {"a", "b", "c"}
    with pytest.raises(UserError, match=r"more.yaml names 4 classes, but .*nameless.pt knows 3"):
        run(nameless, "a.png", "--data", "more.yaml")


def predicted(run_dir: Path) -> set[str]:
    with (run_dir / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return {row["Prediction"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}])
def test_several_processes_are_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Each process of a launcher would look at all pictures and write a run folder of its own."""
    others = {
        "RANK": {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        "SLURM_STEP_ID": {
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "host",
            "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2",
        },
    }[next(iter(variables))]  # fmt: skip
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    for name, value in (variables | others).items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(UserError, match="detection runs in one process, but a launcher started 2"):
            detect.main(["--weights", str(weights), "--device", "cpu"])
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
    assert not Path("runs").exists()


def test_several_mistakes_are_told_together(weights: Path) -> None:
    with pytest.raises(UserError) as error:
        detect.main(["--weights", "gone.pt", "--source", "gone.jpg", "--half", "--device", "cpu"])
    assert len(error.value.messages) == 3


def test_view_img_without_a_display(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform == "linux":
        with pytest.raises(UserError, match="--view-img"):
            detect.main(["--weights", str(weights), "--view-img", "--device", "cpu"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--imgsz", "1", "2", "3"], "--imgsz takes one number"),
        (["--save-conf"], "--save-txt"),
        (["--dnn"], "--dnn is not available yet"),
        (["--update"], "--update is not available yet"),
        (["--save-format", "2"], "--save-format"),
        (["--conf", "2"], "--conf"),
        (["--device", "0,1"], "not available yet"),
        (["--imgsz", ""], "--imgsz takes whole numbers, not ''"),
        (["--name", ""], "--name '' is no folder of the run's own"),
        (["--name", "n" * 300], "a name of 300 bytes"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(DetectConfig, ["--weights", "x.pt", *flags])
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("ids", [["0", "3"], ["0,3"], ["0,", "3"], ["0, 3"]])
def test_lists_of_numbers(ids: list[str]) -> None:
    assert parse(DetectConfig, ["--weights", "x.pt", "--classes", *ids]).classes == [0, 3]
    assert parse(DetectConfig, ["--weights", "x.pt", "--classes", ""]).classes == []


def test_wrong_flags_cost_no_torch() -> None:
    """The status and the message come before anything large is imported."""
    code = (
        "import runpy, sys; sys.argv = ['detect.py', '--sauce', 'x']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'cv2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False", "False"], done.stderr
    assert "did you mean --source" in done.stderr
