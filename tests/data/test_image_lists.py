import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.common import as_nobody, needs_root
from utils.core.errors import UserError
from utils.data.image_lists import find_labels, list_images
from utils.data.index import build_index
from utils.data.labels import label_path
from utils.data.report import Problem

ROW = "0 0.5 0.5 0.2 0.3\n"


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_folder_is_searched_recursively_and_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.PNG", "a/1.jpg", "a/notes.txt", "z.webp", "c.jpg.bak")
    assert list_images([tmp_path], []) == [f"{tmp_path}/{name}" for name in ("a/1.jpg", "b/2.PNG", "z.webp")]


def test_linked_folders_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    touch(tmp_path, "real/1.jpg")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/link").symlink_to(tmp_path / "real")
    (tmp_path / "set/circle").symlink_to(tmp_path / "set")
    assert list_images([tmp_path / "set"], []) == [f"{tmp_path}/set/link/1.jpg"]


def test_list_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "lists/x/2.jpg", "lists/x/1.jpg", "cwd/3.jpg")
    lines = ["\ufeff./x/2.jpg", "", "# ./x/9.jpg", "x/1.jpg", "cwd/3.jpg", "/abs/4.jpg", "./x/../x/2.jpg", "x/5.doc"]
    source = tmp_path / "lists/train.txt"
    source.write_text("\n".join(lines), encoding="utf-8")
    problems: list[Problem] = []
    want = [f"{tmp_path}/lists/x/2.jpg", f"{tmp_path}/lists/x/1.jpg", f"{tmp_path}/cwd/3.jpg", "/abs/4.jpg"]
    assert list_images([source], problems) == want
    assert problems == [
        (str(source), 7, "./x/../x/2.jpg", "image listed more than once, used once"),
        (str(source), 8, "x/5.doc", "names no image, line left out"),
    ]


def test_several_sources_keep_their_order(tmp_path: Path) -> None:
    touch(tmp_path, "b/1.jpg", "a/1.jpg")
    (tmp_path / "one.txt").write_text("./a/1.jpg\n")
    sources = [tmp_path / "b", tmp_path / "one.txt", tmp_path / "a"]
    assert list_images(sources, []) == [f"{tmp_path}/b/1.jpg", f"{tmp_path}/a/1.jpg"]


def test_wrong_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        list_images([tmp_path / "nowhere"], [])
    (tmp_path / "x.json").touch()
    with pytest.raises(UserError, match=r"x.json is neither a folder nor a .txt list"):
        list_images([tmp_path / "x.json"], [])
    with pytest.raises(UserError, match=rf"no images in {tmp_path}.*avif, bmp, .*webp"):
        list_images([tmp_path], [])


def test_label_path() -> None:
    assert label_path("/d/images/train/a.b.jpg") == "/d/labels/train/a.b.txt"
    assert label_path("/images/d/images/x/1.png") == "/images/d/labels/x/1.txt"
    assert label_path("/d/myimages/1.png") == "/d/myimages/1.txt"


def test_labels_without_image(tmp_path: Path) -> None:
    """Told apart from labels of images that another list names, and from text files that hold no labels."""
    touch(tmp_path, *(f"images/{name}" for name in ("a.b.jpg", "listed.png", "other.jpg", "sub/s.jpg")))
    touch(tmp_path, "labels/empty.txt")
    (tmp_path / "labels/sub").mkdir()
    for name in ("a.b", "a", "listed", "other", "gone", "sub/s", "sub/listed"):
        (tmp_path / f"labels/{name}.txt").write_text(ROW)
    (tmp_path / "labels/classes.txt").write_text("cat\ndog\n")
    (tmp_path / "labels/numbers.txt").write_text("1\n2\n")
    (tmp_path / "labels/list.txt").write_text("../images/listed.png\n")
    images = [f"{tmp_path}/images/{name}" for name in ("a.b.jpg", "listed.png", "sub/s.jpg")]
    labels, found = find_labels(images, [tmp_path / "labels/list.txt"])
    assert labels == [f"{tmp_path}/labels/{name}.txt" for name in ("a.b", "listed", "sub/s")]
    assert [problem.file for problem in found] == [
        f"{tmp_path}/labels/{name}.txt" for name in ("a", "gone", "sub/listed")
    ]
    assert {problem.rule for problem in found} == {"label file without an image, not used"}
    assert str(found[0]) == f"{found[0].file}: label file without an image, not used"


