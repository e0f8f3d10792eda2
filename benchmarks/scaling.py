"""What a second rank brings, and what the ranks wait for.

python -m benchmarks.scaling                                        the built-in data
python -m benchmarks.scaling --data bccd.yaml --out scaling.json    any other data set; the figures in a file, too
python -m benchmarks.scaling --devices 1,2,4,8 ...                  something else: see `benchmarks.devices`

Three arrangements train in turns on the same two cores, one thread a rank, so that a slow moment of the machine hits
all of them:
  side by side   two runs of one rank that know nothing of each other: what the two cores can do
  two ranks      one run of two ranks, every BatchNorm over its own rank's images
  SyncBN         one run of two ranks, BatchNorm over the images of both
Each rank does the same work in all of them: the training loop of train.py with its loader (workers 0, images cached) on
as many images a batch, each batch an optimizer step, which is the hardest case for the exchange of gradients. The first
batches of a round do not count. The images are copied first, so that nothing is left beside the originals.

The answers are medians over the rounds, with their range. A ratio of 1 is a second rank that costs nothing. The share
of waiting is the time that a rank's main thread spends in collectives; the ratios of CPU time tell what is computed
besides. Then come the seconds that one rank and two take from the command to the first batch, to scan label files
(without a cache file) and to validate.
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from tqdm import tqdm

from benchmarks.devices import DeviceSettings, measure_devices
from benchmarks.rank_group import Figures, Group, there
from benchmarks.scaling_rank import cores
from utils.config.data_yaml import DataConfig, check_split_paths
from utils.core.errors import UserError, run_cli
from utils.core.signals import stops_end_the_process
from utils.data.image_lists import list_images
from utils.data.labels import label_path

RANKS = 2
LIMIT = 0.9  # of the rate of two independent runs, for two ranks without SyncBN
BUSY = 0.9  # of its core's time that a rank has to itself, else other programs have disturbed the figures
MANY_EPOCHS = 10_000  # so that no round is the last one
VAL_BATCHES = 12  # a multiple of RANKS
OF_ROUNDS, OF_DEVICES = ("steps", "skip", "rounds", "starts", "labels"), ("device", "workers")  # flags
SIDE_BY_SIDE, TWO_RANKS, SYNC_BN = "side by side", "two ranks", "SyncBN"


@dataclass(frozen=True)
class Settings:
    """What is measured; see the command line."""

    data: str
    cfg: str
    imgsz: int
    local_batch: int
    amp: str
    steps: int
    skip: int
    rounds: int
    starts: int
    labels: int

    def __post_init__(self) -> None:
        if not 0 <= self.skip < self.steps:
            raise UserError(f"--skip {self.skip} must be at least 0 and less than --steps {self.steps}")
        for name in ("local_batch", "rounds", "starts", "labels"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")


# What the ranks work on ----------------------------------------------------------------------------------------------


def copy_data(data: DataConfig, settings: Settings, folder: Path) -> list[Path]:
    """Copy as many images with their labels as a round takes, some of them twice if there are fewer.

    Returns:
        YAMLs of data sets: for the first rank alone, for the second alone, for both together.
    """
    splits = check_split_paths(data)
    each = settings.local_batch * settings.steps
    train = list(islice(cycle(list_images(splits["train"], [])), RANKS * each))
    val = list(islice(cycle(list_images(splits["val"], [])), VAL_BATCHES * settings.local_batch))
    for part, paths in {"train0": train[:each], "train1": train[each:], "val": val}.items():
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for number, path in enumerate(paths):
            copy = folder / "images" / part / f"{number}{Path(path).suffix}"
            shutil.copyfile(path, copy)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(label_path(path), label_path(copy.as_posix()))
    files = [folder / name for name in ("first.yaml", "second.yaml", "both.yaml")]
    for file, parts in zip(files, (["train0"], ["train1"], ["train0", "train1"]), strict=True):
        content = {"train": [f"images/{part}" for part in parts], "val": "images/val", "names": data.names}
        file.write_text(json.dumps(content))
    return files


def make_labels(folder: Path, count: int) -> Path:
    """Make images of a few pixels with five boxes each; returns the folder of the images."""
    images, labels = folder / "images" / "scan", folder / "labels" / "scan"
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    rng = np.random.default_rng(0)
    ok, image = cv2.imencode(".jpg", rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    assert ok
    boxes = np.concatenate([rng.uniform(0.3, 0.7, (count, 5, 2)), rng.uniform(0.1, 0.5, (count, 5, 2))], 2)
    for number, rows in enumerate(boxes.tolist()):
        (images / f"{number}.jpg").write_bytes(image.tobytes())
        text = "".join("0 " + " ".join(f"{value:.6f}" for value in row) + "\n" for row in rows)
        (labels / f"{number}.txt").write_text(text)
    return images


# Processes -----------------------------------------------------------------------------------------------------------


class Bench:
    """Starts groups of ranks on the same job.

    Args:
        settings: what is measured.
        folder: private, for everything.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.data = copy_data(there(settings.data), settings, folder)
        self.labels = make_labels(folder, settings.labels)

    def group(self, ranks: int, first_core: int = 0, sync_bn: bool = False) -> Group:
        """Start ranks and wait until they are ready."""
        settings = self.settings
        batch = ranks * settings.local_batch
        flags = {
            "labels": self.labels,
            "skip": settings.skip,
            "data": self.data[first_core if ranks == 1 else RANKS],
            "cfg": settings.cfg,
            "imgsz": settings.imgsz,
            "batch-size": batch,
            "nbs": batch,  # an optimizer step each
            "val-batch": settings.local_batch,
            "amp": settings.amp,
            "epochs": MANY_EPOCHS,
            "workers": 0,
            "cache": "ram",
            "device": "cpu",
            "project": self.folder / "runs",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return Group(ranks, first_core, [*words, "--noplots", "--sync-bn" if sync_bn else "--no-sync-bn"], self.folder)


# Measurements --------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> Figures:
    """Return what the ranks said in all rounds; one round before them does not count."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(settings, Path(folder))
        bar = stack.enter_context(tqdm(total=2 + settings.rounds + settings.starts, leave=False, disable=None))
        bar.set_description("starting")

        def opened(ranks: int, **options: Any) -> Group:
            return stack.enter_context(contextlib.closing(bench.group(ranks, **options)))

        one, other = opened(1, first_core=0), opened(1, first_core=1)
        two, synchronized = opened(RANKS), opened(RANKS, sync_bn=True)
        figures: Figures = {"ready": two.ready[0], "train": [], "scan": [], "validate": [], "start": []}
        trained = {SIDE_BY_SIDE: [one, other], TWO_RANKS: [two], SYNC_BN: [synchronized]}
        contestants = {"train": trained, "scan": {"1": [one], "2": [two]}, "validate": {"1": [one], "2": [two]}}
        for number in range(settings.rounds + 1):
            bar.update()
            for command, its in contestants.items():
                bar.set_description(command)
                said = {name: together(its[name], command) for name in in_turn(its, number)}
                if number:
                    figures[command].append(said)
        for number in range(settings.starts):
            bar.update()
            bar.set_description("start")
            figures["start"].append({name: started(bench, int(name)) for name in in_turn(("1", "2"), number)})
    return figures


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """Return the contestants of a round in their order; another one comes first in each."""
    listed = list(names)
    first = number % len(listed)
    return listed[first:] + listed[:first]


def together(groups: Sequence[Group], command: str) -> list[Figures]:
    """Let groups do something at the same time; returns the figures of their ranks."""
    for group in groups:
        group.ask(command)
    return [answer for group in groups for answer in group.answers()]


def started(bench: Bench, ranks: int) -> list[Figures]:
    """Start ranks, once, and end them."""
    group = bench.group(ranks)
    group.close()
    return [{"seconds": group.start_seconds}]


# Answers -------------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def rate(said: Sequence[Figures]) -> float:
    """Images per second of all ranks."""
    return sum(rank["images"] / rank["seconds"] for rank in said)


def effort(said: Sequence[Figures]) -> float:
    """CPU time of an image, seconds; other programs hardly change it."""
    return sum(rank["computing"] for rank in said) / sum(rank["images"] for rank in said)


def share(said: Sequence[Figures], what: str) -> float:
    """Part of the ranks' seconds."""
    return sum(rank[what] for rank in said) / sum(rank["seconds"] for rank in said)


def slowest(said: Sequence[Figures]) -> float:
    """Seconds until the last rank is done."""
    return max(rank["seconds"] for rank in said)


def summarize(figures: Figures) -> dict[str, dict[str, float]]:
    """Return median and range of every answer."""
    rounds = figures["train"]
    rates = {name: [rate(said[name]) for said in rounds] for name in (SIDE_BY_SIDE, TWO_RANKS, SYNC_BN)}
    rows = {f"{name}, images/s": spread(values) for name, values in rates.items()}
    for name in (TWO_RANKS, SYNC_BN):
        ratios = [a / b for a, b in zip(rates[name], rates[SIDE_BY_SIDE], strict=True)]
        rows[f"{name} / {SIDE_BY_SIDE}"] = spread(ratios)
    rows[f"{TWO_RANKS} / {SIDE_BY_SIDE}"]["limit"] = LIMIT
    efforts = {name: [effort(said[name]) for said in rounds] for name in rates}
    for name in (TWO_RANKS, SYNC_BN):
        ratios = [a / b for a, b in zip(efforts[name], efforts[SIDE_BY_SIDE], strict=True)]
        rows[f"{name} / {SIDE_BY_SIDE}, CPU time"] = spread(ratios)
    for name in (TWO_RANKS, SYNC_BN):
        rows[f"{name}, waiting"] = spread([share(said[name], "waiting") for said in rounds])
    rows[f"{SIDE_BY_SIDE}, on the core"] = spread([share(said[SIDE_BY_SIDE], "computing") for said in rounds])
    for command in ("start", "scan", "validate"):
        times = {ranks: [slowest(said[ranks]) for said in figures[command]] for ranks in ("1", "2")}
        rows |= {f"{command}, s, {ranks} rank{'s' * (ranks != '1')}": spread(values) for ranks, values in times.items()}
        rows[f"{command}, 1 rank / 2 ranks"] = spread([a / b for a, b in zip(times["1"], times["2"], strict=True)])
    return rows


def report(rows: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table of the answers."""
    print(f"{'':<36}{'median':>9}   range")
    for name, row in rows.items():
        verdict = ""
        if "limit" in row:
            verdict = f"   {'within' if row['median'] >= row['limit'] else 'UNDER'} the limit of {row['limit']}"
        print(f"{name:<36}{row['median']:9.3f}   {row['low']:.3f} to {row['high']:.3f}{verdict}")
    busy = rows[f"{SIDE_BY_SIDE}, on the core"]["median"]
    if busy < BUSY:
        print(f"WARNING: the runs had {busy:.0%} of their cores' time: other programs were running, so measure again")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="shapes.yaml", help="data set YAML")
    parser.add_argument("--cfg", default="yolov5n.yaml", help="network YAML")
    parser.add_argument("--imgsz", "--img", type=int, default=320, help="image size, pixels")
    parser.add_argument("--local-batch", type=int, default=8, help="images of a rank in a batch")
    parser.add_argument("--amp", default="auto", help="precision")
    parser.add_argument("--steps", type=int, default=12, help="batches in a round of training")
    parser.add_argument("--skip", type=int, default=2, help="of them at the start that do not count")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--starts", type=int, default=3, help="starts of one rank and of two")
    parser.add_argument("--labels", type=int, default=4000, help="label files to scan")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--devices", default="", help="an epoch on so many GPUs instead, one after the other: 1,2,4,8")
    parser.add_argument(
        "--device", default="", help="which ones, of --devices: 0,1,2,3, all or cpu; '' = all, else cpu"
    )
    parser.add_argument("--workers", type=int, default=8, help="most loader processes of a rank, of --devices")
    options = vars(parser.parse_args())
    target = options.pop("out")
    others = {name: options.pop(name) for name in ("devices", "device", "workers")}
    settings = Settings(**options)
    if target and not target.absolute().parent.is_dir():
        raise UserError(f"--out {target}: there is no folder {target.absolute().parent}")
    unused = OF_ROUNDS if others["devices"] else OF_DEVICES
    typed = [name for name in unused if {**options, **others}[name] != parser.get_default(name)]
    if typed:
        names = ", ".join(f"--{name}" for name in typed)
        raise UserError(
            f"{names}: no effect {'with' if others['devices'] else 'without'} --devices; leave out what has none"
        )
    with stops_end_the_process():  # the ranks' processes as well
        answer(settings, options, others, target)


def answer(settings: Settings, options: Mapping[str, Any], others: Mapping[str, Any], target: Path | None) -> None:
    """Measure what was asked for, print it, and write it to a file if one is named."""
    if others["devices"]:
        shared = {name: options[name] for name in ("data", "cfg", "imgsz", "local_batch", "amp")}
        measure_devices(DeviceSettings(**shared, **others), target)
        return
    if len(cores()) < RANKS:
        raise UserError(f"{RANKS} ranks need {RANKS} cores to themselves, and this process may use {len(cores())}")
    figures = measure(settings)
    rows = summarize(figures)
    print(
        f"{RANKS} ranks, one thread and one core each; {Path(settings.cfg).stem}, {settings.imgsz} pixels, "
        f"{settings.local_batch} images a rank and batch, precision {figures['ready']['precision']}"
    )
    report(rows)
    if target:
        written = {"settings": dataclasses.asdict(settings), "answers": rows, "rounds": figures}
        target.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    run_cli(main)
