"""Notes on skipped windows: the right steps and images, however windows and looks fall together."""

import random
from collections.abc import Iterable

import torch

from utils.run.progress import LOOK_EVERY
from utils.training.bad_batches import LONGEST, SkipLog, Skipped

FINITE = torch.tensor([0.5, 1.0, 0.0])
NAN, INF = torch.tensor([0.5, float("nan"), 0.0]), torch.tensor([0.5, 1.0, float("inf")])


def images_of(batch: int) -> list[int]:
    """Two images of each micro-batch, different ones."""
    return [2 * batch, 2 * batch + 1]


class Training:
    """Notes micro-batches of windows as a loop does, and looks every so often."""

    def __init__(self, look_every: int) -> None:
        self.log = SkipLog(torch.device("cpu"))
        self.look_every, self.batch, self.step = look_every, 0, 0
        self.found: list[Skipped] = []
        self.looks: list[int] = []  # how many windows each look found

    def window(self, losses: Iterable[torch.Tensor], *, skipped: bool) -> None:
        losses = list(losses)
        for number, own in enumerate(losses, 1):
            self.log.add_batch(self.step, images_of(self.batch), own)
            self.batch += 1
            if number == len(losses):
                self.log.add_window(self.step, torch.tensor(float(skipped)))
                self.step += 1
            if self.batch % self.look_every == 0:
                self.look()

    def look(self) -> None:
        found = self.log.read()
        self.looks.append(len(found))
        self.found += found


def test_the_spoiled_batches_of_a_skipped_window_are_named() -> None:
    run = Training(LOOK_EVERY)
    run.window([FINITE, FINITE], skipped=False)
    run.window([FINITE, NAN, FINITE, INF], skipped=True)
    run.window([FINITE], skipped=False)
    run.look()
    assert run.found == [Skipped(1, [*images_of(3), *images_of(5)])]
    run.look()
    assert len(run.found) == 1


def test_a_gradient_alone_names_no_image() -> None:
    """Losses may be finite and their gradients not."""
    run = Training(LOOK_EVERY)
    run.window([FINITE, FINITE], skipped=True)
    run.look()
    assert run.found == [Skipped(0, [])]


def test_windows_in_a_row() -> None:
    """Counted across looks, up to the last window that a look saw."""
    run = Training(LOOK_EVERY)
    for skipped, expected in ((True, 1), (True, 2), (False, 0), (True, 1)):
        run.window([FINITE], skipped=skipped)
        run.look()
        assert run.log.in_row == expected
    run.look()
    assert run.log.in_row == 1
    for _ in range(LOOK_EVERY):
        run.window([NAN], skipped=True)
    run.look()
    assert run.log.in_row == 1 + LOOK_EVERY


def test_a_window_longer_than_the_look_interval() -> None:
    """It is told of when it is over, with images from before earlier looks, and the next one starts clean."""
    run = Training(look_every=10)
    run.window([NAN if number in (2, 23) else FINITE for number in range(25)], skipped=True)
    run.window([FINITE] * 25, skipped=True)
    assert run.looks == [0, 0, 1, 0, 1]
    assert run.found == [Skipped(0, [*images_of(2), *images_of(23)]), Skipped(1, [])]


def test_windows_of_as_many_batches_as_are_remembered() -> None:
    """One image a batch and 64 a step: windows and looks never fall together."""
    run = Training(look_every=10)
    for number in range(4):
        run.window([NAN if place == 63 else FINITE for place in range(64)], skipped=number > 0)
    run.look()
    assert run.found == [Skipped(step, images_of(64 * step + 63)) for step in (1, 2, 3)]


def test_a_window_longer_than_is_remembered() -> None:
    run = Training(look_every=10)
    run.window([FINITE] * 7, skipped=False)
    run.window([NAN if place in (0, 150, 199) else FINITE for place in range(200)], skipped=True)
    run.window([FINITE] * 3, skipped=False)
    run.look()
    assert run.found == [Skipped(1, [image for place in (0, 150, 199) for image in images_of(7 + place)])]


def test_a_window_with_more_spoiled_batches_than_are_remembered() -> None:
    run = Training(look_every=10)
    run.window([NAN] * 100, skipped=True)
    run.window([FINITE, NAN], skipped=True)
    run.look()
    first, second = run.found
    assert first == Skipped(0, [image for batch in range(LONGEST) for image in images_of(batch)])
    assert second == Skipped(1, images_of(101))


def test_any_windows_and_looks() -> None:
    """Against a plain list of everything."""
    assert LOOK_EVERY < LONGEST
    rng = random.Random(0)
    for _ in range(50):
        run = Training(look_every=rng.randint(1, 40))
        expected = []
        for step in range(rng.randint(1, 12)):
            length = rng.choice([1, 2, 16, rng.randint(1, 150)])
            spoiled = sorted({rng.randrange(length) for _ in range(rng.randint(0, 3))})
            skipped = bool(spoiled) or rng.random() < 0.2
            if skipped:
                expected.append(Skipped(step, [image for place in spoiled for image in images_of(run.batch + place)]))
            run.window([NAN if place in spoiled else FINITE for place in range(length)], skipped=skipped)
        run.look()
        assert run.found == expected