def test_labels_beside_their_images(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg")
    for name in ("1", "2"):
        (tmp_path / f"{name}.txt").write_text(ROW)
    (tmp_path / "readme.txt").write_text("One picture of a cat, 2 by 2 meters")
    labels, found = find_labels([f"{tmp_path}/1.jpg"], [tmp_path])
    assert labels == [f"{tmp_path}/1.txt"]
    assert [problem.file for problem in found] == [f"{tmp_path}/2.txt"]
    assert find_labels(["/nowhere/images/1.jpg"], []) == ([""], [])


def labels_of(root: Path, *names: str) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Label file by image, and findings (file, value, rule), of a folder's images; all below the root."""
    problems: list[Problem] = []
    images = list_images([root / name for name in names], problems)
    labels, odd = find_labels(images, [])
    short = str(root) + "/"
    found = {path.removeprefix(short): label.removeprefix(short) for path, label in zip(images, labels, strict=True)}
    return found, [(one.file.removeprefix(short), one.value, one.rule) for one in sorted(problems + odd)]


def fill(root: Path, *names: str) -> None:
    touch(root, *names)
    for name in names:
        if name.lower().endswith(".txt"):
            (root / name).write_text(ROW)


def test_labels_beside_images_in_a_folder_called_images(tmp_path: Path) -> None:
    """ultralytics/ultralytics#21224: such labels were passed over in silence. Those in labels come first."""
    fill(tmp_path, *(f"images/{name}" for name in ("1.jpg", "1.txt", "2.jpg", "2.txt", "3.jpg", "lone.txt", "4.jpg")))
    fill(tmp_path, "labels/1.txt", "labels/3.txt")
    (tmp_path / "images/classes.txt").write_text("cat")
    (tmp_path / "images/4.txt").write_text("a caption")
    assert labels_of(tmp_path, "images") == (
        {
            "images/1.jpg": "labels/1.txt",
            "images/2.jpg": "images/2.txt",
            "images/3.jpg": "labels/3.txt",
            "images/4.jpg": "images/4.txt",
        },
        [
            ("images/1.txt", "", "second label file of an image, not used"),
            ("images/2.txt", "", "label file beside its image in a folder called images, used"),
            ("images/4.txt", "", "label file beside its image in a folder called images, used"),
            ("images/lone.txt", "", "label file without an image, not used"),
        ],
    )


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/train/1.jpg", "labels/train/1.TXT"),
        ("images/train/1.JPG", "labels/train/1.Txt"),
        ("images/train/IMG_1.JPG", "labels/train/img_1.txt"),
        ("images/train/1.jpg", "LABELS/train/1.txt"),
        ("Images/train/1.jpg", "Labels/train/1.txt"),
        ("IMAGES/Train/1.jpg", "labels/train/1.txt"),
        ("images/train/caf\u00e9.jpg", "labels/train/cafe\u0301.txt"),
        ("plain/1.jpg", "plain/1.TXT"),
        ("images/set/Images/1.jpg", "images/set/labels/1.txt"),
        ("images/set/Images/1.jpg", "labels/set/Images/1.txt"),
    ],
)
def test_labels_in_any_case(image: str, label: str, tmp_path: Path) -> None:
    """ultralytics/yolov5#6872: .TXT was no label file; and what else some file systems hold to be the same name."""
    fill(tmp_path, image, label)
    found, odd = labels_of(tmp_path, image.split("/")[0])
    assert found == {image: label}
    usual = "caf" in image or image.endswith("Images/1.jpg")  # another accent, or all as it should be
    rule = "label file in other upper or lower case than its image or than .txt, used"
    assert odd == ([] if usual else [(label, "", rule)])


