"""The process that draws: ``python -m utils.plots.worker`` reads what to draw from stdin, writes files and ends.

It is a process of its own so that training neither waits for it nor shares its interpreter lock. Whatever goes wrong is
said in the last line that it writes, and by its exit status.
"""

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
from matplotlib.figure import Figure

from utils.core.whole_files import replacing
from utils.plots.charts import confidence_chart, confusion_chart, labels_chart, pr_chart, results_chart
from utils.plots.pages import page

DRAW = {
    "labels": labels_chart,
    "page": page,
    "pr": pr_chart,
    "confidence": confidence_chart,
    "confusion": confusion_chart,
    "results": results_chart,
}
JPEG_QUALITY = 90


def main() -> int:
    """Draw everything that stdin names.

    Returns:
        Exit status: 1 if a picture could not be drawn.
    """
    parent, niceness, jobs = pickle.load(sys.stdin.buffer)
    if hasattr(os, "nice"):
        os.nice(niceness)
    cv2.setNumThreads(1)
    problems = []
    for path, kind, values in jobs:
        if os.getppid() != parent:
            return 0  # the run is gone
        try:
            draw(Path(path), kind, values)
        except Exception as error:  # one picture less; the others are still wanted
            problems.append(f"{Path(path).name} ({type(error).__name__}: {error})")
    if problems:
        print(", ".join(problems).replace("\n", " "))
    return 1 if problems else 0


def draw(path: Path, kind: str, values: Mapping[str, Any]) -> None:
    """Draw one picture and put it in its place when it is complete.

    Args:
        path: its suffix chooses the format.
        kind: a key of ``DRAW``.
        values: arguments of the function it names.
    """
    picture: Any = DRAW[kind](**values)  # type: ignore[operator]
    with replacing(path, durable=False) as file:
        if isinstance(picture, Figure):
            options = {"quality": JPEG_QUALITY} if path.suffix == ".jpg" else {}
            picture.savefig(file, format=path.suffix[1:], pil_kwargs=options)
        else:
            ok, encoded = cv2.imencode(path.suffix, picture, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
            assert ok, f"no {path.suffix} could be made"
            file.write(encoded.tobytes())


if __name__ == "__main__":
    sys.exit(main())
