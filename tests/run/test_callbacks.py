"""Callbacks (A4): what they are told in real runs, how they stop one, how they fail, and what may be one."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import train
from tests.callback_runs import Recorder, Watcher, draw_squares, flags, train_with
from tests.common import PROJECT
from tests.dist.launch import free_port, torchrun
from tests.runs import CHILD_ENVIRONMENT, back_to, results
from utils.core.errors import LostDataError, UserError
from utils.metrics.evaluation import summarize
from utils.run.callback_calls import Callbacks
from utils.run.callback_checks import check_callbacks, check_picklable
from utils.run.callbacks import STOP, Callback, CheckpointSaved, EpochEnd, ExceptionRaised, Stop, TrainEnd, TrainStart
from utils.run.events import class_maps
from utils.torch_utils import load_checkpoint


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = CHILD_ENVIRONMENT | {"PYTHONPATH": str(PROJECT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


FIGURES = ["metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"]
LOSSES = ["box", "obj", "cls"]
EPOCHS = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_squares(tmp_path_factory.mktemp("squares") / "data")


@dataclasses.dataclass
class Told:
    """A run and what was told about it."""

    results: train.Results
    early: Recorder
    late: Watcher


@pytest.fixture(scope="module")
def told(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    project = tmp_path_factory.mktemp("told")
    early, late = Recorder(), Watcher()
    return Told(train_with([early, late], *flags(data, project, "--noplots", "--save-period", 2)), early, late)


# What is told ---------------------------------------------------------------------------------------------------------


def test_events_come_in_order(told: Told) -> None:
    """Epochs count from 1, as they do on the terminal (ultralytics/ultralytics PR 4491)."""
    expected = ["TrainStart", *["EpochEnd", "CheckpointSaved"] * EPOCHS, "TrainEnd"]
    assert told.early.kinds() == told.late.kinds() == expected
    assert [event.epoch for event in told.early.epochs()] == list(range(1, EPOCHS + 1))
    assert told.early.events == told.late.events


def test_train_start(told: Told, data: Path) -> None:
    start = told.early.events[0]
    run_dir = told.results.run_dir
    assert (start.run_dir, start.epochs, start.batches_per_epoch, start.resumed_epoch) == (run_dir, EPOCHS, 2, None)
    assert (list(start.names), list(start.losses)) == (["blue", "red"], LOSSES)
    assert list(start.rates) == ["lr0", "lr1", "lr2"]
    assert start.flags == yaml.safe_load((run_dir / "opt.yaml").read_text())
    assert start.hyp == yaml.safe_load((run_dir / "hyp.yaml").read_text())
    assert (start.flags["batch_size"], start.hyp["lr0"]) == (4, 0.005)


def test_epoch_ends_say_what_results_csv_has(told: Told) -> None:
    """And what follows from it: the best fitness so far is the running maximum of 0.1 mAP50 + 0.9 mAP50-95."""
    table = results(told.results.run_dir)
    fitness = (0.1 * table[FIGURES[2]] + 0.9 * table[FIGURES[3]]).to_numpy()
    best = np.maximum.accumulate(fitness)
    assert len(set(fitness)) == EPOCHS, "different in each epoch, or the test can't tell them apart"
    for i, (event, (_, row)) in enumerate(zip(told.early.epochs(), table.iterrows(), strict=True)):
        figures = event.metrics
        assert figures is not None
        assert event.epochs == EPOCHS
        assert list(event.train_losses.values()) == pytest.approx([row[f"train/{x}_loss"] for x in LOSSES], rel=1e-5)
        assert list(event.val_losses.values()) == pytest.approx([row[f"val/{x}_loss"] for x in LOSSES], rel=1e-5)
        assert list(event.train_losses) == list(event.val_losses) == LOSSES
        found = [figures.precision, figures.recall, figures.map50, figures.map]
        assert found == pytest.approx(row[FIGURES].tolist(), rel=1e-5)
        base = 0.005 * (1 - i / EPOCHS * (1 - 0.01))  # of the recipe
        warm = min((2 * i + 1) / 2, 1.0)  # over one epoch of two batches; AdamW's biases start from lr0
        rates = [0.005 + (base - 0.005) * warm, base * warm, base * warm]
        assert dict(event.rates) == pytest.approx({f"lr{k}": rate for k, rate in enumerate(rates)})
        assert row[["x/lr0", "x/lr1", "x/lr2"]].tolist() == pytest.approx(rates, rel=1e-5)
        assert figures.fitness == pytest.approx(fitness[i], rel=1e-5)
        assert event.best_value == pytest.approx(best[i], rel=1e-5)
        assert event.better == (i == 0 or best[i] > best[i - 1])
        assert figures.class_maps.keys() == {"blue", "red"}
        assert sum(figures.class_maps.values()) / 2 == pytest.approx(figures.map)
        assert 0 < event.seconds < 60


def test_checkpoints_are_whole_when_they_are_told_of(told: Told, tmp_path: Path) -> None:
    ends = {event.epoch: event for event in told.early.epochs()}
    found = [(i, event) for i, event in enumerate(told.early.events) if isinstance(event, CheckpointSaved)]
    for epoch, (i, event) in enumerate(found, start=1):
        assert (event.epoch, event.better) == (epoch, ends[epoch].better)
        assert event.path == told.results.run_dir / "weights/last.pt"
        names = ["best.pt"] * event.better + [f"epoch{epoch}.pt"] * (epoch % 2 == 0)
        assert [path.name for path in event.also] == names
        for name in ["last.pt", *names]:
            path = tmp_path / f"{epoch}-{name}"
            path.write_bytes(told.early.files[i][f"weights/{name}"])
            assert load_checkpoint(path)["state"]["epoch"] == epoch


def test_train_end_says_what_there_is(told: Told) -> None:
    end, evaluation = told.early.events[-1], told.results.evaluation
    assert evaluation is not None
    assert (end.run_dir, end.best) == (told.results.run_dir, told.results.run_dir / "weights/best.pt")
    found = [end.metrics.precision, end.metrics.recall, end.metrics.map50, end.metrics.map]
    assert found == [evaluation.metrics.p, evaluation.metrics.r, evaluation.metrics.map50, evaluation.metrics.map]
    assert end.metrics.class_maps == {row.name: row.map for row in evaluation.metrics.rows(["blue", "red"])[1:]}
    assert "optimizer" not in load_checkpoint(end.best)
    best = max(told.early.epochs(), key=lambda event: event.metrics.fitness if event.metrics else -1)
    assert end.metrics == best.metrics
    assert list(best.val_losses.values()) == pytest.approx(evaluation.losses)


def test_loggers_are_told_after_the_verdict(told: Told) -> None:
    """Those that may stop are told before anything of the epoch is written, the others when results.csv has it."""
    for recorder, more in ((told.early, 0), (told.late, 1)):
        rows = [
            files["results.csv"].count(b"\n") - 1
            for event, files in zip(recorder.events, recorder.files, strict=True)
            if isinstance(event, EpochEnd)
        ]
        assert rows == [epoch + more for epoch in range(EPOCHS)]


def test_a_resumed_run_says_so(told: Told, tmp_path: Path) -> None:
    recorder = Recorder()
    run_dir = shutil.copytree(told.results.run_dir, tmp_path / "copy")
    train_with([recorder], "--resume", back_to(run_dir, 2))
    assert recorder.events[0].resumed_epoch == 3
    assert [event.epoch for event in recorder.epochs()] == [3, 4, 5]
    again = [dataclasses.replace(event, seconds=0) for event in recorder.epochs()]
    assert again == [dataclasses.replace(event, seconds=0) for event in told.early.epochs()[2:]]
    assert results(run_dir).equals(results(told.results.run_dir))


def test_what_was_not_measured_is_not_there(data: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    train_with(
        [recorder], *flags(data, tmp_path, "--noval", "--nosave", "--noplots", "--epochs", 2, "--metric", "recall")
    )
    assert recorder.kinds() == ["TrainStart", "EpochEnd", "EpochEnd", "CheckpointSaved", "TrainEnd"]
    first, last = recorder.epochs()
    assert first.metrics is None
    assert not first.val_losses
    assert (first.best_value, first.better) == (-1, False)
    assert last.metrics is not None
    assert last.better
    # Fitness has one meaning, whatever is best.
    assert last.metrics.fitness == pytest.approx(0.1 * last.metrics.map50 + 0.9 * last.metrics.map)
    assert last.best_value == last.metrics.recall != last.metrics.fitness


def test_class_maps_have_the_right_names() -> None:
    """Class 2 has no labels; classes 1 and 3 have one name. Each image has one label and its detection."""
    names, classes = ["a", "twin", "none", "twin"], [0, 1, 3]
    tp = np.ones((3, 10), dtype=bool)
    tp[1, 5:] = False  # class 1 is found up to IoU 0.7 only, class 3 not at all
    tp[2] = False
    ids = [np.array([c], dtype=np.float32) for c in classes]
    metrics = summarize(tp, np.full(3, 0.9, np.float32), np.concatenate(ids), ids, names)
    found = class_maps(metrics, names)
    assert math.isnan(found.pop("none"))
    assert found == pytest.approx({"a": 0.995, "twin (1)": 0.995 / 2, "twin (3)": 0}, abs=0.01)


# Stopping -------------------------------------------------------------------------------------------------------------


def test_stop_ends_the_run_after_its_epoch(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All are told of that epoch, the files are those of a run that is over, and the pictures are drawn."""
    callbacks = [Recorder(ask_after=2), Recorder()]
    done = train_with(callbacks, *flags(data, tmp_path))
    said = capsys.readouterr().out
    assert "Recorder asked to stop after epoch 2 of 5" in said
    assert "--patience" not in said
    for callback in callbacks:
        assert callback.kinds() == ["TrainStart", *["EpochEnd", "CheckpointSaved"] * 2, "TrainEnd"]
    assert {"results.png", "PR_curve.png", "weights/best.pt"} <= callbacks[0].files[-1].keys()
    assert results(done.run_dir)["epoch"].tolist() == [1, 2]
    state = load_checkpoint(done.run_dir / "weights/last.pt")["state"]
    assert (state["epoch"], state["stopped"]) == (2, True)
    assert load_checkpoint(done.run_dir / "weights/best.pt")["state"]["epoch"] in (1, 2)
    with pytest.raises(UserError, match="nothing is left to resume, it stopped early"):
        train_with([], "--resume", done.run_dir)


