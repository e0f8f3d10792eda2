"""Where pictures come from: what a text means, odd files, videos, streams that stall, break and come back."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.core.errors import UserError
from utils.inference.frames import Frame, Unread, count_pictures, read_files
from utils.inference.sources import Source, _named, find_sources, without_login
from utils.inference.streams import Stream, open_streams, read_streams


def write(path: Path, image: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cv2.imencode(path.suffix, image)[1].tobytes())
    return path


def picture(value: int = 100, height: int = 12, width: int = 16) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def make_video(path: Path, frames: int, fps: float = 10, size: tuple[int, int] = (64, 48)) -> Path:
    """Frame n (from 1) has the grey level 10 n, from the 26th on of less."""
    code = "MJPG" if path.suffix == ".avi" else "mp4v"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*code), fps, size)
    assert writer.isOpened()
    for number in range(1, frames + 1):
        writer.write(picture(10 * number % 260, size[1], size[0]))
    writer.release()
    return path


def names(sources: list[Source]) -> list[str]:
    return [source.name for source in sources]


# ---- what a text means ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jpg", "a.png", "sub/c.jpg", "sub/deep/d.JPG"):
        write(tmp_path / name, picture())
    make_video(tmp_path / "clip.mp4", 2)
    (tmp_path / "notes.md").write_text("no picture")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_folder_in_order_of_names_without_what_is_below(folder: Path) -> None:
    sources = find_sources(str(folder))
    assert [(source.kind, source.name) for source in sources] == [("image", "a"), ("image", "b"), ("video", "clip")]


def test_file_pattern_and_name_with_brackets(folder: Path) -> None:
    assert names(find_sources(str(folder / "b.jpg"))) == ["b"]
    assert names(find_sources(str(folder / "**/*.*"))) == ["a", "b", "clip", "c", "d"]
    assert names(find_sources(str(folder / "?.jpg"))) == ["b"]
    path = write(folder / "img[1].jpg", picture())
    assert names(find_sources(str(path))) == ["img[1]"]


def test_list_has_paths_from_its_own_folder_and_others(folder: Path, tmp_path: Path) -> None:
    path = folder / "list.txt"
    path.write_text(f"# comment\n./b.jpg\n\n  sub/c.jpg \n{folder}/clip.mp4\ngone.jpg\n", encoding="utf-8-sig")
    sources = find_sources(str(path))
    assert names(sources) == ["b", "c", "clip", "gone"]
    assert [isinstance(item, Frame) for item in read_files(sources)] == [True, True, True, True, False]


def test_streams(tmp_path: Path) -> None:
    path = tmp_path / "cameras.streams"
    path.write_text("rtsp://user:secret@host:554/live?x=1\nhttp://host/cam\n0\n")
    sources = find_sources(str(path))
    assert names(sources) == ["host_554_live", "host_cam", "camera0"]
    assert {source.kind for source in sources} == {"stream"}
    assert sources[0].shown == "rtsp://host:554/live?x=1"
    assert find_sources("3") == [Source("stream", "3", "camera3")]


def test_names_are_unique(tmp_path: Path) -> None:
    """Also on disks where upper and lower case are the same, and beside the frames of a video."""
    for name in ("x/a.jpg", "y/a.jpg", "y/A.png", "y/v_1.jpg"):
        write(tmp_path / name, picture())
    make_video(tmp_path / "x/v.mp4", 2)
    sources = find_sources(str(tmp_path / "*/*"))
    assert names(sources) == ["a", "v", "A-2", "a-3", "v_1-2"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}/b.jpeg", "did you mean b.jpg?"),
        ("{}/nowhere/b.jpg", "no such file"),
        ("{}/empty", "holds no image"),
        ("{}/*.webp", "matches this pattern"),
        ("{}/notes.md", "neither an image nor a video"),
        ("{}/" + "x" * 5000, "cannot be read"),
        ("{}/bad.txt", "no image and no video (notes.md)"),
        ("{}/none.txt", "the list is empty"),
        ("{}/binary.txt", "UTF-8"),
        ("ftp://host/x", "is no stream"),
        ("https://youtu.be/x", "not available yet"),
        ("screen 0", "not available yet"),
        ("http://host/x.jpg", "download it"),
        ("http://host:port/x", "is not a URL"),
        ("http://", "is no stream"),
        ("2147483648", "there is no camera 2147483648"),
        ("9" * 5000, "there is no camera 999"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, source: str, message: str) -> None:
    (folder / "bad.txt").write_text("notes.md\n")
    (folder / "none.txt").write_text("\n# nothing\n")
    (folder / "binary.txt").write_bytes(b"\xff\x00\x81")
    with pytest.raises(UserError, match=r"--source") as error:
        find_sources(source.format(folder))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_named_file_is_tried_whatever_its_suffix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A clip that OpenCV reads was refused for its suffix (ultralytics/yolov5#10259, ultralytics/ultralytics#7997)."""
    (folder / "clip.mp4").rename(folder / "clip.dat")
    (folder / "b.jpg").rename(folder / "b")
    assert [(source.kind, source.name) for source in find_sources(str(folder / "clip.dat"))] == [("video", "clip")]
    assert find_sources(str(folder / "b"))[0].kind == "image"
    assert names(find_sources(str(folder / "*.dat"))) == ["clip"]
    (folder / "list.txt").write_text("clip.dat\nb\nnotes.md\n")
    assert names(find_sources(str(folder / "list.txt"))) == ["clip", "b"]
    assert "neither images nor videos, left out: 1 (notes.md)" in capsys.readouterr().out


