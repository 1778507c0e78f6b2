"""``deploy/front``: Envoy reads its configuration anew, and no request is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.engine_process import free_ports
from tests.support import envoy
from tests.support.deadlines import eventually
from tests.support.openai_worker import ScriptedWorker, scripted

FRONT = envoy.ROOT / "deploy/front"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}

pytestmark = pytest.mark.usefixtures("grpc_started")


class Front:
    """A running one. ``file``: its configuration."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path, log: Path, port: int) -> None:
        self.process, self.file, self._log, self._port = process, file, log, port

    @contextmanager
    def chat(self) -> Iterator[http.client.HTTPResponse]:
        """A streamed one, whose first part has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(BODY), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            assert response.status == 200
            assert response.readline().startswith(b"data:")
            yield response

    def read_anew(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def has_said(self, text: str, *, within_s: float = 60.0) -> bool:
        return eventually(lambda: text in self._log.read_text(), within_s=within_s)


@contextmanager
def started(folder: Path, worker: ScriptedWorker, *wrapper: str) -> Iterator[Front]:
    """``wrapper``: a command that runs the front's."""
    listen, admin, picker = free_ports(3)
    file, log = folder / "envoy.yaml", folder / "front.log"
    file.write_text(
        envoy.configured([worker.at], [f"127.0.0.1:{picker}"], listen=listen, admin=admin, duplex=False)
    )
    command = [*wrapper, str(FRONT), str(file), "--base-id", str(listen), "--skip-hot-restart-parent-stats"]
    path = f"{envoy.BINARY.parent}:{os.environ['PATH']}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "PATH": path}, start_new_session=True
        )
    try:
        envoy.wait_ready(process, admin, log)
        yield Front(process, file, log, listen)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for shared in Path("/dev/shm").glob(f"envoy_shared_memory_{listen}*"):
            shared.unlink()


def test_a_configuration_that_is_read_twice_cuts_no_stream(tmp_path: Path) -> None:
    """Also where SIGHUP was ignored at its start, as under nohup."""
    with scripted("w") as (worker,), started(tmp_path, worker, "env", "--ignore-signal=HUP") as front:
        worker.hold_parts.clear()
        with front.chat() as response:
            front.read_anew()
            assert front.has_said("configuration 2 is in use")
            front.read_anew()
            assert front.has_said("when the process before the last has answered")
            assert not front.has_said("configuration 3 is in use", within_s=2)
            worker.hold_parts.set()
            assert response.read().rstrip().endswith(b"data: [DONE]")
        assert front.has_said("configuration 3 is in use")
        with front.chat() as response:
            assert response.read().rstrip().endswith(b"data: [DONE]")


def test_a_configuration_that_envoy_refuses_changes_nothing(tmp_path: Path) -> None:
    with scripted("w") as (worker,), started(tmp_path, worker) as front:
        front.file.write_text("this is no configuration")
        front.read_anew()
        assert front.has_said("Envoy goes on with the one before")
        with front.chat() as response:
            assert response.read().rstrip().endswith(b"data: [DONE]")
        front.process.terminate()
        assert front.process.wait(60) == 0
