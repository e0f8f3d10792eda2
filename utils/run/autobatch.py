"""The batch that fits into a device's memory, measured by real training steps (``--batch-size -1``).

The measuring is done by a short-lived child process, so that nothing of it stays on the device.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from models.families import family_of
from utils.config.build import build_config, config_to_dict
from utils.config.data_yaml import load_data
from utils.config.flags import TrainConfig
from utils.config.recipe import Hyp, load_hyp
from utils.config.yaml_files import ROOT
from utils.core.errors import Problems, UserError
from utils.core.logging import get_logger
from utils.data.sampler import max_imgsz
from utils.dist.place import DistEnv
from utils.run.inputs import read_network
from utils.torch_utils import ModelEMA, split_global_batch
from utils.training.optim import build_optimizer
from utils.training.steps import MAX_GRAD_NORM, BufferSnapshot, choose_precision, guarded_step

CPU_BATCH = 16  # more makes a CPU no faster, and its memory is shared with everything else
SHARE = 0.85  # of the free memory: the rest is for what differs from step to step, and for NCCL
SIZES = (1, 2, 4, 8, 16)
LARGEST = 1024
TARGETS = 20  # objects an image in the measured steps, above the average of COCO (7)


class Measurement(NamedTuple):
    """What a device said.

    Attributes:
        used: peak bytes of a training step by its images; sizes that did not fit are not in it.
        free: bytes that were free before.
    """

    used: dict[int, int]
    free: int


class Meter(Protocol):
    """Tells of a device's memory, in bytes."""

    def free(self) -> int:
        """Return what nobody uses."""

    def reset(self) -> None:
        """Give back what is held in reserve, and look for a peak from here on."""

    def peak(self) -> int:
        """Return the most that this process held since `reset`."""


class CudaMeter:
    """The memory of a CUDA device, with what PyTorch holds in reserve."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        """Return what no process uses."""
        return torch.cuda.mem_get_info(self.device)[0]

    def reset(self) -> None:
        """Empty the cache."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Wait for the device, and return the most that was reserved."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)


def automatic_batch(
    config: TrainConfig,
    given: Mapping[str, Any],
    device: torch.device,
    world_size: int,
    measured_by: Callable[[TrainConfig, torch.device], Measurement] | None = None,
) -> int:
    """Return a global batch for ``--batch-size -1``, a multiple of the ranks, and say how it came about.

    Args:
        config: every flag; ``--nbs`` caps the global batch where it was typed, or is not its default.
        given: flags that were typed.
        device: of the first rank; the others are taken to be like it.
        world_size: ranks.
        measured_by: asks a CUDA device; None is `measure_apart`.

    Raises:
        UserError: not even one image fits, or the flags are wrong.
    """
    cap = config.nbs if "nbs" in given or config.nbs != TrainConfig.nbs else None
    if device.type != "cuda":
        batch = capped(CPU_BATCH, world_size, cap)
        get_logger().info(
            f"batch       --batch-size -1 on {device.type} is not measured: {batch} images over all ranks"
        )
        return batch
    measured = (measured_by or measure_apart)(config, device)
    local = largest_batch(measured)
    batch = capped(local * world_size, world_size, cap)
    get_logger().info(
        f"batch       --batch-size -1: {local} images fit into {SHARE:.0%} of the {measured.free / 2**30:.1f} GiB free "
        f"on {device}; {batch} images over {world_size} rank{'s' * (world_size > 1)}"
    )
    return batch


