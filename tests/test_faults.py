"""Every mistake costs one clear message, exit status 2, and leaves nothing behind: by real command lines."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pytest

import detect
import train
import val
from models.families import YOLOV5
from tests.common import PROJECT
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import run_cli
from utils.torch_utils import save_checkpoint

SCRIPTS = {"train.py": train.main, "val.py": val.main, "detect.py": detect.main}
ROW = "0 0.5 0.5 0.2 0.3\n"


class Done(NamedTuple):
    status: int
    out: str
    err: str


def call(script: str, *arguments: object, cwd: Path) -> Done:
    """Run a script's command line in a copy of this process, which has paid for the imports already."""
    files = [cwd.parent / f"{cwd.name}.{name}" for name in ("out", "err")]
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.chdir(cwd)
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            run_cli(lambda: SCRIPTS[script](list(map(str, arguments))))
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Done(status, *(file.read_text() for file in files))


def launch(script: str, *arguments: object, cwd: Path, before: tuple[str, ...] = (), **environment: str) -> Done:
    """Run a script as a user would; for what happens before or while it imports, or outside of it."""
    command = [*before, sys.executable, script, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def assert_clear(done: Done, *words: object, left: Path) -> None:
    """The error is one message that says these words, and the folder is still empty."""
    assert done.status == 2, done
    assert done.err.startswith("error: "), done.err
    assert "Traceback" not in done.err
    assert done.err.count("error: ") == 1
    for word in words:
        assert str(word) in done.err, f"{word} is not in: {done.err}"
    assert list(left.iterdir()) == []


def make_data(root: Path, train: list[str | None], val: list[str | None], yaml: str = "") -> Path:
    """A data set with one image per entry and that text as its label file (None: none); returns its YAML."""
    for split, texts in {"train": train, "val": val}.items():
        (root / "images" / split).mkdir(parents=True)
        (root / "labels" / split).mkdir(parents=True)
        for number, text in enumerate(texts):
            cv2.imwrite(str(root / f"images/{split}/{number}.png"), np.full((24, 32, 3), 90, np.uint8))
            if text is not None:
                (root / f"labels/{split}/{number}.txt").write_text(text)
    path = root / "data.yaml"
    path.write_text(yaml or "train: images/train\nval: images/val\nnames: [a, b]\n")
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing is wrong with this one."""
    return make_data(tmp_path_factory.mktemp("good"), [ROW, ROW], [ROW])


@pytest.fixture(scope="module", autouse=True)
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of yolov5n with the two classes of the data, as train.py leaves it.

    It is made for every test, for what building a first network costs is then paid once, before the forks.
    """
    spec = load_yaml(find_yaml("yolov5n", "model"))
    model = YOLOV5.build(spec, 2, ["a", "b"])
    path = tmp_path_factory.mktemp("weights") / "two.pt"
    state = {"spec": model.yaml, "names": model.names, "model": model.state_dict(), "config": {"imgsz": 64}}
    save_checkpoint(state, path)
    return path


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def small(data: Path, *more: object) -> list[object]:
    """Flags of a run of seconds, if it ever started."""
    return ["--data", data, "--img", 64, "--batch", 2, "--epochs", 1, "--workers", 0, *more]


# --- flags, files and keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--epoch 3", ["--epoch is not a flag; did you mean --epochs?"]),
        (
            "--img 16 --batch 0",
            ["--imgsz must be between 32 and 16384, not 16", "--batch-size must be at least 1 or -1, not 0"],
        ),
        ("--batch -5", ["--batch-size must be at least 1 or -1, not -5"]),
        (
            "--batch many --workers -1",
            ["--batch-size takes a whole number, not 'many'", "--workers must be at least 0"],
        ),
        ("--optimizer Adm", ["--optimizer is one of SGD, Adam, AdamW, not 'Adm'; did you mean Adam?"]),
        ("--device 7", ["--device", "asks for cuda:7, which this machine does not have; here are: cpu"]),
        (
            "--device gpu --data x.yaml",
            ["--device", "gpu", "is not a device or a list of CUDA devices", "; here are: cpu"],
        ),
        ("--data shape", ["--data shape: there is no such file; did you mean shapes.yaml?"]),
        ("--cfg yolo5n --hyp scratch-lo", ["did you mean yolov5n.yaml?", "--hyp scratch-lo: there is no such file"]),
        ("--weights best.pt", ["--weights best.pt is not there"]),
        ("--weights .", ["--weights . is a folder; name a file, such as weights/best.pt of a run"]),
        (
            "--weights yolov5s.pt",
            ["--weights yolov5s.pt is not there and can't", "train.py --weights '' --cfg yolov5s.yaml"],
        ),
        ("--resume", ["--resume: no run with weights/last.pt under runs/train"]),
        ("--resume nowhere", ["--resume nowhere: no weights/last.pt there"]),
    ],
)
def test_mistyped_commands(arguments: str, words: list[str], cwd: Path) -> None:
    assert_clear(call("train.py", *arguments.split(), cwd=cwd), *words, left=cwd)


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        *(("train.py", flag) for flag in ("--name", "--project", "--data", "--weights", "--cfg", "--hyp", "--resume")),
        *(("val.py", flag) for flag in ("--name", "--data", "--weights")),
        *(("detect.py", flag) for flag in ("--name", "--weights", "--source")),
    ],
)
def test_names_that_are_too_long(script: str, flag: str, cwd: Path) -> None:
    first = [] if script == "train.py" else ["--weights", "best.pt"]
    assert_clear(call(script, *first, flag, "x" * 300, cwd=cwd), f"{flag} {'x' * 20}", left=cwd)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("train:", "tran:", ["tran is not a key; did you mean train?"]),
        ("names: [a, b]\n", "", ["names is missing"]),
        ("names: [a, b]", "names: [a, b]\nnc: 3", ["nc says 3 classes, names lists 2"]),
        ("names: [a, b]", "names: {0: a, 2: b}", ["names leaves out the class id 1, but ids are counted from 0"]),
        ("val: images/val", "val: images/vla", ["images/vla does not exist; did you mean val?"]),
        (
            "val: images/val",
            "val: labels/val",
            ["data.yaml: val: no images in ", "labels/val; looked for the suffixes avif, bmp"],
        ),
        ("val: images/val", "val: data.yaml", ["data.yaml: val: ", "is neither a folder nor a .txt list of images"]),
        ("names: [a, b]", "names: [a, b", ["data.yaml, line "]),
    ],
)
def test_mistakes_in_the_data_yaml(old: str, new: str, words: list[str], good: Path, cwd: Path) -> None:
    path = cwd.parent / "data.yaml"
    text = good.read_text().replace(old, new)
    assert text != good.read_text()
    path.write_text(f"path: {good.parent}\n{text}")
    assert_clear(call("train.py", *small(path), cwd=cwd), *words, left=cwd)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("momentm: 0.9", ["momentm is not a hyperparameter; did you mean momentum?"]),
        ("lr0: 100", ["lr0 must be between 0 and 10, not 100"]),
        ("lr0: .nan", ["lr0 must be between 0 and 10, not nan"]),
        ("mosaic: often", ["mosaic takes a number, not 'often'"]),
    ],
)
def test_mistakes_in_hyperparameters(line: str, words: list[str], good: Path, cwd: Path) -> None:
    hyp = cwd.parent / "hyp.yaml"
    hyp.write_text(f"{line}\n")
    assert_clear(call("train.py", *small(good, "--hyp", hyp), cwd=cwd), *words, left=cwd)


