"""Parameter groups and the schedule, against tables worked out from the published formulas."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from models.yolo import DetectionModel
from utils.config.recipe import Hyp
from utils.config.yaml_files import ROOT, load_yaml
from utils.torch_utils import split_global_batch
from utils.training.optim import Schedule, build_optimizer, load_optimizer, param_groups
from utils.training.steps import guarded_step

OFF = torch.amp.GradScaler("cpu", enabled=False)


class Net(nn.Module):
    """Every kind of parameter, one of them shared and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.again = self.head
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def test_groups() -> None:
    """Biases (those of norm layers too), decayed weights, norm weights: in this order."""
    net = Net()
    groups = param_groups(net, 5e-4)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert [[names[id(p)] for p in group["params"]] for group in groups] == [
        ["bn.bias", "head.bias", "norm.bias", "attention.in_proj_bias", "attention.out_proj.bias"],
        ["scale", "conv.weight", "head.weight", "attention.in_proj_weight", "attention.out_proj.weight"],
        ["bn.weight", "norm.weight"],
    ]
    assert [group["weight_decay"] for group in groups] == [0.0, 5e-4, 0.0]


def test_groups_of_a_real_network() -> None:
    """Names say what a parameter is: YOLOv5n has 57 convolutions with a norm layer and 3 biased ones in its head."""
    net = DetectionModel(load_yaml(ROOT / "models" / "yolov5n.yaml"), num_classes=80)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    biases, weights, norms = ([names[id(p)] for p in group["params"]] for group in param_groups(net, 5e-4))
    assert (len(biases), len(weights), len(norms)) == (60, 60, 57)
    assert all(name.endswith(".bias") for name in biases)
    assert all(name.endswith(".bn.weight") for name in norms)
    assert all(name.endswith(".weight") and ".bn." not in name for name in weights)


