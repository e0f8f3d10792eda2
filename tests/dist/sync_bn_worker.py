"""One rank of test_sync_bn: measures everything in one start, and leaves the figures of all ranks in a JSON file."""

import copy
import json
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from utils.dist.collectives import all_gather_objects, all_reduce_sum
from utils.dist.place import DistEnv
from utils.dist.worker import as_worker
from utils.torch_utils import process_group
from utils.training.sync_bn import SyncBatchNorm, average_buffers, convert_sync_bn

Figures = dict[str, Any]
SHARES = (1, 3, 2, 5)  # images on each rank


@dataclass(frozen=True)
class Layer:
    """A layer and what it is fed; the joined batch has the images of all ranks."""

    spatial: tuple[int, ...] = (5, 4)
    channels: int = 6
    shares: tuple[int, ...] = SHARES
    momentum: float | None = 0.03
    affine: bool = True
    bias: bool = True
    track_running_stats: bool = True
    eps: float = 1e-3
    memory_format: torch.memory_format = torch.contiguous_format
    every_second: bool = False  # of a larger tensor's columns, which is not dense
    dtype: torch.dtype = torch.float64
    mean: float = 0.0
    std: float = 1.0
    same_spread: bool = False  # in all images
    grad_mean: float = 0.5

    def reference(self) -> nn.Module:
        """Torch's own layer in double precision, with weights other than 1 and 0."""
        kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(self.spatial)]
        norm = kind(self.channels, self.eps, self.momentum, self.affine, self.track_running_stats).double()
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        if not self.bias:
            norm.register_parameter("bias", None)
        return norm

    def batch(self, images: int) -> Tensor:
        """Values whose mean and spread differ from image to image."""
        size = (images, self.channels, *self.spatial)
        level, spread = torch.randn(2, images, self.channels, *[1] * len(self.spatial), dtype=torch.float64)
        spread = spread * (not self.same_spread)
        values = (level + spread.exp() * torch.randn(size, dtype=torch.float64)) * self.std + self.mean
        return values.to(self.dtype).contiguous(memory_format=self.memory_format)


# The last bit of 1e4 in float32 is a tenth of the spread.
LARGE_MEAN = Layer(
    dtype=torch.float32, mean=1e4, std=1e-2, same_spread=True, grad_mean=0.0, eps=1e-8, spatial=(128, 128)
)
LAYERS = {
    "2d": Layer(),
    "channels-last": Layer(memory_format=torch.channels_last),
    "one channel": Layer(channels=1, memory_format=torch.channels_last),
    "vectors": Layer(spatial=(), shares=(4, 3, 2, 5)),
    "1d": Layer(spatial=(7,)),
    "3d": Layer(spatial=(2, 3, 4), memory_format=torch.channels_last_3d),
    "not dense": Layer(every_second=True),
    "cumulative": Layer(momentum=None),
    "without affine": Layer(affine=False),
    "without bias": Layer(bias=False),
    "without running statistics": Layer(track_running_stats=False),
    "large": Layer(spatial=(192, 192), memory_format=torch.channels_last),  # statistics are taken in several parts
    "large, planes": Layer(spatial=(192, 192)),
    "a rank without images": Layer(shares=(2, 0, 3, 1)),
    "one value on some ranks": Layer(spatial=(1, 1), shares=(2, 1, 1, 1)),
    "float32": Layer(dtype=torch.float32, spatial=(40, 40), memory_format=torch.channels_last),
    "large mean": replace(LARGE_MEAN, memory_format=torch.channels_last),
    "large mean, planes": LARGE_MEAN,
    "bfloat16": Layer(dtype=torch.bfloat16, spatial=(40, 40), memory_format=torch.channels_last),
    "bfloat16, planes": Layer(dtype=torch.bfloat16, spatial=(40, 40)),
    "float16": Layer(dtype=torch.float16, spatial=(40, 40), memory_format=torch.channels_last),
}