def on_two_ranks(kind: str, folder: Path, data: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Train on two ranks and return how that ended, and what each of them saw that came to its end."""
    line = flags(data, folder / "runs", "--noplots", "--loggers", "jsonl")
    done = torchrun(["-m", "tests.callback_runs", kind, folder, *line], 2, port=free_port(), timeout=300)
    return done, {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.slow
@pytest.mark.gate
def test_both_ranks_stop_together(data: Path, tmp_path: Path) -> None:
    """The callbacks and loggers are rank 0's (ultralytics/yolov5#4866), the stop is everybody's (#4576)."""
    done, ranks = on_two_ranks("stop", tmp_path, data)
    assert done.returncode == 0, done.stderr  # of the launcher: of all ranks
    assert ranks["0"]["told"] == ["TrainStart", *["EpochEnd", "CheckpointSaved"] * 2, "TrainEnd"]
    assert ranks["1"]["told"] == []
    assert ranks["0"]["trained"] == ranks["1"]["trained"] >= 4  # two micro-batches in each of two epochs
    assert results(tmp_path / "runs/run")["epoch"].tolist() == [1, 2]
    assert load_checkpoint(tmp_path / "runs/run/weights/last.pt")["state"]["stopped"]
    assert "optimizer" not in load_checkpoint(tmp_path / "runs/run/weights/best.pt")
    assert (tmp_path / "runs/run/results.jsonl").read_text().count("\n") == 3
    assert done.stdout.count("asked to stop") == 1


# Failing --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failing_callback_ends_the_run_with_its_traceback(data: Path, tmp_path: Path) -> None:
    """A second one that fails over this does not hide it."""
    line = flags(data, tmp_path / "runs", "--noplots")
    command = [sys.executable, "-m", "tests.callback_runs", "fail", str(tmp_path), *line]
    done = run(command, cwd=PROJECT)
    assert done.returncode == 1
    traceback = done.stderr[done.stderr.rindex("Traceback") :]
    assert "in on_epoch_end\n    print(1 / (2 - event.epoch))" in traceback
    assert traceback.strip().endswith("ZeroDivisionError: division by zero")
    assert "FailingLater.on_exception failed as well" in done.stdout
    assert "LookupError: and that after ZeroDivisionError" in done.stdout
    told = json.loads((tmp_path / "0.json").read_text())["told"]
    assert told == ["TrainStart", "EpochEnd", "CheckpointSaved", "EpochEnd", "ExceptionRaised"]
    assert results(tmp_path / "runs/run")["epoch"].tolist() == [1]  # and can be resumed from there
    assert load_checkpoint(tmp_path / "runs/run/weights/last.pt")["state"]["epoch"] == 1


@pytest.mark.slow
def test_a_failing_callback_ends_both_ranks(data: Path, tmp_path: Path) -> None:
    done, ranks = on_two_ranks("fail", tmp_path, data)
    assert done.returncode not in (0, 2)
    assert "in on_epoch_end\n" in done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert ranks["0"]["told"] == ["TrainStart", "EpochEnd", "CheckpointSaved", "EpochEnd", "ExceptionRaised"]
    assert not ranks.get("1", {}).get("told")


def test_errors_of_others_are_told(data: Path, tmp_path: Path) -> None:
    class Saboteur(Watcher):
        def on_epoch_end(self, event: EpochEnd) -> Stop | None:
            shutil.rmtree(own.parent / "images")
            return super().on_epoch_end(event)

    own = Path(shutil.copytree(data.parent, tmp_path / "data")) / data.name
    callback = Saboteur()
    with pytest.raises(
        LostDataError, match=r"images in a row, .*, could not be read, the last one was .*images/"
    ) as info:
        train_with([callback], *flags(own, tmp_path / "runs", "--noplots", "--cache", "off"))
    told = [kind for kind in callback.kinds() if kind != "CheckpointSaved"]  # it may not be on the disk by then
    assert told == ["TrainStart", "EpochEnd", "ExceptionRaised"]
    assert callback.events[-1].error is info.value


EVENTS: dict[str, Callable[[Callbacks], Any]] = {
    "on_train_start": lambda callbacks: callbacks.train_start(start_event()),
    "on_epoch_end": lambda callbacks: callbacks.epoch_end(epoch_event()),
    "on_checkpoint": lambda callbacks: callbacks.checkpoint(CheckpointSaved(Path("last.pt"), 0, True)),
    "on_train_end": lambda callbacks: callbacks.train_end(TrainEnd(Path(), None, None)),
}


def start_event() -> TrainStart:
    return TrainStart(Path(), 3, 2, ["a"], LOSSES, ["lr0"], {}, {}, None)


def epoch_event() -> EpochEnd:
    return EpochEnd(0, 3, dict.fromkeys(LOSSES, 0.5), {}, None, {"lr0": 0.1}, -1.0, False, 1.0)


class Answering(Callback):
    """Gives one answer to all, or raises it, and notes what it is told."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.answers, self.told = answers or {}, list[str]()
        self.errors: list[BaseException] = []

    def answer(self, hook: str) -> Any:
        self.told.append(hook)
        answer = self.answers.get(hook)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def on_train_start(self, event: TrainStart) -> None:
        return self.answer("on_train_start")

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        return self.answer("on_epoch_end")

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        return self.answer("on_checkpoint")

    def on_train_end(self, event: TrainEnd) -> None:
        return self.answer("on_train_end")

    def on_exception(self, event: ExceptionRaised) -> None:
        self.errors.append(event.error)
        self.answer("on_exception")


def tell_all(callbacks: Callbacks) -> None:
    with callbacks:
        for tell in EVENTS.values():
            tell(callbacks)


@pytest.mark.parametrize("error", [ZeroDivisionError("first"), KeyboardInterrupt(), UserError("no room")])
@pytest.mark.parametrize("hook", EVENTS)
def test_every_event_can_fail(hook: str, error: BaseException) -> None:
    """The others are told once; those that the run never began for are not."""
    before, failing, after = Answering(), Answering({hook: error}), Answering()
    with pytest.raises(type(error)) as info:
        tell_all(Callbacks([before, failing, after]))
    assert info.value is error
    assert before.errors == [error]
    assert failing.errors == []
    assert after.errors == ([] if hook == "on_train_start" else [error])
    assert before.told == [*list(EVENTS)[: list(EVENTS).index(hook) + 1], "on_exception"]


@pytest.mark.parametrize("second", [LookupError("second"), SystemExit(0), KeyboardInterrupt()])
def test_the_first_error_is_never_hidden(second: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even by one that would end the process as if all were well."""
    last = Answering()
    failing = [Answering({"on_train_end": ZeroDivisionError("first")}), Answering({"on_exception": second})]
    with pytest.raises(ZeroDivisionError, match="first"):
        tell_all(Callbacks([*failing, last]))
    assert len(last.errors) == 1
    said = capsys.readouterr().out
    assert "ERROR: Answering.on_exception failed as well" in said
    assert type(second).__name__ in said


@pytest.mark.parametrize(
    ("hook", "answer", "words"),
    [
        ("on_epoch_end", True, "Answering.on_epoch_end returned True; it returns STOP or None"),
        ("on_epoch_end", "stop", "Answering.on_epoch_end returned 'stop'; it returns STOP or None"),
        ("on_checkpoint", STOP, "Answering.on_checkpoint returned <Stop.STOP: 'stop'>; it returns None"),
    ],
)
def test_answers_that_mean_nothing_are_errors(hook: str, answer: object, words: str) -> None:
    with pytest.raises(TypeError) as info:
        tell_all(Callbacks([Answering({hook: answer})]))
    assert str(info.value) == words


def test_one_that_asks_is_enough() -> None:
    assert Callbacks([Answering(), Answering({"on_epoch_end": STOP}), Answering()]).epoch_end(epoch_event())
    assert not Callbacks([Answering(), Answering()]).epoch_end(epoch_event())
    assert not Callbacks().epoch_end(epoch_event())


def test_a_logger_cannot_stop_a_run() -> None:
    class Late(Answering):
        may_stop = False

    late, early = Late({"on_epoch_end": STOP}), Answering()
    callbacks = Callbacks([late, early])
    assert not callbacks.epoch_end(epoch_event())
    assert (late.told, early.told) == ([], ["on_epoch_end"])
    with pytest.raises(TypeError, match="it returns None"):
        callbacks.log_epoch(epoch_event())
    assert early.told == ["on_epoch_end"]


# What may be a callback -----------------------------------------------------------------------------------------------


class Plain(Callback):
    """Travels if what it holds does."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Careful(Callback):
    """Leaves at home what can't travel."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}


class OldNames(Callback):
    def on_train_epoch_end(self, trainer: object) -> None:
        raise AssertionError("nothing calls this")


def refused(check: Callable[[list[Any]], None], *callbacks: object) -> str:
    with pytest.raises(UserError) as info:
        check(list(callbacks))
    return str(info.value)


def a_closure() -> Callable[[], int]:
    value = 3

    def inner() -> int:
        return value

    return inner


def a_local_class() -> type[Callback]:
    class Local(Callback):
        pass

    return Local


def test_what_can_travel() -> None:
    check_picklable([])
    check_picklable([Plain(numbers=[1, 2], path=Path("a"), text="b", event=epoch_event()), Careful(), Recorder()])


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lambda event: None, "callbacks[1] is a lambda (function) and can't travel"),
        (a_closure(), "callbacks[1] is the function a_closure.<locals>.inner and can't travel"),
        (a_local_class()(), "of type a_local_class.<locals>.Local (tests.run.test_callbacks) and can't travel"),
        (a_local_class()(), "the class a_local_class.<locals>.Local, defined inside a function"),
        (Plain(name="x", tell=lambda: 3), "callbacks[1] is of type Plain (tests.run.test_callbacks) and can't travel"),
        (Plain(name="x", tell=lambda: 3), "its attribute tell holds a lambda, which has no name to import it by"),
        (Plain(deep=[{"a": a_closure()}]), "its attribute deep holds the function a_closure.<locals>.inner"),
        (Plain(lock=threading.Lock()), "its attribute lock holds what Python refuses to pickle (TypeError: cannot"),
        (Plain(numbers=(i for i in range(3))), "its attribute numbers holds what Python refuses to pickle"),
    ],
)
def test_what_cannot_travel(callback: object, words: str) -> None:
    """The argument, its type, why, and what to do instead."""
    message = refused(check_picklable, Recorder(), callback)
    assert words in message
    assert "Define a class at the top level of a module" in message
    assert "loggers=['csv', 'jsonl', 'tensorboard']" in message


