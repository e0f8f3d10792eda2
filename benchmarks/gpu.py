"""What one GPU can do and what a run makes of it, as ratios; under five minutes.

python -m benchmarks --gpu
python -m benchmarks --gpu --cfg yolov5n.yaml --batch 128

Limits are measured in the same run: the rate of a large matrix product, of a copy on the device, of a copy from pinned
memory. A training step moves every activation several times, so its limit is the slower of arithmetic and memory.
"""

import argparse
import contextlib
import copy
import functools
import io
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import train
import val
from benchmarks.measuring import Row, format_rows, ratios, take_turns, write_rows
from benchmarks.optimizer import average_one_by_one, step_one_by_one
from benchmarks.train_step import MANY_EPOCHS, WARMED_UP, BareSteps, Repeated, loop_epochs
from models.costs import count_flops
from utils.config.data_yaml import build_train_config
from utils.core.devices import upload
from utils.core.errors import UserError, run_cli
from utils.data.loaders import PREFETCH_BATCHES, Batch, share_workers
from utils.metrics.boxes import non_max_suppression
from utils.run.loading import open_loaders
from utils.run.state import TrainState
from utils.torch_utils import process_group
from utils.training.optim import param_groups
from utils.training.steps import MAX_GRAD_NORM, Precision, guarded_step

BF16_BYTES = 2
MANY_TIMES = 5  # what the loader has ready when a round begins
PRODUCT, COPIED = 8192, 1 << 30  # side of the matrix product; bytes of a copy


class Device:
    """A device and its measured rates.

    Args:
        device: which.
        small: measure with small amounts, where the figures do not matter.

    Attributes:
        flops: multiply-adds a second, times two, in bf16.
        bytes: copied a second on the device, reads and writes together.
        upload: bytes a second from pinned memory.
    """

    def __init__(self, device: torch.device, small: bool = False) -> None:
        self.device = device
        side, size = (256, 1 << 20) if small else (PRODUCT, COPIED)
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.flops = 2 * side**3 / self.seconds(lambda: a @ b, 20)
        source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        self.bytes = 2 * size / self.seconds(lambda: target.copy_(source), 20)
        host = torch.empty(size // 8, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.upload = host.nbytes / self.seconds(lambda: target[: host.nbytes].copy_(host, non_blocking=True), 10)

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeat: int) -> float:
        """Return how long one of several calls takes on the device, after one that does not count."""
        work()
        self.wait()
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        self.wait()
        return (time.perf_counter() - start) / repeat

    def waited(self, work: Callable[[], object]) -> Callable[[], None]:
        """Return a function that ends when the device is done."""

        def whole() -> None:
            work()
            self.wait()

        return whole


def moved_bytes(model: nn.Module, images: Tensor) -> int:
    """Return bytes of activations that the layers of a network read and write in a forward pass, in bf16."""
    moved = 0

    def add(_module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal moved
        moved += sum(one.numel() for one in (*inputs, output) if isinstance(one, Tensor)) * BF16_BYTES

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(add) for module in leaves]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return moved


