"""The built-in loggers (A4): what they write in real runs, also in one that was killed and resumed."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.callback_runs import draw_squares, flags, train_with
from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, back_to, kill_in_third_epoch, launch, results, sees_images
from utils.config.flags import LOGGERS
from utils.core.errors import Stopped, UserError
from utils.run.callbacks import EpochEnd, Figures, TrainEnd, TrainStart
from utils.run.loggers import CsvLogger, JsonlLogger, loggers_from_names
from utils.torch_utils import load_checkpoint

EPOCHS = 5
BATCH = 2  # images, of runs that stop inside an epoch
HAVE_TENSORBOARD = find_spec("tensorboard") is not None
needs_tensorboard = pytest.mark.skipif(not HAVE_TENSORBOARD, reason="TensorBoard is not installed")
NAMES = ["jsonl"] + ["tensorboard"] * HAVE_TENSORBOARD
MORE = ["best_value", "better", "seconds", "class_maps"]  # than results.csv has


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_squares(tmp_path_factory.mktemp("squares") / "data")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted, with a checkpoint of every epoch."""
    project = tmp_path_factory.mktemp("whole")
    train_with([], *flags(data, project, "--noplots", "--save-period", 1, "--loggers", *NAMES))
    return project / "run"


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def read_jsonl(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line, and the rows."""
    text = (run_dir / "results.jsonl").read_text()
    assert text.endswith("\n")
    first, *rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return first, rows


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each tag, as TensorBoard's own reader gives them for the whole folder."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run_dir))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# What they write ------------------------------------------------------------------------------------------------------


def test_jsonl_has_the_rows_of_results_csv(whole: Path) -> None:
    first, rows = read_jsonl(whole)
    header, *lines = (whole / "results.csv").read_text().splitlines()
    columns = header.split(",")
    assert len(rows) == len(lines) == EPOCHS
    for row, line in zip(rows, lines, strict=True):
        assert list(row) == [*columns, *MORE]
        assert [f"{row[column]:.6g}" for column in columns] == line.split(",")
        assert row["class_maps"].keys() == {"blue", "red"}
    fitness = [0.1 * row["metrics/mAP_0.5"] + 0.9 * row["metrics/mAP_0.5:0.95"] for row in rows]
    assert [row["best_value"] for row in rows] == pytest.approx([max(fitness[: i + 1]) for i in range(EPOCHS)])
    assert [row["better"] for row in rows] == [not i or fitness[i] > max(fitness[:i]) for i in range(EPOCHS)]
    assert (first["flags"]["batch_size"], first["hyp"]["lr0"], first["names"]) == (4, 0.005, ["blue", "red"])
    assert first["flags"]["loggers"] == NAMES
    assert first["versions"] == load_checkpoint(whole / "weights/last.pt")["versions"]


@needs_tensorboard
def test_tensorboard_has_the_figures_of_jsonl(whole: Path) -> None:
    rows, scalars = read_jsonl(whole)[1], read_scalars(whole)
    plain = [name for name, value in rows[0].items() if isinstance(value, float) and name not in MORE]
    assert scalars.keys() == {*plain, "class_mAP/blue", "class_mAP/red"}
    for row in rows:
        expected = {name: row[name] for name in plain}
        expected |= {f"class_mAP/{name}": value for name, value in row["class_maps"].items()}
        assert {tag: dict(values)[row["epoch"]] for tag, values in scalars.items()} == pytest.approx(expected)
    assert len(list(whole.glob("events.out.tfevents.*"))) == 1


def test_results_csv_is_always_written(data: Path, tmp_path: Path) -> None:
    """Whatever is asked for: results.png and resume build on it."""
    assert [type(logger) for logger in loggers_from_names([])] == [CsvLogger]
    assert [type(logger) for logger in loggers_from_names(["jsonl", "csv", "jsonl"])] == [CsvLogger, JsonlLogger]
    train_with([], *flags(data, tmp_path, "--noplots", "--epochs", 1))
    assert results(tmp_path / "run")["epoch"].tolist() == [1]
    assert not list((tmp_path / "run").glob("*.jsonl"))


# Resumed --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.gate
def test_killed_and_resumed_gives_the_same_rows(data: Path, whole: Path, tmp_path: Path) -> None:
    """Killed in the third epoch, and once more in the moment between a row and its checkpoint."""
    line = flags(data, tmp_path / "runs", "--noplots", "--loggers", *NAMES)
    with subprocess.Popen(
        [sys.executable, str(PROJECT / "train.py"), *line],
        cwd=tmp_path,
        env=CHILD_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as started:
        run_dir = tmp_path / "runs/run"
        kill_in_third_epoch(started, run_dir)
    assert load_checkpoint(run_dir / "weights/last.pt")["state"]["epoch"] == 2, "killed too late to test anything"
    first, rows = read_jsonl(run_dir)
    assert without_seconds(rows) == without_seconds(read_jsonl(whole)[1][:2])
    with (run_dir / "results.jsonl").open("a") as file:
        file.write(json.dumps(rows[1] | {"epoch": 3}) + '\n{"epoch": 4, "train/box')

    train_with([], "--resume", run_dir)
    assert read_jsonl(run_dir)[0] == first
    assert without_seconds(read_jsonl(run_dir)[1]) == without_seconds(read_jsonl(whole)[1])
    assert results(run_dir).equals(results(whole))
    if HAVE_TENSORBOARD:
        assert len(list(run_dir.glob("events.out.tfevents.*"))) == 2
        assert read_scalars(run_dir) == read_scalars(whole)


def stop_in(forward: int) -> Callable[[nn.Module, Any], None]:
    """A hook that asks this process to stop while the network trains for this time, counted from 1."""
    count = 0

    def hook(module: nn.Module, inputs: Any) -> None:
        nonlocal count
        if sees_images(module, inputs) and module.training:
            count += 1
            if count == forward:
                signal.raise_signal(signal.SIGTERM)

    return hook


@pytest.mark.slow
def test_stopped_in_the_middle_of_epochs_gives_the_same_rows(data: Path, tmp_path: Path) -> None:
    """Twice, in the second and in the fourth epoch; each file is as if nothing had happened."""
    more = ["--batch", BATCH, "--nbs", BATCH, "--noplots", "--loggers", *NAMES]  # four windows an epoch
    whole, run_dir = tmp_path / "whole/run", tmp_path / "runs/run"
    train_with([], *flags(data, tmp_path / "whole", *more))
    line: list[object] = [*flags(data, tmp_path / "runs", *more)]
    for forward, place in ((5, (1, 2)), (8, (3, 3))):  # all ranks stop at the end of the window after the signal
        handle = nn.modules.module.register_module_forward_pre_hook(stop_in(forward))
        with handle, pytest.raises(Stopped):
            train_with([], *line)
        state = load_checkpoint(run_dir / "weights/last.pt")["state"]
        assert (state["epoch"], state["batch"]) == place
        assert without_seconds(read_jsonl(run_dir)[1]) == without_seconds(read_jsonl(whole)[1][: place[0]])
        line = ["--resume", run_dir]
    train_with([], *line)
    assert (run_dir / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()
    assert without_seconds(read_jsonl(run_dir)[1]) == without_seconds(read_jsonl(whole)[1])
    if HAVE_TENSORBOARD:
        assert len(list(run_dir.glob("events.out.tfevents.*"))) == 3
        assert read_scalars(run_dir) == read_scalars(whole)


@pytest.mark.slow
def test_resumed_from_an_earlier_epoch(whole: Path, tmp_path: Path) -> None:
    """The epochs that are done again are there once, in the new folder that the run goes on in."""
    run_dir = train_with([], "--resume", whole / "weights/epoch2.pt", "--project", tmp_path).run_dir
    assert run_dir == tmp_path / "run"
    assert without_seconds(read_jsonl(run_dir)[1]) == without_seconds(read_jsonl(whole)[1])
    if HAVE_TENSORBOARD:
        assert read_scalars(run_dir) == read_scalars(whole)


def test_a_logger_can_join_a_resumed_run(data: Path, tmp_path: Path) -> None:
    train_with([], *flags(data, tmp_path, "--noplots", "--save-period", 1, "--epochs", 2))
    train_with([], "--resume", back_to(tmp_path / "run", 1), "--loggers", "jsonl")
    first, rows = read_jsonl(tmp_path / "run")
    assert (first["flags"]["loggers"], [row["epoch"] for row in rows]) == (["jsonl"], [2])


def test_a_new_run_in_an_old_folder_starts_anew(data: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    train_with([], *flags(data, tmp_path, "--noplots", "--exist-ok", "--epochs", 1, "--loggers", *NAMES))
    first, rows = read_jsonl(run_dir)
    assert (first["epochs"], [row["epoch"] for row in rows]) == (1, [1])
    if HAVE_TENSORBOARD:
        assert {step for values in read_scalars(run_dir).values() for step, _ in values} == {1}
        assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1


def start(run_dir: Path, resumed_epoch: int | None = None) -> TrainStart:
    return TrainStart(run_dir, 9, 2, ["a"], ["box"], ["lr0"], {"epochs": 9}, {"lr0": 0.1}, resumed_epoch)


def end(epoch: int, validated: bool = True) -> EpochEnd:
    figures = Figures(0.1, 0.2, 0.3, 0.4, 0.5, {"a": 0.6}) if validated else None
    return EpochEnd(
        epoch, 9, {"box": math.nan}, {"box": math.inf} if validated else {}, figures, {"lr0": 0.1}, 0.5, True, 1
    )


def test_jsonl_is_strict_json(tmp_path: Path) -> None:
    """Python's own NaN and Infinity are words that other readers refuse."""
    logger = JsonlLogger()
    logger.on_train_start(start(tmp_path))
    for epoch, validated in enumerate([False, True]):
        logger.on_epoch_end(end(epoch, validated))
    bare, validated_row = read_jsonl(tmp_path)[1]
    assert list(bare) == list(validated_row)
    assert {name for name, value in bare.items() if value is None} == {
        *("train/box_loss", "val/box_loss", "class_maps", "metrics/precision", "metrics/recall"),
        *("metrics/mAP_0.5", "metrics/mAP_0.5:0.95"),
    }
    assert {name for name, value in validated_row.items() if value is None} == {"train/box_loss", "val/box_loss"}


@pytest.mark.parametrize(
    ("left", "epochs"),
    [
        (b"", 9),
        (b'{"run_dir": "r", "epo', 9),
        (b"\xff\xfe\n[1]\n3\n\n", 9),
        (b'{"flags": {"epochs": 8}}', 9),
        (b'{"flags": {"epochs": 8}}\n{"epoch": 1}', 8),
    ],
)
def test_jsonl_mends_what_a_dead_run_left(left: bytes, epochs: int, tmp_path: Path) -> None:
    """A line counts when it is a whole one."""
    (tmp_path / "results.jsonl").write_bytes(left)
    logger = JsonlLogger()
    logger.on_train_start(start(tmp_path, resumed_epoch=2))
    logger.on_epoch_end(end(2))
    first, rows = read_jsonl(tmp_path)
    assert (first["flags"], [row["epoch"] for row in rows]) == ({"epochs": epochs}, [2])
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("jsonl", [True, False])
def test_a_results_csv_that_is_gone_comes_back_or_is_missed(
    jsonl: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Removed before a resume: the table began in a later epoch, in silence (roboflow/rf-detr#1321)."""
    before = [CsvLogger(), *[JsonlLogger()] * jsonl]
    for logger in before:
        logger.on_train_start(start(tmp_path))
        for epoch in (1, 2):
            logger.on_epoch_end(end(epoch, validated=epoch == 2))
    table = (tmp_path / "results.csv").read_text().replace("inf", "nan")  # as JSON has them
    assert capsys.readouterr().out == ""
    (tmp_path / "results.csv").unlink()
    CsvLogger().on_train_start(start(tmp_path, resumed_epoch=3))
    said = capsys.readouterr().out
    if jsonl:
        assert (tmp_path / "results.csv").read_text() == table
        assert said == "2 of 2 rows were gone from results.csv; they are back from results.jsonl\n"
    else:
        gone = "2 of 2 rows are gone from results.csv, the first of them that of epoch 1; it goes on without them"
        assert said == f"WARNING: {gone}\n"


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOGGERS)
def test_every_name_is_a_logger(name: str) -> None:
    if name == "tensorboard" and not HAVE_TENSORBOARD:
        pytest.skip("TensorBoard is not installed")
    assert name in type(loggers_from_names([name])[-1]).__name__.lower()


def test_an_unknown_name_ends_with_status_2(tmp_path: Path) -> None:
    done = launch("--loggers", "csv", "tensorbord", "wandb", cwd=tmp_path)
    assert done.returncode == 2
    assert "--loggers is one of csv, jsonl, tensorboard, not 'tensorbord'; did you mean tensorboard?" in done.stderr
    assert "not 'wandb'" in done.stderr
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"not 'json'; did you mean jsonl\?"):
        loggers_from_names(["json"])


@pytest.mark.slow
def test_without_tensorboard_nothing_is_begun(data: Path, tmp_path: Path) -> None:
    """With what to type, and together with other mistakes."""
    line = flags(data, tmp_path / "runs", "--loggers", "tensorboard", "--hyp", "none.yaml")
    code = "import sys\nsys.modules['tensorboard'] = None\nimport train\nfrom utils.core.errors import run_cli\n"
    code += "run_cli(lambda: train.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *line],
        cwd=tmp_path,
        env=CHILD_ENVIRONMENT | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 problems")
    assert "--loggers tensorboard: TensorBoard can't be imported" in done.stderr
    assert "pip install tensorboard" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@needs_tensorboard
def test_tensorboard_skips_what_was_not_measured(tmp_path: Path) -> None:
    logger = loggers_from_names(["tensorboard"])[-1]
    logger.on_train_start(start(tmp_path))
    logger.on_epoch_end(end(0, validated=False))
    assert read_scalars(tmp_path).keys() == {"train/box_loss", "x/lr0"}
    logger.on_train_end(TrainEnd(tmp_path, None, None))


@needs_tensorboard
def test_tensorboard_loses_no_epoch_of_a_run_that_dies(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        logger = loggers_from_names(["tensorboard"])[-1]
        logger.on_train_start(start(tmp_path))
        logger.on_epoch_end(end(0))
        os._exit(0)
    os.waitpid(child, 0)
    scalars = read_scalars(tmp_path)
    assert len(scalars) == 8
    assert scalars["class_mAP/a"] == [(0, pytest.approx(0.6))]
