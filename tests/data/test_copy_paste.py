"""Outlines from label files to training samples: the index, boxes of what is seen, copy-paste."""

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.config.recipe import Hyp
from utils.data.augmentations import copy_paste, draw_copies, letterbox_warp, mosaic
from utils.data.dataset import DetectionDataset
from utils.data.image_cache import ImageCache
from utils.data.index import LabelIndex, build_index
from utils.data.polygons import Polygons, join, paint, visible_boxes
from utils.data.sampler import SampleRequest
from utils.data.warping import Geometry, Tile, place_labels, warp_labels, warp_tiles

STILL = Hyp(degrees=0, translate=0, scale=0, shear=0, perspective=0, hsv_h=0, hsv_s=0, hsv_v=0, fliplr=0)
TRIANGLE = [(0.1, 0.2), (0.5, 0.2), (0.1, 0.8)]


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))


def packed(*outlines: Sequence[tuple[float, float]]) -> Polygons:
    """Outlines of labels, an empty one for a label that has none."""
    points = [np.array(outline, np.float32).reshape(-1, 2) for outline in outlines]
    return Polygons(np.concatenate(points), np.cumsum([0, *map(len, points)]))


def boxed(outlines: Polygons) -> np.ndarray:
    """(n, 5) labels of class 0, 1, 2... around outlines that all labels have."""
    rows = [[k, *outlines.of(k).min(0), *outlines.of(k).max(0)] for k in range(len(outlines.offsets) - 1)]
    return np.array(rows, np.float32)


def star(rng: np.random.Generator, center: tuple[float, float], radius: float, count: int) -> list[tuple[float, float]]:
    """A polygon with dents, without crossings."""
    angles = np.sort(rng.uniform(0, 2 * np.pi, count))
    lengths = radius * rng.uniform(0.2, 1, count)
    return [(center[0] + r * np.cos(a), center[1] + r * np.sin(a)) for a, r in zip(angles, lengths, strict=True)]


# --- The index -------------------------------------------------------------------------------------------------------


def row(category: int, outline: Sequence[tuple[float, float]]) -> str:
    return " ".join(map(str, (category, *(value for point in outline for value in point)))) + "\n"


def make_set(folder: Path, labels: dict[str, str], side: tuple[int, int] = (40, 60)) -> Path:
    """Images of noise, one for each label file, and their folder."""
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    for seed, (name, text) in enumerate(labels.items()):
        image = np.random.default_rng(seed).integers(0, 255, (*side, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"images/{name}.png"), image)
        (folder / f"labels/{name}.txt").write_text(text)
    return folder / "images"


BOX = "1 0.5 0.5 0.2 0.2\n"


def test_index_keeps_the_polygons_of_rows_that_stay(tmp_path: Path) -> None:
    """Rows that a rule takes out take their polygons with them; the others keep theirs, in order."""
    square = [(0.6, 0.6), (0.9, 0.6), (0.9, 0.9), (0.6, 0.9)]
    outside = [(0.1, 0.1), (1.4, 0.1), (0.1, 0.5)]
    beyond = [(0.2, 0.2), (1.005, 0.2), (0.2, 0.5)]  # within the tolerance: clipped
    images = make_set(
        tmp_path,
        {
            "a": BOX + row(0, TRIANGLE) + row(0, outside) + row(2, square) + row(2, square),
            "b": BOX,
            "c": row(1, outside) + row(1, beyond),
        },
    )
    index = build_index([images], 3)
    for one in (index, build_index([images], 3), pickle.loads(pickle.dumps(index))):  # mapped from the cache file, too
        outlines = one.outlines(0)
        assert outlines is not None and outlines.outlined.tolist() == [False, True, True]
        np.testing.assert_allclose(outlines.of(1), TRIANGLE, rtol=1e-6)
        np.testing.assert_allclose(outlines.of(2), square, rtol=1e-6)
        np.testing.assert_allclose(one.labels(0)[1], [0, 0.3, 0.5, 0.4, 0.6], rtol=1e-6)
        assert one.outlines(1) is None
        clipped = one.outlines(2)
        assert clipped is not None and len(one.labels(2)) == 1
        np.testing.assert_allclose(clipped.of(0), [(0.2, 0.2), (1.0, 0.2), (0.2, 0.5)], rtol=1e-6)


