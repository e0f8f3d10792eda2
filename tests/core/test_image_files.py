import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.common import SHARED, needs_shared
from utils.core.image_files import ImageError, depth_doubts, image_size, page_count, read_image


def write_image(path: Path, height: int = 24, width: int = 32) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((height, width, 3), 90, np.uint8))
    return path


def exif(orientation: int, order: str = "<") -> bytes:
    """TIFF block with two entries: image width, then orientation (TIFF 6.0)."""
    entries = struct.pack(order + "HHIHH", 0x0100, 3, 1, 7, 0) + struct.pack(
        order + "HHIHH", 0x0112, 3, 1, orientation, 0
    )
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(order + "IH", 8, 2) + entries + struct.pack(order + "I", 0)


def with_exif(data: bytes, block: bytes) -> bytes:
    """The JPEG, PNG or WebP file with an EXIF block."""
    if data[:2] == b"\xff\xd8":
        return data[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 8) + b"Exif\0\0" + block + data[2:]
    if data[:4] == b"\x89PNG":
        body = b"eXIf" + block
        return data[:33] + struct.pack(">I", len(block)) + body + struct.pack(">I", zlib.crc32(body)) + data[33:]
    bits = struct.unpack_from("<I", data, 21)[0]  # a lossless file: 14 bits width - 1, 14 bits height - 1
    size = (bits & 0x3FFF).to_bytes(3, "little") + (bits >> 14 & 0x3FFF).to_bytes(3, "little")
    chunks = b"VP8X" + struct.pack("<II", 10, 0x08) + size + data[12:] + b"EXIF" + struct.pack("<I", len(block)) + block
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