def test_what_a_folder_passes_over_is_counted_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files were passed over in silence (ultralytics/ultralytics#7997), hidden ones taken (Abe404/root_painter#173)."""
    for suffix in ("flv", "webm", "3gp"):
        (folder / f"v.{suffix}").touch()
    write(folder / "._b.jpg", picture())
    write(folder / "@eaDir/b.jpg", picture())
    assert names(find_sources(str(folder))) == ["a", "b", "clip", "v", "v-2", "v-3"]
    said = capsys.readouterr().out
    assert "hidden pictures left out: 1 (._b.jpg)" in said
    assert "no pictures by their suffix, left out: 1 (notes.md)" in said
    assert names(find_sources(str(folder / "**/b.jpg"))) == ["b"]
    assert "hidden pictures left out: 1 (b.jpg)" in capsys.readouterr().out
    assert names(find_sources(str(folder / "@eaDir"))) == ["b"]  # who names it wants it


def test_several_files_as_a_shell_makes_them_of_a_pattern(folder: Path) -> None:
    """Each file of a pattern without quotes was an error of its own (mikel-brostrom/boxmot#805)."""
    assert names(find_sources(*map(str, sorted(folder.glob("*.??g"))))) == ["a", "b"]
    assert names(find_sources("0", "rtsp://host/a")) == ["camera0", "host_a"]
    with pytest.raises(UserError, match="don't go together"):
        find_sources("0", str(folder))
    with pytest.raises(UserError) as error:
        find_sources(*(str(folder / f"{number}.gone") for number in range(23)))
    assert len(error.value.messages) == 6 and "18 more" in error.value.messages[-1]


def test_thousands_of_files_of_one_name_take_no_time() -> None:
    """As many as there are folders with a frame.jpg in each; by counting them anew each time it took minutes."""
    began = time.process_time()
    paths = [("image", f"{number}/frame.jpg", "frame") for number in range(20_000)]
    sources = _named([*paths, ("video", "v.mp4", "v"), ("image", "v_7.jpg", "v_7")])
    assert time.process_time() - began < 10  # 0.1 s
    assert len({source.name for source in sources}) == len(sources) == 20_002
    assert [source.name for source in sources[-3:]] == ["frame-20000", "v", "v_7-2"]


def test_password_is_not_printed() -> None:
    with pytest.raises(UserError) as error:
        find_sources("ftp://user:secret@host/x")
    assert "secret" not in str(error.value)


# ---- files ----


def exif_rotated(path: Path, image: np.ndarray) -> Path:
    """Write a JPEG that says: turn me by 90 degrees clockwise (EXIF orientation 6, TIFF 6.0 layout)."""
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0" + b"II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 0)
    data = cv2.imencode(".jpg", image)[1].tobytes()
    path.write_bytes(data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:])
    return path


