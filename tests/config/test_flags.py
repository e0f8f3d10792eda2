"""Flags and hyperparameters: what is read, and what a mistake costs."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.common import PROJECT
from utils.checkpoints.files import check_readable
from utils.config.build import build_config, config_to_dict, parse
from utils.config.command_line import flags_page, given_flags, given_keywords, repeated_flags, without_flags
from utils.config.flags import DetectConfig, TrainConfig, ValConfig
from utils.config.recipe import SHIPPED_RECIPES, Hyp, Recipe, load_hyp, load_recipe
from utils.config.yaml_files import SHIPPED, find_yaml, load_yaml
from utils.core.errors import Problems, UserError, nearest_file, run_cli
from utils.run.folder import write_yaml

HEAVY = ("numpy", "torch", "cv2", "pandas", "matplotlib", "tqdm")


def run_python(code: str, *argv: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=cwd, check=False)


def train_error(argv: str) -> str:
    with pytest.raises(UserError) as info:
        build_config(TrainConfig, given_flags(TrainConfig, argv.split()))
    return str(info.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- flags ----


def test_nothing_heavy_is_imported() -> None:
    """Help and a wrong flag must not wait seconds for torch."""
    code = "import sys, utils.config.build; print([name for name in sys.modules if name in sys.argv[1:]])"
    done = run_python(code, *HEAVY)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_no_flags_train_on_the_built_in_data() -> None:
    config = parse(TrainConfig, [])
    assert (config.weights, config.cfg, config.data) == ("", "yolov5n.yaml", "shapes.yaml")
    assert (config.batch_size, config.nbs, config.val_batch, config.amp, config.cache) == (16, 64, 0, "auto", "ram")
    assert config.resume is False
    assert config.deterministic is None


def test_a_yolov5_command_line_is_read() -> None:
    line = (
        "--weights best.pt --cfg yolov5s.yaml --data coco.yaml --hyp hyp.scratch-med.yaml --epochs 7 --batch-size 32"
        " --img 640 --rect --resume --nosave --noval --cache disk --device cuda:1 --multi-scale --optimizer AdamW"
        " --workers 3 --project out --name x --exist-ok --cos-lr --patience 5 --freeze 0 3 --save-period -1 --seed 9"
    )
    assert parse(TrainConfig, line.split()) == TrainConfig(
        weights="best.pt",
        cfg="yolov5s.yaml",
        data="coco.yaml",
        hyp="hyp.scratch-med.yaml",
        epochs=7,
        batch_size=32,
        imgsz=640,
        rect=True,
        resume=True,
        nosave=True,
        noval=True,
        cache="disk",
        device="cuda:1",
        multi_scale=True,
        optimizer="AdamW",
        workers=3,
        project="out",
        name="x",
        exist_ok=True,
        cos_lr=True,
        patience=5,
        freeze=[0, 3],
        save_period=-1,
        seed=9,
    )


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--batch 8", "batch_size", 8),
        ("--imgsz 64", "imgsz", 64),
        ("--img-size 64", "imgsz", 64),
        ("--img=64", "imgsz", 64),
        ("--cache", "cache", "ram"),
        ("--cache --epochs 3", "epochs", 3),
        ("--cache off", "cache", "off"),
        ("--resume runs/train/exp", "resume", "runs/train/exp"),
        ("--resume", "resume", True),
        ("--deterministic", "deterministic", True),
        ("--no-deterministic", "deterministic", False),
        ("--weights a.pt", "cfg", ""),
        ("--weights a.pt --cfg b.yaml", "cfg", "b.yaml"),
        ("--name cfg --cfg models/yolov5s.yaml", "name", "yolov5s"),
        ("--freeze 0,3 5, 7", "freeze", [0, 3, 5, 7]),
        ("--name a/b..c", "name", "a/b..c"),
    ],
)
def test_spellings(line: str, field: str, value: object) -> None:
    assert getattr(parse(TrainConfig, line.split()), field) == value


def test_empty_weights_mean_from_scratch() -> None:
    assert parse(TrainConfig, ["--weights", ""]) == TrainConfig()


@pytest.mark.parametrize("line", ["--local-rank=1", "--local_rank 1", "--local-rank 1 --epochs 100"])
def test_the_local_rank_of_old_launchers_is_ignored(line: str) -> None:
    """YOLOv5 refuses the newer spelling; yjh0410/YOWOv2#8 refuses both."""
    assert parse(TrainConfig, line.split()) == TrainConfig()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--bach-size 32", "--bach-size is not a flag; did you mean --batch-size?"),
        ("--epoch 3", "--epoch is not a flag; did you mean --epochs?"),  # no abbreviations
        ("--batch_size=3", "--batch_size is not a flag; did you mean --batch-size?"),
        ("--xyzzy", "--xyzzy is not a flag\n"),
        ("--foo", "--foo is not a flag\n"),
        ("--bar 3", "--bar is not a flag\n"),
        ("--rec", "--rec is not a flag; did you mean --rect?"),
        ("--eights x.pt", "--eights is not a flag; did you mean --weights?"),
        ("--hyp-file x", "--hyp-file is not a flag\n"),  # rather than --profile
        ("--size 64", "--size is not a flag; did you mean --img-size?"),
        ("--hpy x.yaml", "--hpy is not a flag; did you mean --hyp?"),
        ("cat.jpg", "'cat.jpg' belongs to no flag"),
        ("--epochs 0", "--epochs must be at least 1, not 0"),
        ("--epochs ten", "--epochs takes a whole number, not 'ten'"),
        ("--epochs 1.5", "--epochs takes a whole number, not '1.5'"),
        ("--epochs", "--epochs: expected one argument"),
        ("--batch-size 0", "--batch-size must be at least 1 or -1, not 0"),
        ("--batch -2", "--batch-size must be at least 1 or -1, not -2"),
        ("--imgsz 31", "--imgsz must be between 32 and 16384, not 31"),
        ("--workers -1", "--workers must be at least 0, not -1"),
        ("--patience -1", "--patience must be at least 0, not -1"),
        ("--seed -1", "--seed must be between 0 and 4294967295, not -1"),
        ("--freeze 1 -2", "--freeze must be at least 0, not -2"),
        ("--freeze a", "--freeze takes whole numbers, not 'a'"),
        ("--freeze 1,b", "--freeze takes whole numbers, not '1,b'"),
        ("--freeze ,", "--freeze takes whole numbers, not ','"),
        ("--name=", "--name '' is no folder of the run's own; leave it out"),
        ("--name .", "--name '.' is no folder of the run's own"),
        ("--name a/..", "--name 'a/..' is no folder of the run's own"),
        ("--name ../x", "--name ../x leads out of --project runs/train; give --project runs --name x"),
        ("--name ../../../x", "--name ../../../x leads out of --project runs/train; give --project .. --name x"),
        ("--name /a/b --project p", "--name /a/b leads out of --project p; give --project /a --name b"),
        (f"--name {'x' * 300}", f"--name {'x' * 20}...: a name of 300 bytes; give one of 250 at most"),
        (f"--project a/{'x' * 300}", f"--project a/{'x' * 18}...: a name of 300 bytes; give one of 250 at most"),
        ("--optimizer adamw", "--optimizer is one of SGD, Adam, AdamW, not 'adamw'; did you mean AdamW?"),
        ("--cache gpu", "--cache is one of ram, disk, off, not 'gpu'"),
        ("--rect=1", "--rect: ignored explicit argument '1'"),
    ],
)
def test_mistakes_in_flags(line: str, words: str) -> None:
    assert words in train_error(line) + "\n"


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        (
            TrainConfig,
            "--batch 8 --batch-size 16",
            "--batch 8 and --batch-size 16 are the same setting; leave one of them",
        ),
        (TrainConfig, "--img 64 --epochs 3 --imgsz 96", "--img 64 and --imgsz 96 are the same setting"),
        (ValConfig, "--weights x --img-size 64 --img 96", "--img-size 64 and --img 96 are the same setting"),
        (DetectConfig, "--weights x --img 64 96 --imgsz 96", "--img [64, 96] and --imgsz [96] are the same setting"),
    ],
)
def test_two_spellings_of_a_flag_that_differ(kind: type[Any], line: str, message: str) -> None:
    """The later one won, without a word."""
    with pytest.raises(UserError) as info:
        given_flags(kind, line.split())
    assert str(info.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "given", "said"),
    [
        ("--epochs 9 --epochs 9", {"epochs": 9}, []),
        ("--batch 8 --batch-size 8", {"batch_size": 8}, []),
        ("--freeze 0 1 --freeze 0,1", {"freeze": [0, 1]}, []),
        ("--noval --noval", {"noval": True}, []),
        ("--epochs 9 --noval --epochs 3", {"epochs": 3, "noval": True}, ["--epochs 3 counts, given after --epochs 9"]),
        ("--freeze 0 1 --freeze 3", {"freeze": [3]}, ["--freeze 3 counts, given after --freeze 0 1"]),
        ("--sync-bn --no-sync-bn", {"sync_bn": False}, ["--no-sync-bn counts, given after --sync-bn"]),
        ("--resume --resume a", {"resume": "a"}, ["--resume a counts, given after --resume"]),
        ("--seed 1 --seed 2 --seed 3", {"seed": 3}, ["--seed 3 counts, given after --seed 1, --seed 2"]),
    ],
)
def test_flags_that_are_given_twice(line: str, given: dict[str, Any], said: list[str]) -> None:
    """Scripts override flags that way ($ARGS --epochs 3): the last one counts, and that is said."""
    assert given_flags(TrainConfig, line.split()) == given
    assert repeated_flags(TrainConfig, line.split()) == said