# --- data ------------------------------------------------------------------------------------------------------------


def test_no_label_at_all(cwd: Path) -> None:
    """In train or val; a test split may be without any, to detect on."""
    data = make_data(cwd.parent / "data", [ROW], [None, ""])
    where = f"val: no labels in {data.parent}/images/val: "
    done = call("train.py", *small(data), cwd=cwd)
    assert_clear(done, f"{where}all label files that are there, 1, are empty; at least one label is needed", left=cwd)
    shutil.rmtree(data.parent / "labels")
    done = call("train.py", *small(data), cwd=cwd)
    assert_clear(done, "2 problems", "- val: no labels", "- train: no labels", left=cwd)


def test_class_ids_of_all_splits_at_once(cwd: Path) -> None:
    """Late index errors elsewhere (ultralytics/ultralytics#26207)."""
    data = make_data(cwd.parent / "data", [ROW, "2 .5 .5 .1 .1"], [ROW + "1.5 .5 .5 .1 .1\n-1 .5 .5 .1 .1\n"])
    labels = data.parent / "labels"
    words = (
        "2 problems",
        "- train: class ids in 1 label files are not whole numbers from 0 to 1; correct them or the names",
        f"{labels}/train/1.txt:1: class id outside the names of the data YAML (2)",
        "- val: class ids in 1 label files",
        f"{labels}/val/0.txt:2: class id outside the names of the data YAML (1.5)",
        f"{labels}/val/0.txt:3: class id outside the names of the data YAML (-1)",
    )
    assert_clear(call("train.py", *small(data), cwd=cwd), *words, left=cwd)
    assert sorted(path.name for path in data.parent.iterdir()) == ["data.yaml", "images", "labels"]


