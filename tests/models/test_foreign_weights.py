"""Weights from elsewhere: what is taken from them, what is said about them, and what they do in this program."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lockstep import YOLO
from models.build import network_spec, start_from
from models.families import load_model
from models.foreign_weights import read_weights
from models.yolo import DetectionModel, load_state
from tests.common import PROJECT, SHARED, copy_shared, needs_shared
from utils.config.build import build_config
from utils.config.data_yaml import DataConfig
from utils.config.flags import TrainConfig
from utils.config.recipe import Hyp
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import Problems, UserError
from utils.dist.place import ALONE
from utils.run.inputs import read_network
from utils.torch_utils import save_checkpoint

GOLDEN = SHARED / "golden/yolov5n_bccd.pt"
BLOOD = ["RBC", "WBC", "Platelets"]
OWN_NAMES = ["cell", "dot", "ring"]
KEYS = ("P", "R", "mAP50", "mAP50-95")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that a process with YOLOv5's module names has written."""
    folder = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, PROJECT / "tests/yolov5_files.py", folder], check=True)
    return folder


@pytest.fixture
def blood(tmp_path: Path) -> Path:
    """A copy of the BCCD data, for the original stays as it is."""
    copy_shared("datasets/bccd", tmp_path / "bccd")
    data = tmp_path / "bccd/bccd.yaml"
    data.write_text(f"path: {tmp_path / 'bccd'}\ntrain: images/train\nval: images/val\nnames: [{', '.join(BLOOD)}]\n")
    return data


def decoded(model: DetectionModel, images: NDArray[Any]) -> NDArray[Any]:
    with torch.no_grad():
        return model.decode(model(torch.from_numpy(images))).numpy()


def nano(num_classes: int = 3) -> DetectionModel:
    return DetectionModel(load_yaml(find_yaml("yolov5n", "model")), num_classes)


def start(weights: Path, cfg: str = "", classes: int = 3) -> DetectionModel:
    """The network that train.py would start from."""
    problems, names = Problems(), [f"c{number}" for number in range(classes)]
    data = DataConfig(Path("x.yaml"), Path(), [], [], names)
    config = build_config(TrainConfig, {"weights": str(weights), "cfg": cfg})
    model = read_network(config, ALONE, Hyp(), data, None, problems, [])
    problems.raise_if_any()
    assert model is not None
    return model


# a checkpoint of YOLOv5 itself ----------------------------------------------------------------------------------------


@needs_shared
def test_golden_checkpoint() -> None:
    """Every tensor as it is, and the network: its shape, anchors, classes and image size."""
    found = read_weights(GOLDEN)
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    assert found["model"].keys() == set(arrays.files)
    for name, tensor in found["model"].items():
        assert tensor.numpy().dtype == arrays[name].dtype and np.array_equal(tensor.numpy(), arrays[name]), name
    assert found["names"] == BLOOD and found["config"]["imgsz"] == 320
    assert found["origin"] == "a YOLOv5 checkpoint (fp16 in the file)"
    anchors = load_yaml(find_yaml("yolov5n", "model"))["anchors"]
    assert np.array_equal(np.array(found["spec"]["anchors"]), np.array(anchors))


@needs_shared
def test_golden_forward() -> None:
    case = np.load(SHARED / "golden/yolov5n_bccd_forward.npz")
    state = torch.get_rng_state()
    model, family, imgsz = load_model(GOLDEN, ALONE)
    torch.set_rng_state(state)
    assert (family.name, imgsz, model.names, model.training) == ("yolov5", 320, BLOOD, False)
    assert np.abs(decoded(model, case["x"]) - case["decoded"]).max() < 1e-3


@needs_shared
def test_golden_detections() -> None:
    case = np.load(SHARED / "golden/yolov5n_bccd_forward.npz")
    yolo = YOLO(GOLDEN, device="cpu")
    assert yolo.names == BLOOD
    image = SHARED / "datasets/bccd/images/val" / str(case["image_name"])
    (found,) = yolo.predict(image, conf_thres=0.25, iou_thres=0.45)
    expected = case["detections_xyxy_conf_cls"]  # boxes rounded to whole pixels
    assert len(expected) > 5 and found.boxes.shape == expected.shape
    np.testing.assert_array_equal(found.cls, expected[:, 5])
    np.testing.assert_allclose(found.xyxy, expected[:, :4], atol=0.52)
    np.testing.assert_allclose(found.conf, expected[:, 4], atol=1e-3)


