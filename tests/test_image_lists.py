from pathlib import Path

import pytest

from utils.data_report import Problem
from utils.errors import UserError
from utils.image_lists import labels_without_image, list_images
from utils.labels import label_path

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
    with pytest.raises(UserError, match=rf"no images in {tmp_path}.*bmp, dng, .*webp"):
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
    found = labels_without_image(images, [tmp_path / "labels/list.txt"])
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
    assert [problem.file for problem in labels_without_image([f"{tmp_path}/1.jpg"], [tmp_path])] == [
        f"{tmp_path}/2.txt"
    ]
    assert labels_without_image(["/nowhere/images/1.jpg"], []) == []