UPRIGHT: dict[int, Callable[[Any], Any]] = {  # orientation: how the stored picture becomes upright
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(("suffix", "order"), [("jpg", "<"), ("jpg", ">"), ("png", ">"), ("webp", "<")])
def test_exif_orientation(tmp_path: Path, orientation: int, suffix: str, order: str) -> None:
    noise = cv2.resize(np.random.default_rng(0).integers(0, 256, (3, 5, 3), np.uint8), (40, 24))
    data = cv2.imencode(f".{suffix}", noise, [cv2.IMWRITE_WEBP_QUALITY, 101])[1].tobytes()
    stored = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(with_exif(data, exif(orientation, order)))
    image = read_image(str(path))
    np.testing.assert_array_equal(image, UPRIGHT[orientation](stored))
    assert image_size(str(path)) == image.shape[:2]
    if suffix == "jpg":
        np.testing.assert_array_equal(image, cv2.imread(str(path)))


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_senseless_orientation_is_ignored(tmp_path: Path, value: int) -> None:
    data = write_image(tmp_path / "a.jpg").read_bytes()
    for block in (exif(value), exif(6)[:20], b"II*\0\xff\xff\xff\xff", b"XX", b""):
        (tmp_path / "a.jpg").write_bytes(with_exif(data, block))
        assert image_size(str(tmp_path / "a.jpg")) == read_image(str(tmp_path / "a.jpg")).shape[:2] == (24, 32)


FORMATS = [
    *[(suffix, channels, np.uint8) for suffix in ("bmp", "png", "tif", "tiff", "webp") for channels in (1, 3, 4)],
    *[(suffix, channels, np.uint8) for suffix in ("jpg", "jpeg") for channels in (1, 3)],
    *[(suffix, channels, np.uint16) for suffix in ("png", "tif") for channels in (1, 3, 4)],
    *[("pfm", channels, np.float32) for channels in (1, 3)],
]


@pytest.mark.parametrize(("suffix", "channels", "kind"), FORMATS)
def test_size_agrees_with_pixels(tmp_path: Path, suffix: str, channels: int, kind: type) -> None:
    values = np.random.default_rng(0).integers(0, 256, (37, 53, channels))
    path = str(tmp_path / f"a.{suffix}")
    cv2.imwrite(path, (values * (257 if kind == np.uint16 else 1)).astype(kind))
    image = read_image(path)
    assert image_size(path) == image.shape[:2] == (37, 53)
    assert image.shape == (37, 53, 3)
    assert image.dtype == np.uint8
    if suffix in ("png", "tif", "bmp") and channels < 4:
        np.testing.assert_array_equal(image, np.broadcast_to(values, image.shape))


# --- depth ---

RAMP = np.linspace(0, 1, 24 * 32 * 3, dtype=np.float32).reshape(24, 32, 3)


def pfm(values: np.ndarray, order: str = "<") -> bytes:
    """Rows from the bottom, RGB or grey; the sign of the scale is the order of the bytes."""
    height, width = values.shape[:2]
    kind, scale = ("PF" if values.ndim == 3 else "Pf"), (-1 if order == "<" else 1)
    rows = values[::-1, :, ::-1] if values.ndim == 3 else values[::-1]
    return f"{kind}\n{width} {height}\n{scale}\n".encode() + rows.astype(f"{order}f4").tobytes()


@pytest.mark.parametrize("white", [1, 255, 65535])
@pytest.mark.parametrize("file", ["f4.pfm", ">f4.pfm", "f4.tif", "f8.tiff", "i4.tif"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_floats_are_scaled(tmp_path: Path, white: int, file: str, channels: int) -> None:
    """ultralytics/yolov5#7726, #11840: of 0 to 1 every picture was black, float TIFF files were left out."""
    kind, _, suffix = file.partition(".")
    values = RAMP[..., 0] if channels == 1 else RAMP if channels == 3 else np.dstack([RAMP, RAMP[..., :1]])
    values = (values * white).round() if kind == "i4" else values * white
    path = tmp_path / f"a.{suffix}"
    if suffix == "pfm":
        path.write_bytes(pfm(values[..., :3] if channels > 1 else values, kind[0] if kind[0] == ">" else "<"))
    else:
        cv2.imwrite(str(path), values.astype(kind), [cv2.IMWRITE_TIFF_COMPRESSION, 1])  # 1: none
    expected = np.broadcast_to(RAMP[..., :1], RAMP.shape) if channels == 1 else RAMP
    expected = expected.round() if (kind, white) == ("i4", 1) else expected
    image = read_image(str(path))
    assert image.dtype == np.uint8 and image_size(str(path)) == image.shape[:2]
    np.testing.assert_allclose(image, expected * 255, atol=1.01)
    np.testing.assert_array_equal(read_image(str(path), (24, 32), 4), image)


def test_floats_out_of_range(tmp_path: Path) -> None:
    """Highlights, negative values and such as are not finite are clipped; what is no picture is named."""
    values = RAMP[..., 0].copy()
    values[0, :4] = [-3, np.nan, np.inf, 7.5]
    (tmp_path / "a.pfm").write_bytes(pfm(values))
    image = read_image(str(tmp_path / "a.pfm"))
    assert image[0, :4, 0].tolist() == [0, 0, 255, 255]
    np.testing.assert_allclose(image[1:, :, 0], RAMP[1:, :, 0] * 255, atol=0.51)
    (tmp_path / "a.pfm").write_bytes(pfm(values * 1e6))
    with pytest.raises(ImageError, match=r"a\.pfm: has values up to 7\.5e\+06; scale them to 0 to 1, 0 to 255 or"):
        read_image(str(tmp_path / "a.pfm"))
    with pytest.raises(ImageError, match=r"a\.pfm: has values up to"):
        image_size(str(tmp_path / "a.pfm"))


@pytest.mark.parametrize("suffix", ["png", "tif", "pfm"])
@pytest.mark.parametrize(("bits", "dark"), [(10, True), (12, True), (14, True), (15, False), (16, False)])
def test_a_set_of_too_few_bits(tmp_path: Path, suffix: str, bits: int, dark: bool) -> None:
    """ultralytics/yolov5#11840: 12 bits in files of 16 make pictures that are almost black."""
    paths = [str(tmp_path / f"{number}.{suffix}") for number in range(40)]
    for number, path in enumerate(paths):
        values = (RAMP * (2**bits - 1) * (0.6 if number % 2 else 1)).astype(np.uint16)
        cv2.imwrite(path, values.astype(np.float32) if suffix == "pfm" else values)
    (tmp_path / f"5.{suffix}").unlink()
    said = depth_doubts(paths.__getitem__, len(paths))
    assert len(said) == dark
    if dark:
        assert said[0].startswith("images of more than 8 bits look almost black: the brightest value in 14 of the 14 ")
        factor = 65535 // (2**bits - 1)
        assert said[0].endswith(f" is {2**bits - 1} of 65535; multiply their values, for example by {factor}")


@pytest.mark.parametrize(("every", "said"), [(2, "8 of the 16"), (8, "2 of the 16"), (16, "")])
def test_some_of_a_set_have_too_few_bits(tmp_path: Path, every: int, said: str) -> None:
    """ultralytics/yolov5#11840: bright pictures beside them don't make those of 12 bits any brighter.

    PGM files say in their header how many values they have, which decoders pass over.
    """
    paths = [str(tmp_path / f"{number:02}.pgm") for number in range(16)]
    for number, path in enumerate(paths):
        bright = number % every < every - 1
        cv2.imwrite(path, (RAMP * (65535 if bright else 4095)).astype(np.uint16)[..., 2])
        if not bright:
            Path(path).write_bytes(Path(path).read_bytes().replace(b"65535", b"4095", 1))
    doubts = depth_doubts(paths.__getitem__, len(paths))
    assert len(doubts) == bool(said)
    if said:
        dark = f"brightest value in {said} that were looked at, such as {paths[every - 1]}, is 4095 of 65535"
        assert dark in doubts[0]


def test_a_set_of_other_images(tmp_path: Path) -> None:
    paths = []
    for name, kind in (("a.png", "uint8"), ("b.tif", "uint8"), ("c.jpg", "uint8"), ("d.png", "uint16")):
        paths.append(str(tmp_path / name))
        cv2.imwrite(paths[-1], (RAMP * 9 * ("d" not in name)).astype(kind))
    (tmp_path / "e.png").write_bytes(b"")
    paths += [str(tmp_path / "e.png"), str(tmp_path / "f.png")]
    assert depth_doubts(paths.__getitem__, len(paths)) == depth_doubts(paths.__getitem__, 0) == []


def test_pages(tmp_path: Path) -> None:
    """Thumbnails and masks are no pages; chains of pages that have no end do."""
    path = tmp_path / "a.tif"
    for count in (1, 3):
        cv2.imwritemulti(str(path), [np.full((24, 32, 3), 90 + k, np.uint8) for k in range(count)])
        assert page_count(str(path)) == count
        assert read_image(str(path)).max() == 90
    for order in "<>":
        chain = exif(1, order)[:4]
        for place, (kind, after) in zip((8, 26, 44), ((0, 26), (1, 44), (0, 8)), strict=True):
            chain += struct.pack(order + "I", place) if place == 8 else b""
            chain += struct.pack(order + "HHHII", 1, 254, 4, 1, kind) + struct.pack(order + "I", after)
        path.write_bytes(chain)
        assert page_count(str(path)) == 2
        path.write_bytes(chain[:30])
        assert page_count(str(path)) == 1
    assert page_count(str(write_image(tmp_path / "b.png"))) == page_count(str(tmp_path / "gone.tif")) == 1


def test_why_a_file_is_no_image(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    for data, why in ((b"", "it is empty"), (b"%PDF-1.7 of", r"it is no image, but starts with b'%PDF-1\.7 of'")):
        path.write_bytes(data)
        with pytest.raises(ImageError, match=rf"a\.jpg: cannot be decoded: {why}$"):
            read_image(str(path))
    path.write_bytes(write_image(tmp_path / "b.tif").read_bytes()[:100])
    with pytest.raises(ImageError, match=r"a\.jpg: cannot be decoded$"):
        read_image(str(path))


def test_lossy_webp_and_progressive_jpeg(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.webp"), picture, [cv2.IMWRITE_WEBP_QUALITY, 50])
    cv2.imwrite(str(tmp_path / "a.jpg"), picture, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    assert image_size(str(tmp_path / "a.webp")) == image_size(str(tmp_path / "a.jpg")) == (37, 53)


def test_size_behind_long_segments(tmp_path: Path) -> None:
    """A camera's EXIF with a preview, then a color profile in several segments: the frame header is far inside."""
    data = write_image(tmp_path / "a.jpg").read_bytes()
    segment = b"\xff\xe2" + struct.pack(">H", 65535) + b"\0" * 65533
    preview = exif(6) + data  # has an end mark and a frame header of its own
    whole = with_exif(data[:2] + segment * 6 + data[2:], preview)
    path = tmp_path / "b.jpg"
    path.write_bytes(whole)
    assert image_size(str(path)) == read_image(str(path)).shape[:2] == (32, 24)
    path.write_bytes(whole[:-3])
    with pytest.raises(ImageError, match=r"b\.jpg: is cut short"):
        image_size(str(path))
    path.write_bytes(whole[: -len(data) // 3])
    with pytest.raises(ImageError, match=r"b\.jpg: ends inside its header"):
        image_size(str(path))


def test_bytes_behind_the_end_are_no_damage(tmp_path: Path) -> None:
    data = write_image(tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(data + b"\0" * 5000)
    assert image_size(str(tmp_path / "a.jpg")) == (24, 32)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "tif"])
def test_damaged_images_are_named(tmp_path: Path, suffix: str) -> None:
    path = write_image(tmp_path / f"a.{suffix}")
    data = path.read_bytes()
    for broken in (b"", data[:1], data[:12], b"not an image" * 9):
        path.write_bytes(broken)
        with pytest.raises(ImageError, match=f"a.{suffix}: "):
            image_size(str(path))
        with pytest.raises(ImageError, match=f"a.{suffix}: "):
            read_image(str(path))
    if suffix in ("jpg", "png"):
        path.write_bytes(data[: len(data) - 20])
        with pytest.raises(ImageError, match="is cut short"):
            image_size(str(path))
    with pytest.raises(ImageError, match=r"missing\.jpg: No such file"):
        read_image(str(tmp_path / "missing.jpg"))


# --- damage behind a header that is whole ---


def noise(height: int = 96, width: int = 128) -> np.ndarray:
    return cv2.GaussianBlur(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8), (5, 5), 0)


def chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """Name, place and length of each chunk of a PNG file, its 12 bytes of length, name and checksum included."""
    found, at = [], 8
    while at < len(data):
        length = struct.unpack_from(">I", data, at)[0] + 12
        found.append((data[at + 4 : at + 8], at, length))
        at += length
    return found


def damaged(data: bytes, at: int, length: int = 1) -> bytes:
    return data[:at] + bytes(255 - byte for byte in data[at : at + length]) + data[at + length :]


def decodes(data: bytes) -> bool:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) is not None


@pytest.mark.parametrize("colors", [3, 1, 0])  # 0: a palette
def test_png_is_whole_where_decoders_say_so(tmp_path: Path, colors: int) -> None:
    """Bytes are turned over in every part of every chunk; a length leads elsewhere, a part is gone."""
    if colors:
        picture = noise()[..., :colors]
        whole = cv2.imencode(".png", picture)[1].tobytes()
    else:
        rows = (noise()[..., 0] >> 4).tobytes()
        pixels = zlib.compress(b"".join(b"\0" + rows[k : k + 128] for k in range(0, len(rows), 128)))
        parts = (
            b"IHDR" + struct.pack(">IIBBBBB", 128, 96, 8, 3, 0, 0, 0),
            b"PLTE" + bytes(range(48)),
            b"IDAT" + pixels,
        )
        whole = b"".join(
            struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (*parts, b"IEND")
        )
        whole = b"\x89PNG\r\n\x1a\n" + whole
    whole = with_exif(whole, exif(1))  # a chunk that the picture does not need
    cases = {"whole": whole}
    for kind, at, length in chunks(whole)[:-1]:
        for part, where in (("first", at + 8), ("last", at + length - 5), ("checksum", at + length - 2)):
            if kind != b"IHDR" or part == "checksum":
                cases[f"{kind.decode()} {at} {part}"] = damaged(whole, where)
    _, at, length = next(chunk for chunk in chunks(whole) if chunk[0] == b"IDAT")
    cases["length"] = damaged(whole, at + 2)
    cases["gone"] = whole[: at + 200] + whole[at + 300 :]
    path = tmp_path / "a.png"
    outcomes = {}
    for name, data in cases.items():
        path.write_bytes(data)
        try:
            outcomes[name] = image_size(str(path)) == (96, 128)
        except ImageError:
            outcomes[name] = False
    assert outcomes == {name: decodes(data) for name, data in cases.items()}
    assert outcomes["whole"] and not outcomes["length"] and not outcomes["gone"]
    assert len(cases) > 9 and 3 < sum(outcomes.values()) < len(cases) - 3
    path.write_bytes(cases["gone"])
    with pytest.raises(ImageError, match=r"a\.png: is damaged$"):
        image_size(str(path))


def jpeg(*options: int, sampling: int = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, colors: int = 3) -> bytes:
    flags = [cv2.IMWRITE_JPEG_QUALITY, 92, *options]
    if colors == 3:
        flags += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    return cv2.imencode(".jpg", noise(101, 131)[..., :colors], flags)[1].tobytes()


@pytest.mark.parametrize("interval", [1, 3, 5, 60])
@pytest.mark.parametrize(
    ("sampling", "colors"),
    [
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, 3),
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422, 3),
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440, 3),
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444, 3),
        (0, 1),
    ],
)
def test_restart_markers_show_what_is_gone(tmp_path: Path, interval: int, sampling: int, colors: int) -> None:
    whole = jpeg(cv2.IMWRITE_JPEG_RST_INTERVAL, interval, sampling=sampling, colors=colors)
    path = tmp_path / "a.jpg"
    path.write_bytes(whole)
    assert image_size(str(path)) == (101, 131)
    start = whole.rindex(b"\xff\xda")
    marks = [k for k in range(start, len(whole)) if whole[k] == 0xFF and 0xD0 <= whole[k + 1] <= 0xD7]
    assert marks
    for first, last in ((marks[0], marks[0] + 2), (marks[-1], len(whole) - 2), (marks[0], marks[len(marks) // 2] + 2)):
        for filling in (b"", bytes(last - first)):
            path.write_bytes(whole[:first] + filling + whole[last:])
            with pytest.raises(ImageError, match=r"a\.jpg: is damaged$"):
                image_size(str(path))


@pytest.mark.parametrize("progressive", [0, 1])
def test_whole_jpeg_files_are_no_damage(tmp_path: Path, progressive: int) -> None:
    """Also with restart markers in several scans, a thumbnail that has some, and padding behind the end."""
    marks = jpeg(cv2.IMWRITE_JPEG_RST_INTERVAL, 3, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive)
    plain = jpeg(cv2.IMWRITE_JPEG_PROGRESSIVE, progressive)
    assert b"\xff\xdd" in marks and b"\xff\xdd" not in plain
    for data in (marks, plain, with_exif(plain, exif(1) + marks), marks + b"\xff\xd0" * 50):
        (tmp_path / "a.jpg").write_bytes(data)
        assert image_size(str(tmp_path / "a.jpg")) == (101, 131)


def test_jpeg_without_a_picture(tmp_path: Path) -> None:
    whole = jpeg()
    frame, start = whole.index(b"\xff\xc0"), whole.index(b"\xff\xda")
    path = tmp_path / "a.jpg"
    for data, part in (
        (whole[:start] + b"\xff\xd9", "picture"),
        (whole[:start] + whole[start + 2 :], "picture"),
        (whole[:frame] + whole[start:], "frame header"),
    ):
        path.write_bytes(data)
        assert not decodes(data)
        with pytest.raises(ImageError, match=rf"a\.jpg: has no {part}$"):
            image_size(str(path))


@pytest.mark.parametrize("value", [0, 1, 255])
def test_any_frame_header_is_a_size_or_an_error(tmp_path: Path, value: int) -> None:
    data = jpeg(cv2.IMWRITE_JPEG_RST_INTERVAL, 3)
    starts = [data.index(mark) for mark in (b"\xff\xc0", b"\xff\xdd", b"\xff\xda")]
    path, errors = tmp_path / "a.jpg", 0
    for place in (k for start in starts for k in range(start, start + 19)):
        path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
        try:
            assert len(image_size(str(path))) == 2
        except ImageError:
            errors += 1
    assert errors > 5


@needs_shared
def test_real_photos_are_whole() -> None:
    paths = sorted((SHARED / "datasets").rglob("*.jpg"))
    assert len(paths) > 200
    for path in paths:
        image = cv2.imread(str(path))
        assert image is not None and image_size(str(path)) == image.shape[:2], path


# --- decoding at a reduced size ---


UPRIGHT_BACK: dict[int, Callable[[Any], Any]] = {1: UPRIGHT[1], 3: UPRIGHT[3], 6: np.rot90, 7: UPRIGHT[7]}


def block_means(image: np.ndarray, side: int) -> np.ndarray:
    """Mean of each block of side x side pixels, of those that are there at the ends."""
    height, width = (-(-length // side) * side for length in image.shape[:2])
    padded = np.pad(image.astype(float), ((0, height - image.shape[0]), (0, width - image.shape[1]), (0, 0)), "edge")
    return padded.reshape(height // side, side, width // side, side, 3).mean((1, 3))


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
@pytest.mark.parametrize("gray", [False, True])
def test_reduced_jpeg(tmp_path: Path, reduction: int, orientation: int, gray: bool) -> None:
    picture = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 256, (203, 301, 3), np.uint8), (0, 0), 6)
    picture = cv2.normalize(picture, picture, 0, 255, cv2.NORM_MINMAX)
    stored = picture[..., 0] if gray else picture
    data = cv2.imencode(".jpg", stored, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    path = tmp_path / "a.jpg"
    path.write_bytes(with_exif(data, exif(orientation)))
    whole = read_image(str(path))
    image = read_image(str(path), (whole.shape[0], whole.shape[1]), reduction)
    assert image.shape == (-(-whole.shape[0] // reduction), -(-whole.shape[1] // reduction), 3)
    as_stored = cv2.imread(str(path), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert as_stored is not None and as_stored.shape == (203, 301, 3)
    expected = UPRIGHT[orientation](block_means(as_stored, reduction)[:-1, :-1])  # the last ones are no whole blocks
    image = UPRIGHT[orientation](UPRIGHT_BACK[orientation](image)[:-1, :-1])
    assert image.shape == expected.shape
    assert np.abs(image - expected).mean() < 3


@pytest.mark.parametrize(
    ("suffix", "kind"), [("png", np.uint8), ("png", np.uint16), ("webp", np.uint8), ("tif", np.uint8)]
)
def test_other_formats_are_decoded_whole(tmp_path: Path, suffix: str, kind: type) -> None:
    path = str(tmp_path / f"a.{suffix}")
    cv2.imwrite(path, noise(101, 131).astype(kind) * (257 if kind == np.uint16 else 1))
    np.testing.assert_array_equal(read_image(path, (101, 131), 4), read_image(path))


def test_reduced_jpeg_is_checked_as_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg())
    for reduction in (1, 2, 8):
        with pytest.raises(ImageError, match=r"was 131 x 100 pixels when it was checked, now 131 x 101"):
            read_image(str(path), (100, 131), reduction)
    path.write_bytes(jpeg()[:-40])
    for reduction in (1, 2, 8):
        with pytest.raises(ImageError, match=r"a\.jpg: is cut short"):
            read_image(str(path), (101, 131), reduction)