def test_names_that_differ_in_case_only(tmp_path: Path) -> None:
    """The same name goes before a name that is alike, and no file is passed over without a word."""
    fill(tmp_path, "images/a.jpg", "images/A.jpg", "images/b.jpg", "labels/a.txt", "labels/b.txt", "labels/b.TXT")
    if not (tmp_path / "images/A.jpg").samefile(tmp_path / "images/a.jpg"):
        found, odd = labels_of(tmp_path, "images")
        assert found == {"images/A.jpg": "", "images/a.jpg": "labels/a.txt", "images/b.jpg": "labels/b.txt"}
        assert odd == [("labels/b.TXT", "", "second label file of an image, not used")]
        fill(tmp_path, "Labels/A.txt", "Labels/b.txt")
        found, odd = labels_of(tmp_path, "images")
        assert found == {"images/A.jpg": "Labels/A.txt", "images/a.jpg": "labels/a.txt", "images/b.jpg": "labels/b.txt"}
        assert [file for file, _, rule in odd if rule.startswith("second")] == ["Labels/b.txt", "labels/b.TXT"]


def test_labels_of_linked_folders_and_files(tmp_path: Path) -> None:
    """Links keep their own labels; without some, those of what they lead to are used."""
    fill(tmp_path, "far/images/x/1.jpg", "far/labels/x/1.txt", "far/images/y/2.jpg", "far/labels/y/2.txt")
    fill(tmp_path, "far/images/y/3.jpg", "far/labels/y/3.txt", "set/3.txt")
    (tmp_path / "set/x").symlink_to(tmp_path / "far/images/x")
    for name in ("2", "3"):
        (tmp_path / f"set/{name}.jpg").symlink_to(tmp_path / f"far/images/y/{name}.jpg")
    assert labels_of(tmp_path, "set") == (
        {"set/2.jpg": "far/labels/y/2.txt", "set/3.jpg": "set/3.txt", "set/x/1.jpg": "far/labels/x/1.txt"},
        [],
    )
    (tmp_path / "again").symlink_to(tmp_path / "far")  # one folder by two names has no second label files
    assert labels_of(tmp_path, "again/images/x") == ({"again/images/x/1.jpg": "again/labels/x/1.txt"}, [])


def test_images_that_share_a_label_file(tmp_path: Path) -> None:
    """cvat-ai/cvat#7523: 0.jpg and 0.png have the same boxes, and nobody said so."""
    fill(tmp_path, "images/0.jpg", "images/0.png", "images/1.jpg", "images/1.png", "labels/0.txt")
    found, odd = labels_of(tmp_path, "images")
    assert list(found.values()) == ["labels/0.txt", "labels/0.txt", "", ""]
    assert odd == [("labels/0.txt", "0.jpg and 0.png", "label file of several images, used for each")]


