"""The networks: golden names, shapes and outputs; the strict YAML; loading of weights; families."""

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from models.common import SPP, SPPF, Concat
from models.costs import count_flops
from models.families import YOLOV3, YOLOV5, family_of
from models.yolo import DetectionModel, load_state
from tests.common import PROJECT, SHARED, golden, needs_shared
from utils.config.recipe import Hyp
from utils.core.errors import UserError
from utils.metrics.boxes import non_max_suppression, scale_boxes

Spec = dict[str, Any]

# 2 x multiply-adds at 640 px and 80 classes, in units of 10^9, as counted on the published
# networks
GFLOPS = {
    "yolov5n": "4.47",
    "yolov5s": "16.4",
    "yolov5m": "48.9",
    "yolov5l": "109.0",
    "yolov5x": "205.5",
    "yolov5n6": "4.56",
    "yolov5s6": "16.8",
    "yolov5m6": "49.9",
    "yolov5l6": "111.2",
    "yolov5x6": "209.6",
    "yolov3": "155.9",
    "yolov3-spp": "156.7",
    "yolov3-tiny": "13.2",
}


def shipped(name: str) -> Spec:
    return yaml.safe_load((PROJECT / "models" / f"{name}.yaml").read_text())


@cache
def on_meta(name: str) -> DetectionModel:
    with torch.device("meta"):
        return DetectionModel(shipped(name), 80)


def first_weight(model: DetectionModel) -> Tensor:
    return model.get_parameter("model.0.conv.weight")


def small_spec() -> Spec:
    """A user's YAML as it may look: quoted words, two levels, a pooling."""
    return yaml.safe_load(
        """
        nc: 7
        depth_multiple: 0.5
        width_multiple: 0.3
        anchors: [[10,13, 16,30], [116,90, 156,198]]
        backbone:
          - [-1, 1, Conv, [64, 6, 2, 2]]
          - [-1, 4, C3, [64]]
          - [-1, 1, nn.MaxPool2d, [2]]
          - [-1, 1, Conv, [128, 3, 2]]
        head:
          - [-1, 1, nn.Upsample, ["None", 2, "'nearest'"]]
          - [[-1, 2], 1, Concat, [1]]
          - [-1, 3, Conv, [64]]
          - [[-1, 3], 1, "Detect", ["nc", "anchors"]]
        """
    )


def golden_model() -> DetectionModel:
    model = DetectionModel(shipped("yolov5n"), 3, ["RBC", "WBC", "Platelets"])
    load_state(model, golden_state())
    return model.eval()


def golden_state() -> dict[str, Tensor]:
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize("name", sorted(GFLOPS))
def test_names_order_shapes_counts_and_strides_are_the_published_ones(name: str) -> None:
    facts = golden("architectures.json.gz")[name]
    model = on_meta(name)
    assert [(key, list(value.shape)) for key, value in model.state_dict().items()] == list(facts["state_dict"].items())
    assert sum(parameter.numel() for parameter in model.parameters()) == facts["parameters"]
    assert model.stride.tolist() == facts["stride"]


@pytest.mark.parametrize("name", sorted(GFLOPS))
def test_flops_are_the_published_ones(name: str) -> None:
    last_digit = 0.1 ** len(GFLOPS[name].split(".")[1])
    assert count_flops(on_meta(name), 640) / 1e9 == pytest.approx(float(GFLOPS[name]), abs=0.6 * last_digit)


def test_counting_flops_leaves_the_model_alone() -> None:
    model = DetectionModel(small_spec(), 2).train()
    before = copy.deepcopy(model.state_dict())
    assert count_flops(model, 128) == 4 * count_flops(model, 64)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@needs_shared
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_forward_and_decode_equal_golden(memory_format: torch.memory_format) -> None:
    case = np.load(SHARED / "golden/yolov5n_bccd_forward.npz")
    model = golden_model().to(memory_format=memory_format)
    with torch.inference_mode():
        decoded = model.decode(model(torch.from_numpy(case["x"]).contiguous(memory_format=memory_format)))
    np.testing.assert_allclose(decoded.numpy(), case["decoded"], rtol=0, atol=1e-3)


