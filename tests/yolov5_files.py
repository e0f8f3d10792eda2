"""Write checkpoints as YOLOv5 v6 and v7 do, with classes of our own making under YOLOv5's module names.

Run as a script in a process of its own, for it takes these names: python yolov5_files.py FOLDER writes checkpoints,
and ``expected.npz`` with an image and what each network makes of it; python yolov5_files.py FOLDER hostile writes some
whose networks would take all memory or time.
"""

import argparse
import copy
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NAMES = ["cell", "dot", "ring"]
ANCHORS = [[4, 5, 8, 10], [16, 14, 30, 28]]
YAML: dict[str, Any] = {
    "nc": 3,
    "depth_multiple": 0.5,
    "width_multiple": 0.5,
    "anchors": [[1, 2, 3, 4], [5, 6, 7, 8]],  # what the YAML said before better ones were found
    "backbone": [
        [-1, 1, "Conv", [16, 6, 2, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
        [-1, 4, "C3", [32]],
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "SPPF", [64, 5]],
    ],
    "head": [
        [-1, 1, "Conv", [32, 1, 1]],
        [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
        [[-1, 2], 1, "Concat", [1]],
        [-1, 2, "C3", [32, False]],
        [-1, 1, "Conv", [32, 3, 2]],
        [[-1, 5], 1, "Concat", [1]],
        [-1, 2, "C3", [64, False]],
        [[8, 11], 1, "Detect", ["nc", "anchors"]],
    ],
    "ch": 3,
}


class Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1, p: int | None = None, act: Any = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2 if p is None else p, bias=False)
        self.bn = nn.BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        self.act = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, c: int, shortcut: bool) -> None:
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c), Conv(c, c, 3), shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3(nn.Module):
    def __init__(self, c1: int, c2: int, n: int, shortcut: bool = True) -> None:
        super().__init__()
        hidden = c2 // 2
        self.cv1, self.cv2, self.cv3 = Conv(c1, hidden), Conv(c1, hidden), Conv(2 * hidden, c2)
        self.m = nn.Sequential(*(Bottleneck(hidden, shortcut) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1))