def test_flags_are_taken_off_a_command_line() -> None:
    line = "--batch -1 --freeze 0 1 --device=0,1 --cache --save-period -1 --batch-size 8 --name x --resume"
    rest = without_flags(TrainConfig, line.split(), ("device", "batch_size"))
    assert rest == ["--freeze", "0", "1", "--cache", "--save-period", "-1", "--name", "x", "--resume"]


@pytest.mark.parametrize("name", ["lr0", "mosaic", "warmup_bias_lr"])
def test_hyperparameters_are_no_flags(name: str) -> None:
    """Where they belong is said, on the command line and from Python."""
    where = f"a hyperparameter: write {name} into a YAML file and give that as --hyp (hyp=... from Python)"
    for error in (
        lambda: given_flags(TrainConfig, [f"--{name.replace('_', '-')}", "0.1"]),
        lambda: given_keywords(TrainConfig, {name: 0.1}),
    ):
        with pytest.raises(UserError, match=re.escape(where)):
            error()


@pytest.mark.parametrize(
    ("keywords", "given"),
    [
        ({"batch": 8, "batch_size": 16}, None),
        ({"batch_size": 16, "batch": 8}, None),
        ({"img": 64, "imgsz": 96}, None),
        ({"batch": 8, "batch_size": 8}, {"batch_size": 8}),
    ],
)
def test_two_spellings_of_a_keyword(keywords: dict[str, Any], given: dict[str, Any] | None) -> None:
    if given is not None:
        assert given_keywords(TrainConfig, keywords) == given
        return
    (first, value), (second, other) = keywords.items()
    with pytest.raises(UserError, match=f"^{first} {value} and {second} {other} are the same setting; leave one"):
        given_keywords(TrainConfig, keywords)