def test_hidden_pictures_are_left_out_and_counted(tmp_path: Path) -> None:
    """Abe404/root_painter#173: copies of editors, previews of storage and archives were background pictures."""
    hidden = [".ipynb_checkpoints/1-checkpoint.jpg", "@eaDir/1.jpg/S.jpg", "@eaDir/1.jpg/M.jpg", "__MACOSX/._1.jpg"]
    fill(tmp_path, *(f"images/{name}" for name in ("1.jpg", "._1.jpg", ".h.png", ".git/x", *hidden)))
    fill(tmp_path, "labels/1.txt")
    rule = "hidden, not used"
    named = [
        ("images/._1.jpg", "", rule),
        ("images/.h.png", "", rule),
        ("images/.ipynb_checkpoints", "1 image", rule),
        ("images/@eaDir", "2 images", rule),
        ("images/__MACOSX", "1 image", rule),
    ]
    assert labels_of(tmp_path, "images") == ({"images/1.jpg": "labels/1.txt"}, named)
    lines = ["./images/1.jpg", "./images/._1.jpg", f"./images/{hidden[0]}", f"{tmp_path}/.data/2.jpg"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    problems: list[Problem] = []
    assert list_images([tmp_path / "list.txt"], problems) == [f"{tmp_path}/images/1.jpg", f"{tmp_path}/.data/2.jpg"]
    assert [(one.line, one.rule) for one in problems] == [(2, rule), (3, rule)]


def test_pictures_of_other_formats(tmp_path: Path) -> None:
    """ultralytics/ultralytics PR 23358: they were passed over in silence."""
    fill(tmp_path, *(f"images/{name}" for name in ("1.jp2", "2.AVIF", "3.HEIC", "4.gif", "5.mp4", "6.jfif")))
    found, odd = labels_of(tmp_path, "images")
    assert list(found) == ["images/1.jp2", "images/2.AVIF", "images/6.jfif"]
    left = "picture in a format that is not read, not used; save it as JPEG or PNG"
    used = "picture in a format that not every OpenCV reads, used"
    assert [file for file, _, rule in odd if rule == left] == ["images/3.HEIC", "images/4.gif"]
    assert [file for file, _, rule in odd if rule == used] == ["images/1.jp2", "images/2.AVIF"]
    fill(tmp_path, "others/7.heic")
    with pytest.raises(UserError, match=r"no images in .*others; looked for[^\n]*\n  .*7\.heic: picture in a format"):
        list_images([tmp_path / "others"], [])


@pytest.mark.skipif(os.sep != "/", reason="there it is the separator")
def test_lists_with_paths_of_windows(tmp_path: Path) -> None:
    touch(tmp_path, "images/train/1.jpg", "images/a\\b.jpg")
    (tmp_path / "LIST.TXT").write_text("images\\train\\1.jpg\n.\\images\\train\\2.jpg\nimages/a\\b.jpg\n")
    want = [f"{tmp_path}/images/{name}" for name in ("train/1.jpg", "train/2.jpg", "a\\b.jpg")]
    assert list_images([tmp_path / "LIST.TXT"], []) == want


@needs_root
def test_folder_of_labels_that_cannot_be_read(tmp_path: Path) -> None:
    """Its images are not taken for background."""
    fill(tmp_path, "images/1.jpg", "labels/1.txt")
    (tmp_path / "labels").chmod(0o700)
    with as_nobody(tmp_path), pytest.raises(UserError, match=rf"folder {tmp_path}/labels can't be read: Permission"):
        find_labels([f"{tmp_path}/images/1.jpg"], [])


def test_links_to_label_files_that_are_gone(tmp_path: Path) -> None:
    """Their images are not taken for background."""
    (tmp_path / "images").mkdir()
    for name in ("1", "2"):
        cv2.imwrite(str(tmp_path / f"images/{name}.png"), np.zeros((20, 20, 3), np.uint8))
    fill(tmp_path, "labels/1.txt")
    (tmp_path / "labels/2.txt").symlink_to("/nowhere/2.txt")
    report = build_index([tmp_path / "images"], 1, cache=False).report
    assert (report.found, report.missing, report.corrupt) == (1, 0, 1)
    assert [(one.file, one.value) for one in report.problems] == [
        (f"{tmp_path}/labels/2.txt", "a link to a file that is not there")
    ]


@pytest.mark.parametrize("link", ["labels", "labels/a"])
def test_links_to_folders_that_are_gone(link: str, tmp_path: Path) -> None:
    """Their images were taken for such without objects, and those of a folder of images were missing, in silence."""
    touch(tmp_path, "images/a/1.jpg", "images/b/2.jpg")
    if link != "labels":
        touch(tmp_path, "labels/b/2.txt")
    paths = list_images([tmp_path / "images"], [])
    (tmp_path / link).symlink_to("/nowhere")
    with pytest.raises(UserError, match=f"^the folder of labels {tmp_path}/{link} is a link to /nowhere, which is not"):
        find_labels(paths, [])
    problems: list[Problem] = []
    (tmp_path / "images/c").symlink_to("/nowhere")
    assert list_images([tmp_path / "images"], problems) == paths
    assert problems == [(f"{tmp_path}/images/c", 0, "/nowhere", "link that leads nowhere, not used")]
    touch(tmp_path, "images/a/1.txt")  # a better place is not there, but a worse one is not looked at
    with pytest.raises(UserError, match="is a link to /nowhere"):
        find_labels(paths, [])
