"""``kvpool doctor``: its findings, and workers that it finds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

from kvpool import open_store
from kvpool.cli.doctor import indexes
from kvpool.discovery.announcer import Announcer
from kvpool.discovery.worker import Publisher, Worker
from kvpool.key.hashing import seed_id
from tests.support.announced_workers import records
from tests.support.command_line import kvpool
from tests.support.deadlines import eventually

NOBODY = "no worker of tenant default has announced"


def examined(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings, both without that no worker is there: most tests have a pool alone."""
    with mock.patch.object(indexes, "CALL_S", 60.0):
        ended = kvpool("doctor", *arguments, "--json")
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["ok"] is (ended.returncode == 0)
    findings = [one for one in report["findings"] if not one["says"].startswith(NOBODY)]
    fails = any(one["level"] == "fail" for one in findings)
    assert report["ok"] is not (fails or len(findings) < len(report["findings"]))
    return int(fails), findings


def sentences(findings: list[dict[str, str]], level: str) -> str:
    return "\n".join(f"{one['says']} -> {one['change']}" for one in findings if one["level"] == level)


def worker(name: str, publisher: Publisher, **more: Any) -> Worker:
    fields: dict[str, Any] = {"model": "m", "block_tokens": 16, "hash_seed_id": seed_id(None)}
    return Worker(name=name, publishers=(publisher,), incarnation=name, **{**fields, **more})


@contextlib.contextmanager
def announced(url: str, *workers: Worker) -> Iterator[None]:
    """These announce themselves in the pool for as long as the block runs."""
    with open_store(url) as store, contextlib.ExitStack() as announcers:
        for one in workers:
            announcers.callback(Announcer(store, one).close)
        assert eventually(lambda: len(records(store)) == len(workers))
        yield