@pytest.mark.parametrize(
    "line",
    [
        "--image-weights",
        "--evolve",
        "--evolve 10",
        "--evolve_population data/hyps",
        "--resume_evolve x.yaml",
        "--quad",
        "--bucket b",
        "--entity e",
        "--upload_dataset val",
        "--bbox_interval 1",
        "--cache val",
    ],
)
def test_features_of_later_are_never_ignored(line: str) -> None:
    message = train_error(line)
    assert message.startswith("--")
    assert "is not available yet: " in message
    assert message.count("\n") == 1  # and no complaint about the value; the second line points to --help


def test_all_mistakes_come_at_once() -> None:
    message = train_error("--bach-size 32 --quad --epochs 0 --cache val --imgsz x")
    assert message.splitlines()[0] == "5 problems"
    for flag in ("--bach-size", "--quad", "--epochs", "--cache val", "--imgsz"):
        assert f"- {flag} " in message


def test_a_mistake_ends_with_status_2_and_two_lines() -> None:
    done = run_python(
        "from utils.config.build import *; parse(TrainConfig)",
        "--bach-size",
        "32",
    )
    assert done.returncode == 2
    assert done.stdout == ""
    expected = "error: --bach-size is not a flag; did you mean --batch-size?\nsee python train.py --help\n"
    assert done.stderr == expected


