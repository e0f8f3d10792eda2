"""Opens the labels of data sets on every rank, one after another.

    torchrun ... scans.py FOLDER DATA.yaml ...

Every rank writes RANK.json into the folder: what it got of each.
"""

import json
import os
import sys
from pathlib import Path

from utils.config.data_yaml import load_data
from utils.core.errors import UserError
from utils.data.splits import open_splits
from utils.dist.worker import as_worker
from utils.torch_utils import process_group


def main() -> None:
    folder, *files = map(Path, sys.argv[1:])
    found = {}
    with process_group("cpu") as env:
        for file in files:
            try:
                index = open_splits(load_data(str(file)), ["train"], env)["train"]
            except UserError as error:
                found[file.parent.name] = ["", str(error)]
            else:
                found[file.parent.name] = [str(index.file), index.labels_digest()]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    as_worker(main)()