def test_odd_images_come_as_three_upright_channels(tmp_path: Path) -> None:
    wide = picture(60, 20, 40)
    wide[:, :20] = 200
    write(tmp_path / "grey.png", wide[..., 0])
    write(tmp_path / "alpha.png", np.dstack([wide, wide[..., 0]]))
    write(tmp_path / "deep.png", wide.astype(np.uint16) * 256)
    write(tmp_path / "\u732b mit \u00fcber [1] 100%.jpg", wide)
    exif_rotated(tmp_path / "turned.jpg", wide)
    frames = {
        frame.source.name: frame.image for frame in read_files(find_sources(str(tmp_path))) if isinstance(frame, Frame)
    }
    assert len(frames) == 5
    for name, image in frames.items():
        turned = image if name != "turned" else np.rot90(image)
        assert turned.shape == (20, 40, 3) and turned.dtype == np.uint8, name
        assert np.abs(turned.astype(int) - wide).mean() < 3, name


def test_what_cannot_be_read_is_said_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jpg", picture())
    whole = write(tmp_path / "z.jpg", picture()).read_bytes()
    (tmp_path / "b.jpg").write_bytes(b"no image")
    (tmp_path / "c.mp4").write_bytes(whole[:50])
    (tmp_path / "d.png").write_bytes(b"")
    items = list(read_files(find_sources(str(tmp_path))))
    assert [isinstance(item, Frame) for item in items] == [True, False, False, False, True]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("b.jpg", "c.mp4", "d.png")) and "Traceback" not in printed


def with_hole(path: Path) -> Path:
    """Damage a file in the middle."""
    data = bytearray(path.read_bytes())
    third, half = len(data) // 3, len(data) // 2
    data[third:half] = bytes(half - third)
    path.write_bytes(data)
    return path


def noise_video(path: Path, codec: str) -> Path:
    """Make a video of 60 frames that don't compress well."""
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 10, (64, 48))
    for number in range(60):
        writer.write(np.roll(noise, number, 1))
    writer.release()
    return path


