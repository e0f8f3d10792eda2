"""Counted, not timed: what passes between the ranks in an epoch, and how often the host waits for the device.

Rules I2 and I7, and R5, of which the last counts who moves averaged weights.
"""

from collections import Counter
from itertools import pairwise

import pytest

from tests.dist.counted_epoch import Counted, MicroBatch, run_counted
from tests.runs import flags, make_data

IMAGES, FEWER_IMAGES, BATCH, RANKS = 42, 11, 4, 2
BATCHES, ACCUMULATE = 11, 2  # the last batch of the epoch is a window of its own
LOG_POINTS = (9, 10)  # every tenth batch and the last one
EPOCH = 40  # past the warm-up, which starts with a step at every batch
COUNTS = ("all_reduce", 9 + 3)  # of each loss and level; and whether to stop, to save, and where each rank is
LOSSES = ("all_reduce", 4)  # 3 losses and their weight
COUNT_BYTES, LOSS_BYTES = 8, 8  # of a number


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Counted]]:
    """What each rank saw, with SyncBN off and on, and off with compressed gradients."""
    folder = tmp_path_factory.mktemp("counts")
    lines = []
    all_data = {images: make_data(folder / f"data{images}", images) for images in (IMAGES, FEWER_IMAGES)}
    kinds = {
        "off": ("--no-sync-bn", IMAGES),
        "on": ("--sync-bn", FEWER_IMAGES),
        "compressed": ("--no-sync-bn --grad-compress bf16", FEWER_IMAGES),
    }
    for more, images in kinds.values():
        data = all_data[images]
        batches = f"--batch {BATCH} --nbs {BATCH * ACCUMULATE} --epochs {EPOCH + 2}"
        lines.append(flags(data, folder / "runs", f"{batches} {more}"))
    return dict(zip(kinds, run_counted(lines, RANKS, EPOCH, folder, timeout=480), strict=True))


def stepped(rank: Counted) -> list[bool]:
    """Whether each batch ended with an optimizer step."""
    steps = [batch.step for batch in rank.batches] + [rank.steps]
    return [after > before for before, after in pairwise(steps)]


def test_windows(counted: dict[str, list[Counted]]) -> None:
    for rank, batches in [(rank, BATCHES) for rank in counted["off"]] + [(rank, 3) for rank in counted["on"]]:
        assert stepped(rank) == [k % ACCUMULATE == ACCUMULATE - 1 or k == batches - 1 for k in range(batches)]


def test_collectives_of_a_micro_batch(counted: dict[str, list[Counted]]) -> None:
    """One for the counts; gradients once in a window, one for each bucket; losses at log points; no other.

    ultralytics/yolov5 sends gradients after every micro-batch; ultralytics/ultralytics#24410 has buffers with every
    forward pass.
    """
    for rank in counted["off"]:
        assert sum(rank.buckets) == rank.parameters
        assert len(rank.buckets) > 1
        for k, (batch, step) in enumerate(zip(rank.batches, stepped(rank), strict=True)):
            expected = [COUNTS] + [("all_reduce", size) for size in rank.buckets] * step
            expected += [LOSSES] * (k in LOG_POINTS) + [LOSSES] * (k == BATCHES - 1)  # the epoch's own, after the last
            assert batch.calls == expected, k


@pytest.mark.parametrize(("kind", "gradient_bytes"), [("off", 4), ("compressed", 2)])
def test_bytes_of_a_window(counted: dict[str, list[Counted]], kind: str, gradient_bytes: int) -> None:
    """Once the gradients, in 4 bytes a number or 2, and for each micro-batch the counts; nothing else but losses."""
    for rank in counted[kind]:
        batches = len(rank.batches)
        for k, (batch, step) in enumerate(zip(rank.batches, stepped(rank), strict=True)):
            looks = ((k + 1) % 10 == 0 or k == batches - 1) + (k == batches - 1)
            small = COUNTS[1] * COUNT_BYTES + looks * LOSSES[1] * LOSS_BYTES
            assert sum(batch.sent) == small + step * gradient_bytes * rank.parameters, k
            of_gradients = [sent for sent, call in zip(batch.sent, batch.calls, strict=True) if call[1] in rank.buckets]
            assert of_gradients == [gradient_bytes * size for size in rank.buckets] * step