def test_every_image_unreadable(cwd: Path) -> None:
    data = make_data(cwd.parent / "data", [ROW], [ROW, ROW])
    for path in (data.parent / "images/val").iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    words = (f"no image of {data.parent}/images/val can be used, all 2 are bad", "val/0.png: is cut short")
    assert_clear(call("train.py", *small(data), cwd=cwd), *words, left=cwd)


# --- weights and network ---------------------------------------------------------------------------------------------


def test_weights_that_are_none(good: Path, cwd: Path) -> None:
    wrong = cwd.parent / "photo.pt"
    wrong.write_bytes(b"\xff\xd8\xff\xe0 JFIF")
    for script, flags in {"train.py": small(good, "--cfg", "yolov5n"), "val.py": ["--data", good]}.items():
        done = call(script, *flags, "--weights", wrong, cwd=cwd)
        assert_clear(done, "photo.pt is damaged or not a checkpoint: it is no file of torch.save", left=cwd)


def test_weights_of_another_network(weights: Path, good: Path, cwd: Path) -> None:
    for cfg in ("yolov3-tiny", "yolov5s"):
        done = call("train.py", *small(good, "--weights", weights, "--cfg", cfg), cwd=cwd)
        assert_clear(done, "two.pt: the weights don't fit the network", "name the --cfg", left=cwd)
    three = cwd.parent / "three.yaml"
    three.write_text(f"path: {good.parent}\n{good.read_text().replace('[a, b]', '[a, b, c]')}")
    done = call("train.py", *small(three, "--weights", weights, "--cfg", "yolov3-tiny"), cwd=cwd)
    assert_clear(done, "the weights don't fit the network, not one tensor has a place in it", left=cwd)


def test_weights_of_other_classes_than_the_data(weights: Path, good: Path, cwd: Path) -> None:
    three = cwd.parent / "three.yaml"
    three.write_text(f"path: {good.parent}\n{good.read_text().replace('[a, b]', '[a, b, c]')}")
    done = call("val.py", "--weights", weights, "--data", three, cwd=cwd)
    assert_clear(done, "two.pt knows 2 classes, --data", "has 3; use the data set that", left=cwd)


def test_image_size_below_the_stride(weights: Path, good: Path, cwd: Path) -> None:
    done = call("train.py", *small(good, "--img", 48, "--cfg", "yolov5n6"), cwd=cwd)
    assert_clear(done, "--imgsz 48 is below the network's stride; give at least 64", left=cwd)
    done = call("val.py", "--weights", weights, "--data", good, "--img", 16, cwd=cwd)
    assert_clear(done, "--imgsz 16 is below the network's stride; give at least 32", left=cwd)


# --- the machine -----------------------------------------------------------------------------------------------------


def test_batch_that_memory_cannot_hold(good: Path, cwd: Path) -> None:
    done = call("train.py", *small(good, "--batch", 10**7, "--device", "cpu"), cwd=cwd)
    assert_clear(done, "--batch-size: a step of 10000000 images at 64 pixels takes at least", "GB are free", left=cwd)
    assert "use --batch-size " in done.err