@pytest.mark.parametrize("stride", [1, 7])
def test_damaged_video_goes_on_behind_the_damage(
    tmp_path: Path, stride: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading ended at the first bad frame, in silence (ultralytics/yolov5#2064, #5791)."""
    path = noise_video(tmp_path / "clip.mp4", "mp4v")
    whole = {frame.number for frame in read_files(find_sources(str(path)), stride) if isinstance(frame, Frame)}
    assert whole == set(range(1, 61, stride)) and capsys.readouterr().out == ""
    *frames, rest = read_files(find_sources(str(with_hole(path))), stride)
    numbers = [frame.number for frame in frames if isinstance(frame, Frame)]
    assert len(numbers) == len(frames) and set(numbers) < whole
    assert min(numbers) == 1 and max(numbers) == max(whole)  # the numbers are those of the whole video
    assert isinstance(rest, Unread) and rest.frames == 60 and 30 < rest.read < 60
    said = capsys.readouterr().out
    assert f"{rest.read} of 60 frames can be read" in said and "lower numbers" not in said


def test_damage_that_shifts_the_numbers_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Frames of an AVI file that can't be decoded are passed over by OpenCV itself (ultralytics/yolov5#2064)."""
    path = with_hole(noise_video(tmp_path / "clip.avi", "MJPG"))
    *frames, rest = read_files(find_sources(str(path)))
    numbers = [frame.number for frame in frames if isinstance(frame, Frame)]
    assert isinstance(rest, Unread) and 30 < rest.read < 60 and numbers == [*range(1, rest.read + 1)]
    assert capsys.readouterr().out == (
        f"WARNING: {path}: {rest.read} of 60 frames can be read; it is damaged or cut short; behind a gap, frames have "
        "lower numbers than in the whole video\n"
    )


def test_half_a_video_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a file passed as a whole one (ultralytics/yolov5#2064)."""
    path = make_video(tmp_path / "clip.avi", 60)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    *frames, rest = read_files(find_sources(str(path)))
    assert isinstance(rest, Unread) and rest.frames == 60 and rest.read == len(frames) < 40
    assert f"{rest.read} of 60 frames can be read" in capsys.readouterr().out


def test_video_frames_and_stride(tmp_path: Path) -> None:
    sources = find_sources(str(make_video(tmp_path / "v.mp4", 7, fps=12.5)))
    frames = [frame for frame in read_files(sources) if isinstance(frame, Frame)]
    assert [frame.number for frame in frames] == [1, 2, 3, 4, 5, 6, 7]
    assert all(abs(int(frame.image.mean()) - 10 * frame.number) < 6 for frame in frames)
    assert frames[0].fps == 12.5
    strided = [frame for frame in read_files(sources, 3) if isinstance(frame, Frame)]
    assert [frame.number for frame in strided] == [1, 4, 7] and strided[0].fps == pytest.approx(12.5 / 3)
    assert (count_pictures(sources), count_pictures(sources, 3)) == (7, 3)
    assert count_pictures(find_sources("0")) is None


# ---- streams ----


class Server(ThreadingHTTPServer):
    """Serves motion JPEG at /cam; ``frames`` per connection, a pause before each, then the end, or silence at /mute."""

    daemon_threads = True
    frames, pause, connections, silent_after, delay = 6, 0.02, 0, False, 0.0
    connection_limit = 1000
    file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves in the middle is no error."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.connections += 1
        if self.server.connections > self.server.connection_limit:
            self.send_error(503)
            return
        time.sleep(self.server.delay)
        self.send_response(200)
        if self.path.endswith(".avi"):
            data = self.server.file.read_bytes()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        for number in range(1, self.server.frames + 1 if self.path == "/cam" else 1):
            data = cv2.imencode(".jpg", picture(10 * number, 48, 64))[1].tobytes()
            self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data))
            self.wfile.write(data + b"\r\n")
            time.sleep(self.server.pause)
        if self.path == "/mute" or self.server.silent_after:
            time.sleep(20)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_stream_is_opened_again_and_ends_when_it_stays_away(server: Server) -> None:
    """More frames than one connection gives; after the server has gone the reader ends within the time limit."""
    with open_streams(find_sources(f"{server.url}/cam"), timeout=1.0) as streams:
        numbers = []
        for frames in read_streams(streams):
            numbers.append(frames[0].number)
            if len(numbers) == 15:
                server.shutdown()
                server.server_close()
                stopped = time.monotonic()
        assert time.monotonic() - stopped < 15
    assert server.connections > 1
    assert numbers == sorted(set(numbers)) and numbers[-1] > 2 * server.frames


def test_newest_frame_is_kept(server: Server) -> None:
    server.frames, server.silent_after = 20, True
    with open_streams(find_sources(f"{server.url}/cam"), timeout=10) as streams:
        numbers = [0]
        while numbers[-1] < server.frames:
            time.sleep(0.5)  # in which more than one frame comes
            numbers.append(next(iter(read_streams(streams)))[0].number)
        assert len(numbers) <= server.frames / 2
        assert streams[0].take(0.1) is None


def test_one_slow_stream_holds_up_no_other(server: Server, tmp_path: Path) -> None:
    server.frames, server.silent_after = 3, True
    path = tmp_path / "two.streams"
    path.write_text(f"{server.url}/cam\n{make_video(tmp_path / 'whole.avi', 20)}\n")
    seen: dict[str, list[int]] = {"whole": []}
    start = time.monotonic()
    with open_streams(find_sources(str(path)), timeout=2) as streams:
        for frames in read_streams(streams):
            for frame in frames:
                seen.setdefault(frame.source.name, []).append(frame.number)
            if len(seen["whole"]) == 20:
                break
    assert seen["whole"] == list(range(1, 21)) and len(seen) == 2
    assert time.monotonic() - start < 15


def test_video_on_a_server_is_read_whole_and_once(server: Server, tmp_path: Path) -> None:
    server.file = make_video(tmp_path / "v.avi", 9)
    with open_streams(find_sources(f"{server.url}/v.avi"), vid_stride=2, timeout=3) as streams:
        numbers = []
        for frames in read_streams(streams):
            numbers.append(frames[0].number)
            time.sleep(0.02)
    assert numbers == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "rtsp://user:secret@127.0.0.1:9/x", "{}/mute", "73"])
