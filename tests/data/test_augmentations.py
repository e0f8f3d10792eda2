"""Image geometry and augmentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import cv2
import numpy as np
import pytest

from utils.config.recipe import Hyp
from utils.data.augmentations import adjust_hsv, copy_paste, draw_copies, flip, letterbox_warp, mixup, mosaic
from utils.data.polygons import Polygons
from utils.data.resizing import GREY, labels_to_normalized, labels_to_pixels, letterbox, resize_longest, resized_shape
from utils.data.warping import Geometry, Tile, draw_geometry, warp_labels, warp_tiles

STILL = Hyp(
    hsv_h=0, hsv_s=0, hsv_v=0, degrees=0, translate=0, scale=0, shear=0, perspective=0, flipud=0, fliplr=0, mosaic=0
)
RECIPES = {
    "none": STILL,
    "low": Hyp(),
    "turned": Hyp(degrees=30, shear=10, scale=0.3),
    "perspective": Hyp(degrees=10, shear=5, scale=0.3, perspective=0.001),
}


def texture(seed: int, height: int, width: int) -> np.ndarray:
    """Noise soft enough for interpolation to be unambiguous, and rough enough for half a pixel to show."""
    rng = np.random.default_rng(seed)
    noise = cv2.GaussianBlur(rng.normal(0, 1, (height, width, 3)), (0, 0), 2.0)
    return np.clip(128 + noise * 45 / noise.std(), 0, 255).astype(np.uint8)


def boxes(seed: int, n: int, height: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 1, (n, 2, 2)) * (width, height)
    return np.concatenate([rng.integers(0, 5, (n, 1)), corners.min(1), corners.max(1)], 1).astype(np.float32)


def samples(side: int) -> list[tuple[np.ndarray, np.ndarray]]:
    shapes = [(side * 3 // 4, side), (side, side // 2 + 1), (side, side), (side // 3, side)]
    return [(texture(i, *shape), boxes(i, 8 * i, *shape)) for i, shape in enumerate(shapes)]


def reference_warp(canvas: np.ndarray, matrix: np.ndarray, side: int) -> np.ndarray:
    """Each output pixel's centre mapped back onto the canvas, bilinear between pixel centres, grey outside; float64."""
    rows, columns = np.mgrid[:side, :side] + 0.5
    back = np.linalg.inv(matrix) @ np.stack([columns.ravel(), rows.ravel(), np.ones(side * side)])
    x, y = back[:2] / back[2] - 0.5
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    padded = np.pad(canvas.astype(float), ((1, 1), (1, 1), (0, 0)), constant_values=GREY)

    def pixel(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        return padded[np.clip(row + 1, 0, len(padded) - 1), np.clip(column + 1, 0, padded.shape[1] - 1)]

    fx, fy = (x - left)[:, None], (y - top)[:, None]
    upper = pixel(top, left) * (1 - fx) + pixel(top, left + 1) * fx
    lower = pixel(top + 1, left) * (1 - fx) + pixel(top + 1, left + 1) * fx
    return (upper * (1 - fy) + lower * fy).reshape(side, side, 3)


def reference_mosaic(
    parts: list[tuple[np.ndarray, np.ndarray]], side: int, center: tuple[int, int], geometry: Geometry
) -> tuple[np.ndarray, list[list[float]]]:
    """Paint the whole canvas pixel by pixel, then warp it; boxes one by one."""
    x, y = center
    canvas = np.full((2 * side, 2 * side, 3), GREY, np.uint8)
    kept = []
    for place, (image, labels) in enumerate(parts):
        h, w = image.shape[:2]
        left, top = ((x - w, y - h), (x, y - h), (x - w, y), (x, y))[place]
        rows = np.arange(top, top + h)
        columns = np.arange(left, left + w)
        inside_rows, inside_columns = (rows >= 0) & (rows < 2 * side), (columns >= 0) & (columns < 2 * side)
        canvas[np.ix_(rows[inside_rows], columns[inside_columns])] = image[np.ix_(inside_rows, inside_columns)]
        for cls, x1, y1, x2, y2 in labels.astype(float):
            x1, x2 = (min(max(v + left, 0), 2 * side) for v in (x1, x2))
            y1, y2 = (min(max(v + top, 0), 2 * side) for v in (y1, y2))
            hull = [geometry.matrix @ (u, v, 1) for u in (x1, x2) for v in (y1, y2)]
            xs, ys = [p[0] / p[2] for p in hull], [p[1] / p[2] for p in hull]
            a, b = max(min(xs), 0), max(min(ys), 0)
            c, d = min(max(xs), side), min(max(ys), side)
            area = (x2 - x1) * (y2 - y1) * geometry.scale**2
            if c - a > 2 and d - b > 2 and (c - a) * (d - b) > 0.1 * area and 0.01 < (c - a) / (d - b) < 100:
                kept.append([cls, a, b, c, d])
    return reference_warp(canvas, geometry.matrix, side), kept


# --- Sizes and padding -----------------------------------------------------------------------------------------------


def test_resized_shape_rounds_up() -> None:
    assert resized_shape(333, 500, 640) == (427, 640)  # 426.24
    assert resized_shape(375, 500, 640) == (480, 640)  # exactly
    assert resized_shape(2000, 3, 320) == (320, 1)


def test_longer_side_is_exact_for_every_size() -> None:
    """In floating point the longer side times imgsz / itself rounds up to one pixel too many for some sizes."""
    assert all(resized_shape(n, n // 2 + 1, 640)[0] == 640 for n in range(2, 3000))


def test_shrinking_interpolates_as_told_and_enlarging_always_linearly() -> None:
    image = texture(0, 40, 60)
    halves = image.reshape(20, 2, 30, 2, 3).mean(axis=(1, 3))
    assert np.abs(resize_longest(image, 30, cv2.INTER_AREA) - halves).max() <= 0.5
    wide = np.zeros((6, 6, 3), np.uint8)
    wide[:, ::3] = 240
    assert resize_longest(wide, 2).max() == 0  # every third column is bright; linear reads the dark ones between
    assert resize_longest(wide, 2, cv2.INTER_AREA).min() == 80
    np.testing.assert_array_equal(resize_longest(image, 80, cv2.INTER_AREA), resize_longest(image, 80))
    assert resize_longest(image, 60) is image


def test_letterbox_centres_on_grey() -> None:
    image = texture(0, 5, 8)
    padded, left, top = letterbox(image, (10, 8))
    assert (left, top) == (0, 2)  # of 5 rows of padding 2.4 and 2.6 rounded
    np.testing.assert_array_equal(padded[2:7], image)
    assert (padded[:2] == GREY).all()
    assert (padded[7:] == GREY).all()
    with pytest.raises(AssertionError, match="does not fit"):
        letterbox(image, (10, 7))


def test_label_formats() -> None:
    labels = np.array([[2, 0.5, 0.25, 0.5, 0.5]], np.float32)
    pixels = labels_to_pixels(labels, 100, 40)
    np.testing.assert_allclose(pixels, [[2, 10, 0, 30, 50]], rtol=1e-6)
    np.testing.assert_allclose(labels_to_normalized(pixels, 100, 40), labels, rtol=1e-6)
    assert labels_to_pixels(labels[:0], 100, 40).shape == (0, 5)
    assert labels_to_normalized(labels[:0], 100, 40).shape == (0, 5)


# --- Warp ------------------------------------------------------------------------------------------------------------


def test_geometry_goes_step_by_step() -> None:
    hyp = Hyp(degrees=40, translate=0.2, scale=0.6, shear=20, perspective=0.001)
    px, py, angle, size, shear_x, shear_y, tx, ty = np.random.default_rng(5).uniform(-1, 1, 8)
    geometry = draw_geometry(np.random.default_rng(5), hyp, (100, 200), (50, 80))
    point = complex(130, 20) - complex(100, 50)
    point /= 1 + 0.001 * (px * point.real + py * point.imag)
    point *= (1 + 0.6 * size) * np.exp(-1j * np.radians(40 * angle))
    x = point.real + np.tan(np.radians(20 * shear_x)) * point.imag + (0.5 + 0.2 * tx) * 80
    y = point.imag + np.tan(np.radians(20 * shear_y)) * point.real + (0.5 + 0.2 * ty) * 50
    mapped = geometry.matrix @ (130, 20, 1)
    np.testing.assert_allclose(mapped[:2] / mapped[2], [x, y], rtol=1e-12)
    assert geometry.scale == pytest.approx(1 + 0.6 * size, rel=1e-12)


def test_geometry_stays_in_its_ranges() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_geometry(rng, Hyp(degrees=0, translate=0.1, scale=0.5), (640, 640), (320, 320)) for _ in range(2000)]
    scales = np.array([g.scale for g in drawn])
    centers = np.array([(g.matrix @ (320, 320, 1))[:2] for g in drawn]) / 320
    for values, low, high in ((scales, 0.5, 1.5), (centers, 0.4, 0.6)):
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high >= values.max() > high - 0.01 * (high - low)
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.03)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([10, 10, 30, 20], [20, 20, 60, 40]),  # twice as large
        ([-20, 10, 30, 20], [0, 20, 60, 40]),  # clipped, 60 % left
        ([-95, 10, 5, 20], None),  # 5 % left
        ([-85, 10, 15, 20], [0, 20, 30, 40]),  # 15 % left
        ([10, 10, 11, 20], None),  # 2 pixels wide, not more
        ([10, 10, 11.01, 20], [20, 20, 22.02, 40]),
        ([60, 10, 90, 20], None),  # outside
    ],
)
def test_boxes_are_clipped_and_filtered(box: list[float], expected: list[float] | None) -> None:
    labels = np.array([[3, *box]], np.float32)
    out = warp_labels(labels, Geometry(np.diag([2.0, 2.0, 1.0]), 2.0), (100, 100))
    wanted = np.array([[3, *expected]] if expected else np.zeros((0, 5)))
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    assert out.dtype == np.float32


