"""A subscription to what changes in a pool waits in the kernel, also long after the last message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.store.server import notices as module
from tests.support.conformance import keys
from tests.support.deadlines import eventually
from tests.support.servers import running

SILENCE_S = 3 * module.TIMEOUT_S  # beyond the end of the last step, and beyond a PING


def test_a_silent_server_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    read = module._Tracking.read

    def counted(self: module._Tracking, inbox: module._Inbox) -> None:
        reads.append(time.monotonic())
        read(self, inbox)

    monkeypatch.setattr(module._Tracking, "read", counted)
    with running("valkey-server", tmp_path) as server, open_store(server.url) as store:
        notices = store.notices()
        assert notices is not None
        assert notices.take(5).missed, "what was before it listened"
        reads.clear()
        time.sleep(SILENCE_S)
        assert SILENCE_S / module.POLL_S / 4 < len(reads) < 2 * SILENCE_S / module.POLL_S
        store.put_many(keys(1), [b"x"])
        assert eventually(lambda: notices.take(1).keys == keys(1))
        notices.close()