def compare(layer: Layer, env: DistEnv, steps: int = 3) -> Figures:
    """Largest errors of this rank against BatchNorm in double precision on the joined batch, over several steps.

    Errors are relative to the largest value; those of running variances to each.
    """
    torch.manual_seed(1)
    reference = layer.reference()
    # Also on a single rank, where a converted model has none.
    norm = SyncBatchNorm(layer.channels, env, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    if not layer.bias:
        norm.register_parameter("bias", None)
    norm.to(torch.float64 if layer.dtype == torch.float64 else torch.float32).load_state_dict(reference.state_dict())
    shares = list(layer.shares[: env.world_size])
    figures: Figures = {"dtype": True, "format": True, "counter": True}
    worst: dict[str, float] = {}

    def add(name: str, value: Tensor, expected: Tensor) -> None:
        if value.numel() == 0:
            return
        scale = expected if name == "running_var" else expected.abs().max()
        error = ((value.double() - expected).abs() / scale).max().item()
        worst[name] = max(worst.get(name, 0.0), error if error == error else float("inf"))

    for _ in range(steps):
        joined = layer.batch(sum(shares))
        expected_input = joined.double().requires_grad_()
        # Gradients that hang together with the values, so that no sum over both is a small difference.
        grad = torch.randn_like(expected_input) + layer.grad_mean + (expected_input - layer.mean) / layer.std
        grad = grad.detach().to(layer.dtype)
        expected = reference(expected_input)
        expected.backward(grad.double())

        start = sum(shares[: env.rank])
        mine = slice(start, start + shares[env.rank])
        input = joined[mine].clone()
        if layer.every_second:
            input = input.repeat_interleave(2, -1)[..., ::2]
        input = input.detach().requires_grad_()
        with torch.autocast("cpu", layer.dtype, enabled=layer.dtype in (torch.bfloat16, torch.float16)):
            output = norm(input)
        output.backward(grad[mine])
        assert input.grad is not None and expected_input.grad is not None

        add("output", output.detach(), expected.detach()[mine])
        add("grad_input", input.grad, expected_input.grad[mine])
        for ours, theirs in zip(norm.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            add("grad_affine", all_reduce_sum(ours.grad.clone(), env), theirs.grad)
            ours.grad = theirs.grad = None
        for name in ("running_mean", "running_var"):
            if layer.track_running_stats:
                add(name, getattr(norm, name), getattr(reference, name))
        figures["dtype"] &= output.dtype == layer.dtype == input.grad.dtype
        if input.numel():
            kept = [tensor.is_contiguous(memory_format=layer.memory_format) for tensor in (output, input.grad)]
            figures["format"] &= layer.every_second or all(kept)
    if layer.track_running_stats:
        figures["counter"] = bool(norm.num_batches_tracked == reference.num_batches_tracked == steps)
        add("evaluation", norm.eval()(joined[mine]).detach(), reference.eval()(joined[mine].double()).detach())
    return figures | {"errors": worst}


def too_few(env: DistEnv) -> Figures:
    """What is said to a single value over all ranks."""
    norm = SyncBatchNorm(3, env)
    message = ""
    try:
        norm(torch.randn(int(env.rank == 0), 3, 1, 1))
    except ValueError as error:
        message = str(error)
    return {"message": message}


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Count what goes over the network while the block runs."""
    count: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield count
    for event in profiler.key_averages():
        if event.key.startswith("c10d::"):
            count[event.key.removeprefix("c10d::")] += event.count


def network(layers: int = 3) -> nn.Sequential:
    """Convolutions with BatchNorm between them."""
    torch.manual_seed(2)
    blocks = [(nn.Conv2d(3 if i == 0 else 8, 8, 3), nn.BatchNorm2d(8, 1e-3, 0.03), nn.SiLU()) for i in range(layers)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def messages(env: DistEnv) -> Figures:
    """Collectives of each pass, with three layers."""
    model = convert_sync_bn(network(), env)
    images = torch.randn(2, 3, 12, 12)
    with collectives() as forward:
        output = model(images)
    with collectives() as backward:
        output.sum().backward()
    with collectives() as without_gradient, torch.no_grad():
        model(images)
    with collectives() as evaluation:
        model.eval()(images).sum().backward()
    frozen = convert_sync_bn(nn.Sequential(nn.BatchNorm2d(3)), env)
    with collectives() as first_layer:  # whose input needs no gradient
        frozen(images).sum().backward()
    return {
        "forward": forward,
        "backward": backward,
        "without gradient": without_gradient,
        "evaluation": evaluation,
        "first layer": first_layer,
    }


def wrapped(env: DistEnv) -> Figures:
    """Error of the gradients that DistributedDataParallel leaves, against one process with the joined batch."""
    reference = network().double()
    model = convert_sync_bn(copy.deepcopy(reference), env)
    ddp = DistributedDataParallel(model) if env.world_size > 1 else model
    joined = torch.randn(2 * env.world_size, 3, 12, 12, dtype=torch.float64)
    grad = torch.randn(2 * env.world_size, 8, 6, 6, dtype=torch.float64)
    (reference(joined) * grad).sum().backward()
    mine = slice(2 * env.rank, 2 * env.rank + 2)
    (ddp(joined[mine]) * grad[mine]).sum().backward()
    errors = []
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        # A convolution's bias in front of BatchNorm has no gradient but rounding errors.
        errors.append((ours.grad * env.world_size - theirs.grad).norm().item() / max(theirs.grad.norm().item(), 1.0))
    return {"error": max(errors)}


def converted(env: DistEnv) -> Figures:
    """What became of a model."""
    model = network()
    shared = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    model.extend([shared, shared, nn.Sequential(shared), nn.BatchNorm3d(2).eval()])
    model[1].weight.requires_grad_(False)
    before = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    state, parameters = model.state_dict(keep_vars=True), list(model.parameters())
    result = convert_sync_bn(model, env)
    after = [module for module in result.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    new_state = result.state_dict(keep_vars=True)
    names = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")
    alone = convert_sync_bn(before[0], env)
    return {
        "same model": result is model,
        "kinds": sorted({type(module).__name__ for module in after}),
        "number": len(after),
        "same layers": [id(module) for module in after] == [id(module) for module in before],
        "same keys": list(state) == list(new_state),
        "same tensors": all(state[key] is new_state[key] for key in state),
        "same parameters": all(a is b for a, b in zip(parameters, result.parameters(), strict=True)),
        "frozen": [parameter.requires_grad for parameter in result.parameters()].count(False),
        "same settings": [[getattr(module, name) for name in names] for module in after]
        == [[getattr(module, name) for name in names] for module in before],
        "still shared": model[-4] is model[-3] is next(model[-2].children()),
        "alone": type(alone).__name__,
    }


def copied(env: DistEnv) -> Figures:
    """Whether copies of a converted model work as it does, collectives included."""
    model = convert_sync_bn(network(), env)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    images = torch.randn(2, 3, 12, 12) + env.rank
    expected = model(images)
    equal = [torch.equal(other(images), expected) for other in copies]
    buffers = [[torch.equal(a, b) for a, b in zip(other.buffers(), model.buffers(), strict=True)] for other in copies]
    return {"equal": all(equal), "buffers": all(map(all, buffers))}


def averaged(env: DistEnv) -> Figures:
    """Error of averaged buffers, and what it took."""
    norms = [nn.BatchNorm2d(5), nn.BatchNorm2d(3).double(), nn.BatchNorm2d(7)]
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
        norm.running_mean.copy_(torch.arange(float(norm.num_features)) * (env.rank + 1))
        norm.running_var.fill_(2.0**env.rank)
        norm.num_batches_tracked.fill_(env.rank + 10)
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    places = [buffer.data_ptr() for buffer in buffers]
    with collectives() as count:
        average_buffers(buffers, env)
    world = env.world_size
    errors = []
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None
        errors.append((norm.running_mean - torch.arange(float(norm.num_features)) * (world + 1) / 2).abs().max().item())
        errors.append((norm.running_var - (2**world - 1) / world).abs().max().item())
    average_buffers([], env)
    return {
        "error": max(errors),
        "counters": [int(buffer) - env.rank for buffer in buffers if not buffer.is_floating_point()],
        "in place": places == [buffer.data_ptr() for norm in norms for buffer in norm.buffers()],
        "collectives": count,
    }


CASES: tuple[Callable[[DistEnv], Figures], ...] = (too_few, messages, wrapped, converted, copied, averaged)


def main(path: Path) -> None:
    torch.set_num_threads(1)
    with process_group("cpu") as env:
        figures: Figures = {name: compare(layer, env) for name, layer in LAYERS.items()}
        figures |= {case.__name__: case(env) for case in CASES}
        everyone = all_gather_objects(figures, env)
        if env.is_main_process:
            path.write_text(json.dumps(everyone))


if __name__ == "__main__":
    as_worker(lambda: main(Path(sys.argv[1])))()
