"""Command lines as people paste them from documents, chats and other programs' manuals."""

import pytest

from utils.config.command_line import given_flags
from utils.config.flags import DetectConfig, TrainConfig, ValConfig
from utils.core.errors import UserError

PASTED = {
    "\u2014epochs 3": {"epochs": 3},  # -- of a word processor is one long dash
    "\u2013-epochs 3": {"epochs": 3},
    "\u2013epochs=3": {"epochs": 3},
    "-epochs 3 -cos-lr": {"epochs": 3, "cos_lr": True},
    "--label\u2011smoothing 0.1": {"label_smoothing": 0.1},
    "--epochs\u00a03 --seed 1": {"epochs": 3, "seed": 1},
    "\u200b--epochs 3": {"epochs": 3},
    "--batch \u22121": {"batch_size": -1},
    "\u2014no-sync-bn": {"sync_bn": False},
    "--data \u201cmy.yaml\u201d --name=\u2018x\u2019": {"data": "my.yaml", "name": "x"},
    "--data 'my.yaml'": {"data": "my.yaml"},  # as cmd.exe hands it over
}


@pytest.mark.parametrize("line", PASTED)
def test_pasted_command_lines_are_read_as_they_were_meant(line: str) -> None:
    """A typographic dash made two unclear problems of a flag (ultralytics/yolov5#7504)."""
    assert given_flags(TrainConfig, line.split(" ")) == PASTED[line]


@pytest.mark.parametrize("kind", [TrainConfig, ValConfig, DetectConfig])
def test_dashes_in_all_scripts(kind: type) -> None:
    """As ultralytics/yolov5#7504."""
    assert given_flags(kind, ["\u2014weights", "best.pt"]) == {"weights": "best.pt"}
    with pytest.raises(UserError, match=r"--wieghts is not a flag; did you mean --weights\?") as error:
        given_flags(kind, ["\u2014wieghts", "best.pt"])
    assert len(error.value.messages) == 1


def test_names_of_files_stay_as_they_are() -> None:
    given = given_flags(
        DetectConfig, ["--source", "\u2013 1.jpg", "Shot\u202f1.png", "a,b.jpg", "\u201ca\u201d.jpg", "-1"]
    )
    assert given["source"] == ["\u2013 1.jpg", "Shot\u202f1.png", "a,b.jpg", "\u201ca\u201d.jpg", "-1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "data=my.yaml epochs=3",
            "data=my.yaml epochs=3: flags begin with two dashes; write --data my.yaml --epochs 3",
        ),
        (
            "--data \u201cmy data.yaml\u201d",
            "'data.yaml\u201d' belongs to no flag; quotes that hold words together are ' or \"",
        ),
    ],
)
def test_other_spellings_have_one_hint(line: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        given_flags(TrainConfig, line.split(" "))
    assert str(error.value).splitlines()[0] == message
