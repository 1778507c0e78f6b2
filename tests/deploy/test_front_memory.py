"""What the bodies of requests make Envoy hold, as ``deploy/envoy.yaml`` configures it."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import envoy
from tests.support.deadlines import eventually
from tests.support.openai_worker import scripted

MiB = 1 << 20
PART = 15 * MiB  # of a body of 16
UPLOADS = 60
STOPPED = "overload.envoy.overload_actions.stop_accepting_requests.active"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % (16 * MiB)
)


def limit_nbytes() -> int:
    """Of the front in ``docker-compose.yml``."""
    found = re.search(r"\$\{FRONT_MEMORY:-(\d+)m\}", (envoy.ROOT / "docker-compose.yml").read_text())
    assert found is not None
    return int(found[1]) * MiB


def peak_nbytes(front: envoy.Envoy) -> int:
    status = Path(f"/proc/{front.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def ask(front: envoy.Envoy) -> int:
    """The status of a small request; 0: its connection was closed."""
    with closing(http.client.HTTPConnection(urlsplit(front.url).netloc, timeout=60)) as connection:
        try:
            connection.request("POST", "/v1/completions", b'{"model": "m", "prompt": "x"}')
            reply = connection.getresponse()
            reply.read()
            return reply.status
        except (ConnectionError, http.client.HTTPException):
            return 0


class Uploads:
    """Requests whose bodies do not end."""

    def __init__(self, front: envoy.Envoy) -> None:
        self._front, self._sockets = front, list[socket.socket]()

    def begin(self) -> socket.socket:
        at = urlsplit(self._front.url)
        upload = socket.create_connection((at.hostname, at.port), timeout=60)
        self._sockets.append(upload)
        upload.sendall(HEAD)
        return upload

    def end(self) -> None:
        for upload in self._sockets:
            upload.close()


@contextmanager
def fronting(folder: Path) -> Iterator[tuple[envoy.Envoy, Uploads]]:
    """Envoy without an index, before one worker."""
    with ExitStack() as parts:
        (worker,) = parts.enter_context(scripted("a"))
        text = envoy.CONFIG.read_text()
        assert text.count("request_timeout: 30s") == 1
        text = text.replace("request_timeout: 30s", "request_timeout: 600s")  # no upload ends by itself
        front = parts.enter_context(envoy.running(folder, [worker.at], ["127.0.0.1:9"], text=text))
        uploads = Uploads(front)
        parts.callback(uploads.end)
        assert eventually(lambda: front.healthy("workers") == 1)
        assert ask(front) == 200
        yield front, uploads


def test_uploads_that_do_not_end_are_refused_before_memory_ends(tmp_path: Path) -> None:
    """29 of them filled 512 MiB, and the kernel killed Envoy with all streams."""
    with fronting(tmp_path) as (front, uploads):
        for _ in range(UPLOADS):
            send(uploads.begin())
            if eventually(lambda: bool(front.counters(STOPPED).get(STOPPED)), within_s=0.3):
                break
        else:
            pytest.fail("none was refused")
        assert ask(front) == 503, "at once: no upload has timed out"
        assert peak_nbytes(front) < limit_nbytes()
        uploads.end()
        assert eventually(lambda: ask(front) == 200), "as soon as they have ended"


def test_uploads_that_begin_together_are_broken_off(tmp_path: Path) -> None:
    """Each was taken while there was room for it."""
    with fronting(tmp_path) as (front, uploads):
        begun = [uploads.begin() for _ in range(UPLOADS)]
        active = "http.openai.downstream_rq_active"
        assert eventually(lambda: front.counters(active)[active] == UPLOADS)
        threads = [threading.Thread(target=send, args=(one,)) for one in begun]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert front.process.poll() is None
        assert peak_nbytes(front) < limit_nbytes()
        broken = "http.openai.downstream_rq_overload_close"
        assert front.counters(broken)[broken] > 0
        uploads.end()
        assert eventually(lambda: ask(front) == 200)


def send(upload: socket.socket) -> None:
    with contextlib.suppress(OSError):  # Envoy has closed it
        upload.sendall(bytes(PART))