@pytest.mark.parametrize(
    ("batch", "decay"), [(16, 5e-4), (64, 5e-4), (128, 1e-3), (48, 5e-4 * 48 / 64), (24, 5.625e-4)]
)
def test_weight_decay_follows_images_per_step(batch: int, decay: float) -> None:
    """Global batch x accumulate / nbs: 24 accumulates round(64 / 24) = 3 times, so 72 / 64 of the recipe's."""
    optimizer = build_optimizer(Net(), "SGD", Hyp(weight_decay=5e-4), split_global_batch(batch, 1, 64))
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.0, decay, 0.0])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimizer_options(name: str) -> None:
    optimizer = build_optimizer(Net(), name, Hyp(momentum=0.9), split_global_batch(16, 1, 64))
    assert isinstance(optimizer, getattr(torch.optim, name))
    assert isinstance(optimizer, torch.optim.AdamW) == (name == "AdamW")  # which is an Adam, too
    assert optimizer.defaults["fused"]
    for group in optimizer.param_groups:
        if name == "SGD":
            assert (group["momentum"], group["nesterov"], group["dampening"]) == (0.9, True, 0)
        else:
            assert group["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_steps_equal_the_textbook(name: str) -> None:
    """Three steps of the fused optimizer, with warm-up momentum, against the update rules in float64."""
    hyp = Hyp(momentum=0.9, warmup_momentum=0.5, lr0=0.01, weight_decay=0.05)
    net = nn.Conv2d(2, 3, 3, bias=False).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(net, name, hyp, split_global_batch(64, 1, 64))
    schedule = Schedule(hyp, 2, 60, split_global_batch(64, 1, 64))
    p = net.weight.detach().double().clone()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    generator = torch.Generator().manual_seed(0)
    for t, i in enumerate((30, 60, 90), start=1):
        schedule.apply(optimizer, i)
        g = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        net.weight.grad = torch.empty_like(net.weight).copy_(g)
        guarded_step(optimizer, [net.weight], 1e9, OFF)
        lr, beta = schedule.lr(i)[1], schedule.momentum(i)
        if name == "AdamW":
            p = p * (1 - lr * 0.05)  # Loshchilov and Hutter 2019: decay apart from the gradient
        else:
            g = g + 0.05 * p
        if name == "SGD":
            m = beta * m + g
            p = p - lr * (g + beta * m)  # Nesterov as Sutskever et al. 2013 rewrite it
        else:
            m = beta * m + (1 - beta) * g
            v = 0.999 * v + 0.001 * g * g
            p = p - lr * (m / (1 - beta**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    assert torch.allclose(net.weight.double(), p, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_counts_its_steps_where_its_device_needs_it(name: str) -> None:
    """Saved by one that is not fused (MPS), resumed by a fused one (CUDA), whose next step would fail."""
    plan, layer = split_global_batch(64, 1, 64), nn.Linear(2, 2, bias=False)
    before = build_optimizer(layer, name, Hyp(), plan)
    layer.weight.grad = torch.ones_like(layer.weight)
    before.step()
    state = before.state_dict()
    optimizer = build_optimizer(nn.Linear(2, 2, bias=False, device="meta"), name, Hyp(), plan)
    for unfused, fused in zip(state["param_groups"], optimizer.param_groups, strict=True):
        unfused["fused"], fused["fused"] = False, True
    load_optimizer(optimizer, state)
    (values,) = optimizer.state.values()
    assert {value.device.type for value in values.values()} == {"meta"}
    assert [group["fused"] for group in optimizer.param_groups] == [True] * 3


@pytest.mark.parametrize(("momentum", "start"), [(0.0, 0.0), (0.0, 0.8), (0.9, 0.0)])
def test_sgd_without_momentum(momentum: float, start: float) -> None:
    """A recipe's momentum or warmup_momentum may be 0: plain SGD then."""
    hyp = Hyp(momentum=momentum, warmup_momentum=start, warmup_epochs=1.0)
    net, plan = nn.Linear(2, 2, bias=False), split_global_batch(64, 1)
    optimizer, steps = build_optimizer(net, "SGD", hyp, plan), Schedule(hyp, 2, 60, plan)
    for i, beta in ((0, start), (119, momentum)):
        before = net.weight.detach().clone()
        steps.apply(optimizer, i)
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
        if not beta:
            decayed = before + steps.lr(i)[1] * (-1 - 0.0005 * before)
            assert torch.allclose(net.weight, decayed, rtol=0, atol=1e-7)


def test_state_of_another_memory_format() -> None:
    """Fused steps walk through memory: a momentum saved as NCHW must be laid out anew for an NHWC model."""
    plan, hyp = split_global_batch(64, 1, 64), Hyp()
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    last.load_state_dict(plain.state_dict())
    first, second = (build_optimizer(net, "SGD", hyp, plan) for net in (plain, last))
    gradient = torch.randn(4, 3, 3, 3)

    def step(net: nn.Conv2d, optimizer: torch.optim.Optimizer) -> None:
        net.weight.grad = torch.empty_like(net.weight).copy_(gradient)
        optimizer.step()

    step(plain, first)
    last.load_state_dict(plain.state_dict())
    load_optimizer(second, first.state_dict())
    step(plain, first)
    step(last, second)
    assert torch.equal(plain.weight, last.weight)


# the schedule ---------------------------------------------------------------------------------------------------------

RECIPE = {
    "lr0": 0.01,
    "lrf": 0.1,
    "momentum": 0.937,
    "warmup_epochs": 3.0,
    "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1,
}


def schedule(batches: int = 50, batch: int = 16, epochs: int = 10, cos: bool = False, **changes: float) -> Schedule:
    return Schedule(Hyp(**{**RECIPE, **changes}), epochs, batches, split_global_batch(batch, 1, 64), cos)


def test_table_of_a_run() -> None:
    """Ten epochs of 50 batches of 16: warm-up of 150 micro-batches; values worked out by hand.

    f(0) = 1, f(1) = 0.9 x 0.9 + 0.1 = 0.91, f(2) = 0.82, f(3) = 0.73, f(9) = 0.19.
    """
    table = [  # i, bias lr, weight lr, momentum, accumulate
        (0, 0.1, 0.0, 0.8, 1),
        (30, 0.1 - 0.2 * 0.09, 0.2 * 0.01, 0.8 + 0.2 * 0.137, 2),  # 1 + 0.2 x 3 = 1.6
        (75, 0.1 - 0.5 * (0.1 - 0.0091), 0.5 * 0.0091, 0.8685, 2),  # 2.5 rounds half to even
        (120, 0.1 - 0.8 * (0.1 - 0.0082), 0.8 * 0.0082, 0.9096, 3),  # 3.4
        (149, 0.1 - 149 / 150 * (0.1 - 0.0082), 149 / 150 * 0.0082, 0.8 + 149 / 150 * 0.137, 4),
        (150, 0.0073, 0.0073, 0.937, 4),
        (199, 0.0073, 0.0073, 0.937, 4),
        (499, 0.0019, 0.0019, 0.937, 4),
    ]
    plan = schedule()
    for i, bias, weight, momentum, accumulate in table:
        assert plan.lr(i) == pytest.approx((bias, weight, weight), rel=1e-12), i
        assert plan.momentum(i) == pytest.approx(momentum, rel=1e-12), i
        assert plan.accumulate(i) == accumulate, i


def test_cosine() -> None:
    """F falls from 1 over (1 + lrf) / 2 in the middle to lrf at the end."""
    plan = schedule(cos=True, warmup_epochs=0.0)
    assert plan.factor(0) == pytest.approx(1.0)
    assert plan.factor(5) == pytest.approx(0.55)
    assert plan.factor(10) == pytest.approx(0.1)
    assert plan.factor(2) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2)
    assert plan.lr(3 * 50)[0] == pytest.approx(0.01 * plan.factor(3))


@pytest.mark.parametrize(("batches", "batch", "warmup"), [(1, 16, 30), (8, 16, 100), (50, 128, 150), (33, 5, 99 + 1)])
def test_against_interpolation(batches: int, batch: int, warmup: int) -> None:
    """Every index of a run against NumPy's interpolation of the same corner points."""
    plan = schedule(batches, batch, epochs=300)
    corners = [0, warmup]
    for i in range(0, 3 * warmup):
        base = 0.01 * ((1 - i // batches / 300) * 0.9 + 0.1)
        expected = (np.interp(i, corners, [0.1, base]), np.interp(i, corners, [0.0, base]))
        assert plan.lr(i)[:2] == pytest.approx(expected, rel=1e-12)
        assert plan.momentum(i) == pytest.approx(np.interp(i, corners, [0.8, 0.937]), rel=1e-12)
        if i <= warmup:
            assert plan.accumulate(i) == max(round(float(np.interp(i, corners, [1, 64 / batch]))), 1)
        else:
            assert plan.accumulate(i) == max(round(64 / batch), 1)


@pytest.mark.parametrize(
    ("batches", "epochs", "warmup_epochs", "warmup"),
    [
        (13, 100, 3.0, 100),  # BCCD: as YOLOv5 has it
        (3, 20, 3.0, 9),
        (3, 20, 1.0, 6),
        (3, 20, 0.1, 6),
        (10, 100, 0.0, 0),
        (500, 100, 0.0, 0),
        (1, 1, 3.0, 3),
    ],
)
def test_warmup_leaves_most_of_a_short_run(batches: int, epochs: int, warmup_epochs: float, warmup: int) -> None:
    """60 batches never got above a sixth of lr0 (ultralytics/ultralytics PR 25321).

    max(warmup_epochs x batches, min(100, a tenth of the run)) micro-batches; without warm-up, where 0 epochs are asked
    for (ultralytics/yolov5#12180), all is as after it.
    """
    plan = schedule(batches, epochs=epochs, warmup_epochs=warmup_epochs)
    assert plan.warmup == warmup
    assert plan.describe_warmup() == (
        f"warm-up {warmup} batches, {warmup / batches / epochs:.0%} of the run" if warmup else "no warm-up"
    )
    for i in range(warmup, batches * epochs, 7):
        base = 0.01 * plan.factor(i // batches)
        assert (plan.lr(i), plan.momentum(i), plan.accumulate(i)) == ((base, base, base), 0.937, 4)


def test_a_run_of_little_but_warmup_is_doubted() -> None:
    """More than half of it (ultralytics/ultralytics PR 25321)."""
    assert not schedule(10, epochs=6).doubts()
    assert not schedule(10, epochs=1, warmup_epochs=0.0).doubts()
    assert schedule(10, epochs=5).doubts() == [
        "30 of the run's 50 batches are warm-up, so it hardly trains at lr0 0.01: give more --epochs, or less "
        "warmup_epochs (now 3) in --hyp"
    ]
    assert schedule(10, epochs=1).doubts()[0].startswith("10 of the run's 10 batches are warm-up")


def test_windows_of_a_run() -> None:
    """Every micro-batch belongs to one step, also the last ones of an epoch (ultralytics/ultralytics#11217)."""
    plan = schedule(batches=30, batch=16, epochs=8)
    windows, since_last = [], 0
    for i in range(8 * 30):
        since_last += 1
        if plan.step_now(i, since_last):
            windows.append((i, since_last))
            since_last = 0
    assert since_last == 0
    assert sum(length for _, length in windows) == 8 * 30
    assert {i for i, _ in windows} >= {30 * epoch + 29 for epoch in range(8)}
    assert [length for i, length in windows if i >= 120] == ([4] * 7 + [2]) * 4
    assert [length for i, length in windows if i < 15] == [1] * 15  # 1 + 3 x 15 / 90 rounds to 2


def test_resume_needs_only_the_index() -> None:
    """Asked for one index in a fresh process or after a whole run, a schedule answers the same bits."""
    used, optimizer = schedule(), build_optimizer(Net(), "SGD", Hyp(**RECIPE), split_global_batch(16, 1, 64))
    for i in range(500):
        used.apply(optimizer, i)
    for i in (3, 77, 151, 333):
        fresh = schedule()
        assert fresh.lr(i) == used.lr(i)
        assert (fresh.momentum(i), fresh.accumulate(i)) == (used.momentum(i), used.accumulate(i))
        used.apply(optimizer, i)
        assert tuple(group["lr"] for group in optimizer.param_groups) == fresh.lr(i)
        assert {group["momentum"] for group in optimizer.param_groups} == {fresh.momentum(i)}
