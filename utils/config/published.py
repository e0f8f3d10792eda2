"""What is published where: addresses of weights and data sets, how large they are, their digests and licenses."""

from dataclasses import dataclass

YOLOV5_RELEASE = "https://github.com/ultralytics/yolov5/releases/download/v7.0"
YOLOV5_LICENSE = "YOLOv5's weights: AGPL-3.0, as their publisher states"
COCO_LICENSE = "COCO: annotations CC BY 4.0, images under Flickr's terms of use (https://cocodataset.org/#termsofuse)"
VOC_LICENSE = "PASCAL VOC: images under Flickr's terms of use (http://host.robots.ox.ac.uk/pascal/VOC)"
UNKNOWN_LICENSE = "its license is what its publisher says"


@dataclass(frozen=True)
class Published:
    """A file on a server.

    Attributes:
        address: plain http only where there is a digest, or where a user wrote it.
        license: a line that says whose terms hold.
        size: in bytes; None if only the server knows.
        digest: ``sha256:HEX`` or ``md5:HEX``; "" if none is published.
        start: first bytes of every such file.
    """

    address: str
    license: str = UNKNOWN_LICENSE
    size: int | None = None
    digest: str = ""
    start: bytes = b""


WEIGHTS = {
    f"{name}.pt": Published(f"{YOLOV5_RELEASE}/{name}.pt", YOLOV5_LICENSE, start=b"PK")  # a zip, as torch.save writes
    for letter in "nsmlx"
    for name in (f"yolov5{letter}", f"yolov5{letter}6")
}
"""Weights that are fetched when they are named and not there, by file name."""

_COCO, _VOC = "http://images.cocodataset.org", "https://thor.robots.ox.ac.uk/pascal/VOC"
_ARCHIVES = (
    Published("https://github.com/ultralytics/assets/releases/download/v0.0.0/coco128.zip", COCO_LICENSE),
    # Sizes and digests of COCO as TensorFlow Datasets 4.9.4 has them, of VOC as torchvision does (sizes: the former).
    Published(
        f"{_COCO}/zips/train2017.zip",
        COCO_LICENSE,
        19_336_861_798,
        "sha256:69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929",
    ),
    Published(
        f"{_COCO}/zips/val2017.zip",
        COCO_LICENSE,
        815_585_330,
        "sha256:4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05",
    ),
    Published(
        f"{_COCO}/annotations/annotations_trainval2017.zip",
        COCO_LICENSE,
        252_907_541,
        "sha256:113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268",
    ),
    Published(
        f"{_VOC}/voc2007/VOCtrainval_06-Nov-2007.tar", VOC_LICENSE, 460_032_000, "md5:c52e279531787c972589f7e41ab4ae64"
    ),
    Published(
        f"{_VOC}/voc2007/VOCtest_06-Nov-2007.tar", VOC_LICENSE, 451_020_800, "md5:b6e924de25625d8de591ea690078ad9f"
    ),
    Published(
        f"{_VOC}/voc2012/VOCtrainval_11-May-2012.tar",
        VOC_LICENSE,
        1_999_639_040,
        "md5:6cd6e144f989b92b3379bac3b3de84fd",
    ),
)
ARCHIVES = {archive.address: archive for archive in _ARCHIVES}
"""What is known of archives that data set YAMLs name, by address."""


def archive_at(address: str) -> Published:
    """Return what is known of an archive; of one that is not listed only its address."""
    return ARCHIVES.get(address, Published(address))