@needs_shared
@pytest.mark.slow
@pytest.mark.gate
def test_golden_figures(blood: Path) -> None:
    """Through val.py's own command line, each within 0.002."""
    flags = ["--weights", GOLDEN, "--data", blood, "--img", 320, "--batch", 16, "--workers", 0, "--name", "run"]
    command = [sys.executable, str(PROJECT / "val.py"), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=blood.parent.parent, check=True)
    expected = json.loads((SHARED / "golden/yolov5n_bccd.json").read_text())["val"]
    for name in ("all", *BLOOD):
        row = re.search(rf"^ *{name} +\d+ +\d+ +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$", done.stdout, re.M)
        assert row, done.stdout
        assert [float(figure) for figure in row.groups()] == pytest.approx(
            [expected[name][key] for key in KEYS], abs=0.002
        )
    assert "yolov5n_bccd.pt: from a YOLOv5 checkpoint (fp16 in the file)\n" in done.stdout


@needs_shared
@pytest.mark.slow
def test_golden_fine_tuned(blood: Path) -> None:
    """Five epochs with the default recipe: it starts where the weights were, and stays there."""
    flags = ["--weights", GOLDEN, "--data", blood, "--epochs", 5, "--img", 320, "--batch", 16, "--workers", 0]
    command = [sys.executable, str(PROJECT / "train.py"), *map(str, flags), "--noplots", "--name", "run"]
    subprocess.run(command, cwd=blood.parent.parent, check=True)
    lines = (blood.parent.parent / "runs/train/run/results.csv").read_text().splitlines()
    column = lines[0].split(",").index("metrics/mAP_0.5")
    map50 = [float(line.split(",")[column]) for line in lines[1:]]
    assert len(map50) == 5 and map50[0] >= 0.75 and map50[4] >= 0.83, map50


@needs_shared
@pytest.mark.slow
def test_golden_in_python(blood: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts from it goes through a checkpoint of our own, and is one epoch better or worse than it."""
    monkeypatch.chdir(blood.parent.parent)
    for kind in ("images", "labels"):  # a few will do
        for split in ("train", "val"):
            for path in sorted((blood.parent / kind / split).iterdir())[8:]:
                path.unlink()
    yolo = YOLO(GOLDEN, device="cpu")
    before = yolo.val(data=str(blood), imgsz=320, workers=0).map50
    flags: dict[str, Any] = {"imgsz": 320, "batch": 8, "epochs": 1, "workers": 0, "noplots": True, "device": "cpu"}
    after = yolo.train(data=str(blood), **flags).map50
    assert before > 0.8 and after == pytest.approx(before, abs=0.05)
    assert yolo.names == BLOOD


# checkpoints like those of v6 and v7 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "same_as", "imgsz", "notes"),
    [
        ("list", "list", 640, " (optimizer state not taken, its image size is not in it, 640 is taken)"),
        ("dict", "dict", 64, " (fp16 in the file)"),
        ("ema", "ema", 96, " (EMA weights)"),
        ("whole", "list", 640, " (its image size is not in it, 640 is taken)"),
        ("wrapped", "list", 640, " (its image size is not in it, 640 is taken)"),
        ("leaky", "leaky", 640, " (its image size is not in it, 640 is taken)"),
        ("no_yaml", "no_yaml", 640, " (its image size is not in it, 640 is taken)"),
    ],
)
def test_the_network_computes_what_the_saved_one_did(
    made: Path, name: str, same_as: str, imgsz: int, notes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names as list and dict, fp16 and fp32, with and without EMA and optimizer, beside NumPy scalars and paths."""
    expected = np.load(made / "expected.npz")
    path = made / f"{name}.pt"
    model, _, trained_at = load_model(path, ALONE, "--weights")
    assert capsys.readouterr().out == f"weights     {path}: from a YOLOv5 checkpoint{notes}\n"
    assert (model.names, trained_at) == (OWN_NAMES, imgsz)
    assert model.yaml["anchors"] == [[4, 5, 8, 10], [16, 14, 30, 28]]  # the found ones, not the YAML's
    assert np.abs(decoded(model, expected["image"]) - expected[same_as]).max() < 1e-4
    assert np.abs(expected["ema"] - expected["list"]).max() > 1, "the files must differ for this to mean anything"


def test_other_checkpoints_are_told_apart(made: Path) -> None:
    """What would not compute the same is not built; its weights can still go into a network that --cfg names."""
    reasons = {
        "tuned": r"model YAML, backbone row 1 \(Tuned\): unknown module; known: Conv",
        "elsewhere": r"it is not .*, model\.2\.m\.0\.cv1\.bn has eps \(1e-05,\) instead of \(0\.001,\)",
        "misnamed": "it names 4 classes, but its head has 3",
        "anchorless": "its anchors have no size",
    }
    for name, reason in reasons.items():
        path = made / f"{name}.pt"
        with pytest.raises(UserError, match=rf"^--weights {path} holds a network that can't be built here: {reason}"):
            load_model(path, ALONE, "--weights")
        with pytest.raises(UserError, match=rf"^--weights {path} holds a network .*{reason}.*; add --cfg$"):
            start(path)
    with pytest.raises(
        UserError, match=r"spoiled\.pt holds weights that are not finite, such as weights\.model\.0\.conv"
    ):
        load_model(made / "spoiled.pt", ALONE)
    with pytest.raises(
        UserError, match=r"legacy\.pt is damaged or .* torch's format from before version 1\.6; load it"
    ):
        load_model(made / "legacy.pt", ALONE)


def test_weights_of_a_users_own_network(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --cfg they go where they fit by name and shape."""
    known = load_model(made / "list.pt", ALONE)[0].yaml
    capsys.readouterr()
    cfg = tmp_path / "own.yaml"
    cfg.write_text(json.dumps({key: known[key] for key in known if key != "activation"}))
    model = start(made / "tuned.pt", str(cfg))
    state = read_weights(made / "tuned.pt")["model"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if "anchors" not in name)
    assert re.search(r"from a YOLOv5 checkpoint: 148 tensors taken, anchors of --cfg kept\n", capsys.readouterr().out)


# starting from them ---------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize("cfg", ["", "yolov5n"])
def test_starting_with_as_many_classes(cfg: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is taken; a YAML that is named keeps its own anchors."""
    model, arrays = start(GOLDEN, cfg), np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), arrays[name].astype(value.numpy().dtype)), name
    said = capsys.readouterr().out
    count = "348 tensors taken, anchors of --cfg kept" if cfg else "349 tensors taken"
    assert said == f"weights     {GOLDEN}: from a YOLOv5 checkpoint (fp16 in the file): {count}\n"


