from pathlib import Path

import pytest
import torch

from models.families import YOLOV5
from utils.config import Hyp, TrainConfig, find_yaml, load_yaml
from utils.dataloaders import PREFETCH_BATCHES, choose_val_batch, loader_bytes
from utils.errors import UserError
from utils.image_cache import RAM_SHARE
from utils.inputs import check_loaders, checkpoints_bytes
from utils.optim import build_optimizer
from utils.torch_utils import DistEnv, ModelEMA, save_checkpoint, split_global_batch


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_estimate_of_checkpoints(optimizer: str, tmp_path: Path) -> None:
    """Against the files of a run: last, the one before, best, and one that is being written."""
    model = YOLOV5.build(load_yaml(find_yaml("yolov5n", "model")), 2, None)
    steps = build_optimizer(model, optimizer, Hyp(), split_global_batch(16, 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    steps.step()
    state = {"model": model.state_dict(), "ema": ModelEMA(model).state_dict(), "optimizer": steps.state_dict()}
    save_checkpoint(state, tmp_path / "last.pt")
    size = (tmp_path / "last.pt").stat().st_size
    assert size < checkpoints_bytes(model, TrainConfig(optimizer=optimizer)) / 4 < 1.2 * size
    each = checkpoints_bytes(model, TrainConfig(optimizer=optimizer, save_period=10, epochs=100))
    assert size < each / 14 < 1.2 * size


def test_what_loaders_take() -> None:
    assert loader_bytes(0, 16, 640) == 0
    assert loader_bytes(3, 16, 640) == (3 * PREFETCH_BATCHES + 1) * 16 * 3 * 640 * 640
    assert [choose_val_batch(wanted, batch) for wanted, batch in [(0, 16), (0, 64), (50, 16)]] == [16, 32, 50]


def test_caches_and_loaders_share_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache takes its share first, at most as much as it needs."""

    class Usage:
        free = 10_000_000

    monkeypatch.setattr("utils.image_cache.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("utils.image_cache.shutil.disk_usage", lambda folder: Usage)
    monkeypatch.setattr("utils.image_cache.free_memory", lambda: 10**12)
    needed = loader_bytes(1, 4, 256) / 1e6
    assert 2 < needed < 5
    check_loaders(1, [4], 256, DistEnv(), [])
    check_loaders(1, [4], 256, DistEnv(), [10**12])
    check_loaders(1, [4, 4], 256, DistEnv(), [10**6, 10**6])
    left = 10 * (1 - RAM_SHARE) ** 2
    assert left < 2 * needed
    with pytest.raises(UserError, match=f"in .* {left:.0f} MB are left for them"):
        check_loaders(1, [4, 4], 256, DistEnv(), [10**12, 10**12])
    check_loaders(0, [4, 4], 256, DistEnv(), [10**12, 10**12])
