"""The rules for labels and images, as a user meets them: what is kept, what is said, what the report lists."""

import contextlib
import csv
import hashlib
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from models.families import YOLOV5
from tests.test_faults import assert_clear, call
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import UserError
from utils.data.index import build_index
from utils.data.label_rules import BAD_CLASS, check_rows
from utils.data.labels import RowReader
from utils.data.report import Problem, ScanReport, write_report
from utils.torch_utils import save_checkpoint

GOOD = "0 0.5 0.5 0.2 0.3"
CLIPPED = "coordinate slightly outside 0 to 1, clipped"
FAR = "coordinate outside 0 to 1 by more than 0.01, row left out"
OUT = "box reaches out of the image, clipped"
FLAT = "box without width or height, row left out"

# What stands in the label file of an image: boxes that are kept, then line, value and rule of each finding.
LABELS: dict[str, tuple[str, list[list[float]], list[tuple[int, str, str]]]] = {
    "good": (GOOD, [[0, 0.5, 0.5, 0.2, 0.3]], []),
    "words": (f"cat 0.5 0.5 0.2 0.3\n{GOOD}", [[0, 0.5, 0.5, 0.2, 0.3]], [(1, "cat", "not a number, row left out")]),
    "columns": (
        "0 0.5 0.5 0.2",
        [],
        [(1, "4 columns", "neither 5 columns (class cx cy w h) nor a polygon (class and 3")],
    ),
    "nan": ("0 nan 0.5 0.2 0.3", [], [(1, "nan", "not a finite number, row left out")]),
    "pixels": (f"{GOOD}\n1 320 240 100 80", [[0, 0.5, 0.5, 0.2, 0.3]], [(2, "320", FAR)]),
    "cx": ("0 1.01 0.5 0.2 0.2", [[0, 0.95, 0.5, 0.1, 0.2]], [(1, "1.01", CLIPPED), (1, "1.1", OUT)]),
    "cx_far": ("0 1.0101 0.5 0.2 0.2", [], [(1, "1.0101", FAR)]),
    "cy": ("0 0.5 -0.01 0.2 0.2", [[0, 0.5, 0.05, 0.2, 0.1]], [(1, "-0.01", CLIPPED), (1, "-0.1", OUT)]),
    "cy_far": ("0 0.5 -0.0101 0.2 0.2", [], [(1, "-0.0101", FAR)]),
    "w": ("0 0.5 0.5 1.01 0.2", [[0, 0.5, 0.5, 1, 0.2]], [(1, "1.01", CLIPPED)]),
    "w_far": ("0 0.5 0.5 1.0101 0.2", [], [(1, "1.0101", FAR)]),
    "h": ("0 0.5 0.5 0.2 1.01", [[0, 0.5, 0.5, 0.2, 1]], [(1, "1.01", CLIPPED)]),
    "h_negative": ("0 0.5 0.5 0.2 -0.005", [], [(1, "-0.005", CLIPPED), (1, "0", FLAT)]),
    "h_far": ("0 0.5 0.5 0.2 -0.2", [], [(1, "-0.2", FAR)]),
    "corner": ("0 0.05 0.9 0.2 0.4", [[0, 0.075, 0.85, 0.15, 0.3]], [(1, "1.1", OUT)]),
    "flat": ("0 0.5 0.5 0 0.2", [], [(1, "0", FLAT)]),
    "polygon": ("1 0.1 0.2 0.5 0.2 0.3 0.8", [[1, 0.3, 0.5, 0.4, 0.6]], []),
    "polygon_out": ("1 0.1 0.2 1.0021 0.2 0.3 0.8", [[1, 0.55, 0.5, 0.9, 0.6]], [(1, "1.0021", CLIPPED)]),
    "polygon_far": ("1 0.1 0.2 1.0371 0.2 0.3 0.8", [], [(1, "1.0371", FAR)]),
    "twice": (f"{GOOD}\n{GOOD}", [[0, 0.5, 0.5, 0.2, 0.3]], [(2, "0", "row repeated, kept once")]),
    "empty": ("", [], []),
}


