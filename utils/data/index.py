"""The index of a split: its images and their labels as a few arrays, made by a scan or taken from a cache file.

Shape letters: n images, M boxes over all images, L boxes of one image.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from utils.core.caches import cache_folder, content_digest, home_cache, may_be_made
from utils.core.errors import UserError
from utils.core.heartbeat import Phase, beat
from utils.core.whole_files import write_whole
from utils.data.image_lists import find_labels, list_images
from utils.data.index_file import Arrays, map_index, write_index
from utils.data.label_rules import BAD_CLASS, BOX_COLUMNS
from utils.data.labels import around_images
from utils.data.polygons import Polygons
from utils.data.report import Problem, ScanReport, report_csv, shortened
from utils.data.scan import CORRUPT, LEFT_OUT, Files, Part, Rules, scan, shared_stats
from utils.dist.collectives import once_per_machine
from utils.dist.place import ALONE, DistEnv

RULES_VERSION = 8  # raise it when a rule, its wording or a format changes: older cache files are rebuilt
LISTED = 20  # problems in an error message


class LabelIndex:
    """Images and labels of a split in a handful of arrays; from a cache file they are mapped, so processes share pages.

    Attributes:
        n: images, without those left out.
        shapes: (n, 2) int32 [height, width] pixels, upright.
        offsets: (n + 1,) int64; image i has rows ``offsets[i]:offsets[i + 1]``.
        rows: (M, 5) float32 [class, cx, cy, w, h] cxcywhn in [0, 1].
        num_classes: classes of the data set.
        name: short name that tells this split from others, the same in every run.
        images_digest: digest of paths, sizes and modification times of the images, for caches of their pixels.
        file: cache file the arrays are mapped from, None if they are in memory.
        polygon_offsets: (M + 1,) int64; row k has ``points[polygon_offsets[k]:polygon_offsets[k + 1]]``. None if no row
            of the split has a polygon.
        points: (P, 2) float32 [x, y] divided by the image's width and height, in [0, 1]; None likewise.
    """

    def __init__(self, arrays: Arrays, meta: dict[str, Any], file: Path | None = None) -> None:
        self._arrays, self._meta, self.file = arrays, meta, file
        self._names, self._name_offsets = arrays["names"], arrays["name_offsets"]
        self.shapes, self.offsets, self.rows = arrays["shapes"], arrays["offsets"], arrays["rows"]
        self.polygon_offsets, self.points = arrays.get("polygon_offsets"), arrays.get("points")
        self.n = len(self.shapes)
        self.num_classes: int = meta["num_classes"]
        self.name: str = meta["name"]
        self.images_digest: str = meta["images_digest"]

    def __len__(self) -> int:
        return self.n

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is None:
            return LabelIndex, (self._arrays, self._meta)
        return _reopen, (self.file, self._meta["key"])

    @property
    def num_instances(self) -> int:
        """Boxes in all images."""
        return len(self.rows)

    @property
    def report(self) -> ScanReport:
        """What the scan found; read anew at every access, the index itself holds bytes only."""
        fields = json.loads(self._arrays["report"].tobytes())
        return ScanReport(**{**fields, "problems": [Problem(*problem) for problem in fields["problems"]]})

    def path(self, i: int) -> str:
        """Path of image i."""
        return os.fsdecode(self._names[self._name_offsets[i] : self._name_offsets[i + 1]].tobytes())

    def labels(self, i: int) -> np.ndarray:
        """(L, 5) float32 [class, cx, cy, w, h] cxcywhn of image i, read-only; (0, 5) for a background."""
        return self.rows[self.offsets[i] : self.offsets[i + 1]]

    def labels_digest(self) -> str:
        """Digest of what training sees of the labels: names of the images below their folder, sizes and rows."""
        paths = [self.path(i).split("/") for i in range(self.n)]
        first, *_, last = sorted(path[:-1] for path in [*paths, paths[0]])
        above = next((k for k, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
        names = "\n".join("/".join(path[above:]) for path in paths)
        arrays = (self.shapes, self.offsets, self.rows)
        return content_digest(os.fsencode(names), *(np.ascontiguousarray(array).tobytes() for array in arrays))

    def outlines(self, i: int) -> Polygons | None:
        """Polygons of the labels of image i, normalized as ``points``; None if none of them has one."""
        if self.polygon_offsets is None or self.points is None:
            return None
        offsets = self.polygon_offsets[self.offsets[i] : self.offsets[i + 1] + 1]
        if offsets[0] == offsets[-1]:
            return None
        return Polygons(self.points[offsets[0] : offsets[-1]], offsets - offsets[0])


def open_index(file: Path, key: str, logger: logging.Logger | None = None) -> LabelIndex | None:
    """Map an index from its cache file, see `map_index`; None if there is none that is whole and of this state."""
    found = map_index(file, key, logger)
    return LabelIndex(*found, file) if found else None


def _reopen(file: Path, key: str) -> LabelIndex:
    """Map the file that another process of this run has mapped; how an index is unpickled."""
    index = open_index(file, key)
    if index is None:
        raise RuntimeError(f"the label index {file} was replaced while it was in use; start the run again")
    return index


def build_index(
    sources: Sequence[Path],
    num_classes: int,
    env: DistEnv = ALONE,
    *,
    split: str = "train",
    single_cls: bool = False,
    columns: int = 0,
    cache: bool = True,
    named_in: str = "",
    logger: logging.Logger | None = None,
) -> LabelIndex:
    """Index of a split, from its cache file if images, labels and rules are the same as when that was written.

    The ranks of a machine share the work, and map the same file. Collective: every rank must call it.

    Args:
        sources: folders and ``.txt`` lists.
        num_classes: classes named in the data YAML.
        env: this rank's place.
        split: its name, for messages.
        single_cls: give all boxes class 0, after their ids were checked.
        columns: that the row of a box has, of which the first five are used; 0 = not said.
        cache: read and write the cache file.
        named_in: file and key that name the sources, for messages.
        logger: where the report goes.

    Raises:
        UserError: no image, none that can be used, class ids outside the names, or rows that may mean two things.
    """
    beat(Phase.LABELS)
    logger = logger or logging.getLogger("lockstep")
    paths, labels, problems = once_per_machine(partial(_listed_images, sources, named_in), env)
    files = Files(paths, labels, shared_stats(paths, labels, env))
    rules = Rules(num_classes, single_cls, columns)
    names = [os.fsencode(path) for path in paths]
    said = json.dumps([RULES_VERSION, rules, problems]).encode()
    key = content_digest(b"\n".join(names), os.fsencode("\n".join(labels)), files.stats.tobytes(), said)
    places = json.dumps([os.path.abspath(source) for source in sources])
    name = f"{sources[0].stem}-{content_digest(places.encode(), str(num_classes).encode())[:12]}"
    file_name = f"{name}-single.index" if single_cls else f"{name}.index"
    kept_in = [folder / file_name for folder in cache_folders(paths[0])] if cache else []
    index = once_per_machine(
        lambda: next((found for file in kept_in if (found := open_index(file, key, logger))), None), env
    )
    if index is None:
        scanned = scan(files, rules, split, env)

        def checked_and_stored() -> LabelIndex:
            assert scanned is not None
            part = scanned._replace(problems=sorted(problems + scanned.problems))
            if columns != BOX_COLUMNS and (unclear := part.looks.unclear()):
                raise UserError(f"{split}: {unclear}")
            _refuse_bad_classes(part, num_classes, split, paths[0])
            _refuse_unreadable(part, sources)
            if single_cls:
                part.rows[:, 0] = 0
            meta = {"key": key, "name": name, "num_classes": 1 if single_cls else num_classes}
            arrays, meta["images_digest"] = _packed(names, files.stats, part)
            file = write_index(arrays, meta, kept_in, logger)
            return (file and open_index(file, key, logger)) or LabelIndex(arrays, meta)

        index = once_per_machine(checked_and_stored, env)
    index.report.tell(split, logger)
    return index


def _listed_images(sources: Sequence[Path], named_in: str) -> tuple[list[str], list[str], list[Problem]]:
    """Images of a split, their label files, and what is wrong with its lists and folders."""
    problems: list[Problem] = []
    try:
        paths = list_images(sources, problems)
        labels, odd = find_labels(paths, sources)
    except UserError as error:
        raise UserError(f"{named_in}: {error}".removeprefix(": ")) from error
    return paths, labels, problems + odd


def _refuse_bad_classes(part: Part, num_classes: int, split: str, image: str) -> None:
    bad = [problem for problem in part.problems if problem.rule == BAD_CLASS]
    if not bad:
        return
    files = len({problem.file for problem in bad})
    if part.looks.ids_from_one():
        raise UserError(
            f"{split}: class ids run from 1 to {num_classes}, but are counted from 0: subtract 1 from each, or put a "
            f"name for 0 in front of the names in the data YAML ({len(bad)} rows in {files} label files have no name, "
            f"such as {bad[0].file}:{bad[0].line})"
        )
    hints = "".join(f"; {hint}" for hint in part.looks.hints())
    raise UserError(
        f"{split}: class ids in {files} label files are not whole numbers from 0 to {num_classes - 1}; correct "
        f"them or the names in the data YAML{hints}\n{listed({split: bad}, image)}"
    )


def _refuse_unreadable(part: Part, sources: Sequence[Path]) -> None:
    if (part.status == CORRUPT).all():
        reasons = [problem for problem in part.problems if problem.rule in LEFT_OUT]
        shown = "\n".join(shortened([f"  {problem}" for problem in reasons[:3]], len(reasons)))
        places = ", ".join(map(str, sources))
        raise UserError(f"no image of {places} can be used, all {len(part.status)} are bad\n{shown}")


def _packed(names: list[bytes], stats: np.ndarray, part: Part) -> tuple[Arrays, str]:
    """Arrays of an index, without the images that the scan left out, and a digest of the images."""
    kept = part.status != CORRUPT
    names = [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]
    labelled, missing, empty, corrupt = np.bincount(part.status, minlength=4).tolist()
    background = int((part.counts[kept] == 0).sum())
    found = ScanReport(labelled, missing, empty, corrupt, background, part.problems, part.looks.hints())
    arrays = {
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_offsets": np.cumsum([0, *map(len, names)], dtype=np.int64),
        "shapes": part.shapes[kept],
        "offsets": np.concatenate(([0], np.cumsum(part.counts[kept]))).astype(np.int64),
        "rows": part.rows,
        "report": np.frombuffer(json.dumps(asdict(found)).encode(), np.uint8),
    }
    if len(part.points):
        arrays["polygon_offsets"] = np.concatenate(([0], np.cumsum(part.corners)))
        arrays["points"] = part.points
    for array in arrays.values():
        array.flags.writeable = False
    return arrays, content_digest(b"\n".join(names), stats[kept, :2].tobytes())


def listed(problems: dict[str, list[Problem]], image: str) -> str:
    """Return the first problems, one a line, and where all are listed if that is elsewhere.

    Args:
        problems: by split.
        image: any of the data set: the list is kept where caches are, for there is no run folder yet.
    """
    flat = [str(problem) for found in problems.values() for problem in found]
    lines = shortened([f"  {line}" for line in flat[:LISTED]], len(flat))
    for folder in cache_folders(image) if len(flat) > LISTED else ():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "problems.csv", report_csv(problems).encode("utf-8", "surrogateescape"))
            lines.append(f"  all of them: {folder / 'problems.csv'}")
            break
    return "\n".join(lines)


def cache_folders(image: str) -> list[Path]:
    """Where caches of a data set go, best first: beside its images or labels folder, else the user's, if any."""
    folder = image.rpartition("/")[0]
    around = around_images(folder)
    places = [Path((around[0][0] if around else folder) or "/") / ".lockstep"]
    if home_cache() or not may_be_made(places[0]):  # else the folder in the temporary one is not needed
        with contextlib.suppress(UserError):  # a run goes without
            places.append(cache_folder())
    return places