def test_run_folder_that_cannot_be_written(good: Path, weights: Path, cwd: Path) -> None:
    file = cwd.parent / "file"
    file.write_text("")
    for script, flags in {"train.py": small(good), "val.py": ["--data", good, "--weights", weights]}.items():
        done = call(script, *flags, "--project", file / "runs", cwd=cwd)
        assert_clear(done, f"can't be made, for {file} is a file; choose a folder you can write to", left=cwd)


def test_read_only_disk(good: Path, cwd: Path, tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    done = call("train.py", *small(good, "--project", tiny_disk / "runs"), cwd=cwd)
    words = f"the run folder {tiny_disk}/runs/exp can't be made, for {tiny_disk} can't be written to; choose a folder"
    assert_clear(done, words, left=cwd)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; skipped where none can be mounted."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file systems can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_no_disk_space_for_checkpoints(good: Path, cwd: Path, tiny_disk: Path) -> None:
    done = call("train.py", *small(good, "--project", tiny_disk / "runs"), cwd=cwd)
    assert_clear(done, "the checkpoints of this run need about", "MB, 4 MB are free on that disk", left=cwd)
    assert list(tiny_disk.iterdir()) == []


@pytest.mark.slow
@pytest.mark.gate
def test_too_little_shared_memory(good: Path, cwd: Path) -> None:
    """Elsewhere loader processes die with "Bus error" (ultralytics/yolov3#1151, mmdetection#1997); here it trains."""
    if (
        sys.platform != "linux"
        or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no mounts of one's own here")
    before = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$0" "$@"')
    words = small(good, "--workers", 2, "--img", 320, "--batch", 4)  # a batch has 1.2 MB
    done = launch(str(PROJECT / "train.py"), *words, cwd=cwd, before=before)
    assert done.status == 0, done.err


def test_opencv_without_its_libraries(cwd: Path) -> None:
    """As on a bare server with the package that has windows."""
    (cwd.parent / "cv2.py").write_text(
        "raise ImportError('libGL.so.1: cannot open shared object file: No such file or directory')\n"
    )
    for script in ("train.py", "val.py"):
        done = launch(str(PROJECT / script), "--weights", "x.pt", cwd=cwd, PYTHONPATH=str(cwd.parent))
        assert_clear(done, "libGL.so.1", "opencv-python-headless", left=cwd)


@pytest.mark.parametrize("name", ["utils", "models"])
def test_packages_of_the_same_name(name: str, cwd: Path) -> None:
    """Scripts find their own packages, whatever the path holds; who imports them is told which file is in the way."""
    (cwd.parent / name).mkdir()
    other = cwd.parent / name / "__init__.py"
    other.write_text("raise AssertionError('loaded')\n")
    done = launch(str(PROJECT / "train.py"), "--help", cwd=cwd, PYTHONPATH=str(cwd.parent))
    assert done.status == 0, done.err
    done = launch("-c", "import train", cwd=cwd, PYTHONPATH=f"{cwd.parent}{os.pathsep}{PROJECT}")
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(
        f"ImportError: {other} stands in the way of Lockstep's own package '{name}', {PROJECT}/{name}/"
    )
    done = launch("-c", "import own_packages as o; o.check_packages()", cwd=cwd, PYTHONPATH=str(PROJECT))
    assert done.status == 0, done.err


# --- together --------------------------------------------------------------------------------------------------------


def test_everything_at_once(good: Path, cwd: Path) -> None:
    data = make_data(cwd.parent / "data", ["7 .5 .5 .1 .1"], [ROW])
    (data.parent / "images/val").rename(data.parent / "images/valid")
    (cwd.parent / "hyp.yaml").write_text("lr: 1\n")
    (cwd.parent / "file").write_text("")
    flags = ["--hyp", cwd.parent / "hyp.yaml", "--weights", "none.pt", "--cfg", "yolov5n6", "--amp", "fp16"]
    flags += ["--project", cwd.parent / "file", "--img", 48, "--freeze", 99, "--device", "cpu"]
    done = call("train.py", *small(data, *flags), cwd=cwd)
    words = ["error: 8 problems", "lr is not", "none.pt is not there", "--amp fp16", "file is a file", "--imgsz 48"]
    words += ["--freeze ", "class ids in 1 label files", "images/val does not exist; did you mean valid?"]
    assert_clear(done, *words, left=cwd)
