"""How loader processes share their cores with training on the CPU."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

NICENESS, NICENESS_AT_LEISURE = 10, 19
IN_USE = 1  # batches that training holds while it computes

R = TypeVar("R")
S = TypeVar("S")


class Leisure(Generic[R, S]):
    """How the samples of a process are made that shares its cores with training: it gives way, the more the less hurry.

    Training on the CPU needs all cores at once; a process that holds one makes the threads on the others wait. So while
    batches are waiting, samples are made with the lowest priority there is. It would starve beside other programs that
    need all cores, so it does not last once no batch is waiting. What lowers its priority may not raise it again, but
    on Linux each thread has its own.

    Args:
        batches: gives the number of batches that are made, wait or are used.
    """

    def __init__(self, batches: Callable[[], int]) -> None:
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICENESS_AT_LEISURE - NICENESS,))

    def __call__(self, work: Callable[[R], S], requests: Sequence[R]) -> list[S]:
        """Do the work, here or in the thread that has more time."""
        made: list[S] = []
        while len(made) < len(requests):
            if self._is_in_a_hurry():
                made.append(work(requests[len(made)]))
            else:
                made += self._thread.submit(self._without_haste, work, requests[len(made) :]).result()
        return made

    def _is_in_a_hurry(self) -> bool:
        return self._batches() <= IN_USE

    def _without_haste(self, work: Callable[[R], S], requests: Sequence[R]) -> list[S]:
        """Do the work, or what of it is done before there is a hurry."""
        made: list[S] = []
        for request in requests:
            if made and self._is_in_a_hurry():
                break
            made.append(work(request))
        return made