@needs_shared
@pytest.mark.parametrize("cfg", ["", "yolov5n"])
def test_starting_with_other_classes(cfg: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the head, 3 x (weights and biases) of the 349 tensors."""
    model, arrays = start(GOLDEN, cfg, classes=5), np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    for name, value in model.state_dict().items():
        if not name.startswith("model.24.m."):
            assert np.array_equal(value.numpy(), arrays[name].astype(value.numpy().dtype)), name
    why = "shape (24, 64, 1, 1) in the weights, (30, 64, 1, 1) in the network"
    count = "342 tensors taken, anchors of --cfg kept" if cfg else "343 tensors taken"
    assert f": {count}; 6 keep their initialization ({why})\n" in capsys.readouterr().out


def test_anchors_of_a_named_yaml_stay(made: Path, tmp_path: Path) -> None:
    spec = {**load_model(made / "list.pt", ALONE)[0].yaml, "anchors": [[3, 3, 6, 6], [20, 20, 40, 40]]}
    cfg = tmp_path / "own.yaml"
    cfg.write_text(json.dumps(spec))
    assert start(made / "list.pt", str(cfg)).anchors.flatten().tolist() == [3, 3, 6, 6, 20, 20, 40, 40]
    assert start(made / "list.pt").anchors.flatten().tolist() == [4, 5, 8, 10, 16, 14, 30, 28]


def test_weights_of_another_network(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where not all fits though there are as many classes it is an error; below another head what fits is taken."""
    spec = load_model(made / "list.pt", ALONE)[0].yaml
    cfg = tmp_path / "own.yaml"
    cfg.write_text(json.dumps(spec | {"backbone": [*spec["backbone"][:4], [-1, 1, "SPP", [64, [5, 9, 13]]]]}))
    assert (
        start(made / "list.pt", str(cfg)).get_submodule("model.4.m.2").kernel_size == 13
    )  # SPP has the tensors of SPPF
    cfg.write_text(json.dumps(spec | {"width_multiple": 0.25}))
    with pytest.raises(
        UserError, match=r"^--weights .*list\.pt: the weights don't fit the network, \d+ tensors differ"
    ):
        start(made / "list.pt", str(cfg))
    capsys.readouterr()
    shorter = [[-1, 2, "C3", [32, False]], [[-1, 4], 1, "Detect", ["nc", "anchors"]]]
    cfg.write_text(json.dumps(spec | {"head": [*spec["head"][:3], *shorter]}))
    own, state = start(made / "list.pt", str(cfg)).state_dict(), read_weights(made / "list.pt")["model"]
    taken = [name for name in own if name in state and own[name].shape == state[name].shape]
    assert all(torch.equal(own[name], state[name]) for name in taken)
    said = capsys.readouterr().out
    kept, unused = len(own) - len(taken), len(state.keys() - own.keys())
    taking = rf": {len(taken)} tensors taken, anchors of --cfg kept"
    reason = rf"{kept - 1} keep their initialization \(not in the weights\)"
    assert re.search(rf"{taking}; {reason}; {unused} are not in the network\n", said), said


# state dicts and safetensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["half", "model", "module"])
def test_state_dict_of_a_shipped_network(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and shapes tell which one it is."""
    source = nano(4)
    source.set_anchors((source.anchors * 2).tolist())
    state: dict[str, Any] = dict(source.state_dict())
    if form == "module":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    if form == "half":
        state = dict(source.half().state_dict())
    path = tmp_path / "weights.pt"
    torch.save({"model": state, "epoch": 3} if form == "model" else state, path)
    model, _, imgsz = load_model(path, ALONE)
    half = ", fp16 in the file" if form == "half" else ""
    assert capsys.readouterr().out == f"weights     {path}: from a state dict (class names not in it{half})\n"
    assert (imgsz, model.names) == (640, ["0", "1", "2", "3"])
    wanted = source.float().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    again = DetectionModel(model.yaml, 4)
    assert torch.equal(again.detect.anchors, source.detect.anchors), "anchors are in the spec as well"
    taken = start(path, classes=4).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in taken.items())


def test_state_dict_of_an_unknown_network(made: Path, tmp_path: Path) -> None:
    cfg = tmp_path / "own.yaml"
    cfg.write_text(json.dumps(load_model(made / "list.pt", ALONE)[0].yaml))
    wanted = torch.load(made / "state.pt", weights_only=True)
    for name in ("state", "state_in_model", "state_dict"):
        path = made / f"{name}.pt"
        why = f"^--weights {path} holds tensors by name that fit none of the shipped networks"
        with pytest.raises(UserError, match=f"{why}$"):
            load_model(path, ALONE, "--weights")
        with pytest.raises(UserError, match=f"{why}; add --cfg$"):
            start(path)
        assert all(torch.equal(value, wanted[key]) for key, value in start(path, str(cfg)).state_dict().items())


def test_files_without_weights(tmp_path: Path) -> None:
    contents: list[Any] = [{"epoch": 3}, {"model": {}}, [1, 2], torch.zeros(2), {"model": {"a": 1}}]
    for content in [*contents, {"model": torch.zeros(3), "epoch": 1}]:
        torch.save(content, tmp_path / "none.pt")
        with pytest.raises(UserError, match=r"it holds neither a network nor tensors by name$"):
            read_weights(tmp_path / "none.pt")


def test_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the package the error says how to get it; a file is known by its content."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "weights.pt"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    if importlib.util.find_spec("safetensors") is None:
        with pytest.raises(
            UserError, match=rf"^--weights {path} is a safetensors file; to read it: pip install safete"
        ):
            read_weights(path, "--weights")
        return
    from safetensors.torch import save_file

    assert read_weights(path)["model"]["x"].tolist() == [0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"^--weights {path} is damaged: "):
        read_weights(path, "--weights")
    source = nano()
    save_file(source.state_dict(), path)
    model, _, _ = load_model(path, ALONE)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())
    assert "from a safetensors file (class names not in it)\n" in capsys.readouterr().out


# our own checkpoints --------------------------------------------------------------------------------------------------


def test_own_checkpoints_are_read_as_before(tmp_path: Path) -> None:
    model = nano()
    state = {"spec": model.yaml, "names": OWN_NAMES, "model": model.state_dict(), "config": {"imgsz": 64}}
    save_checkpoint(state, tmp_path / "own.pt")
    found = read_weights(tmp_path / "own.pt")
    assert found.keys() == state.keys() and found["spec"] == model.yaml
    again = DetectionModel(network_spec("", "", found), 3)
    assert load_state(again, found["model"], strict=True).taken == len(model.state_dict())
    start_from(again, "own.pt", found, keep_anchors=False)