class Bench:
    """A run on the device, and one batch of it.

    Args:
        config: flags of a run.
        stack: closes what is opened.
        small: see `Device`.
    """

    def __init__(self, config: Any, stack: contextlib.ExitStack, small: bool = False) -> None:
        env = stack.enter_context(process_group(config.device))
        self.run = train.set_up(config, env)
        self.run.state.epoch = WARMED_UP
        self.batches, self.val_batches = open_loaders(self.run, stack)
        self.batch: Batch = next(self.batches)
        self.run.state.batch = 1
        self.machine = Device(env.device, small)
        self.images = self.run.family.inputs.prepare(self.batch.images.to(env.device))
        self.in_epoch = self.run.schedule.batches_per_epoch * self.run.plan.global_batch

    def looping(self) -> Callable[[], None]:
        """Return a function that trains an epoch on one batch that is in memory."""
        run = copy.copy(self.run)
        run.state = TrainState(epoch=WARMED_UP)
        batches: Iterator[Batch] = Repeated(self.batch._replace(images=self.batch.images.to(run.env.device)), run)
        return self.machine.waited(lambda: loop_epochs(run, batches))

    def steps(self, rounds: int) -> list[Row]:
        """G1, G2, G6: whole epochs."""
        run, machine = self.run, self.machine
        layouts = {"channels last": torch.channels_last, "contiguous": torch.contiguous_format}
        names = ["bf16", "fp16", "off"] if machine.device.type == "cuda" else [run.precision.name]
        ahead = PREFETCH_BATCHES * share_workers(run.config.workers, 1, run.plan.local_batch, run.val_batch)[0]
        epochs = math.ceil(MANY_TIMES * ahead / run.schedule.batches_per_epoch) or 1
        bare = machine.waited(BareSteps(run, self.batch, run.precision, torch.channels_last))
        contestants: dict[str, Callable[[], None]] = {
            "loop": self.looping(),
            "epoch": machine.waited(lambda: loop_epochs(run, self.batches, epochs)),
            "settling": bare,  # beside loader processes that fill their queues again; not looked at
        }
        for name in names:
            for layout, value in layouts.items():
                contestants[f"{name} {layout}"] = machine.waited(BareSteps(run, self.batch, Precision(name), value))
        with contextlib.redirect_stderr(io.StringIO()):  # the progress lines of the epochs
            taken = take_turns(contestants, rounds)
        del taken["settling"]
        taken["epoch"] = [seconds / epochs for seconds in taken["epoch"]]
        bare_taken = taken[f"{run.precision.name} channels last"]
        best = [min(spent) for spent in zip(*(taken[name] for name in contestants if " " in name), strict=True)]
        arithmetic = 3 * count_flops(run.raw_model, run.imgsz) * self.in_epoch / machine.flops
        memory = 3 * moved_bytes(run.raw_model, self.images) / len(self.images) * self.in_epoch / machine.bytes
        limit = max(arithmetic, memory)
        said = ", ".join(f"{name} {self.in_epoch / min(spent):.0f}" for name, spent in taken.items())
        which = "memory" if memory > arithmetic else "arithmetic"
        return [
            Row("G1", f"limit ({which}) / bare step", ratios([limit] * rounds, bare_taken), note=f"images/s: {said}"),
            Row("G1", "training loop / bare step", ratios(taken["loop"], bare_taken), 1.02, at_least=False),
            Row("G2", "best of the cells / the default's", ratios(best, bare_taken), 0.95),
            Row("G6", "epoch with its loader / loop on one batch", ratios(taken["epoch"], taken["loop"]), 1.12,
                at_least=False),
        ]  # fmt: skip

    def optimizer(self, rounds: int) -> list[Row]:
        """G4: clipping, step and averaging."""
        run, machine = self.run, self.machine
        parameters = [parameter for parameter in run.raw_model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        model = copy.deepcopy(run.raw_model)
        plain = torch.optim.SGD(param_groups(model, 5e-4), lr=0.01, momentum=0.9, nesterov=True, foreach=False)
        others = list(model.parameters())
        for parameter in others:
            parameter.grad = torch.randn_like(parameter) * 1e-3

        def ours() -> None:
            found_inf = guarded_step(run.optimizer, parameters, MAX_GRAD_NORM, run.scaler)
            run.ema.update(run.raw_model, found_inf)

        def one_by_one() -> None:
            step_one_by_one(plain, others)
            average_one_by_one(model, run.ema.module)

        taken = take_turns({"ours": machine.waited(ours), "one by one": machine.waited(one_by_one)}, rounds, repeat=10)
        passes = 1 + 5 + 3  # norm; step; average
        limit = passes * 4 * sum(parameter.numel() for parameter in parameters) / machine.bytes
        run.optimizer.zero_grad(set_to_none=True)
        return [
            Row("G4", "clip, step and average: one by one / ours", ratios(taken["one by one"], taken["ours"]), 4.0),
            Row("G4", "limit (memory) / ours", ratios([limit] * rounds, taken["ours"])),
        ]

    def waits(self) -> list[Row]:
        """G5: how often the host waits for the device, and how long the device waits for the host."""
        machine, loop = self.machine, self.looping()
        loop()
        if machine.device.type != "cuda":
            return []
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            loop()
        torch.cuda.set_sync_debug_mode("default")
        steps = self.run.schedule.batches_per_epoch
        waits = sum("synchroniz" in str(warning.message) for warning in caught) / steps
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile, contextlib.redirect_stderr(io.StringIO()):
            start = time.perf_counter()
            loop()
            wall = time.perf_counter() - start
        busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
        return [
            Row("G5", "waits of the host in a batch, progress lines included", (waits,), 1.0, at_least=False),
            Row("G5", "share of the time in which the device is busy", (min(busy / wall, 1.0),), 0.9),
        ]

    def upload(self, rounds: int) -> list[Row]:
        """G7: images to the device."""
        machine, device = self.machine, self.machine.device
        pinned = self.batch.images.pin_memory() if device.type == "cuda" else self.batch.images
        floats = self.batch.images.float()
        prepare = self.run.family.inputs.prepare
        taken = take_turns(
            {
                "ours": machine.waited(lambda: prepare(upload(pinned, device))),
                "floats": machine.waited(lambda: floats.to(device) / 255),
            },
            rounds,
            repeat=5,
        )
        limit = pinned.nbytes / machine.upload
        return [
            Row("G7", "float32 from pageable memory / uint8 from pinned", ratios(taken["floats"], taken["ours"]), 4.0),
            Row("G7", "limit (bus) / ours, normalization included", ratios([limit] * rounds, taken["ours"])),
        ]

    def validation(self, rounds: int) -> list[Row]:
        """G9: suppression and scoring beside the forward pass."""
        run, machine = self.run, self.machine
        model = run.ema.module
        size = len(run.val_index)

        def forward_only() -> None:
            with torch.no_grad():
                for batch in self.val_batches:
                    model(run.family.inputs.prepare(upload(batch.images, machine.device)))

        def whole() -> None:
            val.evaluate(model, run.family, self.val_batches, run.val_index, run.data.names, run.env)

        with contextlib.redirect_stderr(io.StringIO()):
            taken = take_turns({"whole": machine.waited(whole), "forward": machine.waited(forward_only)}, rounds)
        with torch.no_grad():
            decoded = model(self.images)
        decoded = decoded[0] if isinstance(decoded, (list, tuple)) else decoded
        note = f"images/s: {size / min(taken['whole']):.0f}, forward pass only {size / min(taken['forward']):.0f}"
        if isinstance(decoded, Tensor) and decoded.ndim == 3:
            suppress = functools.partial(non_max_suppression, decoded, 0.001, 0.6, multi_label=True)
            note += f"; suppression {machine.seconds(suppress, 3) / len(self.images) * 1e3:.2f} ms an image"
        return [Row("G9", "validation / its forward pass", ratios(taken["whole"], taken["forward"]), note=note)]

    def memory(self) -> list[Row]:
        """G10: the peak of a training step over what it keeps for the backward pass."""
        machine, run = self.machine, self.run
        if machine.device.type != "cuda":
            return []
        torch.cuda.reset_peak_memory_stats(machine.device)
        self.looping()()
        peak = torch.cuda.max_memory_allocated(machine.device)
        weights = 16 * sum(parameter.numel() for parameter in run.raw_model.parameters())
        least = moved_bytes(run.raw_model, self.images) // 2 + weights
        note = f"peak {peak / 2**30:.1f} GiB at batch {run.plan.local_batch}, {run.imgsz} pixels"
        return [Row("G10", "peak memory / activations and weights", (peak / least,), note=note)]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks --gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", default="", help="data set YAML; default: the built-in one")
    parser.add_argument("--cfg", default="yolov5s.yaml", help="network YAML")
    parser.add_argument("--imgsz", "--img", type=int, default=640, help="image size, pixels")
    parser.add_argument("--batch-size", "--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--workers", type=int, default=8, help="loader processes")
    parser.add_argument("--device", default="0", help="which GPU")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--small", action="store_true", help="measure limits with small amounts, to try it out")
    parser.add_argument("--rows", type=Path, help="also write the lines here, as JSON")
    options = vars(parser.parse_args())
    rounds, target, small = options.pop("rounds"), options.pop("rows"), options.pop("small")
    if not small and not torch.cuda.is_available():
        raise UserError("--gpu: PyTorch finds no CUDA device here; without --gpu the benchmarks need none")
    options["data"] = options["data"] or "shapes.yaml"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings = options | {"project": folder, "epochs": MANY_EPOCHS, "weights": ""}
        bench = Bench(build_train_config(settings), stack, small)
        rows = bench.steps(rounds) + bench.optimizer(rounds) + bench.waits() + bench.upload(rounds)
        rows += bench.validation(rounds) + bench.memory()
    print(format_rows(rows))
    if target:
        write_rows(rows, target)


if __name__ == "__main__":
    run_cli(main)
