"""Who touches which files and draws which numbers: R1, R2 of the contract, and what is done once on a machine."""

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import cv2
import pytest

from tests.common import PROJECT
from tests.dist import scans
from tests.dist.commands import Case, run_commands, see
from tests.dist.launch import free_port, torchrun
from tests.dist.watched import Event, events
from tests.runs import flags, make_data, results
from utils.config.data_yaml import load_data
from utils.core.image_files import LOOKED_AT
from utils.data.splits import open_splits

LIMIT = 480.0  # seconds; on an idle machine ten are enough
RANKS = 2


def reads(found: list[Event]) -> Counter[str]:
    """How often each file was opened to be read."""
    return Counter(event.path for event in found if event.kind == "open" and not event.writes)


# --- A run's files ---------------------------------------------------------------------------------------------------

TRAIN_IMAGES, VAL_IMAGES, EPOCHS = 24, 8, 3


class Watched(NamedTuple):
    """A run that was watched.

    Attributes:
        data: its data set.
        project: where run folders are.
        log: what happened to files below the two.
        status: of the launcher.
        text: stdout and stderr.
    """

    data: Path
    project: Path
    log: Path
    status: int
    text: str


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Watched]:
    """Two runs that start at once and have the same name; the labels of the second one's data were read before."""
    folder = tmp_path_factory.mktemp("two")
    datas = [make_data(folder / name, TRAIN_IMAGES, VAL_IMAGES) for name in ("new", "seen")]
    open_splits(load_data(str(datas[1])), ["train", "val"])

    def launch(data: Path) -> Watched:
        log, project = folder / f"{data.parent.name}.log", folder / "runs"
        line = flags(data, project, f"--cache ram --epochs {EPOCHS} --workers 1")
        script = ["-m", "tests.dist.watched", log, folder, PROJECT / "train.py"]
        done = torchrun([*script, *line], RANKS, port=free_port(), timeout=LIMIT)
        return Watched(data.parent, project, log, done.returncode, done.stdout + done.stderr)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(launch, datas))


@pytest.mark.slow
@pytest.mark.gate
def test_two_runs_at_once_get_a_folder_each(two_runs: list[Watched]) -> None:
    """R1: each has exactly one, made by its rank 0."""
    assert [run.status for run in two_runs] == [0, 0], two_runs
    project = two_runs[0].project
    assert sorted(path.name for path in project.iterdir()) == ["run", "run2"]
    for path in project.iterdir():
        assert len(results(path)) == EPOCHS
        assert sorted(file.name for file in (path / "weights").iterdir()) == ["best.pt", "last.prev.pt", "last.pt"]
        assert {"opt.yaml", "hyp.yaml", "environment.json", "results.csv"} <= {file.name for file in path.iterdir()}
    own = [{event.path for event in events(run.log, project) if event.writes} for run in two_runs]
    assert not {path for path in own[0] & own[1] if not path.endswith(("/run", "/run2"))}, "both wrote there"


@pytest.mark.slow
@pytest.mark.gate
def test_only_rank_0_writes(two_runs: list[Watched]) -> None:
    """R1: run folder, checkpoints, figures; all ranks were watched."""
    for run in two_runs:
        assert {event.rank for event in events(run.log, run.data)} == set(range(RANKS))
        written = [event for event in events(run.log, run.project) if event.writes]
        assert {event.rank for event in written} == {0}
        assert any(event.path.endswith("results.csv") for event in written)
        assert any(event.kind == "os.mkdir" for event in written)


@pytest.mark.slow
@pytest.mark.gate
def test_labels_are_read_once_on_a_machine(two_runs: list[Watched]) -> None:
    """I7 (ultralytics/yolov5#7481, ultralytics/ultralytics#1439): one scan for all ranks, none if there was one."""
    new, seen = two_runs
    labels = {str(path) for path in (new.data / "labels").rglob("*.txt") if path.stat().st_size}
    assert reads(events(new.log, new.data / "labels")) == dict.fromkeys(labels, 1)
    assert not reads(events(seen.log, seen.data / "labels"))
    for run in two_runs:
        written = {event.rank for event in events(run.log, run.data) if event.writes}
        assert written == ({0} if run is new else set()), "the machine's first rank keeps the index"


@pytest.mark.slow
@pytest.mark.gate
def test_images_are_decoded_once_on_a_machine(two_runs: list[Watched]) -> None:
    """Over three epochs and four validations, by two ranks with two loader processes each.

    Mosaics take four images a sample. Two processes that need one at the same instant both decode it, which in a large
    data set hardly happens. Rank 0 has looked at some of a split before, for the depth of
    their pixels.
    """
    _, seen = two_runs
    opened = reads(events(seen.log, seen.data / "images"))
    train = {path: count for path, count in opened.items() if "/train/" in path}
    val = [count for path, count in opened.items() if "/val/" in path]
    assert len(train) == TRAIN_IMAGES
    assert max(train.values()) <= RANKS + 1
    assert sum(train.values()) <= 1.3 * TRAIN_IMAGES + LOOKED_AT
    assert val == [1 + 1] * VAL_IMAGES, "looked at, and validated by one rank only"