def picture(path: Path, height: int = 24, width: int = 32) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), cv2.GaussianBlur(noise, (5, 5), 0))
    return path


def data_yaml(root: Path) -> Path:
    (root / "data.yaml").write_text("train: images\nval: images\ntest: images\nnames: [a, b]\n")
    return root / "data.yaml"


def contents(root: Path) -> dict[str, str]:
    """Digest of every file of a data set but those that are ours."""
    files = (path for path in root.rglob("*") if path.is_file() and ".lockstep" not in path.parts)
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def report(run_dir: Path) -> list[list[str]]:
    with (run_dir / "data_report.csv").open(newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each rule in one image; one image without a label file, two label files without an image."""
    root = tmp_path_factory.mktemp("messy")
    (root / "labels").mkdir()
    for name, (text, _, _) in LABELS.items():
        picture(root / f"images/{name}.png")
        (root / f"labels/{name}.txt").write_text(text)
    picture(root / "images/without.png")
    for name in ("alone", "lone"):
        (root / f"labels/{name}.txt").write_text(GOOD)
    return data_yaml(root)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = YOLOV5.build(load_yaml(find_yaml("yolov5n", "model")), 2, ["a", "b"])
    path = tmp_path_factory.mktemp("weights") / "two.pt"
    state = {"spec": model.yaml, "names": model.names, "model": model.state_dict(), "config": {"imgsz": 64}}
    save_checkpoint(state, path)
    return path


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def findings(messy: Path) -> list[tuple[str, str, str, str]]:
    """File, line, value and (start of the) rule that the report of `messy` lists, in its order."""
    root = messy.parent
    rows = [(f"{root}/labels/{name}.txt", *found) for name in LABELS for found in LABELS[name][2]]
    rows += [(f"{root}/labels/{name}.txt", 0, "", "label file without an image") for name in ("alone", "lone")]
    return [(file, str(line), value, rule) for file, line, value, rule in sorted(rows, key=lambda row: row[:2])]


def test_what_is_kept(messy: Path) -> None:
    """Row by row (ultralytics/yolov5#2785, #10632, #10058, #4798, #3656, PR #5210, ultralytics#13924)."""
    index = build_index([messy.parent / "images"], 2, cache=False)
    found = {Path(index.path(i)).stem: index.labels(i) for i in range(index.n)}
    assert found.keys() == {*LABELS, "without"}
    for name, (_, boxes, _) in LABELS.items():
        np.testing.assert_allclose(found[name], np.reshape(boxes, (-1, 5)), atol=1e-7, err_msg=name)
    assert found["without"].shape == (0, 5)
    assert (index.report.found, index.report.missing, index.report.empty) == (len(LABELS) - 1, 1, 1)


@pytest.mark.parametrize("single_cls", [False, True])
def test_boxes_are_kept_once_where_all_classes_count_as_one(single_cls: bool) -> None:
    """Rows keep their class ids for the report; ids that have no name stay a mistake."""
    other_box, other_class = "0 0.5 0.5 0.2 0.4", "1 0.5 0.5 0.2 0.3"
    problems: list[Problem] = []
    reader = RowReader(problems)
    reader.read(0, "a.txt", "\n".join([GOOD, other_class, other_box, GOOD, "2 0.5 0.5 0.2 0.3"]).encode())
    reader.read(1, "b.txt", f"{other_class}\n{GOOD}".encode())
    rows = check_rows(reader.rows(), ["a.txt", "b.txt"], 2, problems, single_cls)
    found = {(problem.file, problem.line, problem.value): problem.rule for problem in problems}
    assert found.pop(("a.txt", 5, "2")) == BAD_CLASS
    kept = list(zip(rows.image.tolist(), rows.line.tolist(), rows.box[:, 0].tolist(), strict=True))
    if single_cls:
        assert kept == [(0, 1, 0), (0, 3, 0), (1, 1, 1)]
        assert found.keys() == {("a.txt", 2, "1"), ("a.txt", 4, "0"), ("b.txt", 2, "0")}
        assert set(found.values()) == {"box repeated where all classes count as one, kept once"}
    else:
        assert kept == [(0, 1, 0), (0, 2, 1), (0, 3, 0), (1, 1, 1), (1, 2, 0)]
        assert found == {("a.txt", 4, "0"): "row repeated, kept once"}


def test_the_report_of_a_training(messy: Path, cwd: Path) -> None:
    """One line and the first problems on the terminal, all of them in the run folder; the data stays as it was."""
    before = contents(messy.parent)
    flags = ("--data", messy, "--img", 64, "--batch", 8, "--epochs", 1, "--workers", 0, "--cache", "off")
    done = call("train.py", *flags, "--device", "cpu", cwd=cwd)
    assert done.status == 0, done.err
    want = findings(messy)
    count = len(want)
    assert f"22 images: 20 with labels, 1 without a label file, 1 with an empty one, 0 left out; {count} problems" in (
        done.out
    )
    assert f"WARNING: 6 x {FAR}\n" in done.out
    assert f"WARNING: 6 x {CLIPPED}\n" in done.out
    file, line, value, rule = want[2]
    assert f"WARNING: {file}:{line}: {rule}" in done.out and f" ({value})\n" in done.out
    assert f"... and {count - 10} more" in done.out
    run_dir = cwd / "runs/train/exp"
    assert f"every problem of the data is listed in {run_dir.relative_to(cwd)}/data_report.csv" in done.out
    header, *rows = report(run_dir)
    assert header == ["split", "file", "line", "value", "rule"]
    assert [row[0] for row in rows] == ["train"] * count + ["val"] * count
    for row, expected in zip(rows, want * 2, strict=True):
        assert row[1:3] == list(expected[:2])
        assert row[3].startswith(expected[2])
        assert row[4].startswith(expected[3])
    assert contents(messy.parent) == before


def test_no_report_without_problems(weights: Path, cwd: Path) -> None:
    root = cwd.parent / "data"
    picture(root / "images/a.png")
    (root / "labels").mkdir()
    (root / "labels/a.txt").write_text(GOOD)
    done = call("val.py", "--weights", weights, "--data", data_yaml(root), "--workers", 0, cwd=cwd)
    assert done.status == 0, done.err
    assert "WARNING" not in done.out
    assert sorted(path.name for path in (cwd / "runs/val/exp").iterdir() if path.suffix == ".csv") == []


def test_strict(messy: Path, weights: Path, cwd: Path) -> None:
    """Every problem is a mistake then: the first are listed, and where all of them are."""
    count = len(findings(messy))
    done = call("val.py", "--weights", weights, "--data", messy, "--strict", "--workers", 0, cwd=cwd)
    first = findings(messy)[0]
    words = (f"--strict: {count} problems in val", f"{first[0]}: {first[2]}", f"... and {count - 20} more")
    assert_clear(done, *words, left=cwd)
    listed = Path(done.err.split("all of them: ")[1].strip())
    assert len(listed.read_text().splitlines()) == 1 + count
    done = call("train.py", "--data", messy, "--strict", "--device", "cpu", cwd=cwd)
    assert_clear(done, f"--strict: {2 * count} problems in train and val", left=cwd)


def test_strict_is_content_with_clean_data(weights: Path, cwd: Path) -> None:
    root = cwd.parent / "data"
    for name in ("a", "b", "c"):
        picture(root / f"images/{name}.png")
        (root / "labels").mkdir(exist_ok=True)
        (root / f"labels/{name}.txt").write_text(GOOD if name == "a" else "")
    (root / "labels/c.txt").unlink()
    done = call("val.py", "--weights", weights, "--data", data_yaml(root), "--strict", "--workers", 0, cwd=cwd)
    assert done.status == 0, done.err  # backgrounds are no mistake
    assert "WARNING: 2 of 3 images in val HAVE NO LABELS and count as background" in done.out


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "webp", "tif"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.6, 0.99])
def test_images_that_were_cut_short(suffix: str, share: float, tmp_path: Path) -> None:
    """A copy that broke off is left out and named, whatever its format."""
    whole = picture(tmp_path / f"images/a.{suffix}", 120, 160)
    cut = picture(tmp_path / f"images/b.{suffix}", 120, 160)
    data = cut.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    index = build_index([tmp_path / "images"], 1, split="val", cache=False)
    assert [index.path(i) for i in range(index.n)] == [str(whole)]
    assert [(problem.file, problem.rule) for problem in index.report.problems] == [(str(cut), "image left out")]
    assert cut.read_bytes() == data[: int(len(data) * share)]


