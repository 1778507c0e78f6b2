"""Records as large as the states of a hybrid model: through each client, over TLS, on a cluster."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.store.clients import executor
from tests.support.conformance import keys
from tests.support.credentials import Authority
from tests.support.servers import CLIENTS, Cluster, TlsServer, running, started, with_client

NBYTES = 150 << 20  # of Qwen3.6-27B's states at one boundary, on one GPU
COUNT = 3
TIMEOUT_S = 400.0  # some 10 on a quiet machine of 2 cores


@contextlib.contextmanager
def served(where: str, folder: Path) -> Iterator[str]:
    with contextlib.ExitStack() as ends:
        if where == "plain":
            yield ends.enter_context(running("valkey-server", folder)).url
        elif where == "tls":
            yield ends.enter_context(started(TlsServer("valkey-server", folder, Authority(folder)))).url
        else:
            yield ends.enter_context(Cluster("valkey-server", folder, authority=Authority(folder))).url


@pytest.mark.parametrize(
    ("where", "client"), [*itertools.product(("plain", "tls"), CLIENTS), ("cluster", "native")]
)
def test_records_of_states_come_back(
    where: str, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MAX_CALL_S", TIMEOUT_S)  # on a busy machine
    value = bytearray(range(256)) * (NBYTES >> 8)
    with served(where, tmp_path) as url, open_store(with_client(url, client)) as store:
        values = [value.copy() for _ in range(COUNT)]
        for number, one in enumerate(values):
            one[number] ^= 1
        assert store.put_many(keys(COUNT), values, timeout_s=TIMEOUT_S) == [True] * COUNT
        targets = [bytearray(NBYTES) for _ in range(COUNT)]
        assert store.get_many_into(keys(COUNT), targets, timeout_s=TIMEOUT_S) == [True] * COUNT
        assert targets == values
