"""Parameter groups, and learning rate, momentum and accumulation as functions of the micro-batch index."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from utils.config.recipe import Hyp
from utils.torch_utils import BatchPlan

NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
FUSED_DEVICES = ("cpu", "cuda")
ADAM_BETA2 = 0.999
MIN_WARMUP = 100  # micro-batches, also for small data sets, but no more than
MIN_WARMUP_SHARE = 10  # a tenth of the run: a short one would be over before its learning rate is reached


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Sort the trainable parameters by what they do.

    Args:
        model: frozen parameters are left out, shared ones counted once.
        weight_decay: of the second group; biases and norm layers are not pulled toward zero.

    Returns:
        Three groups, each possibly empty: biases, weights, weights of norm layers.
    """
    biases: list[Tensor] = []
    weights: list[Tensor] = []
    norms: list[Tensor] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if name.endswith("bias"):
                biases.append(parameter)
            elif isinstance(module, NORM_LAYERS):
                norms.append(parameter)
            else:
                weights.append(parameter)
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": weights, "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, name: str, hyp: Hyp, plan: BatchPlan) -> Optimizer:
    """Build the optimizer over a model's three parameter groups.

    The weight decay is the recipe's, scaled by the images of a step over the nominal batch; learning rate and momentum
    are set by `Schedule.apply` before every step.

    Args:
        model: on its device and in its memory format already: fused optimizers walk through parameter, gradient and
            state side by side in memory.
        name: "SGD" (Nesterov's, where there is momentum), "Adam" or "AdamW".
        hyp: recipe.
        plan: the global batch and its accumulation.
    """
    groups = param_groups(model, hyp.weight_decay * plan.global_batch * plan.accumulate / plan.nbs)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in parameters)
    if name == "SGD":
        optimizer = SGD(groups, lr=hyp.lr0, momentum=hyp.momentum, nesterov=hyp.momentum > 0, fused=fused)
        for parameter in parameters:
            # Torch makes these at the first step, uninitialized; if that step is skipped they stay so and are used.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    assert name in ("Adam", "AdamW"), name
    kind = Adam if name == "Adam" else AdamW
    return kind(groups, lr=hyp.lr0, betas=(hyp.momentum, ADAM_BETA2), fused=fused)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict and lay its tensors out like the parameters.

    A state saved in another memory format than the model's has the same values in another order in memory, and fused
    optimizers on the CPU would take it as it lies, without a word. Torch leaves Adam's count of steps where a state of
    an optimizer that was not fused had it, on the CPU; fused ones need it beside the parameter.
    """
    fused = [group["fused"] for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, value in zip(optimizer.param_groups, fused, strict=True):
        group["fused"] = value  # what this device can do, not the one that the state is from
        for parameter in group["params"]:
            _lay_out(optimizer.state.get(parameter, {}), parameter, value)


def _lay_out(values: dict[str, Any], parameter: Tensor, fused: bool) -> None:
    """Bring an optimizer's state of one parameter to where and how that lies in memory."""
    for key, value in values.items():
        if key == "step" and isinstance(value, Tensor):
            values[key] = value.to(parameter.device if fused else "cpu", torch.float32)
        elif isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
            values[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)


class Schedule:
    """Learning rate, momentum and accumulation of every micro-batch; holds no state, so a resume needs only the index.

    The learning rate follows f(e) of the epoch e, linear or a cosine from 1 to lrf. In the warm-up, the first
    warmup_epochs x batches micro-batches, but no less than 100 or a tenth of the run if that is shorter, the biases'
    rate falls from warmup_bias_lr to lr0 f(e), the others rise to it from 0, momentum and accumulation go from
    warmup_momentum and 1 to their values, all in straight lines. Without warmup_epochs there is no warm-up.

    Args:
        hyp: recipe.
        epochs: of the whole run, E.
        batches_per_epoch: global batches of an epoch.
        plan: the global batch and its accumulation.
        cos: cosine rather than linear.
    """

    def __init__(self, hyp: Hyp, epochs: int, batches_per_epoch: int, plan: BatchPlan, cos: bool = False) -> None:
        assert epochs > 0, epochs
        assert batches_per_epoch > 0, batches_per_epoch
        self.hyp, self.plan, self.cos = hyp, plan, cos
        self.epochs, self.batches_per_epoch = epochs, batches_per_epoch
        self.batches = epochs * batches_per_epoch
        self.warmup = 0
        if hyp.warmup_epochs > 0:
            least = min(MIN_WARMUP, self.batches // MIN_WARMUP_SHARE)
            self.warmup = max(round(hyp.warmup_epochs * batches_per_epoch), least)

    def describe_warmup(self) -> str:
        """Say how long the warm-up is."""
        return (
            f"warm-up {self.warmup} batches, {self.warmup / self.batches:.0%} of the run"
            if self.warmup
            else "no warm-up"
        )

    def doubts(self) -> list[str]:
        """Return a sentence if the run is little more than its warm-up."""
        if self.warmup <= self.batches / 2:
            return []
        return [
            f"{min(self.warmup, self.batches)} of the run's {self.batches} batches are warm-up, so it hardly trains at "
            f"lr0 {self.hyp.lr0:g}: give more --epochs, or less warmup_epochs (now {self.hyp.warmup_epochs:g}) in --hyp"
        ]

    def factor(self, epoch: int) -> float:
        """f(e): share of lr0 that an epoch trains with, 1 at first, lrf at E."""
        done = epoch / self.epochs
        if self.cos:
            return (1 - math.cos(math.pi * done)) / 2 * (self.hyp.lrf - 1) + 1
        return (1 - done) * (1 - self.hyp.lrf) + self.hyp.lrf

    def lr(self, i: int) -> tuple[float, float, float]:
        """Learning rates of biases, weights and norm weights at micro-batch i of the run."""
        base = self.hyp.lr0 * self.factor(i // self.batches_per_epoch)
        others = self._ramp(i, 0.0, base)
        return self._ramp(i, self.hyp.warmup_bias_lr, base), others, others

    def momentum(self, i: int) -> float:
        """Momentum (SGD) or first beta (Adam) at micro-batch i."""
        return self._ramp(i, self.hyp.warmup_momentum, self.hyp.momentum)

    def accumulate(self, i: int) -> int:
        """Micro-batches that a step at micro-batch i waits for."""
        if i >= self.warmup:
            return self.plan.accumulate
        return max(round(self._ramp(i, 1.0, self.plan.nbs / self.plan.global_batch)), 1)

    def step_now(self, i: int, since_last: int) -> bool:
        """Whether micro-batch i closes a window.

        A window ends with its epoch, so that no gradient is thrown away.

        Args:
            i: micro-batch of the run.
            since_last: micro-batches since the last step, this one included.
        """
        return since_last >= self.accumulate(i) or (i + 1) % self.batches_per_epoch == 0

    def apply(self, optimizer: Optimizer, i: int) -> None:
        """Set learning rates and momentum of micro-batch i in the groups made by `param_groups`."""
        momentum = self.momentum(i)
        for group, lr in zip(optimizer.param_groups, self.lr(i), strict=True):
            group["lr"] = lr
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum

    def _ramp(self, i: int, start: float, end: float) -> float:
        """Value at i on the straight line from start to end over the warm-up; end after it."""
        return end if i >= self.warmup else start + (end - start) * (i / self.warmup)
