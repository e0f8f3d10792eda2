"""Whether anchors fit the labels, and anchors that fit them better.

Two sizes are compared by their worst side: the ratio min(w / aw, aw / w, h / ah, ah / h) in (0, 1]. In logarithms this
is a distance (of Chebyshev), so that a search needs no division.

Shape letters: M labels, L levels of the head, A anchors of a level, K = L x A anchors in all.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.core.heartbeat import beating

Floats = NDArray[np.float64]

GOOD_RECALL = 0.98  # best possible recall from which anchors are kept as they are
SCALES = (0.9, 1.1)  # training shows labels at other sizes; each image is looked at in a random one of these
TINY = 3.0  # pixels; smaller labels are hard to learn
LEAST = 2.0  # pixels; labels with both sides below it take no part in the search
SEARCHED = 10_000  # labels at most that the search looks at, drawn at random: more don't change what it finds
KMEANS_ROUNDS = 30
GENERATIONS = 1000
MUTATED, SPREAD, FACTORS = 0.9, 0.1, (0.3, 3.0)  # share of sides, sigma, and bounds of a mutation's factors


class Fit(NamedTuple):
    """How well anchors fit labels.

    Attributes:
        bpr: best possible recall: the share of labels that at least one anchor matches.
        aat: anchors above threshold: how many match a label on average.
        score: mean over labels of the best ratio, 0 where nothing matches; what the search makes large.
    """

    bpr: float
    aat: float
    score: float


def label_sizes(shapes: NDArray[np.int32], offsets: NDArray[np.int64], rows: NDArray[np.float32], imgsz: int) -> Floats:
    """Widths and heights of all labels in images whose longer side is ``imgsz``.

    Args:
        shapes: (n, 2) [height, width] of the originals, pixels.
        offsets: (n + 1,); image i has the rows offsets[i]:offsets[i + 1].
        rows: (M, 5) [class, cx, cy, w, h] cxcywhn.
        imgsz: pixels.

    Returns:
        (M, 2) pixels; (0, 2) without labels.
    """
    resized = shapes[:, ::-1] * (imgsz / shapes.max(axis=1, keepdims=True))  # (n, 2) [width, height]
    return rows[:, 3:5] * np.repeat(resized, np.diff(offsets), axis=0)


def vary(sizes: Floats, offsets: NDArray[np.int64], seed: int) -> Floats:
    """Scale the labels of each image by a random factor of 0.9 to 1.1, the same for the same seed."""
    factors = np.random.default_rng(seed).uniform(*SCALES, len(offsets) - 1)
    return sizes * np.repeat(factors, np.diff(offsets))[:, None]


def measure(anchors: Floats, sizes: Floats, anchor_t: float) -> Fit:
    """Compare anchors with labels, with the rule by which the loss matches them.

    Args:
        anchors: (L, A, 2) or (K, 2) widths and heights, pixels.
        sizes: (M, 2) likewise; M > 0.
        anchor_t: sides up to this many times another match it.
    """
    logs, limit = np.log(sizes), np.log(anchor_t)
    nearest = np.full(len(sizes), np.inf)
    matches = 0
    for anchor in np.log(anchors.reshape(-1, 2)):  # one at a time: there may be millions of labels
        distance = np.abs(logs - anchor).max(axis=1)
        np.minimum(nearest, distance, out=nearest)
        matches += int((distance < limit).sum())
    matched = nearest < limit
    return Fit(float(matched.mean()), matches / len(sizes), float(np.where(matched, np.exp(-nearest), 0.0).mean()))


def search(sizes: Floats, levels: int, per_level: int, anchor_t: float, seed: int) -> Floats:
    """Find anchors for labels: k-means, then random mutations of which the better ones stay.

    Args:
        sizes: (M, 2) widths and heights, pixels; M > 0.
        levels: L.
        per_level: A.
        anchor_t: see ``measure``.
        seed: equal seeds find equal anchors.

    Returns:
        (L, A, 2) pixels, two decimals, smaller areas first.
    """
    rng = np.random.default_rng(seed)
    large = sizes[(sizes >= LEAST).any(axis=1)]
    sizes = large if len(large) else sizes
    if len(sizes) > SEARCHED:
        sizes = sizes[rng.choice(len(sizes), SEARCHED, replace=False)]
    anchors = _evolve(_kmeans(sizes, levels * per_level, rng), sizes, anchor_t, rng)
    anchors = np.maximum(anchors.round(2), 0.01)
    # By area, and by width where that is equal, so that the order never depends on what came before.
    return anchors[np.lexsort((anchors[:, 0], anchors.prod(axis=1)))].reshape(levels, per_level, 2)


def _kmeans(sizes: Floats, k: int, rng: np.random.Generator) -> Floats:
    """Lloyd's algorithm on whitened sizes; (K, 2) pixels, maybe with repetitions where there are few labels."""
    spread = sizes.std(axis=0)
    spread[spread == 0] = 1.0
    points = sizes / spread
    distinct = np.unique(points, axis=0)
    if len(distinct) <= k:  # every size is a center; the rest are like one of them, larger or smaller
        more = distinct[rng.integers(len(distinct), size=k - len(distinct))]
        return np.concatenate([distinct, more * rng.uniform(0.5, 2.0, more.shape)]) * spread
    centers = distinct[rng.choice(len(distinct), k, replace=False)]
    for _ in beating(range(KMEANS_ROUNDS)):
        distances = ((points[:, None] - centers) ** 2).sum(axis=2)  # (M, K)
        owner = distances.argmin(axis=1)
        counts = np.bincount(owner, minlength=k)
        sums = np.stack([np.bincount(owner, points[:, side], k) for side in range(2)], axis=1)
        centers = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centers)
    return centers * spread


def _evolve(anchors: Floats, sizes: Floats, anchor_t: float, rng: np.random.Generator) -> Floats:
    """Multiply sides of anchors by random factors, again and again, and keep what fits better; (K, 2) pixels."""
    width, height = np.log(sizes).T[:, :, None]  # (M, 1) each
    limit = np.log(anchor_t)

    def score(logs: Floats) -> float:
        nearest = np.maximum(np.abs(width - logs[:, 0]), np.abs(height - logs[:, 1])).min(axis=1)
        return float(np.exp(-nearest[nearest < limit]).sum())

    best = np.log(anchors)
    best_score = score(best)
    for _ in beating(range(GENERATIONS)):
        factors = np.clip(1 + SPREAD * rng.standard_normal(best.shape), *FACTORS)
        candidate = best + np.where(rng.random(best.shape) < MUTATED, np.log(factors), 0.0)
        candidate_score = score(candidate)
        if candidate_score > best_score:
            best, best_score = candidate, candidate_score
    return np.exp(best)
