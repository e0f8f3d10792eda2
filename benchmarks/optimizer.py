"""What an optimizer step and the averaging of weights cost, against one flat tensor of as many values.

python -m benchmarks.optimizer

Everything is that of a run of yolov5s with SGD: three groups of parameters, gradients clipped to a norm, a step that is
skipped by a flag on the device, and an average over weights and BatchNorm statistics. The limit does the same
arithmetic on tensors that lie in one piece; "one by one" is the textbook's loop over the tensors.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.measuring import Options, Row, milliseconds, ratios, run_group, take_turns
from models.families import YOLOV5
from utils.config.recipe import Hyp
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import run_cli
from utils.torch_utils import ModelEMA, split_global_batch
from utils.training.optim import build_optimizer, param_groups
from utils.training.steps import CLIP_EPSILON, MAX_GRAD_NORM, Precision, guarded_step

LIMIT = 0.6
REPEAT = 10
DECAY, MOMENTUM, RATE, WEIGHT_DECAY = 0.999, 0.937, 0.01, 5e-4


class FlatStep:
    """SGD with Nesterov momentum, weight decay and clipping, on tensors of one piece for each group."""

    def __init__(self, sizes: list[int]) -> None:
        self.weights, self.gradients = ([torch.randn(size) * 1e-3 for size in sizes] for _ in range(2))
        self.momenta = [torch.zeros(size) for size in sizes]

    def __call__(self) -> None:
        """Do one step."""
        norm = torch.stack([gradient.norm() for gradient in self.gradients]).norm()
        torch._fused_sgd_(
            self.weights,
            self.gradients,
            self.momenta,
            weight_decay=WEIGHT_DECAY,
            momentum=MOMENTUM,
            lr=RATE,
            dampening=0.0,
            nesterov=True,
            maximize=False,
            is_first_step=False,
            grad_scale=((norm + CLIP_EPSILON) / MAX_GRAD_NORM).clamp(min=1.0),
        )


@torch.no_grad()
def average_one_by_one(model: nn.Module, average: nn.Module) -> None:
    """Average the textbook's way."""
    source = model.state_dict()
    for name, tensor in average.state_dict().items():
        if tensor.is_floating_point():
            tensor *= DECAY
            tensor += (1 - DECAY) * source[name]


def step_one_by_one(optimizer: SGD, parameters: Sequence[Tensor]) -> None:
    """Clip and step with one kernel for each tensor and operation."""
    nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM, foreach=False)
    optimizer.step()


def measure(options: Options) -> list[Row]:
    """Time averaging and step in turns with their limits."""
    torch.manual_seed(0)
    model = YOLOV5.build(load_yaml(find_yaml("yolov5s.yaml", "model")), 80, [str(i) for i in range(80)])
    model = model.to(memory_format=torch.channels_last)  # as a run lays it out
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    hyp = Hyp()
    optimizer = build_optimizer(model, "SGD", hyp, split_global_batch(64, 1))
    scaler = Precision("off").make_scaler(torch.device("cpu"))
    plain = SGD(param_groups(model, WEIGHT_DECAY), lr=RATE, momentum=MOMENTUM, nesterov=True, foreach=False)
    sizes = [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]

    ema = ModelEMA(model)
    values = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    flat, target = torch.randn(values), torch.randn(values)
    averaging = take_turns(
        {
            "averaging": functools.partial(ema.update, model, torch.zeros(())),
            "flat": lambda: target.lerp_(flat, 1 - DECAY),
            "one by one": functools.partial(average_one_by_one, model, ema.module),
        },
        options.rounds,
        repeat=REPEAT,
        name="averaging",
    )
    stepping = take_turns(
        {
            "step": lambda: guarded_step(optimizer, parameters, MAX_GRAD_NORM, scaler),
            "flat": FlatStep(sizes),
            "one by one": lambda: step_one_by_one(plain, parameters),
        },
        options.rounds,
        repeat=REPEAT,
        name="step",
    )
    rows = []
    for key, name, taken in (("C8", "averaging", averaging), ("C9", "step", stepping)):
        ours = taken[name]
        note = milliseconds(taken)
        rows.append(Row(key, f"{name}: flat tensors / ours", ratios(taken["flat"], ours), LIMIT, note=note))
        rows.append(Row(key, f"{name}: one by one / ours", ratios(taken["one by one"], ours)))
    return rows


if __name__ == "__main__":
    run_cli(functools.partial(run_group, measure, __doc__))