def test_slivers_are_dropped() -> None:
    """What cutting at an edge leaves, of the output or of the canvas; not what is thin as a whole."""
    move = np.array([[1, 0, 0], [0, 1, -7.5], [0, 0, 1]])
    labels = np.array([[0, 0, 0, 250, 10.01], [0, 0, 0, 250, 9.99]], np.float32)
    assert len(warp_labels(labels, Geometry(move, 0.4), (300, 300))) == 1
    whole = np.array([[0, 0, -20, 250, 2.51], [0, 0, -20, 250, 2.49]], np.float32)
    assert len(warp_labels(whole.clip(0), Geometry(np.eye(3), 1.0), (300, 300), uncut=whole)) == 1


def test_thin_objects_are_trained_on() -> None:
    """ultralytics/yolov5#8391, #2521: wires of 608 x 5 pixels were dropped from every batch without a word."""
    image = np.zeros((640, 640, 3), np.uint8)
    labels = np.array([[0, 16, 317.4, 624, 322.6], [1, 317.4, 16, 322.6, 624], [2, 100, 100, 200, 200]], np.float32)
    _, kept = letterbox_warp(image, labels, (640, 640), STILL, np.random.default_rng(0))
    np.testing.assert_allclose(kept, labels, atol=1e-3)


def test_a_box_is_the_hull_of_its_turned_corners() -> None:
    half = np.sqrt(0.5)
    turn = np.array([[half, -half, 50], [half, half, 0], [0, 0, 1]])
    out = warp_labels(np.array([[0, 10, 10, 30, 20]], np.float32), Geometry(turn, 1.0), (100, 100))
    np.testing.assert_allclose(out, [[0, 50 - 10 * half, 20 * half, 50 + 20 * half, 50 * half]], rtol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", range(4))
def test_mosaic_equals_a_painted_canvas_that_is_warped(recipe: str, seed: int) -> None:
    side, hyp, parts = 160, RECIPES[recipe], samples(160)
    image, labels = mosaic(parts, side, hyp, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    x, y = rng.integers(80, 240, size=2, endpoint=True).tolist()
    geometry = draw_geometry(rng, hyp, (2 * side, 2 * side), (side, side))
    expected, kept = reference_mosaic(parts, side, (x, y), geometry)
    difference = np.abs(image - expected)
    assert difference.mean() < 1.0
    assert np.percentile(difference, 90) <= 1.0  # seams aside it is the same interpolation
    assert len(kept) > 3
    np.testing.assert_allclose(labels, kept, atol=1e-4)


@pytest.mark.parametrize("degrees", [0, 20])
def test_no_lines_between_tiles(degrees: int) -> None:
    """A seam shows the tiles on its sides, nothing of what is below or beyond them."""
    white, none = np.full((80, 80, 3), 255, np.uint8), np.zeros((0, 5), np.float32)
    tiles = [Tile(white, none, left, top) for top in (0, 80) for left in (0, 80)]
    for seed in range(10):
        geometry = draw_geometry(np.random.default_rng(seed), Hyp(degrees=degrees), (160, 160), (160, 160))
        image, labels = warp_tiles(tiles, geometry, (160, 160), (160, 160))
        assert image[60:100, 60:100].min() == 255
        assert labels.shape == (0, 5)


def test_boxes_stay_on_their_pixels() -> None:
    """Also far from the centre and at every scale: boxes and pixels share one coordinate system."""
    image = np.zeros((120, 160, 3), np.uint8)
    image[30:80, 40:110] = 255
    label = np.array([[0, 40, 30, 110, 80]], np.float32)
    errors = []
    for seed in range(60):
        out, labels = letterbox_warp(image, label, (160, 160), Hyp(scale=0.6), np.random.default_rng(seed))
        rows, columns = np.nonzero(out[..., 0] > 127 + 64 * (out[..., 0] == GREY))
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        errors.append(labels[0, 1:] - found)
    assert np.abs(errors).max() < 1.0
    assert np.abs(np.mean(errors, axis=0)).max() < 0.15


def test_still_warp_is_the_letterbox() -> None:
    image = texture(0, 45, 64)
    padded, left, top = letterbox(image, (64, 64))
    labels = boxes(0, 4, 45, 64)
    out, moved = letterbox_warp(image, labels, (64, 64), STILL, np.random.default_rng(0))
    np.testing.assert_array_equal(out, padded)
    np.testing.assert_allclose(moved[:, 1:], labels[:, 1:] + [left, top, left, top], atol=1e-4)


def test_rectangular_canvas_is_centred_too() -> None:
    image = texture(0, 64, 96)
    out, _ = letterbox_warp(image, np.zeros((0, 5), np.float32), (64, 128), STILL, np.random.default_rng(0))
    np.testing.assert_array_equal(out[:, 16:112], image)


# --- Colours, flips, mixtures ----------------------------------------------------------------------------------------


def test_hsv_multiplies_each_channel() -> None:
    image, hyp = texture(3, 40, 40), Hyp(hsv_h=0.5, hsv_s=0.4, hsv_v=0.3)
    for seed in range(5):
        gains = 1 + np.random.default_rng(seed).uniform(-1, 1, 3) * (0.5, 0.4, 0.3)
        h, s, v = np.moveaxis(cv2.cvtColor(image, cv2.COLOR_BGR2HSV).astype(float), 2, 0) * gains[:, None, None]
        hsv = np.stack([np.floor(h) % 180, np.clip(s, 0, 255), np.clip(v, 0, 255)], 2).astype(np.uint8)
        out = adjust_hsv(image, hyp, np.random.default_rng(seed))
        np.testing.assert_array_equal(out, cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR))
    np.testing.assert_array_equal(adjust_hsv(image, STILL, np.random.default_rng(0)), image)


def test_flips_move_boxes_with_pixels() -> None:
    image = np.zeros((30, 50, 3), np.uint8)
    image[4:10, 7:30] = 255
    labels = np.array([[1, 7, 4, 30, 10]], np.float32)
    for flipud in (0, 1):
        for fliplr in (0, 1):
            out, moved = flip(image, labels, Hyp(flipud=flipud, fliplr=fliplr), np.random.default_rng(0))
            rows, columns = np.nonzero(out[..., 0])
            assert moved.tolist() == [[1, columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]]
            assert (rows.min() == 4) != bool(flipud)
            assert (columns.min() == 7) != bool(fliplr)


def test_flip_probability() -> None:
    image, labels = np.zeros((4, 4, 3), np.uint8), np.array([[0, 0, 0, 1, 2]], np.float32)
    rng = np.random.default_rng(0)
    moved = [flip(image, labels, Hyp(flipud=0.2, fliplr=0.7), rng)[1][0] for _ in range(2000)]
    assert np.mean([m[1] == 3 for m in moved]) == pytest.approx(0.7, abs=0.04)
    assert np.mean([m[2] == 2 for m in moved]) == pytest.approx(0.2, abs=0.04)


def test_mixup_blends_and_joins() -> None:
    dark, bright = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 200, np.uint8)
    labels = boxes(0, 3, 8, 8)
    rng, weights = np.random.default_rng(0), []
    for _ in range(500):
        image, joined = mixup((dark, labels[:1]), (bright, labels[1:]), rng)
        np.testing.assert_array_equal(joined, labels)
        assert len(np.unique(image)) == 1
        weights.append(1 - image[0, 0, 0] / 200)
    assert np.mean(weights) == pytest.approx(0.5, abs=0.01)
    assert np.std(weights) == pytest.approx(np.sqrt(0.25 / 65), rel=0.1)  # variance of Beta(32, 32)