# --- Labels ----------------------------------------------------------------------------------------------------------

MANY = 1200  # images, more than two units of the scan


class Scanned(NamedTuple):
    """What ranks found in data sets.

    Attributes:
        folder: of the data sets.
        found: by rank and name of the data set: index file and digest of the labels, or "" and what is wrong.
        log: of files.
        said: by all ranks.
    """

    folder: Path
    found: list[dict[str, list[str]]]
    log: Path
    said: str

    def opened(self, name: str) -> Counter[str]:
        """How often each label file was opened."""
        return reads(events(self.log, self.folder / name / "labels"))


def label_files(folder: Path) -> dict[str, int]:
    return {str(path): 1 for path in (folder / "labels/train").iterdir() if path.stat().st_size}


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Scanned:
    folder = tmp_path_factory.mktemp("scans")
    names = ("many", "damaged", "read_only", "faulty", "refused")
    datas = [make_data(folder / name, 12) for name in names]
    many, damaged, read_only, faulty, refused = (data.parent for data in datas)
    for number in range(12, MANY):
        shutil.copy(many / "images/train/1.png", many / f"images/train/{number}.png")
        shutil.copy(many / "labels/train/1.txt", many / f"labels/train/{number}.txt")
    file = open_splits(load_data(str(datas[1])), ["train"])["train"].file
    assert file is not None and file.is_relative_to(damaged)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    (read_only / ".lockstep").touch()  # a file where the folder should be: nobody can write there, not even root
    (faulty / "labels/train/1.txt").write_text("0 0.5 0.5 0.2 nan\n1 0.5 0.5 0.2 0.2\n")
    (refused / "labels/train/1.txt").write_text("7 0.5 0.5 0.2 0.2\n")

    log = folder / "log"
    script = ["-m", "tests.dist.watched", log, folder, scans.__file__, folder]
    env = {"XDG_CACHE_HOME": str(folder / "user")}
    done = torchrun([*script, *datas, datas[0]], RANKS, port=free_port(), env=env, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return Scanned(folder, found, log, done.stdout + done.stderr)


def test_ranks_share_the_scan(scanned: Scanned) -> None:
    """I7: each label file is opened by one rank, some by each; the second time by none. All have the same index."""
    opened = scanned.opened("many")
    assert len(opened) == MANY - 4
    assert opened == label_files(scanned.folder / "many")
    shares = Counter(event.rank for event in events(scanned.log, scanned.folder / "many/labels"))
    assert len(shares) == RANKS and min(shares.values()) > MANY / 3
    first, second = (found["many"] for found in scanned.found)
    assert first == second
    assert Path(first[0]).parent == scanned.folder / "many/.lockstep"


def test_a_damaged_index_is_made_again_once(scanned: Scanned) -> None:
    """Hit or miss is one decision (ultralytics/yolov5#1507, #8234 of ultralytics/ultralytics)."""
    assert scanned.said.count("is damaged and is built again") == 1
    assert scanned.opened("damaged") == label_files(scanned.folder / "damaged")
    assert scanned.found[0]["damaged"] == scanned.found[1]["damaged"]
    written = [event for event in events(scanned.log, scanned.folder / "damaged") if event.writes]
    assert {event.rank for event in written} == {0}
    assert [path.suffix for path in (scanned.folder / "damaged/.lockstep").iterdir()] == [".index"]


def test_a_data_set_that_cannot_be_written(scanned: Scanned) -> None:
    """All ranks map what the first one keeps in the user's cache (ultralytics/ultralytics#6553)."""
    first, second = (found["read_only"] for found in scanned.found)
    assert first == second
    assert Path(first[0]).parent == scanned.folder / "user/lockstep"
    assert scanned.opened("read_only") == label_files(scanned.folder / "read_only")


def test_problems_are_said_once(scanned: Scanned) -> None:
    """ultralytics/yolov5#500: not once for each rank; a mistake is the same on all."""
    faulty = str(scanned.folder / "faulty/labels/train/1.txt")
    assert scanned.said.count(faulty) == 1, scanned.said
    errors = [found["refused"] for found in scanned.found]
    assert errors[0] == errors[1]
    assert errors[0][0] == "" and "refused/labels/train/1.txt" in errors[0][1]
    assert scanned.said.count("refused/labels/train/1.txt") == 0, "whoever asked tells it"


@pytest.mark.slow
def test_machines_with_different_labels(tmp_path: Path) -> None:
    """L3: one number differs in one file; both machines say so, and nothing is trained."""
    datas = [make_data(tmp_path / name, 4) for name in ("first", "second")]
    label = datas[1].parent / "labels/train/1.txt"
    category, *box = label.read_text().split()
    label.write_text(" ".join([str(1 - int(category)), *box]))
    port = free_port()

    def launch(node: int) -> tuple[int, str]:
        line = flags(datas[node], tmp_path / "runs")
        done = torchrun([PROJECT / "train.py", *line], 1, nnodes=2, node_rank=node, port=port, timeout=LIMIT)
        return done.returncode, done.stderr

    with ThreadPoolExecutor() as pool:
        for status, said in pool.map(launch, (1, 0)):
            assert status != 0
            assert said.startswith(
                "error: train: the machines have different data (4 on machine 0, 4 on machine 1 images, or other "
                "names, sizes or labels); copy the data set from one to the others\n"
            ), said
    assert not (tmp_path / "runs").exists()


# --- Random numbers, and mistakes that one rank finds ----------------------------------------------------------------


@pytest.mark.slow
def test_ranks_draw_different_numbers(tmp_path: Path) -> None:
    """R2: one image, seen 12 times by two ranks, never twice the same; a rank alone sees those very ones.

    A set smaller than the ranks is no error (an index out of bounds elsewhere), and a rectangular batch has one shape
    on all ranks (ultralytics/yolov5#757, #842, #4181, #8698, ultralytics/ultralytics#1604).

    And a mistake that only rank 0 can find is every rank's: nobody waits for its part in drawing the data.
    """
    data = make_data(tmp_path / "data", count=2)
    (data.parent / "images/train/0.png").unlink()
    shapes = make_data(tmp_path / "shapes", count=9)
    for number, size in enumerate([(64, 48), (48, 64), (64, 24), (24, 64), (50, 50), (64, 32), (64, 64), (32, 64)]):
        file = str(shapes.parent / f"images/train/{number}.png")
        image = cv2.imread(file)
        assert image is not None
        cv2.imwrite(file, cv2.resize(image, size))
    (tmp_path / "file").touch()
    lines = [
        flags(data, tmp_path / "runs", "--batch 4 --noval"),
        flags(shapes, tmp_path / "runs", "--batch 4 --noval --rect --multi-scale --img 128 --epochs 1"),
        flags(Path("shapes.yaml"), tmp_path / "file/runs", "--dist-timeout 60"),
    ]
    one_image, rectangles, mistaken = run_commands([Case(line) for line in lines], RANKS, tmp_path / "seen", LIMIT)
    images = [image for rank in one_image for batch in rank.batches for image in batch]
    assert len(set(images)) == len(images) == 12
    assert [len(rank.batches) for rank in rectangles] == [3, 3]
    for line, (first, second) in zip(lines, (one_image, rectangles), strict=False):
        alone = see(Case([*line, "--name", "alone"]))
        assert [a + b for a, b in zip(first.batches, second.batches, strict=True)] == alone.batches

    assert mistaken[0].error == mistaken[1].error
    assert "file is a file; choose a folder you can write to" in mistaken[0].error


@pytest.mark.slow
@pytest.mark.gate
def test_ranks_with_different_settings(tmp_path: Path) -> None:
    """Lines typed on several machines: what differs is named on all, and nothing is trained (Paddle#57220).

    Elsewhere ranks wait for each other, or train two networks.
    """
    data = make_data(tmp_path / "data", count=4)
    (tmp_path / "hyp.yaml").write_text("lr0: 0.02\n")
    other_data = tmp_path / "data/same.yaml"
    shutil.copy(data, other_data)
    line = flags(data, tmp_path / "runs", "--epochs 1 --dist-timeout 60")
    other_names = tmp_path / "data/names.yaml"
    other_names.write_text(data.read_text().replace("blue, red", "red, blue"))
    cases = {
        "the class names (['blue', 'red'] on rank 0, ['red', 'blue'] on rank 1)": Case(
            line, others=["--data", str(other_names)]
        ),
        "--batch-size (4 on rank 0, 8 on rank 1)": Case(line, others=["--batch", "8"]),
        "lr0 of --hyp (0.01 on rank 0, 0.02 on rank 1)": Case(line, others=["--hyp", str(tmp_path / "hyp.yaml")]),
        "the network of --cfg (rank 1 has another)": Case(line, others=["--cfg", "yolov5s.yaml"]),
        "": Case(line, others=["--data", str(other_data), "--workers", "1", "--name", "unused"]),
    }
    for name, seen in zip(cases, run_commands(list(cases.values()), RANKS, tmp_path / "seen", LIMIT), strict=True):
        error = f"the machines were started with different settings: {name}; start all with the same flags and files"
        assert [rank.error for rank in seen] == [error if name else ""] * RANKS
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
