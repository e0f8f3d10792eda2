"""How long Lockstep takes to answer, and to take its first optimizer step.

python -m benchmarks.start

`--help` and a mistyped flag are held against an interpreter that imports argparse and yaml only. The time from the
command to the end of the first optimizer step is held against a bare script that imports torch, builds the same network
and takes one step with it. Every figure is that of a process of its own.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import Options, Row, milliseconds, ratios, run_group, take_turns
from utils.config.yaml_files import ROOT
from utils.core.errors import UserError, run_cli

ANSWER_LIMIT, STEP_LIMIT = 3.0, 1.3
CFG, IMGSZ, BATCH = "yolov5n.yaml", 320, 16
NOTHING = "import argparse, yaml"
# A run that ends, without a word, when it has taken its first step; its loader processes would else end later, and who
# waits for the end of its output waits for them.
FIRST_STEP = """
import multiprocessing, os, sys
import train
from utils.core.errors import run_cli
step = train.optimizer_step
def first(*arguments):
    step(*arguments)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)
train.optimizer_step = first
run_cli(lambda: train.main(sys.argv[1:]))
"""
BARE_STEP = f"""
import torch
from models.families import YOLOV5
from utils.config.yaml_files import find_yaml, load_yaml
from utils.training.steps import choose_precision
model = YOLOV5.build(load_yaml(find_yaml({CFG!r}, "model")), 3, ["a", "b", "c"]).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.rand({BATCH}, 3, {IMGSZ}, {IMGSZ}).to(memory_format=torch.channels_last)
with choose_precision("auto", torch.device("cpu")).autocast("cpu"):
    outputs = model(images)
sum(output.float().mean() for output in outputs).backward()
optimizer.step()
"""


def run(command: list[str], expected: int, folder: Path) -> None:
    """Run a Python program to its end.

    Raises:
        UserError: it ended otherwise than it should; with what it said.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != expected:
        raise UserError(f"a process of the benchmark ended with {done.returncode}; it said:\n{done.stderr.strip()}")


def measure(options: Options) -> list[Row]:
    """Start processes in turns."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train_py = str(ROOT / "train.py")
        answers = take_turns(
            {
                "nothing": lambda: run(["-c", NOTHING], 0, folder),
                "--help": lambda: run([train_py, "--help"], 0, folder),
                "mistyped": lambda: run([train_py, "--epoch5", "3"], 2, folder),
            },
            options.rounds,
            name="answers",
        )
        flags = ["--cfg", CFG, "--weights", "", "--img", str(IMGSZ), "--batch", str(BATCH), "--device", "cpu"]
        flags += ["--data", options.data or "shapes.yaml", "--workers", "2", "--project", str(folder / "runs")]
        steps = take_turns(
            {
                "bare": lambda: run(["-c", BARE_STEP], 0, folder),
                "ours": lambda: run(["-c", FIRST_STEP, *flags], 0, folder),
            },
            options.rounds,
            name="first steps",
        )
    said = milliseconds(answers)
    return [
        Row("C1", "--help / an interpreter with argparse and yaml", ratios(answers["--help"], answers["nothing"]),
            ANSWER_LIMIT, at_least=False, note=said),
        Row("C1", "a mistyped flag / the same", ratios(answers["mistyped"], answers["nothing"]), ANSWER_LIMIT,
            at_least=False),
        Row("C2", "first step / bare import, build and step", ratios(steps["ours"], steps["bare"]), STEP_LIMIT,
            at_least=False, note=milliseconds(steps)),
    ]  # fmt: skip


if __name__ == "__main__":
    run_cli(functools.partial(run_group, measure, __doc__))
