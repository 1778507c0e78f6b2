"""Envoy, as ``deploy/envoy.yaml`` configures it, on ports of loopback."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from demo.engine_process import free_ports
from tests.support.deadlines import answers, eventually

ROOT = Path(__file__).parents[2]
BINARY = ROOT / ".cache/envoy/envoy/_bin/envoy"
CONFIG = ROOT / "deploy/envoy.yaml"
_ENDPOINT = "        - endpoint: {{address: {{socket_address: {{address: {}, port_value: {}}}}}}}\n"


class Envoy:
    """A running one. ``url``: where it takes requests."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, admin: str, log: Path) -> None:
        self.process, self.url, self._admin, self.log = process, url, admin, log

    def counters(self, prefix: str) -> dict[str, int]:
        """Of its statistics."""
        with urllib.request.urlopen(f"{self._admin}/stats?format=json", timeout=60) as page:
            stats = json.load(page)["stats"]
        return {one["name"]: one["value"] for one in stats if one.get("name", "").startswith(prefix)}

    def healthy(self, cluster: str) -> int:
        return self.counters(f"cluster.{cluster}.membership_healthy")[f"cluster.{cluster}.membership_healthy"]


def configured(
    workers: Sequence[str],
    pickers: Sequence[str],
    *,
    listen: int,
    admin: int,
    duplex: bool,
    text: str = "",
    message_timeout_s: float = 60,
) -> str:
    """The shipped file, or ``text``, with other endpoints and ports, and deadlines of a busy machine.

    ``duplex``: the body mode that the protocol asks for.
    """
    text = text or CONFIG.read_text()
    for cluster, targets in (("workers", workers), ("picker", pickers)):
        endpoints = "".join(_ENDPOINT.format(*target.rsplit(":", 1)) for target in targets)
        text, count = re.subn(
            rf"(cluster_name: {cluster}\n      endpoints:\n      - lb_endpoints:\n)(        - endpoint: .*\n)+",
            lambda found, endpoints=endpoints: found[1] + endpoints,  # type: ignore[misc]
            text,
        )
        assert count == 1, cluster
    for old, new in (
        ("address: 127.0.0.1, port_value: 9901", f"address: 127.0.0.1, port_value: {admin}"),
        ("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {listen}"),
        ("interval: 2s", "interval: 0.2s"),
        ("connect_timeout: 1s", "connect_timeout: 60s"),
        ("    - timeout: 2s", "    - timeout: 60s"),
        ("message_timeout: 2s", f"message_timeout: {message_timeout_s:g}s"),
    ):
        assert old in text
        text = text.replace(old, new)
    if duplex:
        text = text.replace(
            "request_body_mode: BUFFERED",
            "request_body_mode: FULL_DUPLEX_STREAMED\n                request_trailer_mode: SEND\n"
            "                response_body_mode: FULL_DUPLEX_STREAMED\n                response_trailer_mode: SEND",
        )
    return text


@contextmanager
def running(
    folder: Path,
    workers: Sequence[str],
    pickers: Sequence[str],
    *,
    duplex: bool = False,
    text: str = "",
    message_timeout_s: float = 60,
) -> Iterator[Envoy]:
    """Until the end of the block. ``workers``, ``pickers``: ``IP:PORT``. ``text``: of the configuration; else the
    shipped one."""
    listen, admin = free_ports(2)
    config = configured(
        workers, pickers, listen=listen, admin=admin, duplex=duplex, text=text,
        message_timeout_s=message_timeout_s,
    )  # fmt: skip
    with started(folder, config, listen=listen, admin=admin) as front:
        yield front


@contextmanager
def started(folder: Path, config: str, *, listen: int, admin: int) -> Iterator[Envoy]:
    """With this configuration, which names these ports, until the end of the block."""
    file = folder / f"envoy-{listen}.yaml"
    file.write_text(config)
    log = file.with_suffix(".log")
    process = subprocess.Popen(
        [
            str(BINARY), "--config-path", str(file), "--log-path", str(log), "--concurrency", "1",
            "--disable-hot-restart", "--log-level", "warning", "--drain-time-s", "1",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_ready(process, admin, log)
        yield Envoy(process, f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}", log)
    finally:
        process.kill()
        process.wait(60)


def wait_ready(process: subprocess.Popen[bytes], admin: int, log: Path) -> None:
    """Until the Envoy that ``process`` is, or has started, says so at its port for administrators."""
    ready = f"http://127.0.0.1:{admin}/ready"
    assert eventually(lambda: answers(ready, process, log), within_s=120), log.read_text()[-4000:]
