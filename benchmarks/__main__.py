"""Measure what Lockstep costs against the limits of this machine, as ratios: one table, under ten minutes on two cores.

python -m benchmarks                                  everything that two cores can tell
python -m benchmarks --only loader,labels             some groups of lines
python -m benchmarks --data coco128.yaml --json f.json    with images of your own, and the figures in a file
python -m benchmarks --gpu                            what one GPU can tell, under five minutes; takes flags of its own

Each ratio is one of the same round, in which the things that are compared take turns; the table shows the median of the
rounds and their range. A limit is what the machine can do at best, measured in the same run. Groups run one after the
other, each in a process of its own. Images are made on the way where no data set is given.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import ROUNDS, Row, format_rows, load_of_others
from utils.config.yaml_files import ROOT
from utils.core.errors import UserError, run_cli

GROUPS = ("start", "loader", "labels", "optimizer", "train_step", "ranks", "evaluation", "checkpoint")
BUSY = 0.5  # processes of others that want a core


def measure_group(name: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run one group in a process of its own.

    Raises:
        UserError: it failed; what it said is on the terminal.
    """
    target = folder / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--rounds", str(options.rounds), "--rows", str(target)]
    command += ["--data", options.data] if options.data else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(f"`{' '.join(command)}` failed; what it said is above")
    return [Row(**fields) for fields in json.loads(target.read_text())]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, of {', '.join(GROUPS)}")
    parser.add_argument("--data", default="", help="data set YAML whose images are used; default: images made here")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count")
    parser.add_argument("--gpu", action="store_true", help="measure one GPU instead; --gpu --help tells more")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    for name in options.only:
        if name not in GROUPS:
            raise UserError(f"--only {name!r} is no group; take some of {', '.join(GROUPS)}, separated by commas")
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: must be at least 1")
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    return options


def main() -> None:
    """Parse the command line and measure."""
    if "--gpu" in sys.argv[1:]:
        words = [word for word in sys.argv[1:] if word != "--gpu"]
        raise SystemExit(subprocess.call([sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT))
    options = parse(sys.argv[1:])
    busy = load_of_others()
    start = time.perf_counter()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            found = measure_group(name, options, Path(folder))
            print(format_rows(found), flush=True)
            rows += found
    missed = [row.key for row in rows if row.met is False]
    print(f"\n{time.perf_counter() - start:.0f} s; aims missed: {', '.join(missed) or 'none'}")
    if busy > BUSY:
        print(f"other programs wanted {busy:.1f} cores at the start: the ratios may be off")
    if options.json:
        options.json.write_text(json.dumps([row.to_dict() for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    run_cli(main)