@needs_shared
def test_detections_of_a_real_image_equal_golden() -> None:
    case = np.load(SHARED / "golden/yolov5n_bccd_forward.npz")
    image = cv2.imread(str(SHARED / "datasets/bccd/images/val" / str(case["image_name"])))
    assert image is not None
    height, width = image.shape[:2]
    ratio = 320 / max(height, width)
    resized = cv2.resize(image, (round(width * ratio), round(height * ratio)), interpolation=cv2.INTER_LINEAR)
    inputs = YOLOV5.inputs
    rest = -resized.shape[0] % 32
    top = round(rest / 2 - 0.1)
    padded = cv2.copyMakeBorder(resized, top, rest - top, 0, 0, cv2.BORDER_CONSTANT, value=(114,) * 3)
    x = torch.from_numpy(padded[..., ::-1].copy()).permute(2, 0, 1)[None].float() * inputs.scale
    assert list(x.shape) == case["letterboxed_rgb_shape"].tolist()

    model = golden_model()
    with torch.inference_mode():
        predictions = YOLOV5.decode(model, model(x))
    (detections,) = YOLOV5.postprocess(predictions, 0.25, 0.45, multi_label=False, max_det=1000)
    boxes = scale_boxes(detections[:, :4], ratio, 0, top, (height, width)).round()
    expected = case["detections_xyxy_conf_cls"]
    assert detections[:, 5].tolist() == expected[:, 5].tolist()
    np.testing.assert_allclose(detections[:, 4].numpy(), expected[:, 4], atol=1e-3)
    np.testing.assert_allclose(boxes.numpy(), expected[:, :4].round(), atol=1)


def test_raw_outputs_have_the_shape_of_their_level() -> None:
    model = DetectionModel(shipped("yolov5n"), 2).eval()
    with torch.no_grad():
        outputs = model(torch.rand(2, 3, 64, 96))
    assert [tuple(output.shape) for output in outputs] == [(2, 3, 8, 12, 7), (2, 3, 4, 6, 7), (2, 3, 2, 3, 7)]


def test_strides_are_those_of_a_real_pass() -> None:
    model = DetectionModel(shipped("yolov3-tiny"), 2).eval()
    with torch.no_grad():
        outputs = model(torch.rand(1, 3, 64, 64))
    assert [64 / output.shape[2] for output in outputs] == model.stride.tolist() == [16, 32]


def test_decode_of_zeros_is_every_cell_center_and_anchor() -> None:
    model = DetectionModel(small_spec(), 2)
    outputs = [torch.zeros(1, 2, 2, 3, 7), torch.zeros(1, 2, 1, 1, 7)]
    expected = [
        [(column + 0.5) * 4, (row + 0.5) * 4, *anchor]
        for anchor in ((10, 13), (16, 30))
        for row in range(2)
        for column in range(3)
    ]
    expected += [[4, 4, 116, 90], [4, 4, 156, 198]]
    decoded = model.decode(outputs)
    torch.testing.assert_close(decoded[0, :, :4], torch.tensor(expected, dtype=torch.float32))
    assert (decoded[..., 4:] == 0.5).all()


def test_decode_computes_in_fp32() -> None:
    model = DetectionModel(small_spec(), 2)
    low = [torch.randn(1, 2, 8, 8, 7).bfloat16(), torch.randn(1, 2, 4, 4, 7).bfloat16()]
    decoded = model.decode(low)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, model.decode([output.float() for output in low]))


def test_decode_of_no_image() -> None:
    model = DetectionModel(small_spec(), 2)
    assert model.decode([torch.zeros(0, 2, 8, 8, 7), torch.zeros(0, 2, 4, 4, 7)]).shape == (0, 2 * (64 + 16), 7)


@pytest.mark.parametrize("name", ["yolov5n6", "yolov3-tiny"])
def test_forward_and_decode_need_no_values_on_the_host(name: str) -> None:
    """On the meta device there are no values, so anything that waits for one raises."""
    model = on_meta(name).to("meta")
    x = torch.empty(2, 3, 128, 128, device="meta")
    assert model.decode(model(x)).device.type == "meta"


def test_decoding_leaves_no_trace_in_the_state() -> None:
    model = DetectionModel(small_spec(), 2)
    names = list(model.state_dict())
    model.decode(model(torch.rand(2, 3, 64, 64)))
    assert list(model.state_dict()) == names


def test_biases_expect_eight_objects_per_image() -> None:
    model = DetectionModel(shipped("yolov5n"), 4)
    for conv, stride in zip(model.detect.m, (8, 16, 32), strict=True):
        assert isinstance(conv, nn.Conv2d)
        assert conv.bias is not None
        bias = conv.bias.detach().view(3, 9)
        torch.testing.assert_close(bias[:, 4].exp(), torch.full((3,), 8 / (640 / stride) ** 2))
        torch.testing.assert_close(bias[:, 5:].exp(), torch.full((3, 4), 0.6 / (4 - 0.99999)))
        assert conv.bias.requires_grad
        assert conv.bias.is_leaf