def test_index_of_boxes_holds_no_polygons(tmp_path: Path) -> None:
    index = build_index([make_set(tmp_path, {"a": BOX, "b": ""})], 3)
    assert index.points is None and index.polygon_offsets is None and index.outlines(0) is None


def test_index_of_many_chunks_is_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are scanned by several processes and joined; outlines stay with their rows."""
    monkeypatch.setattr("utils.data.scan.CHUNK", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    labels = {f"{k:02}": row(0, [(0.1, 0.1), (0.1 + 0.05 * k, 0.1), (0.1, 0.5)]) + BOX * (k % 2) for k in range(1, 12)}
    index = build_index([make_set(tmp_path, labels)], 3)
    for k in range(1, 12):
        outlines = index.outlines(k - 1)
        assert outlines is not None and len(outlines.offsets) == 2 + k % 2
        assert outlines.offsets[0] == 0 and len(outlines.points) == outlines.offsets[-1]
        np.testing.assert_allclose(outlines.of(0)[1, 0], 0.1 + 0.05 * k, rtol=1e-5)


# --- What is seen of an outline --------------------------------------------------------------------------------------


def seen_by_pixels(points: np.ndarray, width: int, height: int, zoom: int = 8) -> list[float]:
    """Box of a polygon within a window, from a fine raster."""
    pad = 200 * zoom
    mask = np.zeros((height * zoom + 2 * pad, width * zoom + 2 * pad), np.uint8)
    cv2.fillPoly(mask, [np.round(points * zoom + pad).astype(np.int32)], 1)
    rows, columns = np.nonzero(mask[pad : pad + height * zoom, pad : pad + width * zoom])
    if not len(rows):
        return [0, 0, 0, 0]
    return [columns.min() / zoom, rows.min() / zoom, (columns.max() + 1) / zoom, (rows.max() + 1) / zoom]


def test_visible_boxes_are_those_of_the_pixels() -> None:
    rng = np.random.default_rng(0)
    outlines = [star(rng, (rng.uniform(-20, 70), rng.uniform(-20, 60)), 60, int(rng.integers(3, 9))) for _ in range(60)]
    got = visible_boxes(packed(*outlines, [])._replace(), 50, 40)
    assert len(got) == 60
    expected = np.array([seen_by_pixels(np.array(outline), 50, 40) for outline in outlines])
    np.testing.assert_allclose(got, expected, atol=0.4)
    assert 5 < (expected == 0).all(1).sum() + (expected == [0, 0, 50, 40]).all(1).sum() < 60  # of every kind


def test_visible_boxes_at_the_edges() -> None:
    around = [(-10, -10), (60, -10), (60, 50), (-10, 50)]  # the window lies in it: no side is seen, all corners are in
    corner = [(-10, -10), (20, -10), (-10, 20)]
    away = [(60, 5), (90, 5), (90, 30)]
    diagonal = [(40, -20), (90, 30), (90, -20)]  # its box meets the window's, itself misses the middle of it
    along = [(0, 0), (50, 0), (50, 10), (0, 10)]
    boxes = visible_boxes(packed(around, [], corner, away, diagonal, along), 50, 40)
    expected = [[0, 0, 50, 40], [0, 0, 10, 10], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 50, 10]]
    np.testing.assert_allclose(boxes, expected, atol=1e-9)
    assert visible_boxes(packed([]), 50, 40).shape == (0, 4)


@pytest.mark.parametrize("degrees", [0.0, 30.0])
def test_warped_boxes_follow_the_outline(degrees: float) -> None:
    """A turned triangle has a smaller box than its turned box; a tenth of a percent may be seen of it."""
    angle = np.radians(degrees)
    matrix = np.array([[np.cos(angle), np.sin(angle), 0], [-np.sin(angle), np.cos(angle), 30], [0, 0, 1]])
    outlines = packed([(10, 10), (50, 10), (10, 40)])
    labels = boxed(outlines)
    turned = outlines.points @ matrix[:2, :2].T + matrix[:2, 2]
    got = warp_labels(labels, Geometry(matrix, 1.0), (100, 100), outlines)
    np.testing.assert_allclose(got[0, 1:], [*turned.min(0), *turned.max(0)], rtol=1e-5)
    if degrees:
        plain = warp_labels(labels, Geometry(matrix, 1.0), (100, 100))
        assert (plain[0, 3:] - plain[0, 1:3]).prod() > 1.2 * (got[0, 3:] - got[0, 1:3]).prod()


def test_little_is_enough_of_an_outline() -> None:
    """The kept share of the area is 0.01 with an outline, 0.1 without one."""
    square = [(0, 0), (40, 0), (40, 40), (0, 40)]
    outlines = packed(square, [])
    labels = np.array([[0, 0, 0, 40, 40], [1, 0, 0, 40, 40]], np.float32)
    for shift, kept in ((-30, [0, 1]), (-37, [0])):
        move = Geometry(np.array([[1.0, 0, shift], [0, 1, 0], [0, 0, 1]]), 1.0)
        assert warp_labels(labels, move, (100, 100), outlines)[:, 0].tolist() == kept
    sliver = Geometry(np.array([[1.0, 0, -37], [0, 1, -37.5], [0, 0, 1]]), 1.0)  # 3 x 2.5 of 1600 pixels
    assert not len(warp_labels(labels, sliver, (100, 100), outlines))


def test_labels_of_tiles_with_and_without_outlines() -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    outlines = packed([(0, 0), (10, 0), (0, 10)])
    labels = boxed(outlines)
    tiles = [
        Tile(image, np.zeros((0, 5), np.float32), 0, 0),
        Tile(image, labels, 5, -4, outlines),
        Tile(image, labels, 30, 20),
    ]
    placed, joined = place_labels(tiles, (40, 60))
    assert joined is not None and joined.outlined.tolist() == [True, False]
    assert placed[:, 1:].tolist() == [[5, 0, 15, 6], [30, 20, 40, 30]]
    assert joined.points.tolist() == [[5, 0], [15, 0], [5, 6]]  # cut off at the canvas, as boxes are
    assert join([None, None], [2, 0]) is None
    assert place_labels(tiles[::2], (40, 60))[1] is None


# --- Copy-paste ------------------------------------------------------------------------------------------------------


def scene() -> tuple[np.ndarray, np.ndarray, Polygons]:
    """A red triangle at the left, a green square at the right where the mirrored triangle would come; grey noise."""
    image = np.random.default_rng(0).integers(90, 110, (100, 200, 3), dtype=np.uint8)
    outlines = packed([(10, 10), (50, 10), (10, 50)], [(20, 60), (40, 60), (40, 90), (20, 90)], [])
    labels = np.concatenate([boxed(Polygons(outlines.points, outlines.offsets[:3])), [[2, 145, 5, 195, 55]]])
    cv2.fillPoly(image, [outlines.of(0).astype(np.int32)], (0, 0, 250))
    cv2.fillPoly(image, [outlines.of(1).astype(np.int32)], (250, 0, 0))
    image[5:55, 145:195] = (0, 250, 0)
    return image, labels.astype(np.float32), outlines


def test_objects_without_room_are_not_copied() -> None:
    """The triangle would cover more than 30 % of the green box; the blue one has room."""
    image, labels, outlines = scene()
    chosen = draw_copies(labels, outlines, 200, Hyp(copy_paste=1.0), np.random.default_rng(0))
    assert chosen == [1]
    pasted, more, drawn = copy_paste(image, labels, outlines, chosen)
    assert more[3].tolist() == [1, 160, 60, 180, 90]
    assert sorted(drawn.of(3).tolist()) == [[160, 60], [160, 90], [180, 60], [180, 90]]
    np.testing.assert_array_equal(more[:3], labels)
    expected = image.copy()
    expected[60:90, 160:180] = image[60:90, 20:40][:, ::-1]
    np.testing.assert_array_equal(pasted[60:90, 160:180], expected[60:90, 160:180])
    np.testing.assert_array_equal(pasted[:59], image[:59])
    np.testing.assert_array_equal(pasted[:, :158], image[:, :158])
    assert image[70, 170].max() < 120  # the image given is not written to


def test_only_the_outline_is_pasted() -> None:
    image, labels, outlines = scene()
    alone = Polygons(outlines.points[:3], outlines.offsets[:2])
    chosen = draw_copies(labels[:1], alone, 200, Hyp(copy_paste=1.0), np.random.default_rng(0))
    pasted, more, drawn = copy_paste(image, labels[:1], alone, chosen)
    assert more[1].tolist() == [0, 150, 10, 190, 50]
    mask = np.zeros((100, 200), np.uint8)
    paint(mask, drawn.of(1))
    mask[:, 190:] = mask[50:] = 0  # nothing outside of the box, where a side may touch a pixel
    np.testing.assert_array_equal(pasted[mask > 0], image[:, ::-1][mask > 0])
    np.testing.assert_array_equal(pasted[mask == 0], image[mask == 0])
    assert 700 < mask.sum() < 900  # of the triangle's 800; its box has 1600


def test_covering_less_than_a_third_is_allowed() -> None:
    """Share of the other box, not of the copy: 20 of 100 columns are covered, or 40."""
    outlines = packed([(0, 0), (40, 0), (40, 40), (0, 40)], [])
    for covered, expected in ((20, [0]), (29, [0]), (31, []), (40, [])):
        labels = np.array([[0, 0, 0, 40, 40], [1, 60 + covered, 0, 160 + covered, 40]], np.float32)
        assert draw_copies(labels, outlines, 200, Hyp(copy_paste=1.0), np.random.default_rng(0)) == expected, covered


def test_a_share_of_the_objects_is_tried() -> None:
    outlines = packed(*[[(0, 20 * k), (10, 20 * k), (10, 20 * k + 10)] for k in range(10)], [])
    labels = np.concatenate([boxed(Polygons(outlines.points, outlines.offsets[:11])), [[9, 50, 0, 60, 9]]])
    for share, count in ((0.0, 0), (0.04, 0), (0.3, 3), (1.0, 10)):
        rng = np.random.default_rng(1)
        chosen = draw_copies(labels.astype(np.float32), outlines, 300, Hyp(copy_paste=share), rng)
        assert len(set(chosen)) == count and 10 not in chosen
        assert rng.random() == np.random.default_rng(1).random(11)[10]  # as many draws, whatever the share
    picks = {
        tuple(sorted(draw_copies(labels, outlines, 300, Hyp(copy_paste=0.2), np.random.default_rng(s))))
        for s in range(9)
    }
    assert len(picks) > 3


def test_copies_leave_room_for_each_other() -> None:
    """Two objects at one place: the second copy would hide the first."""
    square = [(0, 0), (20, 0), (20, 20), (0, 20)]
    outlines = packed(square, square)
    assert len(draw_copies(boxed(outlines), outlines, 100, Hyp(copy_paste=1.0), np.random.default_rng(0))) == 1


def parts(side: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[Polygons | None]]:
    """Four images, each with a bright triangle in a corner of it, one without a label."""
    samples, outlines = [], []
    for k in range(4):
        image = np.full((side, side, 3), 60 + k, np.uint8)
        drawn = packed([(4, 4), (24, 4), (4, 30)]) if k != 2 else None
        labels = np.zeros((0, 5), np.float32) if drawn is None else boxed(drawn)
        if drawn is not None:
            cv2.fillPoly(image, [drawn.points.astype(np.int32)], (255, 255, 255))
        samples.append((image, labels))
        outlines.append(drawn)
    return samples, outlines


def test_mosaic_pastes_before_it_warps() -> None:
    """Labels, also of copies, lie around bright pixels; without copy-paste the picture is that without outlines."""
    samples, outlines = parts(64)
    plain = mosaic(samples, 64, STILL, np.random.default_rng(3))
    same = mosaic(samples, 64, STILL, np.random.default_rng(3), outlines)
    np.testing.assert_array_equal(plain[0], same[0])
    more = 0
    for seed in range(12):
        image, labels = mosaic(samples, 64, Hyp(scale=0.3, copy_paste=1.0), np.random.default_rng(seed), outlines)
        _, few = mosaic(samples, 64, Hyp(scale=0.3), np.random.default_rng(seed), outlines)
        more += len(labels) - len(few)
        for _, x1, y1, x2, y2 in labels.tolist():
            bright = image[:, :, 0] > 150
            rows, columns = np.nonzero(bright[int(y1) : int(np.ceil(y2)), int(x1) : int(np.ceil(x2))])
            assert len(rows), "a label without its object"
            assert np.ptp(columns) >= x2 - x1 - 4 and np.ptp(rows) >= y2 - y1 - 4
    assert more >= 6


def test_letterbox_takes_outlines() -> None:
    (image, labels), outlines = parts(64)[0][0], parts(64)[1][0]
    hyp = Hyp(degrees=45, scale=0, translate=0)
    areas = []
    for seed in range(8):
        with_outline = letterbox_warp(image, labels, (96, 96), hyp, np.random.default_rng(seed), outlines)
        without = letterbox_warp(image, labels, (96, 96), hyp, np.random.default_rng(seed))
        np.testing.assert_array_equal(with_outline[0], without[0])
        areas.append([(found[:, 3:] - found[:, 1:3]).prod(1)[0] for _, found in (with_outline, without)])
    assert all(known < unknown for known, unknown in areas)
    assert min(known / unknown for known, unknown in areas) < 0.8


def test_warp_of_an_outline_behind_the_viewer_is_finite() -> None:
    outlines = packed([(0, 0), (90, 0), (90, 90), (0, 90)])
    strong = Geometry(np.array([[1.0, 0, 50], [0, 1, 50], [0.02, 0.02, -0.5]]), 1.0)
    image, labels = warp_tiles(
        [Tile(np.zeros((90, 90, 3), np.uint8), boxed(outlines), 0, 0, outlines)], strong, (90, 90), (80, 80)
    )
    assert np.isfinite(labels).all() and image.shape == (80, 80, 3)


# --- The data set ----------------------------------------------------------------------------------------------------


def make_dataset(index: LabelIndex, hyp: Hyp) -> DetectionDataset:
    return DetectionDataset(index, ImageCache(), hyp, 64, seed=0)


def test_samples_of_polygon_labels(tmp_path: Path) -> None:
    """Equal requests, equal samples; copies appear with copy_paste and only where polygons are given."""
    labels = {"a": row(0, TRIANGLE), "b": row(1, TRIANGLE) + BOX, "c": BOX, "d": ""}
    index = build_index([make_set(tmp_path, labels)], 3)
    requests = [SampleRequest(0, k, k % 4, 64, 64) for k in range(16)]
    plain, pasted = make_dataset(index, Hyp()), make_dataset(index, Hyp(copy_paste=1.0))
    counts = []
    for request in requests:
        first, again, without = pasted[request], pasted[request], plain[request]
        np.testing.assert_array_equal(first.image, again.image)
        np.testing.assert_array_equal(first.labels, again.labels)
        assert ((first.labels[:, 1:] >= 0) & (first.labels[:, 1:] <= 1)).all()
        counts.append(len(first.labels) - len(without.labels))
    assert sum(counts) > 4

    boxes = build_index([make_set(tmp_path / "boxes", {"a": BOX, "b": BOX})], 3)
    for k in range(4):
        request = SampleRequest(0, k, k % 2, 64, 64)
        one, other = (make_dataset(boxes, hyp)[request] for hyp in (Hyp(), Hyp(copy_paste=1.0)))
        np.testing.assert_array_equal(one.image, other.image)
        np.testing.assert_array_equal(one.labels, other.labels)


def test_validation_ignores_outlines(tmp_path: Path) -> None:
    index = build_index([make_set(tmp_path, {"a": row(0, TRIANGLE)})], 3, logger=logging.getLogger("lockstep"))
    sample = DetectionDataset(index, ImageCache(), None, 64)[SampleRequest(0, 0, 0, 64, 64)]
    np.testing.assert_allclose(sample.labels[0, [1, 3]], [0.3, 0.4], rtol=1e-5)