def capped(batch: int, world_size: int, cap: int | None) -> int:
    """Round a global batch, no more than the cap, down to a multiple of the ranks; at least one image each."""
    batch = batch if cap is None else min(batch, cap)
    return max(batch // world_size, 1) * world_size


def largest_batch(measured: Measurement, share: float = SHARE) -> int:
    """Return the images whose step takes a share of the free memory, by the line through the measured sizes.

    Args:
        measured: at least one size.
        share: of the free memory.

    Raises:
        UserError: not one image fits.
    """
    sizes = sorted(measured.used)
    if not sizes:
        raise UserError(
            "--batch-size -1: not even one image fits into the device's memory; use a smaller --imgsz or --cfg"
        )
    high = sizes[-1]
    does_not_fit = next((size for size in SIZES if size > high), LARGEST + 1)
    if len(sizes) == 1:
        return high
    # Small batches are mostly constant costs: the slope of the larger half is the one that goes on.
    middle = sizes[(len(sizes) - 1) // 2]
    per_image = max((measured.used[high] - measured.used[middle]) / (high - middle), 1.0)
    fits = math.floor(high + (measured.free * share - measured.used[high]) / per_image)
    return max(min(fits, does_not_fit - 1), 1)


def measure(step: Callable[[int], int], sizes: tuple[int, ...] = SIZES) -> dict[int, int]:
    """Run training steps of growing size until one does not fit.

    Args:
        step: runs a step of so many images and returns its peak in bytes; raises `torch.OutOfMemoryError`.
        sizes: rising.
    """
    used: dict[int, int] = {}
    for size in sizes:
        try:
            used[size] = step(size)
        except torch.OutOfMemoryError:
            break
    return used


def measure_apart(config: TrainConfig, device: torch.device) -> Measurement:
    """Measure in a process of its own.

    Raises:
        UserError: the flags are wrong, or the process fails.
    """
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from utils.run.autobatch import main; main()"
    asked = json.dumps({"config": config_to_dict(config), "device": str(device)})
    child = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, check=False)
    try:
        said: Mapping[str, Any] = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        why = "".join(child.stderr.splitlines()[-1:]) or f"the process ended with status {child.returncode}"
        raise UserError(f"--batch-size -1: measuring on {device} failed; give a number ({why})") from None
    if "mistakes" in said:
        raise UserError(said["mistake"], said["mistakes"])
    return Measurement({int(size): used for size, used in said["used"].items()}, said["free"])


def training_step(config: TrainConfig, device: torch.device, meter: Meter) -> Callable[[int], int]:
    """Return a function that trains on so many made-up images: forward, loss, backward, optimizer, EMA, as in a run.

    It is the step of a single device, whatever ranks there are, and returns its peak of memory.

    Raises:
        UserError: lists what is wrong with data, recipe, network and weights.
    """
    problems = Problems()
    env = DistEnv(device=device)
    hyp: Hyp | None = problems.attempt(lambda: load_hyp(config.hyp))
    data = problems.attempt(lambda: load_data(config.data, config.single_cls))
    raw_model = read_network(config, env, hyp, data, None, problems, [])
    problems.raise_if_any()
    assert hyp is not None and raw_model is not None
    family, precision = family_of(raw_model.yaml), choose_precision(config.amp, device)
    imgsz = max_imgsz(config.imgsz, raw_model.max_stride, config.multi_scale)
    criterion = family.criterion(raw_model, hyp, imgsz, config.label_smoothing)
    optimizer = build_optimizer(raw_model, config.optimizer, hyp, split_global_batch(1, 1, config.nbs))
    scaler, ema, buffers = precision.make_scaler(device), ModelEMA(raw_model), BufferSnapshot(raw_model)
    parameters = [parameter for parameter in raw_model.parameters() if parameter.requires_grad]
    raw_model.train()

    def step(batch: int) -> int:
        meter.reset()
        images = torch.randint(0, 255, (batch, raw_model.channels, imgsz, imgsz), dtype=torch.uint8, device=device)
        targets = torch.rand(batch * TARGETS, 6)
        targets[:, 0] = torch.arange(batch).repeat_interleave(TARGETS)
        targets[:, 1] = 0
        buffers.take()
        matches = criterion.match(targets, batch, imgsz, imgsz)
        with precision.autocast(device.type):
            outputs = raw_model(family.inputs.prepare(images))
        sums = criterion.sums(outputs, [level.to(device) for level in matches])
        scaler.scale(criterion.items(sums, criterion.counts(matches)).sum() * batch).backward()
        found_inf = guarded_step(optimizer, parameters, MAX_GRAD_NORM, scaler)
        buffers.restore(found_inf)
        ema.update(raw_model, found_inf)
        optimizer.zero_grad(set_to_none=True)
        return meter.peak()

    return step


def answer(config: TrainConfig, device: torch.device, meter: Meter) -> dict[str, Any]:
    """Measure, and return what `measure_apart` wants to know: a `Measurement`, or the mistakes in the flags."""
    free = meter.free()
    try:
        return {"used": measure(training_step(config, device, meter)), "free": free}
    except UserError as error:
        return {"mistake": str(error), "mistakes": error.messages}


def main() -> None:
    """Measure what stdin asks for, and answer in a line of JSON."""
    asked = json.load(sys.stdin)
    device = torch.device(asked["device"])
    torch.cuda.set_device(device)
    print(json.dumps(answer(build_config(TrainConfig, asked["config"]), device, CudaMeter(device))))
