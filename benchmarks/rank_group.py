"""Ranks that train together, as processes that are told what to do."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.config.data_yaml import DataConfig, load_data
from utils.config.yaml_files import ROOT
from utils.core.errors import UserError
from utils.data.fetch import ensure_data
from utils.data.shapes import ensure_shapes

START_TIMEOUT = 300  # seconds
SHOWN_LINES = 20  # of what a process said that failed

Figures = dict[str, Any]


def there(name: str) -> DataConfig:
    """Return a data set that ranks can begin with: drawn, or fetched, if it was not there."""
    data = load_data(name)
    if data.generator is not None:
        ensure_shapes(data.root)
    ensure_data(data, ["train", "val"])
    return data


class Group:
    """Ranks that train together, as processes that take commands from a socket, one a line.

    Attributes:
        ready: what each rank said when it had its first batch.
        start_seconds: how long that took from the command.

    Args:
        ranks: how many; a single one is started without a launcher, as a user would.
        first_core: place of its first rank's core; None leaves the ranks where the system puts them.
        flags: of train.py, and of `benchmarks.scaling_rank`.
        folder: for what the processes print.

    Raises:
        UserError: they ended, or took too long; with what they said.
    """

    def __init__(self, ranks: int, first_core: int | None, flags: Sequence[object], folder: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks] if ranks > 1 else []
        self._lines: list[Any] = []
        start = time.perf_counter()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            self._log = folder / f"{port}.log"
            own: list[object] = ["-m", "benchmarks.scaling_rank", "--port", port]
            own += [] if first_core is None else ["--first-core", first_core]
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, *map(str, [*launcher, *own, *flags])],
                    cwd=ROOT,
                    # torch's launcher leaves a folder behind
                    env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # as the launcher's ranks have: systems share out cores by session
                )
            try:
                self._connect(server, ranks, start + START_TIMEOUT)
                self.ready = self.answers()
            except BaseException:
                self.close()
                raise
        self.start_seconds = time.perf_counter() - start

    def _connect(self, server: socket.socket, ranks: int, deadline: float) -> None:
        server.settimeout(0.2)
        while len(self._lines) < ranks:
            try:
                link, _ = server.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.perf_counter() > deadline:
                    raise self._failure() from None
            else:
                link.setblocking(True)
                with link:  # the file keeps the connection
                    self._lines.append(link.makefile("rw", encoding="utf-8"))

    def ask(self, command: str) -> None:
        """Tell all ranks to do something, and do not wait."""
        for lines in self._lines:
            lines.write(f"{command}\n")
            lines.flush()

    def answers(self) -> list[Figures]:
        """Wait for what each rank says; their order is that of their connections.

        Raises:
            UserError: one ended instead.
        """
        said = [lines.readline() for lines in self._lines]
        if not all(said):
            raise self._failure()
        return [json.loads(line) for line in said]

    def _failure(self) -> UserError:
        printed = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        mistakes = [number for number, line in enumerate(printed) if line.startswith("error: ")]
        first = mistakes[0] if mistakes else max(len(printed) - SHOWN_LINES, 0)
        said = "\n".join(printed[first : first + SHOWN_LINES])
        return UserError(f"a process of the benchmark ended or hangs; it said:\n{said}")

    def close(self) -> None:
        """End the processes: a rank leaves when its connection does."""
        for lines in self._lines:
            lines.close()
        try:
            self._process.wait(30 if self._lines else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