def test_images_that_are_left_out(weights: Path, cwd: Path) -> None:
    """Tiny and over-large ones, and files that are no images, are named with the reason; the rest is used."""
    root = cwd.parent / "data"
    picture(root / "images/fine.png", 10, 10)
    picture(root / "images/tiny.png", 9, 200)
    huge = bytearray(picture(root / "images/huge.png").read_bytes())
    huge[16:24] = struct.pack(">II", 20000, 20000)
    huge[29:33] = struct.pack(">I", zlib.crc32(huge[12:29]))
    (root / "images/huge.png").write_bytes(huge)
    (root / "images/text.jpg").write_text("<html>404 not found</html>")
    (root / "labels").mkdir()
    (root / "labels/fine.txt").write_text(GOOD)
    done = call("val.py", "--weights", weights, "--data", data_yaml(root), "--workers", 0, cwd=cwd)
    assert done.status == 0, done.err
    assert "4 images: 1 with labels, 0 without a label file, 0 with an empty one, 3 left out; 3 problems" in done.out
    assert [(Path(row[1]).stem, row[2], row[3], row[4]) for row in report(cwd / "runs/val/exp")[1:]] == [
        ("huge", "0", "20000 x 20000 pixels, more than 268435456 in all", "image left out"),
        ("text", "0", "cannot be decoded: it is no image, but starts with b'<html>404 no'", "image left out"),
        ("tiny", "0", "200 x 9 pixels, less than 10 on a side", "image left out"),
    ]