class SPPF(nn.Module):
    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.m = Conv(c1, c1 // 2), Conv(c1 * 2, c2), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(self.m(maps[-1]))
        return self.cv2(torch.cat(maps, 1))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = 1

    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.cat(x, self.d)


class Tuned(Conv):
    """A layer of a user's own."""


class Detect(nn.Module):
    stride: Tensor
    anchors: Tensor

    def __init__(self, nc: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.nc, self.no, self.nl, self.na, self.inplace = nc, nc + 5, 2, 2, True
        self.stride = torch.tensor([4.0, 8.0])
        self.grid = [torch.zeros(1)] * 2
        self.register_buffer("anchors", torch.tensor(ANCHORS).float().view(2, 2, 2) / self.stride.view(-1, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(width, 2 * self.no, 1) for width in widths)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """(1, all boxes, 5 + classes), in pixels; box by box."""
        boxes = []
        for level, x in enumerate(maps):
            raw = self.m[level](x)[0].sigmoid()
            for anchor in range(2):
                y = raw[anchor * self.no : (anchor + 1) * self.no]  # (5 + classes, H, W)
                stride = float(self.stride[level])
                for row in range(y.shape[1]):
                    for column in range(y.shape[2]):
                        box = y[:, row, column].clone()
                        box[0] = (box[0] * 2 - 0.5 + column) * stride
                        box[1] = (box[1] * 2 - 0.5 + row) * stride
                        box[2:4] = (box[2:4] * 2) ** 2 * self.anchors[level, anchor] * stride
                        boxes.append(box)
        return torch.stack(boxes)[None]


class Model(nn.Module):
    model: Any

    def __init__(self, names: Any, act: Any = None) -> None:
        super().__init__()
        layers: list[Any] = [
            *(Conv(3, 8, 6, 2, 2), Conv(8, 16, 3, 2), C3(16, 16, 2), Conv(16, 32, 3, 2), SPPF(32, 32)),
            *(Conv(32, 16), nn.Upsample(None, 2, "nearest"), Concat(), C3(32, 16, 1, False)),
            *(Conv(16, 16, 3, 2), Concat(), C3(32, 32, 1, False), Detect(3, (16, 32))),
        ]
        rows = [*YAML["backbone"], *YAML["head"]]
        for number, (layer, row) in enumerate(zip(layers, rows, strict=True)):
            layer.i, layer.f, layer.type = number, row[0], f"models.common.{type(layer).__name__}"
        self.model = nn.Sequential(*layers)
        self.yaml, self.names, self.nc, self.hyp = copy.deepcopy(YAML), names, 3, {"lr0": 0.01}
        self.stride, self.inplace, self.save = torch.tensor([4.0, 8.0]), True, [2, 5, 8, 11]
        self.class_weights = torch.ones(3)
        for module in self.modules():
            if act and isinstance(module, Conv):
                module.act = act
            if isinstance(module, nn.BatchNorm2d):
                for tensor, low, high in ((module.running_mean, -0.3, 0.3), (module.running_var, 0.5, 2)):
                    assert tensor is not None
                    nn.init.uniform_(tensor, low, high)
                nn.init.uniform_(module.weight, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = []
        for layer in self.model:
            f = layer.f
            maps.append(layer([maps[one] for one in f] if isinstance(f, list) else maps[-1] if maps else x))
        return maps[-1]


def as_written(network: nn.Module, half: bool = False, **more: Any) -> dict[str, Any]:
    network = copy.deepcopy(network).half() if half else network
    return {"epoch": -1, "best_fitness": np.float64(0.5), "model": network, "ema": None, "optimizer": None, **more}


def hostile() -> dict[str, Any]:
    """Return files whose description of the network would take all memory or time."""
    files: dict[str, Any] = {}

    def network(name: str) -> Model:
        made = Model(NAMES)
        files[name] = as_written(made)
        return made

    network("repeats").yaml["backbone"][2][1] = 10**9
    network("depth").yaml["depth_multiple"] = 1e9
    network("width").yaml["width_multiple"] = 1e9
    network("channels").yaml["backbone"][0][2:] = ["Conv", [10**18, 3, 2]]
    network("rows").yaml["backbone"][3:3] = [[-1, 1, "Conv", [64, 3, 1]]] * 10**5
    network("kernels").yaml["backbone"][4][2:] = ["SPP", [64, [5] * 10**5]]
    network("anchors").yaml["head"][-1][3] = ["nc", 10**9]
    network("anchor_counts").yaml["anchors"] = 10**9
    network("scale").yaml["head"][1][3] = [None, 10**6, "nearest"]
    network("nested").yaml["backbone"][0][3].append(files["nested"]["model"].yaml)
    itself = network("layer_in_itself")
    itself.model[2].add_module("again", itself)
    bush = nn.Sequential(nn.Conv2d(1, 1, 1))
    for _ in range(60):
        bush = nn.Sequential(bush, bush)
    network("layers_in_layers").model[2].add_module("bush", bush)
    dots: Any = "dot"
    for _ in range(60):
        dots = [dots, dots]
    network("yaml_in_yaml").yaml["anchors"] = dots
    network("names").names = dots
    return files


def write(folder: pathlib.Path) -> None:
    """Write all files but the hostile ones."""
    torch.manual_seed(3)
    plain, averaged = Model(list(NAMES)), Model(dict(enumerate(NAMES)))
    optimizer = torch.optim.SGD(plain.parameters(), 0.01, momentum=0.9)
    plain(torch.rand(1, 3, 32, 32)).sum().backward()
    optimizer.step()
    leaky, tuned, no_yaml = Model(NAMES, nn.LeakyReLU(0.1)), Model(NAMES), Model(NAMES)
    tuned.model[1].__class__ = Tuned
    tuned.yaml["backbone"][1][2] = "Tuned"
    del no_yaml.yaml
    elsewhere, misnamed, anchorless = Model(NAMES), Model([*NAMES, "too many"]), Model(NAMES)
    elsewhere.model[2].m[0].cv1.bn.eps = 1e-5
    anchorless.model[-1].anchors.zero_()
    spoiled = Model(NAMES)
    spoiled.model[0].conv.weight.data[0, 0, 0, 0] = float("nan")
    paths = {"save_dir": pathlib.Path("runs/train/exp"), "weights": pathlib.Path("/w/yolov5n.pt")}
    numbers = {"best": np.array([0.1, 0.2]), "count": np.int64(3), "flag": np.bool_(True), "small": np.float32(0.5)}
    options = argparse.Namespace(imgsz=96, hyp={"lr0": 0.01}, save_dir=pathlib.Path("runs"))
    files = {
        "list": as_written(plain, optimizer=optimizer.state_dict(), numbers=numbers, wandb_id=None, empty=b"", b=b"ab"),
        "dict": as_written(averaged, half=True, opt={"imgsz": 64, **paths}, git={"branch": None}),
        "ema": as_written(plain, ema=averaged, updates=7, opt=options),
        "whole": plain,
        "wrapped": as_written(nn.DataParallel(plain)),
        "leaky": as_written(leaky),
        "no_yaml": as_written(no_yaml),
        "tuned": as_written(tuned),
        "elsewhere": as_written(elsewhere),
        "misnamed": as_written(misnamed),
        "anchorless": as_written(anchorless),
        "spoiled": as_written(spoiled),
        "state": plain.state_dict(),
        "state_in_model": {"model": plain.state_dict(), "epoch": 3},
        "state_dict": {"state_dict": OrderedDict((f"module.{k}", v) for k, v in plain.state_dict().items())},
    }
    for name, content in files.items():
        torch.save(content, folder / f"{name}.pt")
    torch.save(plain.state_dict(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    image = torch.rand(1, 3, 64, 96)
    rounded = copy.deepcopy(averaged).half().float()
    networks = {"list": plain, "dict": rounded, "ema": averaged, "leaky": leaky, "no_yaml": no_yaml, "whole": plain}
    with torch.no_grad():
        made = {name: network.eval()(image).numpy() for name, network in networks.items()}
    np.savez(folder / "expected.npz", image=image.numpy(), wrapped=made["list"], **made)


if __name__ == "__main__":
    models = types.ModuleType("models")
    common, yolo = types.ModuleType("models.common"), types.ModuleType("models.yolo")
    sys.modules |= {"models": models, "models.common": common, "models.yolo": yolo}
    for kind in (Conv, Bottleneck, C3, SPPF, Concat, Tuned, Detect, Model):
        kind.__module__ = "models.yolo" if kind in (Detect, Model) else "models.common"
        setattr(sys.modules[kind.__module__], kind.__name__, kind)
    if "hostile" in sys.argv:
        for name, content in hostile().items():
            torch.save(content, pathlib.Path(sys.argv[1]) / f"{name}.pt")
    else:
        write(pathlib.Path(sys.argv[1]))
