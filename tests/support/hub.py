"""A hub of models on loopback: what huggingface_hub asks of ``HF_ENDPOINT`` to resolve a branch and to fetch files.

A repository is a name; a branch of it names a commit, and a commit is a folder, whose files are served as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?(?:/.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """Threads: those of the server read; tests change ``branches``."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Path]] = {}  # repository -> commit -> folder
        self.branches: dict[str, dict[str, str]] = {}  # repository -> branch -> commit
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that closing waits for them
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hub")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Of a process that knows this hub alone, and keeps what it fetches in ``cache``."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
        }

    def push(self, name: str, folder: Path) -> str:
        """Let ``main`` of a repository be the files of ``folder``; the commit."""
        commit = hashlib.sha1(str(folder).encode(), usedforsecurity=False).hexdigest()
        self.commits.setdefault(name, {})[commit] = folder
        self.branches.setdefault(name, {})["main"] = commit
        return commit

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append(f"{request.command} {path}")
        if match := _API.fullmatch(path):
            self._describe(request, match[1], match[2], match[3])
        elif match := _FILE.fullmatch(path):
            self._send_file(request, match[1], match[2], match[3])
        else:
            self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _folder(self, name: str, revision: str) -> tuple[str, Path] | None:
        commit = self.branches.get(name, {}).get(revision, revision)
        folder = self.commits.get(name, {}).get(commit)
        return None if folder is None else (commit, folder)

    def _describe(
        self, request: BaseHTTPRequestHandler, name: str, what: str | None, revision: str | None
    ) -> None:
        found = self._folder(name, revision or "main")
        if found is None:
            code = "RevisionNotFound" if name in self.commits else "RepoNotFound"
            self._send(request, 404, b"{}", {"X-Error-Code": code})
            return
        commit, folder = found
        files = sorted(one for one in folder.iterdir() if one.is_file())
        says: Any = {
            "_id": name, "id": name, "modelId": name, "private": False, "tags": [], "downloads": 0, "likes": 0,
            "sha": commit, "siblings": [{"rfilename": one.name} for one in files],
        }  # fmt: skip
        if what in ("tree", "paths-info"):
            says = [
                {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": _etag(one)}
                for one in files
            ]
        self._send(request, 200, json.dumps(says).encode(), {"Content-Type": "application/json"})

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, revision: str, path: str) -> None:
        found = self._folder(name, revision)
        if found is None or not (found[1] / path).is_file():
            code = "RevisionNotFound" if found is None else "EntryNotFound"
            commit = {} if found is None else {"X-Repo-Commit": found[0]}
            self._send(request, 404, b"", {"X-Error-Code": code, **commit})
            return
        file = found[1] / path
        headers = {"X-Repo-Commit": found[0], "ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        self._send(request, 200, file.read_bytes(), headers)

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            with contextlib.suppress(BrokenPipeError):
                request.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()