def test_buckets_are_small(counted: dict[str, list[Counted]]) -> None:
    """Most gradients are on their way before the backward pass is over: no bucket has much more than 4 MiB."""
    for rank in counted["off"]:
        assert rank.parameters * 4 > 2**22
        assert max(rank.buckets) * 4 < 1.25 * 2**22


def test_counts_are_summed_while_the_network_runs(counted: dict[str, list[Counted]]) -> None:
    """They are sent before the first layer that needs the other ranks."""
    for rank in counted["on"]:
        assert all(batch.calls[0] == COUNTS for batch in rank.batches)


def test_collectives_with_sync_bn(counted: dict[str, list[Counted]]) -> None:
    """One more for each layer forward, and one backward; everything else is as without."""
    for rank in counted["on"]:
        assert rank.sync_layers == 57
        for batch, step, last in zip(rank.batches, stepped(rank), (False, False, True), strict=True):
            others = 1 + len(rank.buckets) * step + 2 * last
            kinds = [kind for kind, _ in batch.calls]
            assert kinds.count("all_gather") == 2 * rank.sync_layers
            assert kinds.count("all_reduce") == others
            assert len(kinds) == 2 * rank.sync_layers + others


def test_all_ranks_call_in_the_same_order(counted: dict[str, list[Counted]]) -> None:
    """LibreYOLO/libreyolo#567, ultralytics/yolov5#3284: no collective on one side only, no one-sided forward pass."""
    for first, second in counted.values():
        for one, other in zip(first.batches, second.batches, strict=True):
            assert in_order(one, first) == in_order(other, second)
            assert Counter(one.calls) == Counter(other.calls)


def in_order(batch: MicroBatch, rank: Counted) -> list[tuple[str, int]]:
    """Collectives but for gradients: several of those are on their way at once, and their start is the network's."""
    return [(kind, size) for kind, size in batch.calls if size not in rank.buckets]


def test_the_host_does_not_wait_between_log_points(counted: dict[str, list[Counted]]) -> None:
    """On a GPU every read of a tensor as a number is a wait. Two are there on the CPU only, where there is none.

    `ModelEMA.update` reads its weight once for each step, and SyncBatchNorm (of Gloo) its number of values.
    """
    for kind, ranks in counted.items():
        for rank in ranks:
            on_cpu = rank.sync_layers if kind == "on" else 0
            expected = [on_cpu + step for step in stepped(rank)]
            assert [batch.reads for batch in rank.batches] == expected


def test_averaged_weights_live_on_rank_0(counted: dict[str, list[Counted]]) -> None:
    """R5: elsewhere they stay as they are until rank 0's come; all then have the same (Tencent/YOLO-Master#154)."""
    for main, other in counted.values():
        assert main.weights[0] != main.weights[1] == main.weights[2]
        assert other.weights[0] == other.weights[1] != other.weights[2]
        assert main.weights[0] == other.weights[0]
        assert main.weights[2] == other.weights[2]


def test_statistics_are_those_of_all_ranks(counted: dict[str, list[Counted]]) -> None:
    """Without SyncBN each rank's are its own in an epoch, and joined before they are used (LibreYOLO/libreyolo#531)."""
    for kind, (main, other) in counted.items():
        assert main.raw_buffers[0] == other.raw_buffers[0] and main.buffers[0] == other.buffers[0]
        assert (main.raw_buffers[1] == other.raw_buffers[1]) == (kind == "on")
        assert (main.buffers[1] == other.buffers[1]) == (kind == "on")
        assert main.raw_buffers[2] == other.raw_buffers[2] and main.buffers[2] == other.buffers[2]
