"""Flags of train.py, val.py and detect.py: what a run is told, each default written once, as a dataclass field.

``python -m utils.config.flags`` prints the flags as the page docs/flags.md. Imports no torch, so that ``--help`` and a
wrong flag cost no wait.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from utils.config.command_line import flag, flags_page
from utils.config.help_texts import (
    DETECT_EXAMPLES,
    DETECT_NOT_YET,
    TRAIN_EXAMPLES,
    TRAIN_NOT_YET,
    VAL_EXAMPLES,
    VAL_NOT_YET,
)
from utils.config.recipe import Hyp

SPLITS = ("train", "val", "test")
LOGGERS = ("csv", "jsonl", "tensorboard")  # where the figures of a run can go
VIDEO_CODECS = ("avc1", "vp09", "mp4v")  # H.264 and VP9, which browsers play; MPEG-4 part 2
METRICS = ("fitness", "mAP50", "mAP50-95", "precision", "recall", "F1")  # of a validation: what can be best
LARGEST_IMGSZ = 1 << 14  # pixels; a square of this side has as many as the largest image that is read
MOST_DET = 5000  # that are kept on their own account, however many labels there are
MAX_DET = 300  # detections of an image in a validation; more where images have many labels
AUTOMATIC = -1  # of --batch-size: what fits


@dataclass
class TrainConfig:
    """Flags of train.py."""

    script: ClassVar[str] = "train.py"
    examples: ClassVar[str] = TRAIN_EXAMPLES
    not_yet: ClassVar[dict[str, str]] = TRAIN_NOT_YET
    not_planned: ClassVar[tuple[str, ...]] = ("--bucket", "--quad")
    elsewhere: ClassVar[dict[str, str]] = {
        item.name: f"a hyperparameter: write {item.name} into a YAML file and give that as --hyp (hyp=... from Python)"
        for item in dataclasses.fields(Hyp)
    }

    weights: str = flag("", "model", "checkpoint to start from; '' = from scratch", metavar="FILE")
    cfg: str = flag(
        "yolov5n.yaml", "model", "network YAML; with --weights the checkpoint's own unless given", metavar="FILE"
    )
    freeze: list[int] = flag(  # noqa: RUF009
        [0],
        "model",
        "keep layers as they are, BatchNorm's statistics too: N = layers 0 to N-1; several = exactly these",
        low=0,
        metavar="N",
    )
    noautoanchor: bool = flag(False, "model", "keep the anchors even if they fit the labels badly")

    data: str = flag(
        "shapes.yaml",
        "data",
        "data set YAML, a path or a shipped name; with --weights what they were trained on unless given",
        metavar="FILE",
    )
    imgsz: int = flag(
        640,
        "data",
        "image size in pixels, rounded up to a multiple of the stride",
        "--img",
        "--img-size",
        low=32,
        high=LARGEST_IMGSZ,
    )
    single_cls: bool = flag(False, "data", "train all classes as one")
    strict: bool = flag(False, "data", "stop at any problem of images and labels instead of leaving it out")
    allow_download_script: bool = flag(
        False, "data", "run the script that a data set YAML has under download, if the data set is not there"
    )
    rect: bool = flag(False, "data", "rectangular batches of similar aspect ratio, without mosaic")
    multi_scale: bool = flag(False, "data", "another size for each batch, 0.5 to 1.5 times --imgsz")
    cache: str = flag(
        "ram",
        "data",
        "keep decoded images in memory or on disk, as many as fit",
        const="ram",
        choices=("ram", "disk", "off"),
    )
    workers: int = flag(8, "data", "most loader processes of a rank; 0 = load in the training process", low=0)

    epochs: int = flag(100, "training", "passes over the training split", low=1)
    batch_size: int = flag(
        16,
        "training",
        "images per forward and backward pass, over all devices; -1 = what fits",
        "--batch",
        low=1,
        also=AUTOMATIC,
    )
    nbs: int = flag(64, "training", "nominal batch: gradients are accumulated up to about so many images", low=1)
    hyp: str = flag("hyp.scratch-low.yaml", "training", "hyperparameter YAML, a path or a shipped name", metavar="FILE")
    optimizer: str = flag("SGD", "training", "optimizer", choices=("SGD", "Adam", "AdamW"))
    label_smoothing: float = flag(
        0.0, "training", "class targets are 1 - X/2 and X/2 instead of 1 and 0", low=0, high=1
    )
    cos_lr: bool = flag(False, "training", "cosine learning rate schedule instead of a linear one")
    patience: int = flag(100, "training", "stop after so many epochs without a better --metric; 0 = never", low=0)
    seed: int = flag(0, "training", "order, augmentation and initial weights follow from it", low=0, high=2**32 - 1)
    resume: bool | str = flag(
        False, "training", "go on with a run: its folder or checkpoint, bare the newest", const=True, metavar="RUN"
    )

    time_limit: str = flag(
        "",
        "training",
        "save, stop and exit with 143 after so long: 90m, 3h30m, 1-12:00:00; --resume goes on",
        metavar="TIME",
    )

    noval: bool = flag(False, "validation", "validate after the last epoch only")
    val_period: int = flag(1, "validation", "validate after every N-th epoch and the last one", low=1)
    metric: str = flag(
        "fitness",
        "validation",
        "what best.pt and --patience follow; fitness = 0.1 mAP50 + 0.9 mAP50-95",
        choices=METRICS,
    )
    val_batch: int = flag(0, "validation", "images per validation batch; 0 = the smaller of --batch-size and 32", low=0)

    device: str = flag(
        "",
        "device",
        "cpu, mps, a GPU as 0 or cuda:0, '' for the best one; several, as 0,1 or all or cpu,cpu, get a process each",
    )
    sync_bn: bool | None = flag(
        None, "device", "BatchNorm over the images of all ranks; automatic = as the network family has it (YOLOv5: yes)"
    )
    grad_compress: str = flag(
        "off", "device", "send gradients from rank to rank rounded to bf16: half the bytes", choices=("off", "bf16")
    )
    dist_timeout: int = flag(10_800, "device", "seconds that a rank waits for the others", low=1)
    stall_warning: float = flag(
        60.0, "device", "say which rank is stuck after so many seconds without progress; 0 = never", low=0
    )
    stall_timeout: float = flag(
        900.0, "device", "end a run that is stuck after so many seconds without progress; 0 = never", low=0
    )
    max_restarts: int = flag(0, "device", "go on by itself after a process died, so many times", low=0)
    amp: str = flag("auto", "device", "precision of the forward pass", choices=("auto", "bf16", "fp16", "off"))
    deterministic: bool | None = flag(None, "device", "bit-identical repeats; automatic = on the CPU")
    compile: bool = flag(
        False, "device", "compile the network by torch.compile; says what that takes and when it has paid off"
    )
    cuda_graph: bool = flag(
        False, "device", "run forward and backward pass as one CUDA graph; one CUDA device, images of one size"
    )
    dp: bool = flag(
        False,
        "device",
        "DataParallel: one process for all GPUs of --device; slow and not recommended, without it each has its own",
    )

    project: str = flag("runs/train", "output", "folder of run folders", metavar="FOLDER")
    name: str = flag("exp", "output", "run folder; exp2, exp3 ... when taken; 'cfg' = the network's name")
    exist_ok: bool = flag(False, "output", "write into the run folder even if it is there")
    nosave: bool = flag(False, "output", "save the final checkpoint only; best.pt is then the last epoch's")
    save_period: int = flag(-1, "output", "also keep a checkpoint every so many epochs; below 1 = none", low=-1)
    save_steps: int = flag(0, "output", "save every so many optimizer steps; 0 = at least every 15 minutes", low=0)
    noplots: bool = flag(False, "output", "draw no pictures of labels, batches, validation and progress")
    loggers: list[str] = flag(  # noqa: RUF009
        ["csv"], "output", "where the figures of each epoch go; results.csv is always written", choices=LOGGERS
    )
    profile: bool = flag(
        False, "output", "look at some batches of the first epoch with PyTorch's profiler: a table, a trace in profile/"
    )


@dataclass
class ValConfig:
    """Flags of val.py."""

    script: ClassVar[str] = "val.py"
    examples: ClassVar[str] = VAL_EXAMPLES
    not_yet: ClassVar[dict[str, str]] = VAL_NOT_YET
    not_planned: ClassVar[tuple[str, ...]] = ()

    weights: str = flag("", "model", "checkpoint to measure", metavar="FILE")

    data: str = flag(
        "", "data", "data set YAML, a path or a shipped name; '' = what the weights were trained on", metavar="FILE"
    )
    task: str = flag(
        "val", "data", "split to measure on; speed = only time the validation split", choices=(*SPLITS, "speed")
    )
    single_cls: bool = flag(False, "data", "measure all classes as one")
    strict: bool = flag(False, "data", "stop at any problem of images and labels instead of leaving it out")
    allow_download_script: bool = flag(
        False, "data", "run the script that a data set YAML has under download, if the data set is not there"
    )
    imgsz: int = flag(
        0,
        "data",
        "image size in pixels; 0 = the one the weights were trained at",
        "--img",
        "--img-size",
        low=0,
        high=LARGEST_IMGSZ,
    )
    batch_size: int = flag(32, "data", "images per forward pass", "--batch", low=1)
    workers: int = flag(8, "data", "most loader processes of a rank; 0 = load in the main process", low=0)

    conf_thres: float = flag(0.001, "scoring", "least confidence of a detection", "--conf", low=0, high=1)
    iou_thres: float = flag(
        0.6, "scoring", "IoU above which non-maximum suppression drops a box", "--iou", low=0, high=1
    )
    max_det: int = flag(
        0, "scoring", f"most detections per image; 0 = {MAX_DET}, or twice the labels of the densest image", low=0
    )
    augment: bool = flag(
        False, "scoring", "look at each image three times: as it is, smaller and flipped, smaller still"
    )
    coco_metrics: bool = flag(False, "scoring", "also score by COCO's rules, as papers do")
    verbose: bool = flag(False, "scoring", "one line per class, however many there are")

    device: str = flag(
        "",
        "device",
        "cpu, mps, a GPU as 0 or cuda:0, '' for the best one; several, as 0,1 or all or cpu,cpu, get a process each",
    )
    half: bool = flag(False, "device", "compute in half precision (fp16); on a CUDA GPU only")
    dist_timeout: int = flag(10_800, "device", "seconds that a rank waits for the others", low=1)

    save_txt: bool = flag(False, "output", "write labels/NAME.txt with the detections of each image")
    save_conf: bool = flag(False, "output", "add the confidence to the rows of --save-txt")
    save_json: bool = flag(False, "output", "write predictions.json in COCO's results format")
    noplots: bool = flag(False, "output", "draw no pictures of batches, curves and the confusion matrix")
    project: str = flag("runs/val", "output", "folder of run folders", metavar="FOLDER")
    name: str = flag("exp", "output", "run folder; exp2, exp3 ... when taken")
    exist_ok: bool = flag(False, "output", "write into the run folder even if it is there")

    @property
    def split(self) -> str:
        """The split that ``task`` looks at."""
        return "val" if self.task == "speed" else self.task


@dataclass
class DetectConfig:
    """Flags of detect.py."""

    script: ClassVar[str] = "detect.py"
    examples: ClassVar[str] = DETECT_EXAMPLES
    not_yet: ClassVar[dict[str, str]] = DETECT_NOT_YET
    not_planned: ClassVar[tuple[str, ...]] = ("--update",)

    weights: str = flag("", "model", "checkpoint to detect with", metavar="FILE")
    data: str = flag("", "model", "data set YAML: names for weights that have none, else compared", metavar="FILE")

    source: list[str] = flag(  # noqa: RUF009
        ["data/images"],
        "input",
        "images, videos, folders, patterns, .txt or .streams lists, URLs, or numbers of cameras",
        commas=False,
    )
    imgsz: list[int] = flag(  # noqa: RUF009
        [0],
        "input",
        "image size in pixels, or height and width; 0 = the one the weights were trained at",
        "--img",
        "--img-size",
        low=0,
        high=LARGEST_IMGSZ,
        metavar="N",
    )
    batch_size: int = flag(1, "input", "images per forward pass; those of equal shape share one", "--batch", low=1)
    vid_stride: int = flag(1, "input", "use every n-th frame of videos and streams", low=1)
    stream_timeout: float = flag(10.0, "input", "seconds without a frame after which a stream is dead", low=0.1)

    conf_thres: float = flag(0.25, "detection", "least confidence of a detection", "--conf", low=0, high=1)
    iou_thres: float = flag(
        0.45, "detection", "IoU above which non-maximum suppression drops a box", "--iou", low=0, high=1
    )
    max_det: int = flag(1000, "detection", "most detections per image", low=1)
    classes: list[int] = flag([], "detection", "ids of the classes to keep; '' = all", low=0, metavar="N")  # noqa: RUF009
    augment: bool = flag(
        False, "detection", "look at each image three times: as it is, smaller and flipped, smaller still"
    )
    agnostic_nms: bool = flag(False, "detection", "suppress boxes of other classes too")

    device: str = flag("", "device", "cpu, mps, a GPU as 0 or cuda:0, or '' for the best one there is")
    half: bool = flag(False, "device", "compute in half precision (fp16); on a CUDA GPU only")

    view_img: bool = flag(False, "output", "show the pictures in a window as they come; key q ends")
    nosave: bool = flag(False, "output", "write no images and videos")
    video_codec: str = flag(
        "auto",
        "output",
        "of videos; auto = the first of them that OpenCV can write; mp4v is fastest, but browsers don't play it",
        choices=("auto", *VIDEO_CODECS),
    )
    save_txt: bool = flag(False, "output", "write labels/NAME.txt, for videos NAME_FRAME.txt")
    save_format: int = flag(0, "output", "rows of --save-txt: 0 = center and size, 1 = corners", low=0, high=1)
    save_conf: bool = flag(False, "output", "add the confidence to the rows of --save-txt")
    save_csv: bool = flag(False, "output", "write predictions.csv, one row per detection")
    save_crop: bool = flag(False, "output", "write what is in each box to crops/CLASS/NAME.jpg")
    project: str = flag("runs/detect", "output", "folder of run folders", metavar="FOLDER")
    name: str = flag("exp", "output", "run folder; exp2, exp3 ... when taken")
    exist_ok: bool = flag(False, "output", "write into the run folder even if it is there")

    line_thickness: int = flag(0, "drawing", "of the boxes in pixels; 0 = in proportion to the image", low=0)
    hide_labels: bool = flag(False, "drawing", "boxes only")
    hide_conf: bool = flag(False, "drawing", "class names without confidences")


if __name__ == "__main__":
    print(flags_page((TrainConfig, ValConfig, DetectConfig)), end="")