@pytest.mark.parametrize("script", ["train.py", "val.py", "detect.py"])
def test_scripts_check_flags_before_they_import_torch(script: str, tmp_path: Path) -> None:
    write(tmp_path / "torch.py", "raise RuntimeError('torch was imported')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for argv, status, out in ((["--help"], 0, f"usage: python {script}"), (["--epohcs", "3", "--imgsz", "-1"], 2, "")):
        done = subprocess.run(
            [sys.executable, script, *argv], capture_output=True, text=True, cwd=PROJECT, env=env, check=False
        )
        assert done.returncode == status, done.stderr
        assert done.stdout.startswith(out)
        assert done.stderr.startswith("error: 2 problems\n- --epohcs is not a flag" if status else "")
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", [TrainConfig, ValConfig, DetectConfig])
def test_image_sizes_have_an_upper_bound(kind: type[Any]) -> None:
    """They were tracebacks of whatever ran out of memory first; so were those of Python callers."""
    low = 32 if kind is TrainConfig else 0
    for size in (99999999, 16385):
        with pytest.raises(UserError, match=rf"^--imgsz must be between {low} and 16384, not {size}\n"):
            given_flags(kind, ["--imgsz", str(size)])
        with pytest.raises(UserError, match=rf"^--imgsz must be between {low} and 16384, not {size}$"):
            given_keywords(kind, {"imgsz": size})
    assert given_flags(kind, ["--imgsz", "16384"])["imgsz"] in (16384, [16384])


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (TrainConfig, ValConfig, DetectConfig):
        with pytest.raises(SystemExit) as info:
            parse(kind, ["--help"])
        assert not info.value.code
        text = " ".join(capsys.readouterr().out.split())
        assert text.index("examples:") < text.index("--weights FILE")
        for item in dataclasses.fields(kind):
            assert f"--{item.name.replace('_', '-')}" in text
        assert text.count("(default: ") == len(dataclasses.fields(kind))
        assert "--local-rank N, --local_rank N passed by old launchers and ignored" in text
        assert "--quad" not in text


def test_flags_page_is_up_to_date() -> None:
    text = (PROJECT / "docs" / "flags.md").read_text()
    assert text == flags_page((TrainConfig, ValConfig, DetectConfig)), (
        "run: python -m utils.config.flags > docs/flags.md"
    )


def test_val_flags() -> None:
    line = "--weights a.pt --conf-thres 0.25 --iou-thres 0.45 --max-det 10 --task test --batch 4"
    config = parse(ValConfig, line.split())
    expected = (0.25, 0.45, 10, "test", 4)
    assert (config.conf_thres, config.iou_thres, config.max_det, config.task, config.batch_size) == expected
    shortened = ["--weights", "a.pt", "--conf", "0.3", "--iou", "0.5"]
    for short in (parse(ValConfig, shortened), parse(DetectConfig, shortened)):
        assert (short.conf_thres, short.iou_thres) == (0.3, 0.5)
    defaults = ValConfig(weights="a.pt")
    assert (defaults.conf_thres, defaults.iou_thres, defaults.max_det, defaults.batch_size) == (0.001, 0.6, 0, 32)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--weights is missing"),
        ("--weights a.pt --conf-thres 1.5", "--conf-thres must be between 0 and 1, not 1.5"),
        ("--weights a.pt --conf-thres nan", "--conf-thres must be between 0 and 1, not nan"),
        ("--weights a.pt --task study", "--task study is not available yet: "),
        ("--weights a.pt --save-conf", "--save-conf adds a column to --save-txt; give that too"),
        ("--weights a.pt --task speed --save-json", "--task speed writes no files; leave --save-txt and"),
        ("--weights a.pt --dnn", "--dnn is not available yet: "),
        ("--weights a.pt --name ../x", "--name ../x leads out of --project runs/val"),
    ],
)
def test_mistakes_in_val_flags(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        parse(ValConfig, line.split())
    assert info.value.code == 2
    assert words in capsys.readouterr().err


# ---- hyperparameters ----

SCRATCH_LOW = {
    "lr0": 0.01,
    "lrf": 0.01,
    "momentum": 0.937,
    "weight_decay": 0.0005,
    "warmup_epochs": 3.0,
    "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1,
    "box": 0.05,
    "cls": 0.5,
    "cls_pw": 1.0,
    "obj": 1.0,
    "obj_pw": 1.0,
    "iou_t": 0.2,
    "anchor_t": 4.0,
    "fl_gamma": 0.0,
    "hsv_h": 0.015,
    "hsv_s": 0.7,
    "hsv_v": 0.4,
    "degrees": 0.0,
    "translate": 0.1,
    "scale": 0.5,
    "shear": 0.0,
    "perspective": 0.0,
    "flipud": 0.0,
    "fliplr": 0.5,
    "mosaic": 1.0,
    "mixup": 0.0,
    "copy_paste": 0.0,
}
RECIPES = {
    "scratch-low": {},
    "scratch-med": {"lrf": 0.1, "cls": 0.3, "obj": 0.7, "scale": 0.9, "mixup": 0.1},
    "scratch-high": {"lrf": 0.1, "cls": 0.3, "obj": 0.7, "scale": 0.9, "mixup": 0.1, "copy_paste": 0.1},
    "no-augmentation": {
        **{"lrf": 0.1, "cls": 0.3, "obj": 0.7, "hsv_h": 0, "hsv_s": 0, "hsv_v": 0},
        **{"translate": 0, "scale": 0, "fliplr": 0, "mosaic": 0},
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes(name: str) -> None:
    """The figures are those of YOLOv5's files of the same names."""
    assert dataclasses.asdict(Hyp()) == {**SCRATCH_LOW, "anchors": 0.0}
    assert dataclasses.asdict(load_hyp(f"hyp.{name}.yaml")) == {**SCRATCH_LOW, "anchors": 0.0, **RECIPES[name]}
    assert set(load_yaml(find_yaml(f"hyp.{name}", "hyp"))) == set(SCRATCH_LOW)


# Learning rates, for the optimizer that is used -----------------------------------------------------------------------


def test_each_shipped_recipe_is_for_an_optimizer() -> None:
    assert set(SHIPPED_RECIPES) == {path.name for path in SHIPPED["hyp"].iterdir()}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("name", SHIPPED_RECIPES)
def test_learning_rates_suit_the_optimizer(name: str, optimizer: str) -> None:
    """Adam at SGD's 0.01 does not learn (ultralytics/yolov5#8234, #5284); SGD at Adam's 0.001 is slow."""
    own, recipe = load_hyp(name), load_recipe(name, optimizer)
    rates = (recipe.hyp.lr0, recipe.hyp.warmup_bias_lr)
    if (SHIPPED_RECIPES[name] == "SGD") == (optimizer == "SGD"):
        assert recipe == Recipe(own)
    elif optimizer == "SGD":
        assert rates == (0.01, 0.1)
        assert recipe.note == "lr0 0.01 and warmup_bias_lr 0.1 for SGD in place of 0.004 and 0.004, for AdamW"
    else:
        assert rates == (0.001, 0.001)
        assert recipe.note == (
            f"lr0 0.001 and warmup_bias_lr 0.001 for {optimizer} in place of {own.lr0:g} and {own.warmup_bias_lr:g}, "
            "for SGD"
        )
    assert dataclasses.replace(recipe.hyp, lr0=own.lr0, warmup_bias_lr=own.warmup_bias_lr) == own
    assert not recipe.doubts


@pytest.mark.parametrize(
    ("text", "optimizer", "rates", "note", "doubts"),
    [
        ("lr0: 0.002\nwarmup_bias_lr: 0", "Adam", (0.002, 0.0), "", 0),
        ("lr0: 0.002", "Adam", (0.002, 0.002), "warmup_bias_lr 0.002 for Adam in place of 0.1, for SGD", 0),
        ("mosaic: 0", "AdamW", (0.001, 0.001), "lr0 0.001 and warmup_bias_lr 0.001 for AdamW in place of ", 0),
        ("lr0: 0.01\nwarmup_bias_lr: 0.1", "AdamW", (0.01, 0.1), "", 2),  # a copy of a shipped recipe
        ("lr0: 0.01", "AdamW", (0.01, 0.01), "warmup_bias_lr 0.01 for AdamW in place of 0.1, for SGD", 1),
        ("lr0: 0.002", "SGD", (0.002, 0.1), "", 0),
        ("mosaic: 0", "SGD", (0.01, 0.1), "", 0),
    ],
)
def test_learning_rates_chosen_by_hand(
    text: str, optimizer: str, rates: tuple[float, float], note: str, doubts: int, tmp_path: Path
) -> None:
    """A file of one's own that names them; also under a shipped recipe's name."""
    recipe = load_recipe(write(tmp_path / "hyp.scratch-low.yaml", text), optimizer)
    assert (recipe.hyp.lr0, recipe.hyp.warmup_bias_lr) == rates
    assert recipe.note.startswith(note) and bool(recipe.note) == bool(note)
    assert len(recipe.doubts) == doubts
    if doubts:
        assert ": lr0 0.01 is a learning rate for SGD; AdamW usually starts from 0.001, and does so" in recipe.doubts[0]


@pytest.mark.parametrize(("name", "lr0", "anchors"), [("VOC", 0.00334, 3.412), ("Objects365", 0.00258, 3.2)])
def test_recipes_that_name_a_number_of_anchors(name: str, lr0: float, anchors: float) -> None:
    content = load_yaml(find_yaml(f"hyp.{name}", "hyp"))
    assert (content["lr0"], content["anchors"]) == (lr0, anchors)
    assert set(content) == {*SCRATCH_LOW, "anchors"}
    hyp = load_hyp(f"hyp.{name}.yaml")
    assert (hyp.lr0, hyp.anchors) == (lr0, anchors)


def test_hyp_keys_left_out_are_scratch_low(tmp_path: Path) -> None:
    assert load_hyp(write(tmp_path / "h.yaml", "lr0: 0.1\nwarmup_epochs: 1\n")) == Hyp(lr0=0.1, warmup_epochs=1.0)


def test_numbers_without_a_dot(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as a text."""
    assert load_hyp(write(tmp_path / "h.yaml", "lr0: 1e-3\ndegrees: 1E+1\n")) == Hyp(lr0=0.001, degrees=10.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 0.1", "lr is not a hyperparameter; did you mean lr"),
        ("mosiac: 1", "mosiac is not a hyperparameter; did you mean mosaic?"),
        ("lr0: fast", "lr0 takes a number, not 'fast'"),
        ("lr0: true", "lr0 takes a number, not True"),
        ("lr0:", "lr0 takes a number, not None"),
        ("degrees: 010", "degrees takes a number, not '010'"),
        ("warmup_epochs: 1_0", "warmup_epochs takes a number, not '1_0'"),
        ("degrees: 0:30", "degrees takes a number, not '0:30'"),
        ("lr0: -1", "lr0 must be between 0 and 10, not -1"),
        ("warmup_epochs: -1", "warmup_epochs must be between 0 and 1000, not -1"),
        ("warmup_momentum: -0.1", "warmup_momentum must be between 0 and 0.9999, not -0.1"),
        ("mosaic: 1.5", "mosaic must be between 0 and 1, not 1.5"),
        ("lr0: .nan", "lr0 must be between 0 and 10, not nan"),
    ],
)
def test_mistakes_in_hyp(text: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "h.yaml", text)
    with pytest.raises(UserError) as info:
        load_hyp(path)
    assert str(info.value).startswith(f"{path}: {words}")


# ---- YAML ----


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", ", line 3: key a appears twice"),
        ("a:\n  b: 1\n  b: 2\n", ", line 3: key b appears twice"),
        ("a: [1\nb: 2\n", ", line 2: "),
        ("a: 1\n  b: 2\n", ", line 2: "),
        ("- a\n- b\n", " must hold keys and values (key: value), not a list"),
        ("", " must hold keys and values (key: value), not nothing"),
        ("a: !!python/object/apply:os.getcwd []\n", ", line 1: could not determine a constructor"),
        ("a: \x07", ": "),
    ],
)
def test_yaml_is_strict(text: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", text)
    with pytest.raises(UserError) as info:
        load_yaml(path)
    assert str(info.value).startswith(f"{path}{words}")


def test_yaml_merge_keys_still_work(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", "a: &base {x: 1, y: 2}\nb: {<<: *base, y: 3}\n")
    assert load_yaml(path)["b"] == {"x": 1, "y": 3}


WORDS = {
    **{"1": 1, "-12": -12, "+3": 3, "0": 0, "1.10": 1.1, ".5": 0.5, "5.": 5.0, "1e3": 1000.0, "-1.5E-3": -0.0015},
    **{".inf": math.inf, "-.INF": -math.inf, "true": True, "False": False, "~": None, "null": None, "": None},
    **{
        word: word
        for word in ("010", "0x1F", "0o17", "0b1", "1_000", "12:30", "1:2:3.5", "2024-01-01", "00.5", "1e", "+")
    },
    **{word: word for word in ("yes", "No", "ON", "off", "y", "n", "tRUE", "nULL", ".", "inf", "nan", "=", "1.2.3")},
}


def test_words_of_yaml(tmp_path: Path) -> None:
    """ultralytics/yolov5#11439: what looks like no number and no truth value is a text, as it is written."""
    content = load_yaml(write(tmp_path / "x.yaml", "".join(f"k{k}: {word}\n" for k, word in enumerate(WORDS))))
    assert list(content.values()) == list(WORDS.values())
    assert list(map(type, content.values())) == list(map(type, WORDS.values()))
    assert load_yaml(write(tmp_path / "x.yaml", "k: 0755\n010: a\n8: b\n")) == {"k": "0755", "010": "a", 8: "b"}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """ultralytics/yolov5#11439: by us, and by programs that read YAML 1.1."""
    texts = [
        *WORDS,
        "null",
        " a ",
        "#1",
        "a: b",
        "Soci\u00e9t\u00e9",
        "\u7fd8\u5934",
        "caf\udce9",
        "[a]",
        "- a",
        "'",
        "a\nb",
        "1e-3",
    ]
    values: dict[str, Any] = {f"k{number}": text for number, text in enumerate(texts)}
    values |= {
        "f": 1e-5,
        "g": 1e20,
        "h": math.inf,
        "i": -3,
        "j": True,
        "l": None,
        "m": [1, "1", 1.0],
        "n": [],
        "010": 1,
    }
    path = write(tmp_path / "x.yaml", "")
    write_yaml(path, values)
    assert load_yaml(path) == values
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == values
    assert list(map(type, load_yaml(path).values())) == list(map(type, values.values()))


def test_yaml_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(UserError, match="not a text file in UTF-8"):
        load_yaml(tmp_path / "x.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load_yaml(tmp_path / "absent.yaml")


def test_shipped_files_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: from any folder, with or without the suffix."""
    monkeypatch.chdir(tmp_path)
    shipped = PROJECT / "data" / "hyps" / "hyp.scratch-low.yaml"
    for name in ("hyp.scratch-low.yaml", "hyp.scratch-low", "data/hyps/hyp.scratch-low.yaml"):
        assert find_yaml(name, "hyp") == shipped
    own = write(tmp_path / "hyp.scratch-low.yaml", "lr0: 0.5\n")
    assert find_yaml("hyp.scratch-low.yaml", "hyp") == own  # a user's own file comes first
    with pytest.raises(UserError, match=r"--hyp hyp.scratch-lo: .*did you mean hyp.scratch-low.yaml"):
        find_yaml("hyp.scratch-lo", "hyp")
    with pytest.raises(UserError, match=r"--cfg zzz: there is no such file; shipped are "):
        find_yaml("zzz", "model")
    with pytest.raises(UserError, match=r"--data nope.yaml: there is no such file; shipped are "):
        find_yaml("nope.yaml", "data")
    with pytest.raises(UserError, match=r"--data shape.yml: there is no such file; did you mean shapes.yaml\?"):
        find_yaml("shape.yml", "data")


def test_a_mistyped_file_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own ones, also in another folder, with another suffix or without, and a mistyped folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("clinic.yaml", "sets/clinic.yml", "runs/train/exp3/weights/best.pt", "sets/clinic.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, "a: 1\n")
    for typed, meant in {
        "clinc.yaml": "clinic.yaml",
        "Clinic.yml": "clinic.yaml",
        "sets/clinik": "sets/clinic.yml",
        "set/clinic.yml": "sets/clinic.yml",
        f"{tmp_path}/sets/clinics.yaml": f"{tmp_path}/sets/clinic.yml",
        "coco12.yaml": "coco128.yaml",
    }.items():
        with pytest.raises(UserError) as info:
            find_yaml(typed, "data")
        assert str(info.value) == f"--data {typed}: there is no such file; did you mean {meant}?"
    for typed, meant in {
        "runs/train/exp3/weights/bets.pt": "runs/train/exp3/weights/best.pt",
        "runs/train/exp3/weights/best": "runs/train/exp3/weights/best.pt",
        "runs/train/exp33/weights/best.pt": "runs/train/exp3/weights/best.pt",
        "runs/tain/exp33/weights/bets.pt": "runs/train/exp3/weights/best.pt",
        "runs/tain/exp3/zzz/best.pt": "runs/train",
        "yolov5ss.pt": "yolov5s.pt",
    }.items():
        with pytest.raises(UserError) as info:
            check_readable(Path(typed), f"--weights {typed}")
        assert str(info.value) == f"--weights {typed} is not there; did you mean {meant}?"
    for typed in ("zzz.pt", "x/" * 40 + "zzz.pt", "x" * 300 + "/zzz.pt", "/zzz/zzz.pt"):
        assert nearest_file(Path(typed), (".pt",)) == ""


@pytest.mark.parametrize(("kind", "spelling"), [("data", "--data"), ("hyp", "--hyp"), ("model", "--cfg")])
def test_names_that_no_file_can_have(kind: str, spelling: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{spelling} {'x' * 20}\\.\\.\\. can't be read: File name too long$"):
        find_yaml("x" * 300, kind)
    with pytest.raises(UserError, match=f"^{spelling} ~no_such_user/x.yaml: "):
        find_yaml("~no_such_user/x.yaml", kind)
    with pytest.raises(UserError, match=f"^{spelling} {tmp_path} is not a file; name the YAML itself$"):
        find_yaml(tmp_path, kind)


# ---- configurations as plain data ----


def test_configurations_survive_json() -> None:
    config = parse(TrainConfig, ["--freeze", "1", "2", "--resume", "--no-deterministic"])
    for value in (config, ValConfig(weights="a.pt"), Hyp(lr0=0.1)):
        plain = json.loads(json.dumps(config_to_dict(value)))
        assert build_config(type(value), plain) == value
        assert yaml.safe_load(yaml.safe_dump(plain)) == plain


def test_mistakes_in_plain_data() -> None:
    with pytest.raises(UserError, match="epoch is not a setting; did you mean epochs"):
        build_config(TrainConfig, {"epoch": 1})
    with pytest.raises(UserError, match="--epochs takes a whole number, not '1'"):
        build_config(TrainConfig, {"epochs": "1"})
    with pytest.raises(UserError, match="--rect takes true or false, not 1"):
        build_config(TrainConfig, {"rect": 1})


# ---- errors ----


def test_problems() -> None:
    problems = Problems()
    problems.raise_if_any()
    assert not problems
    problems.add("one")
    problems.add("one")
    with pytest.raises(UserError, match=r"^one$"):
        problems.raise_if_any()
    problems.add("two")
    with pytest.raises(UserError, match=r"^2 problems\n- f: one\n- f: two$"):
        problems.raise_if_any("f")


def test_problems_of_several_attempts() -> None:
    def fail() -> int:
        inner = Problems()
        inner.add("one")
        inner.add("two")
        inner.raise_if_any("f")
        return 0

    problems = Problems()
    assert problems.attempt(lambda: 7) == 7
    assert problems.attempt(fail) is None
    problems.add("three")
    with pytest.raises(UserError, match=r"^3 problems\n- f: one\n- f: two\n- three$"):
        problems.raise_if_any()


@pytest.mark.parametrize(
    ("body", "status", "err"),
    [
        ("raise UserError('--x is wrong')", 2, "error: --x is wrong\n"),
        ("raise KeyboardInterrupt", 130, "stopped by Ctrl-C\n"),
        ("raise KeyboardInterrupt('go on with: x')", 130, "stopped by Ctrl-C\ngo on with: x\n"),
        ("return 7", 7, ""),
        ("return None", 0, ""),
    ],
)
def test_how_a_script_ends(body: str, status: int, err: str) -> None:
    done = run_python(f"from utils.core.errors import UserError, run_cli\ndef main():\n    {body}\nrun_cli(main)")
    assert (done.returncode, done.stderr) == (status, err)


def test_a_bug_keeps_its_traceback() -> None:
    def main() -> int:
        return 1 // 0

    with pytest.raises(ZeroDivisionError):
        run_cli(main)


@pytest.mark.parametrize("script", ["train.py", "val.py", "detect.py"])
@pytest.mark.parametrize("flags", [["--help"], ["--no-such-flag"]])
def test_an_answer_needs_no_heavy_imports(script: str, flags: list[str]) -> None:
    """Not torch, which takes seconds, nor anything else that is not on the way to the answer."""
    command = [sys.executable, "-X", "importtime", str(PROJECT / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if flags == ["--help"] else 2)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "utils.config.command_line" in imported
    heavy = {"torch", "torchvision", "numpy", "cv2", "pandas", "matplotlib", "multiprocessing", "asyncio"}
    assert not heavy & imported