def test_an_open_file_cannot_travel(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("w") as file:
        message = refused(check_picklable, Plain(log=file))
    assert "callbacks[0] is of type Plain" in message
    assert "its attribute log holds an open file, which belongs to this process" in message


def test_all_that_cannot_travel_is_said_at_once() -> None:
    message = refused(check_picklable, lambda: 0, Recorder(), a_local_class()())
    assert message.startswith("2 problems")
    assert "callbacks[0]" in message
    assert "callbacks[2]" in message


def test_classes_of_a_session_cannot_travel(tmp_path: Path) -> None:
    """Those of a script can: the processes run it. A REPL or a notebook has no file that they could run."""
    code = "from utils.run.callbacks import Callback\nfrom utils.run.callback_checks import check_picklable\n"
    code += "class Mine(Callback):\n    pass\n\ncheck_picklable([Mine()])\nprint('can')\n"
    script = tmp_path / "script.py"
    script.write_text(code)
    for arguments, said in ((["-c", code], "session (REPL, notebook)"), ([str(script)], "")):
        done = run([sys.executable, *arguments], cwd=tmp_path)
        assert done.stdout == ("" if said else "can\n"), done.stderr
        assert said in done.stderr


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            lambda event: None,
            "callbacks[0] is a lambda (function), not a callback; write a subclass of lockstep.Callback",
        ),
        (
            "jsonl",
            "callbacks[0] is of type str, not a callback; write a subclass of lockstep.Callback at the",
        ),
        (Plain, "callbacks[0] is the class Plain itself; give an object: Plain()"),
        (
            OldNames(),
            "has a method on_train_epoch_end that nothing calls; methods that are called are on_train_start,",
        ),
    ],
)
def test_what_is_no_callback(callback: object, words: str) -> None:
    """A method that nothing would call is no silent surprise, either."""
    assert words in refused(check_callbacks, callback)
    with pytest.raises(UserError):
        Callbacks([callback])  # type: ignore[list-item]
    with pytest.raises(UserError):
        check_picklable([callback])


@pytest.mark.parametrize("callbacks", [Plain(), "jsonl", {"on_train_end": Plain()}, 3])
def test_callbacks_are_a_list(callbacks: object) -> None:
    with pytest.raises(UserError, match="callbacks takes a list of callbacks, not of type "):
        check_callbacks(callbacks)
    with pytest.raises(UserError, match="callbacks takes a list of callbacks, not of type "):
        check_picklable(callbacks)


def test_a_run_refuses_what_is_no_callback(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"callbacks\[0\] is of type str"):
        train_with(["csv"], *flags(data, tmp_path / "runs"))  # type: ignore[list-item]
    assert not (tmp_path / "runs").exists()
