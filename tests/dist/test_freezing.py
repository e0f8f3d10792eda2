"""Frozen layers on two ranks: bit-identical, whatever BatchNorm does elsewhere."""

from pathlib import Path

import pytest
import torch
import yaml

from models.families import YOLOV5
from tests.common import PROJECT
from tests.dist.launch import free_port, torchrun
from tests.runs import flags, make_data
from utils.torch_utils import load_checkpoint, save_checkpoint

SPEC = {
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[10, 13, 16, 30, 33, 23]],
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 1]]],
    "head": [[[2], 1, "Detect", ["nc", "anchors"]]],
}


@pytest.mark.parametrize(
    "sync_bn",
    [
        pytest.param("--sync-bn", marks=(pytest.mark.slow, pytest.mark.gate)),
        pytest.param("--no-sync-bn", marks=pytest.mark.slow),
    ],
)
def test_frozen_layers_of_two_ranks(sync_bn: str, tmp_path: Path) -> None:
    """Ranks share statistics of BatchNorm, or average them; those of frozen layers stay (ultralytics/ultralytics#9391).

    A list of layers, of which one is in the middle, and the head with its anchors, which don't fit these labels.
    """
    torch.manual_seed(0)
    model = YOLOV5.build(SPEC, 2, ["blue", "red"])
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    weights = model.state_dict()
    content = {"spec": model.yaml, "names": model.names, "model": weights, "config": {"imgsz": 64}}
    save_checkpoint(content, tmp_path / "start.pt")
    data = make_data(tmp_path / "data", 4, 2)
    data.write_text(yaml.safe_dump({**yaml.safe_load(data.read_text()), "path": str(data.parent)}))
    more = f"--weights {tmp_path / 'start.pt'} --freeze 1 3 {sync_bn} --batch 2 --epochs 2 --optimizer Adam"
    done = torchrun(
        [PROJECT / "train.py", *flags(data, tmp_path, more)], 2, port=free_port(), cwd=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stderr
    last = load_checkpoint(tmp_path / "run/weights/last.pt")
    for state in (last["model"], last["ema"]["module"]):
        same = {name.split(".")[1] for name, value in weights.items() if torch.equal(value, state[name])}
        assert same == {"1", "3"}
        assert all(torch.equal(value, state[name]) for name, value in weights.items() if name[6] in "13")
