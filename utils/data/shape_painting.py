"""How the scenes of the built-in data set are painted: background, clutter, textures, noise.

Colors are BGR, blends are integers. Any change needs a new VERSION in shapes.py.
"""

import math

import cv2
import numpy as np

from utils.data.shape_scenes import OPAQUE, PIXEL, Scene, Shape, uniform

MIN_CONTRAST = 48  # grey levels between a shape's mean color and what is under it (largest channel difference)
LOW_CONTRAST_SHARE = 0.05  # shapes that have little more than the minimum
TEXTURE_STRENGTH = 50  # grey levels between the two colors of a texture, at most
CLUTTER = (2, 9)  # distractors per image: strokes, arcs, blobs
NOISE = 3  # grey levels, at most


def paint(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Draw a scene: background, clutter, shapes, noise.

    Args:
        scene: what to show.
        rng: the image's stream; what it gives to the background and the noise does not depend on the shapes.

    Returns:
        (H, W, 3) uint8, BGR.
    """
    height, width = scene.height, scene.width
    strength = int(rng.integers(NOISE + 1))
    # a sum of two uniform integers: close to Gaussian, and the same on every machine
    noise = rng.integers(-strength, strength + 1, (2, height, width), np.int16).sum(0, dtype=np.int16)
    image = _background(rng, height, width)
    for _ in range(int(rng.integers(CLUTTER[0], CLUTTER[1] + 1))):
        _clutter(rng, image)
    for shape in scene.shapes:
        _paint_shape(rng, image, shape)
    return _add(image, noise)


def _blend(color: np.ndarray, other: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Mix two colors (3,) by weights (H, W) uint8, 0 = all ``color``, 255 = all ``other``; (H, W, 3) uint8."""
    steps = np.arange(256)[:, None]
    table = (color.astype(np.int32) * (255 - steps) + other.astype(np.int32) * steps + 127) // 255
    return cv2.LUT(cv2.merge([weight] * 3), table.astype(np.uint8)[None])


def _add(image: np.ndarray, field: np.ndarray) -> np.ndarray:
    """Add (H, W) int16 grey levels to each channel of (H, W, 3) uint8, clipped."""
    return cv2.add(image, cv2.merge([field] * 3), dtype=cv2.CV_8U)


def _clip(field: np.ndarray) -> np.ndarray:
    return np.clip(field, 0, 255).astype(np.uint8)


def _ramp(rng: np.random.Generator, height: int, width: int, period: float) -> np.ndarray:
    """(H, W) int32 triangle wave 0 .. 256 in a random direction; ``period`` in pixels."""
    angle, phase = uniform(rng, (0, 2 * math.pi)), int(rng.integers(512))
    step = 512 * 256 / period
    a, b = round(step * math.cos(angle)), round(step * math.sin(angle))
    position = (np.arange(width, dtype=np.int32) * a + np.arange(height, dtype=np.int32)[:, None] * b) >> 8
    return np.abs(((position + phase) & 511) - 256)


def _mottle(rng: np.random.Generator, height: int, width: int, cell: float) -> np.ndarray:
    """(H, W) uint8 smooth random field with features of ``cell`` pixels."""
    grid = rng.integers(0, 256, (max(2, round(height / cell)), max(2, round(width / cell))), np.uint8)
    return cv2.resize(grid, (width, height), interpolation=cv2.INTER_LINEAR_EXACT)


def _pattern(rng: np.random.Generator, height: int, width: int, size: float) -> np.ndarray:
    """(H, W) uint8 weights of a texture: plain, shaded, striped, checkered, dotted or mottled."""
    kind = int(rng.integers(6))
    period = max(6.0, size * uniform(rng, (0.15, 0.40)))
    if kind == 0:
        return np.full((height, width), int(rng.integers(256)), np.uint8)
    if kind == 1:
        return _clip(_ramp(rng, height, width, 3 * size))
    if kind == 2:
        return _clip((_ramp(rng, height, width, period) - 128) * 4 + 128)
    if kind in (3, 4):
        one, other = _ramp(rng, height, width, period), _ramp(rng, height, width, period)
        checks = ((one - 128) * (other - 128) >> 4) + 128
        return _clip(checks if kind == 3 else (one + other - 320) * 4)
    return _mottle(rng, height, width, period)


def _color(rng: np.random.Generator, vivid: bool) -> np.ndarray:
    """A random color (3,) uint8; muted ones for backgrounds."""
    saturation, value = ((90, 240), (90, 250)) if vivid else ((10, 110), (50, 220))
    hsv = [rng.integers(180), rng.integers(*saturation), rng.integers(*value)]
    return cv2.cvtColor(np.array([[hsv]], np.uint8), cv2.COLOR_HSV2BGR)[0, 0]


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8: a gradient, mottled, with a faint pattern at times."""
    weight = _clip(_ramp(rng, height, width, uniform(rng, (700, 1600))))
    image = _blend(_color(rng, False), _color(rng, False), weight)
    if rng.random() < 0.7:
        image = _shift(image, _mottle(rng, height, width, uniform(rng, (30, 120))), int(rng.integers(20, 90)))
    if rng.random() < 0.3:
        image = _shift(image, _pattern(rng, height, width, uniform(rng, (50, 160))), int(rng.integers(10, 45)))
    return image


def _shift(image: np.ndarray, weight: np.ndarray, strength: int) -> np.ndarray:
    """Lighten and darken by a field of weights 0 .. 255; ``strength`` is the whole span in grey levels."""
    return _add(image, (weight.astype(np.int16) - 128) * strength >> 8)


def _clutter(rng: np.random.Generator, image: np.ndarray) -> None:
    """Draw one thing that is of no class: a stroke, a zigzag, an arc or a blob; in place."""
    height, width = image.shape[:2]
    color = _color(rng, bool(rng.random() < 0.5)).tolist()
    kind = int(rng.integers(4))
    x, y = int(rng.integers(width)), int(rng.integers(height))
    thickness = int(rng.integers(1, 5))
    if kind == 0:
        x2, y2 = int(rng.integers(width)), int(rng.integers(height))
        cv2.line(image, (x, y), (x2, y2), color, thickness, cv2.LINE_AA)
    elif kind == 1:
        steps = rng.integers(-45, 46, (int(rng.integers(3, 7)), 2))
        points = (np.array([x, y]) + np.cumsum(steps, 0)).astype(np.int32)
        cv2.polylines(image, [points], False, color, thickness, cv2.LINE_AA)
    elif kind == 2:
        axes = (int(rng.integers(10, 90)), int(rng.integers(10, 90)))
        start, sweep = int(rng.integers(360)), int(rng.integers(50, 170))
        cv2.ellipse(image, (x, y), axes, int(rng.integers(180)), start, start + sweep, color, thickness, cv2.LINE_AA)
    else:
        _blob(rng, image, x, y, color)


def _blob(rng: np.random.Generator, image: np.ndarray, x: int, y: int, color: list[int]) -> None:
    """Fill an irregular rounded outline; in place."""
    t = np.arange(48) * (2 * math.pi / 48)
    radius = np.ones(48)
    for k, strength in ((2, 0.28), (3, 0.22), (5, 0.14)):
        radius += strength * np.cos(k * t + uniform(rng, (0, 2 * math.pi)))
    size = uniform(rng, (6, 45))
    points = np.stack([x + size * radius * np.cos(t), y + size * radius * np.sin(t)], 1)
    cv2.fillPoly(image, [np.rint(points * 16).astype(np.int32)], color, cv2.LINE_AA, 4)


def _paint_shape(rng: np.random.Generator, image: np.ndarray, shape: Shape) -> None:
    """Paint a textured shape over the image; in place."""
    window = image[shape.window]
    texture = _texture(rng, np.array(cv2.mean(window, (shape.alpha > 0).astype(np.uint8))[:3]), shape)
    if rng.random() < 0.35:
        local = [points - np.array([shape.left, shape.top], np.int32) * PIXEL - PIXEL // 2 for points in shape.contours]
        shade = 0.45 if rng.random() < 0.7 else 1.6
        edge = np.clip(np.rint(np.array(cv2.mean(texture)[:3]) * shade), 0, 255).tolist()
        thickness = min(1 + min(shape.alpha.shape) // 24, 6)
        cv2.polylines(texture, local, True, edge, thickness, cv2.LINE_AA, 6)  # its outer half is masked away
    alpha = shape.alpha.astype(np.int32)[..., None]
    window[:] = (window * (OPAQUE - alpha) + texture * alpha + OPAQUE // 2) // OPAQUE


def _texture(rng: np.random.Generator, under: np.ndarray, shape: Shape) -> np.ndarray:
    """(h, w, 3) uint8 for a shape, whose mean color differs enough from ``under`` (3,), the mean of what it covers."""
    height, width = shape.alpha.shape
    pattern = _pattern(rng, height, width, float(max(height, width)))
    faint = rng.random() < LOW_CONTRAST_SHARE
    best, best_contrast = np.zeros((height, width, 3), np.uint8), -1.0
    for _ in range(12):
        color = np.clip(under + rng.integers(-60, 61, 3), 0, 255) if faint else _color(rng, True)
        change = rng.integers(-TEXTURE_STRENGTH, TEXTURE_STRENGTH + 1, 3) // (2 if faint else 1)
        texture = _blend(color, np.clip(color + change, 0, 255), pattern)
        contrast = float(np.abs(np.array(cv2.mean(texture, shape.alpha)[:3]) - under).max())
        if contrast > best_contrast:
            best, best_contrast = texture, contrast
        if best_contrast >= MIN_CONTRAST:
            break
    return best
