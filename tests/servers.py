"""Servers on this machine that behave well or badly, for tests of downloads."""

import gzip
import io
import ssl
import subprocess
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PATIENCE = 20.0  # seconds that a bad server keeps a connection
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers a path as the server was told to, and writes down what it was asked."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:  # the name that http.server looks for
        with self.server.mutex:
            self.server.asked.append(self.path)
            self.server.headers.append(dict(self.headers))
        self.close_connection = True
        answer = self.server.answers.get(self.path)
        answer(self) if answer is not None else self.send_error(404)

    def begin(self, length: int | None, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    """Answers by path; what is not in ``answers`` is 404."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.mutex = threading.Lock()

    def handle_error(self, *_: object) -> None: ...  # clients of these tests leave early


@contextmanager
def serving(certificate: Path | None = None) -> Iterator[tuple[Server, str]]:
    """A server and its address; with a certificate (and its key, in one file) over TLS."""
    with Server() as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server, f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def make_certificate(path: Path) -> Path:
    """A key and a certificate of 127.0.0.1, signed by itself."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    key = path.with_suffix(".key")
    subprocess.run([*command.split(), "-keyout", key, "-out", path], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


# Answers --------------------------------------------------------------------------------------------------------------


def whole(content: bytes) -> Answer:
    def answer(request: Handler) -> None:
        request.begin(len(content))
        request.wfile.write(content)

    return answer


def slowly(content: bytes, seconds: float) -> Answer:
    def answer(request: Handler) -> None:
        request.begin(len(content))
        for place in range(0, len(content), len(content) // 4 + 1):
            request.wfile.write(content[place : place + len(content) // 4 + 1])
            time.sleep(seconds / 4)

    return answer


def unannounced(content: bytes) -> Answer:
    """Without a length, as servers send what they make on the spot."""

    def answer(request: Handler) -> None:
        request.begin(None, Connection="close")
        request.wfile.write(content)

    return answer


def cut(content: bytes, size: int, tag: str = "") -> Answer:
    """Announces all and sends a part, from where it is asked to; a server with a tag can go on."""

    def answer(request: Handler) -> None:
        start = 0
        if tag and request.headers.get("If-Range") == tag:
            start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            place = f"bytes {start}-{len(content) - 1}/{len(content)}"
            request.begin(len(content) - start, 206, ETag=tag, Content_Range=place)
        else:
            request.begin(len(content), ETag=tag or "W/any")
        request.wfile.write(content[start : start + size])

    return answer


def stalling(content: bytes, sent: int) -> Answer:
    """Sends the beginning, then nothing, and keeps the connection."""

    def answer(request: Handler) -> None:
        request.begin(len(content))
        request.wfile.write(content[:sent])
        request.wfile.flush()
        time.sleep(PATIENCE)

    return answer


def trickling(content: bytes) -> Answer:
    def answer(request: Handler) -> None:
        request.begin(len(content))
        for _ in range(int(PATIENCE * 20)):
            request.wfile.write(content[:1])
            request.wfile.flush()
            time.sleep(0.05)

    return answer


def leading_to(address: str) -> Answer:
    return lambda request: request.begin(0, 302, Location=address)


def failing(status: int) -> Answer:
    return lambda request: request.begin(0, status)


def in_turn(*answers: Answer) -> Answer:
    """Another answer to each request; the last one stays."""
    left = list(answers)
    return lambda request: (left.pop(0) if len(left) > 1 else left[0])(request)


# Archives -------------------------------------------------------------------------------------------------------------


def zip_of(files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip; a name with a slash at its end is a folder."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tar_of(files: Mapping[str, bytes | tarfile.TarInfo], mode: str = "w") -> bytes:
    """A tar, or a tar.gz with mode "w:gz"; a TarInfo stands for itself."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(content, bytes):
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content)