def test_dead_stream_is_one_sentence_in_time(server: Server, address: str) -> None:
    start, before = time.monotonic(), set(threading.enumerate())
    with (
        pytest.raises(UserError, match="no picture comes from") as error,
        open_streams(find_sources(address.format(server.url)), timeout=1.0),
    ):
        pass
    assert time.monotonic() - start < 15 and "secret" not in str(error.value)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("stream ")]


@pytest.mark.parametrize("scheme", ["http", "https", "rtsp", "rtmp"])
def test_server_that_never_answers(tmp_path: Path, scheme: str) -> None:
    """It accepts connections. Three such take little longer than one."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        path = tmp_path / "three.streams"
        path.write_text("".join(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}/{k}\n" for k in range(3)))
        start = time.monotonic()
        with pytest.raises(UserError, match=r"/[012] \(waited 2 s"), open_streams(find_sources(str(path)), 1, 2.0):
            pass
        assert 1.9 < time.monotonic() - start < 6


def read_all(streams: list[Stream], limit: float = 20) -> list[tuple[float, int]]:
    """Read one stream to its end, which must come within ``limit`` seconds: time and number of each frame."""
    seen: list[tuple[float, int]] = []

    def read() -> None:
        seen.extend((time.monotonic(), frames[0].number) for frames in read_streams(streams))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(limit)
    assert not thread.is_alive(), "the stream did not end"
    return seen


@contextlib.contextmanager
def pipe(path: Path, content: bytes) -> Iterator[None]:
    """A named pipe that gives these bytes and then nothing, without an end: who reads hangs there."""
    os.mkfifo(path)
    written, done = threading.Event(), threading.Event()

    def write_all() -> None:
        with path.open("wb", buffering=0) as file:
            with contextlib.suppress(BrokenPipeError):
                file.write(content)
            written.set()
            done.wait(60)

    thread = threading.Thread(target=write_all, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        let_go(path)
        thread.join(5)


def let_go(path: Path) -> None:
    """End the waiting of a thread that opens a pipe whose other end nobody opens."""
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("suffix", ["ts", "avi"])  # without and with a number of frames
def test_stream_that_hangs_while_reading_is_given_up(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenCV's own time limit does not help: it is in read(2)."""
    whole = make_video(tmp_path / f"whole.{suffix}", 60).read_bytes()
    (tmp_path / "hung.streams").write_text(f"{tmp_path}/hung.{suffix}\n")
    with pipe(tmp_path / f"hung.{suffix}", whole[: len(whole) * 2 // 3]):
        with open_streams(find_sources(str(tmp_path / "hung.streams")), timeout=1.5) as streams:
            seen = read_all(streams)
            ended = time.monotonic()
        assert time.monotonic() - ended < 20
    assert 1.4 < ended - seen[-1][0] < 20  # without a time limit it would hang for a minute
    assert f"hung.{suffix}: no frame for 1.5 s; the stream has ended" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_streams_that_hang_while_opening_cost_their_time_once(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for path in [tmp_path / f"{k}.ts" for k in range(4)]:
            os.mkfifo(path)
            stack.callback(let_go, path)
        path = tmp_path / "four.streams"
        path.write_text("".join(f"{tmp_path}/{k}.ts\n" for k in range(4)))
        sources = find_sources(str(path))
        start = time.monotonic()
        with pytest.raises(UserError, match=r"from \S*/[0-3]\.ts \(waited 1 s"), open_streams(sources, 1, 1.0):
            pass
        assert 2.9 < time.monotonic() - start < 12  # a second for all of them, two until they are left alone


def test_slow_servers_have_their_time_each(server: Server, tmp_path: Path) -> None:
    """OpenCV opens one stream after the other."""
    server.delay, server.frames = 0.9, 1000
    path = tmp_path / "three.streams"
    path.write_text(f"{server.url}/cam\n" * 3)
    start = time.monotonic()
    with open_streams(find_sources(str(path)), timeout=2) as streams:
        assert all(stream.opened for stream in streams)
    assert time.monotonic() - start > 2.7


def test_silent_connection_is_opened_again_in_time(server: Server) -> None:
    """A camera that lost its power says nothing, not even that it is gone."""
    server.silent_after, server.frames = True, 25
    with open_streams(find_sources(f"{server.url}/cam"), timeout=3) as streams:
        for frames in read_streams(streams):
            if frames[0].number > server.frames:
                break
    assert server.connections == 2 and frames[0].number > server.frames


class Driver:
    """A camera's driver as cv2.VideoCapture shows it, live or with an end; the frame after the last one breaks."""

    pause, count, decodable = 0.01, 0, 1_000_000

    def __init__(self, *_: object) -> None:
        self.number = 0

    def grab(self) -> bool:
        time.sleep(self.pause)
        self.number += 1
        return not 0 < self.count < self.number

    def retrieve(self) -> tuple[bool, np.ndarray | None]:
        return (True, picture(self.number % 250)) if self.number <= self.decodable else (False, None)

    def get(self, prop: int) -> float:
        return self.count if prop == cv2.CAP_PROP_FRAME_COUNT else 25.0

    def release(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("stride", [1, 3])
def test_frames_that_cannot_be_decoded_are_no_life(monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    monkeypatch.setattr(cv2, "VideoCapture", Driver)
    monkeypatch.setattr(Driver, "decodable", 30)
    start = time.monotonic()
    with open_streams(find_sources("0"), stride, timeout=1.0) as streams:
        last = read_all(streams)[-1][1]
    assert 31 - stride <= last <= 30 and time.monotonic() - start < 15


def test_frames_that_are_passed_over_are_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stride the frames that are kept may be further apart than the time limit."""
    monkeypatch.setattr(cv2, "VideoCapture", Driver)
    numbers = []
    with open_streams(find_sources("0"), vid_stride=150, timeout=0.5) as streams:
        for frames in read_streams(streams):
            numbers.append(frames[0].number)
            if len(numbers) == 3:
                break
    assert numbers == [1, 151, 301]


def test_who_is_slow_to_take_frames_loses_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture may cost more than the time limit; the next frame is there a moment after the last one was taken."""
    monkeypatch.setattr(cv2, "VideoCapture", Driver)
    monkeypatch.setattr(Driver, "count", 3)
    numbers = []
    stream = Stream(Source("stream", "0", "camera"), timeout=0.6)
    while stream.alive():
        frame = stream.take(1)
        if frame is not None:
            numbers.append(frame.number)
            if len(numbers) < 3:
                assert stream.alive()
                time.sleep(1.2)
    stream.stop()
    stream.join(2)
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize(
    "address", ["rtsp://user:p@ss@host/x", "rtsp://admin:pa/ss@host/x", "rtsp://user@host/x", "rtsp://host/x"]
)
def test_logins_are_not_shown(address: str) -> None:
    """Passwords of cameras often hold @ and /."""
    assert without_login(address) == "rtsp://host/x"


def test_home_of_nobody() -> None:
    with pytest.raises(UserError, match="--source ~no-such-user-here/x cannot be read"):
        find_sources("~no-such-user-here/x")
