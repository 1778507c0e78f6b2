"""An HTTP client of a front: whole requests, and bytes."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from typing import Any, NamedTuple

TEXT = "so long a prompt that it has several blocks of sixteen bytes, and a few more at its end"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def worker(self) -> str:
        return str(json.loads(self.body)["worker"])


def post(url: str, body: Any, path: str = "/v1/completions", **headers: str) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return get(url + path, data, sent)


def get(url: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
    request = urllib.request.Request(url, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return Reply(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


def figures(url: str) -> dict[str, str]:
    """The samples of a page of metrics."""
    lines = get(url).body.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def all_of(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(65536):
        received += part
    return received


def request_of(client: socket.socket) -> bytes:
    """The bytes of one request; empty: the connection has ended."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = client.recv(65536)
        if not part:
            return b""
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    while found and len(body) < int(found[1]):
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


def of_request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