# --- Purity ----------------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Hyp, np.random.Generator], object]] = {
    "geometry": lambda hyp, rng: draw_geometry(rng, hyp, (64, 64), (64, 64)),
    "single": lambda hyp, rng: letterbox_warp(*samples(64)[1], (64, 64), hyp, rng),
    "mosaic": lambda hyp, rng: mosaic(samples(64), 64, hyp, rng),
    "hsv": lambda hyp, rng: adjust_hsv(samples(64)[2][0], hyp, rng),
    "flip": lambda hyp, rng: flip(*samples(64)[2], hyp, rng),
}


@pytest.mark.parametrize("step", STEPS)
def test_hyperparameters_do_not_shift_the_stream(step: str) -> None:
    after = []
    for hyp in (STILL, Hyp(degrees=10, shear=5, perspective=0.0005, flipud=1, fliplr=1)):
        rng = np.random.default_rng(0)
        STEPS[step](hyp, rng)
        after.append(rng.random())
    assert after[0] == after[1]


@pytest.mark.parametrize("degrees", [0, 10])
def test_inputs_are_left_alone(degrees: int) -> None:
    """Cached images, mapped labels and their outlines are read-only, and stay what they are."""
    parts = samples(64)
    corners = [np.array([[1, y], [4, y], [4, y + 4], [1, y + 4]], np.float32) for y in (2, 11, 20)]
    triangles = Polygons(np.concatenate([shape[:3] for shape in corners]), np.array([0, 3, 6, 9]))
    outlined = np.array([[k, *shape.min(0), *shape.max(0)] for k, shape in enumerate(corners)], np.float32)
    parts[0] = (parts[0][0], outlined)
    outlines = [triangles, None, None, None]
    arrays = [array for part in parts for array in part] + list(triangles)
    before = [array.tobytes() for array in arrays]
    for array in arrays:
        array.flags.writeable = False

    hyp = Hyp(degrees=degrees, flipud=1, fliplr=1, copy_paste=1)
    changed = []
    for seed in range(8):
        image, labels = mosaic(parts, 64, hyp, np.random.default_rng(seed), outlines)
        plain, _ = mosaic(parts, 64, replace(hyp, copy_paste=0), np.random.default_rng(seed), outlines)
        changed.append((image != plain).any())
    assert any(changed)  # something was pasted into what is seen
    rng = np.random.default_rng(0)
    assert draw_copies(outlined, triangles, 64, hyp, rng)
    pasted, joined, more = copy_paste(parts[0][0], outlined, triangles, [0, 2])
    assert len(joined) == 5 and more.outlined.all() and (pasted != parts[0][0]).any()
    letterbox_warp(*parts[0], (64, 64), hyp, rng, triangles)
    letterbox_warp(*parts[3], (64, 64), hyp, rng)
    square = parts[2]
    mixup(square, (image, labels), rng)
    flip(*square, hyp, rng)
    adjust_hsv(square[0], hyp, rng)
    assert [array.tobytes() for array in arrays] == before
