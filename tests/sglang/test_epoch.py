"""Caches that are flushed and weights that change: what a server stored before is not for what it computes after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import Controller, Server, extra, hashes, storage_config, tokens

pytestmark = pytest.mark.sglang


Serve = Callable[..., Server]


@pytest.fixture
def pool(tmp_path: Path) -> str:
    return f"file://{tmp_path}/pool"


def update(name: str) -> None:
    """Begin to change the weights of this process as SGLang does; there is no model, so it goes no further."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    with contextlib.suppress(AttributeError, TypeError):
        getattr(object.__new__(WeightUpdater), name)()


@pytest.mark.parametrize("never_change", [False, True])
def test_after_a_flush_a_server_shares_only_with_itself(pool: str, serve: Serve, never_change: bool) -> None:
    ours, theirs = serve(pool, weights_never_change=never_change), serve(pool)
    old, new = hashes(2), hashes(2, start=10**6)
    assert all(ours.backend.batch_set_v1(old, ours.slots(2)))
    assert theirs.backend.batch_exists(old) == 2
    ours.host.clear()
    kept = 2 if never_change else 0
    assert ours.backend.batch_exists(old) == kept
    assert ours.backend.batch_get_v1(old, ours.slots(2)) == [never_change] * 2
    assert all(ours.backend.batch_set_v1(new, ours.slots(2)))
    assert ours.backend.batch_exists(new) == 2
    assert (theirs.backend.batch_exists(old), theirs.backend.batch_exists(new)) == (2, kept)
    ours.host.clear()
    assert ours.backend.batch_exists(new) == kept, "weights may change again"
    ours.backend.clear()
    assert theirs.backend.batch_exists(old) == (0 if never_change else 2)


@pytest.mark.parametrize(
    "name",
    [
        "begin_weight_update", "update_weights_from_disk", "update_weights_from_ipc", "update_weights_from_tensor",
        "load_weights_from_distributed",
    ],
)  # fmt: skip
@pytest.mark.parametrize("never_change", [False, True])
def test_weights_that_change_without_a_flush_are_noticed(
    pool: str, serve: Serve, name: str, never_change: bool
) -> None:
    """Also where the settings say that they never do."""
    ours = serve(pool, weights_never_change=never_change)
    assert all(ours.backend.batch_set_v1(hashes(2), ours.slots(2)))
    update(name)
    assert ours.backend.batch_exists(hashes(2)) == 0
    assert serve(pool).backend.batch_exists(hashes(2)) == 2, "a server that starts now has weights of its own"


def test_sglangs_own_flush_ends_the_epoch(pool: str) -> None:
    """What ``UnifiedRadixCache.reset`` does, which ``flush_cache`` calls; nothing of it is told to a backend."""
    with closing(Controller(pool)) as ours, closing(Controller(pool)) as theirs:
        prompt = tokens(4)
        assert ours.back_up(prompt, ours.host.alloc(len(prompt))) == len(prompt)
        ours.controller.reset()
        ours.controller.mem_pool_host.clear()
        assert ours.prefetch(prompt)[1] == 0
        assert theirs.prefetch(prompt)[1] == len(prompt)
        assert ours.back_up(prompt, ours.host.alloc(len(prompt))) == len(prompt)
        assert ours.prefetch(prompt)[1:] == (len(prompt), len(prompt))


def test_a_backend_that_is_attached_anew_goes_on_in_the_epoch_of_the_memory(pool: str, serve: Serve) -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    server = serve(pool)
    assert all(server.backend.batch_set_v1(hashes(2), server.slots(2)))
    server.backend.close()
    server.host.clear()
    again: Any = StorageBackendFactory.create_backend("dynamic", storage_config(extra(pool)), server.host)
    with closing(again):
        again.register_mem_pool_host(server.host)
        assert again.batch_exists(hashes(2)) == 0


def test_a_backend_that_is_attached_to_a_running_server_shares_nothing(pool: str, serve: Serve) -> None:
    """Its weights may have been changed before anybody watched."""
    from sglang.srt.runtime_context import get_context

    assert all((one := serve(pool)).backend.batch_set_v1(hashes(2), one.slots(2)))
    with get_context().override_server_args(model_path="org/model", hicache_storage_backend=None):
        facts = {"model_id": "tiny"}
        late, trusted = serve(pool, **facts), serve(pool, weights_never_change=True, **facts)
        with get_context().override_server_args(model_path="org/model", hicache_storage_backend="dynamic"):
            early = serve(pool, **facts)
        assert all(early.backend.batch_set_v1(hashes(2), early.slots(2)))
        assert (late.backend.batch_exists(hashes(2)), trusted.backend.batch_exists(hashes(2))) == (0, 2)


def test_ranks_that_shared_one_record_find_none_after_a_flush(pool: str, serve: Serve) -> None:
    """Each rank has an epoch of its own: what one writes for all (MLA) is found by none, and never wrong."""
    writer, reader = (serve(pool, kind="mla", parallel={"tp_size": 2, "tp_rank": rank}) for rank in range(2))
    for server in (writer, reader):
        server.host.clear()
    assert all(writer.backend.batch_set_v1(hashes(2), writer.slots(2)))
    assert (writer.backend.batch_exists(hashes(2)), reader.backend.batch_exists(hashes(2))) == (2, 0)


def test_an_sglang_that_changes_weights_in_unknown_ways_is_refused(
    pool: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from kvpool.errors import EngineRefused

    monkeypatch.delattr(WeightUpdater, "update_weights_from_ipc")
    with pytest.raises(EngineRefused, match="weights_never_change"):
        Server(pool)
    assert serve(pool, weights_never_change=True).backend.batch_exists(hashes(1)) == 0