def test_one_class() -> None:
    model = DetectionModel(small_spec(), 1)
    assert all(output.isfinite().all() for output in model(torch.rand(2, 3, 64, 64)))


def test_batchnorm_and_activation() -> None:
    norms = [module for module in DetectionModel(small_spec(), 2).modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.03)}
    model = DetectionModel(small_spec() | {"activation": "nn.LeakyReLU(0.1)"}, 2)
    assert {type(m) for m in model.modules() if "activation" in type(m).__module__} == {nn.LeakyReLU}


def test_sppf_equals_spp() -> None:
    fast, plain = SPPF(16, 16, 5).eval(), SPP(16, 16, (5, 9, 13)).eval()
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(1, 16, 20, 20)
    torch.testing.assert_close(fast(x), plain(x))


def test_concat_keeps_the_order_given() -> None:
    assert Concat()([torch.zeros(1, 2, 1, 1), torch.ones(1, 1, 1, 1)]).flatten().tolist() == [0, 0, 1]


# The YAML


def test_words_scales_and_repeats_of_a_users_yaml() -> None:
    model = DetectionModel(small_spec(), 2)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes["model.0.conv.weight"] == (24, 3, 6, 6)  # 64 x 0.3 = 19.2, up to 24
    assert sum("model.1.m." in name and name.endswith("conv.weight") for name in shapes) == 2 * 2  # 4 x 0.5 bottlenecks
    assert shapes["model.6.0.conv.weight"] == (24, 40 + 24, 1, 1)  # 3 x 0.5 = 1.5, rounded to 2, one after the other
    assert shapes["model.6.1.conv.weight"] == (24, 24, 1, 1)
    assert shapes["model.7.m.1.weight"] == (2 * 7, 40, 1, 1)
    assert model.stride.tolist() == [4, 8]
    assert model.yaml["nc"] == 2
    assert model.names == ["0", "1"]


def test_the_yaml_it_keeps_builds_the_same_network() -> None:
    spec = small_spec()
    model = DetectionModel(spec, 2)
    assert spec == small_spec()
    spec["backbone"][0][3][0] = 8  # the caller's own copy
    again = DetectionModel(model.yaml, model.num_classes)
    assert load_state(again, model.state_dict(), strict=True).left == {}


def test_anchors_follow_the_order_of_the_strides() -> None:
    spec = small_spec()
    spec["anchors"] = spec["anchors"][::-1]
    assert torch.equal(DetectionModel(spec, 2).detect.anchors, DetectionModel(small_spec(), 2).detect.anchors)


def test_names_must_be_as_many_as_classes() -> None:
    with pytest.raises(UserError, match="names lists 1 classes, but the network has 2"):
        DetectionModel(small_spec(), 2, ["only"])


def put(section: str, number: int, row: Any) -> Callable[[Spec], None]:
    def change(spec: Spec) -> None:
        spec[section][number] = row

    return change


def set_key(key: str, value: Any) -> Callable[[Spec], None]:
    def change(spec: Spec) -> None:
        spec[key] = value

    return change


def without(key: str) -> Callable[[Spec], None]:
    def change(spec: Spec) -> None:
        del spec[key]

    return change