def test_most_images_without_labels(weights: Path, cwd: Path) -> None:
    """Boxes in one JSON file leave every image without labels (ultralytics/ultralytics#9161)."""
    root = cwd.parent / "data"
    for number in range(4):
        picture(root / f"images/{number}.png")
    (root / "labels").mkdir()
    (root / "labels/0.txt").write_text(GOOD)
    (root / "labels/1.txt").write_text("0 9 9 9 9")  # what is left of it is none
    done = call("val.py", "--weights", weights, "--data", data_yaml(root), "--workers", 0, cwd=cwd)
    assert "WARNING: 3 of 4 images in val HAVE NO LABELS" in done.out


def test_no_report_of_a_run_before(tmp_path: Path) -> None:
    """A folder that is used again holds nothing of other data."""
    logger = logging.getLogger("lockstep")
    problem = Problem("a, b.txt", 3, 'x "y"', "left out")
    write_report(tmp_path, {"train": ScanReport(problems=[problem])}, logger)
    assert report(tmp_path)[1:] == [["train", "a, b.txt", "3", 'x "y"', "left out"]]
    write_report(tmp_path, {"train": ScanReport()}, logger)
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def full_disk(room: int = 100) -> Iterator[None]:
    """No file can grow beyond ``room`` bytes; what writes one meets an OSError, as it would without room."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_report_that_cannot_be_written(tmp_path: Path) -> None:
    """A full disk, something in the place of the file, no folder: the file and the reason are named."""
    problems = [Problem("a.txt", line, "x", "left out") for line in range(50)]
    reports = {"train": ScanReport(problems=problems)}
    logger = logging.getLogger("lockstep")
    path = tmp_path / "data_report.csv"
    with pytest.raises(UserError, match=rf"^{path} can't be written: File too large$"), full_disk():
        write_report(tmp_path, reports, logger)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=rf"^{path} can't be written: "):
        write_report(tmp_path, reports, logger)
    with pytest.raises(UserError, match=r"gone/data_report\.csv can't be written: No such file or directory$"):
        write_report(tmp_path / "gone", reports, logger)