MISTAKES: list[tuple[Callable[[Spec], None], str]] = [
    (put("backbone", 3, [-1, 1, "conv", [64]]), r"backbone row 3 \(conv\): unknown module; did you mean Conv\?"),
    (put("backbone", 2, [-1, 1, "MaxPool2d", [2]]), r"backbone row 2 .*did you mean nn.MaxPool2d\?"),
    (put("head", 0, [-1, 1, "Qqqq", [64]]), r"head row 0 .*unknown module; known: Conv, "),
    (put("head", 0, [9, 1, "Conv", [64]]), r"head row 0 \(Conv\): from points at row 9, which is not there yet"),
    (put("backbone", 1, [1, 1, "C3", [64]]), r"backbone row 1 .*points at row 1, which is not there yet"),
    (put("backbone", 1, [-2, 1, "C3", [64]]), r"backbone row 1 .*from -2 points before the first row"),
    (put("backbone", 1, ["-1", 1, "C3", [64]]), r"backbone row 1 .*from is '-1'"),
    (put("backbone", 2, [[0, 1], 1, "Conv", [64]]), r"backbone row 2 .*reads one row, but from lists 2"),
    (put("backbone", 0, [-1, 1, "Conv", []]), r"backbone row 0 .*0 arguments where it takes 1 to 5 \[channels, kernel"),
    (put("backbone", 3, [-1, 1, "SPPF", [64, 5, 1]]), r"backbone row 3 .*3 arguments where it takes 1 to 2"),
    (put("backbone", 1, [-1, 4, "C3", [64, 3, 2]]), r"backbone row 1 \(C3\): its argument 'shortcut' is 3"),
    (put("backbone", 0, [-1, 1, "Conv", [64, True]]), r"backbone row 0 .*'kernel' is True; it must be int"),
    (put("backbone", 0, [-1, 1, "Conv", [0]]), r"backbone row 0 .*'channels' is 0; it must be at least 1"),
    (put("backbone", 3, [-1, 1, "Conv", [128, 3, 2, None, 7]]), r"backbone row 3 .*can't be built"),
    (put("backbone", 3, [-1, 1, "Conv", [128, 3, 2, -1]]), r"backbone row 3 .*'padding' is -1; it must be at least 0"),
    (put("backbone", 3, [-1, 1, "Conv", [128, 0]]), r"backbone row 3 .*'kernel' is 0; it must be at least 1"),
    (put("backbone", 0, [-1, 0, "Conv", [64]]), r"backbone row 0 .*repeats is 0"),
    (put("head", 1, [[-1, 2], 2, "Concat", [1]]), r"head row 1 \(Concat\): repeats is 2; it must be 1"),
    (put("head", 1, [[-1, 3], 1, "Concat", [1]]), r"head row 1 \(Concat\): it can't be built"),
    (put("head", 1, [-1, 1, "Conv"]), r"head row 1: .*not of the form"),
    (put("head", 1, "Conv"), r"head row 1: .*not of the form"),
    (put("head", 3, [-1, 1, "Detect", ["nc", "anchors"]]), r"head row 3 \(Detect\): 'anchors' has 2 levels.* reads 1"),
    (put("head", 3, [[-1, 3], 1, "Detect", ["nc"]]), r"head row 3 .*1 arguments where it takes 2"),
    (put("head", 3, [[-1, 3], 1, "Detect", [80, "anchors"]]), r"head row 3 .*is 80, but there are 2 classes; write nc"),
    (put("head", 3, [-1, 1, "Conv", [64]]), r"head row 3 \(Conv\): Detect is the last row"),
    (put("head", 2, [[-1], 1, "Detect", ["nc", "anchors"]]), r"head row 2 \(Detect\): Detect is the last row"),
    (put("backbone", 0, [-1, 1, "Conv", [64, 3, 3]]), r"head row . .*(can't be built|no whole stride)"),
    (without("depth_multiple"), r"the key 'depth_multiple' is missing"),
    (without("anchors"), r"the key 'anchors' is missing"),
    (set_key("with_multiple", 1), r"unknown key 'with_multiple'; did you mean width_multiple\?"),
    (set_key("width_multiple", "wide"), r"'width_multiple' is 'wide'"),
    (set_key("nc", 0), r"'nc' is 0"),
    *((set_key("ch", channels), rf"'ch' is {channels!r}, but images are") for channels in (0, 1, 4, True, None, "3")),
    (
        put("head", 3, [[], 1, "Detect", ["nc", "anchors"]]),
        r"head row 3 \(Detect\): from is \[\]; it must be the number",
    ),
    (set_key("backbone", {}), r"'backbone' must be a list"),
    (set_key("anchors", 0), r"'anchors' must be a list of levels, .* or a number"),
    (set_key("anchors", [[10, 13, 16], [30, 61, 62]]), r"anchors row 0: .*widths and heights"),
    (set_key("anchors", [[10, 13], [30, 61, 62, 45]]), r"anchors row 1: .*as many anchors as the first"),
    (set_key("anchors", [[10, -13], [30, 61]]), r"anchors row 0"),
    (set_key("activation", "nn.Softmax()"), r"'activation' is 'nn.Softmax\(\)'; known: nn.SiLU\(\)"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[message[:50] for _, message in MISTAKES])
def test_a_mistake_is_reported_with_its_row(change: Callable[[Spec], None], message: str) -> None:
    spec = small_spec()
    change(spec)
    with pytest.raises(UserError, match=message):
        DetectionModel(spec, 2)


@pytest.mark.parametrize("levels", [1, 2, 5, 6])
def test_levels_of_the_head(levels: int) -> None:
    """As many as the loss has weights for; what has more failed in the loss, when the run folder was made."""
    rows = [[-1, 1, "Conv", [8, 3, 2]] for _ in range(8)]
    spec = small_spec() | {"anchors": 2, "backbone": rows, "width_multiple": 1}
    spec["head"] = [[[*range(1, levels + 1)], 1, "Detect", ["nc", "anchors"]]]
    if levels > 5:
        with pytest.raises(UserError, match=r"head row 0 \(Detect\): it reads 6 maps, more than 5$"):
            DetectionModel(spec, 2)
        return
    model = DetectionModel(spec, 2).eval()
    loss = YOLOV5.criterion(model, Hyp(), 128, 0.0)
    assert loss.gains.shape == (3, levels) and model.decode(model(torch.rand(1, 3, 128, 128))).shape[2] == 7


@pytest.mark.parametrize("key", ["args", "module", "activation"])
def test_nothing_in_a_yaml_is_evaluated(key: str, tmp_path: Any) -> None:
    trap = tmp_path / "ran"
    code = f"open({str(trap)!r}, 'w')"
    spec = small_spec()
    if key == "args":
        spec["backbone"][0] = [-1, 1, "Conv", [code]]
    elif key == "module":
        spec["backbone"][0] = [-1, 1, code, [64]]
    else:
        spec["activation"] = code
    with pytest.raises(UserError):
        DetectionModel(spec, 2)
    assert not trap.exists()


# Weights


def test_weights_of_the_same_classes_load_strictly() -> None:
    source, model = DetectionModel(small_spec(), 2), DetectionModel(small_spec(), 2)
    report = load_state(model, {name: value.half() for name, value in source.state_dict().items()})
    assert (report.taken, report.left) == (len(model.state_dict()), {})
    torch.testing.assert_close(first_weight(model), first_weight(source), rtol=1e-3, atol=1e-3)
    assert first_weight(model).dtype == torch.float32


@pytest.mark.parametrize("flaw", ["missing", "extra", "shape"])
def test_strict_loading_names_the_tensor_and_changes_nothing(flaw: str) -> None:
    model = DetectionModel(small_spec(), 2)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    name = "model.1.cv1.conv.weight"
    if flaw == "missing":
        del state[name]
    elif flaw == "extra":
        name = "model.99.weight"
        state[name] = torch.zeros(1)
    else:
        state[name] = torch.zeros(1)
    with pytest.raises(UserError, match=name):
        load_state(model, state)
    assert first_weight(model).any()


def test_weights_of_other_classes_leave_the_head() -> None:
    source, model = DetectionModel(small_spec(), 5), DetectionModel(small_spec(), 2)
    report = load_state(model, source.state_dict())
    assert set(report.left) == {f"model.7.m.{level}.{part}" for level in (0, 1) for part in ("weight", "bias")}
    assert report.left["model.7.m.0.bias"] == "shape (20,) in the weights, (14,) in the network"
    assert report.taken == len(model.state_dict()) - 4
    assert torch.equal(first_weight(model), first_weight(source))


def test_weights_that_have_nothing_in_common_are_refused() -> None:
    with pytest.raises(UserError, match="don't fit"):
        load_state(DetectionModel(small_spec(), 2), {"weight": torch.zeros(1)})


# Families


def test_family_of_a_spec() -> None:
    assert family_of(small_spec()) is YOLOV5
    assert family_of(shipped("yolov3-tiny")) is YOLOV3
    assert {family_of(shipped(name)) for name in GFLOPS if name.startswith("yolov5")} == {YOLOV5}
    with pytest.raises(UserError, match=r"'yolov33'; did you mean yolov3\?"):
        family_of({"family": "yolov33"})


def test_a_family_builds_trains_and_detects() -> None:
    model = YOLOV5.build(small_spec(), 2, ["a", "b"])
    criterion = YOLOV5.criterion(model, Hyp(), 64, 0.0)
    outputs = model(torch.rand(2, 3, 64, 64))
    targets = torch.tensor([[0, 1, 0.5, 0.5, 0.2, 0.2], [1, 0, 0.3, 0.6, 0.4, 0.3]])
    matches = criterion.match(targets, 2, 64, 64)
    items = criterion.items(criterion.sums(outputs, matches), criterion.counts(matches))
    assert (items > 0).all()
    items.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name

    detections = YOLOV5.postprocess(YOLOV5.decode(model, outputs), 0.0, 0.6, multi_label=True, max_det=5)
    assert [tuple(found.shape) for found in detections] == [(5, 6), (5, 6)]
    assert YOLOV5.postprocess is non_max_suppression


def test_the_initial_network_is_unsure() -> None:
    """Objectness starts near its prior, so that the loss is not swamped by the background."""
    torch.manual_seed(0)
    model = DetectionModel(shipped("yolov5n"), 3)
    decoded = model.decode(model(torch.rand(2, 3, 128, 128)))
    prior = 8 / 80**2  # of the finest level, which has three quarters of the cells
    assert math.isclose(decoded[..., 4].median().item(), prior, rel_tol=0.5)
