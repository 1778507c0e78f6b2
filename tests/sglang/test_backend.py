"""``KVPoolHiCache`` under SGLang's own factory, abstract class, host memory and controller, on real stores.

Over 400 lines because all calls of SGLang's interface share one scripted host memory.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch

from kvpool import open_store
from kvpool.config import HiCacheConfig
from kvpool.discovery.facts import announced_namespaces
from kvpool.discovery.quota import write_held, write_quota
from kvpool.errors import ConfigError, EngineRefused, NoThread, StoreUnavailable
from kvpool.key.key import parse_key
from tests.sglang.server import PAGE_TOKENS, Controller, Server, extra, hashes, storage_config, tokens
from tests.support.deadlines import Stopwatch, eventually
from tests.support.servers import Server as StoreServer
from tests.support.servers import running, started
from tests.support.touches import touched_by

pytestmark = pytest.mark.sglang

BUDGET_S = 0.5
MARGIN_S = 5.0
LAYOUTS = [
    ("mha", "page_first", 2), ("mha", "page_first_direct", 2), ("mha", "page_head", 2), ("mha", "layer_first", 6),
    ("asymmetric", "page_first", 2), ("mla", "page_first", 1), ("mla", "layer_first", 3),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with running("valkey-server", tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(params=["file", "valkey"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/pool"
    server = request.getfixturevalue("valkey")
    server.client.flushall()
    return str(server.url)


Serve = Callable[..., Server]


def test_the_factory_makes_a_backend_that_leaves_nothing_abstract(tmp_path: Path, serve: Serve) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    backend = serve(f"file://{tmp_path}").backend
    assert isinstance(backend, HiCacheStorage)
    assert type(backend).__name__ == "KVPoolHiCache"


@pytest.mark.parametrize(("kind", "layout", "records"), LAYOUTS)
def test_pages_come_back_to_another_server_byte_for_byte(
    pool: str, serve: Serve, kind: str, layout: str, records: int
) -> None:
    ours, theirs = serve(pool, kind=kind, layout=layout), serve(pool, kind=kind, layout=layout)
    keys, slots = hashes(5), ours.slots(5)
    assert theirs.backend.batch_exists(keys) == 0
    assert ours.backend.batch_set_v1(keys, slots) == [True] * 5
    with open_store(pool) as store:
        assert sum(len(blocks) for blocks in store.scan()) == 5 * records
    theirs.slots(2)  # elsewhere than they were
    into, others = theirs.slots(5), theirs.slots(10)
    untouched = theirs.contents(others)
    assert theirs.backend.batch_exists(keys) == 5
    assert theirs.backend.batch_get_v1(keys, into) == [True] * 5
    assert theirs.contents(into) == ours.contents(slots)
    assert theirs.contents(others) == untouched


def test_what_a_store_is_handed_is_the_host_memory_itself(tmp_path: Path, serve: Serve) -> None:
    from kvpool.sglang.pages import HostPages

    server = serve(f"file://{tmp_path}")
    slots = server.slots(3)
    pointers, sizes = server.host.get_page_buffer_meta(slots)
    views = HostPages(server.host, None).views(slots)
    assert [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in views] == pointers
    assert [view.nbytes for view in views] == sizes
    with pytest.raises(ValueError, match="whole pages"):
        HostPages(server.host, None).views(slots[:-1])


def test_keys_are_those_of_kvpool_with_the_page_hash_of_sglang(pool: str, serve: Serve) -> None:
    server = serve(pool, parallel={"tp_size": 2, "tp_rank": 1})
    keys = hashes(2)
    assert all(server.backend.batch_set_v1(keys, server.slots(2)))
    with open_store(pool) as store:
        found = [parse_key(block.key) for blocks in store.scan() for block in blocks]
        (namespace,) = announced_namespaces(store, "default")["tiny"]
    assert {(key.hash.hex(), key.group, key.rank) for key in found} == {
        (key, group, 1) for key in keys for group in (0, 1)
    }
    assert {key.fingerprint for key in found} == {namespace.fingerprint}
    assert namespace.facts["layout"] == "page_first"
    assert namespace.facts["page_tokens"] == PAGE_TOKENS
    assert namespace.facts["engine"] == "sglang"


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "other"}, {"tenant": "other"}, {"dtype": torch.float16}, {"layout": "page_first_direct"},
        {"layers": 4}, {"heads": 2}, {"parallel": {"tp_size": 2}}, {"parallel": {"pp_size": 2}},
        {"parallel": {"attn_cp_size": 2}}, {"kv_dtype": "bfloat16"},
    ],
    ids=str,
)  # fmt: skip
def test_servers_whose_bytes_mean_something_else_never_meet(
    tmp_path: Path, serve: Serve, other: dict[str, Any]
) -> None:
    pool = f"file://{tmp_path}/pool"
    ours, theirs = serve(pool), serve(pool, **other)
    assert all(ours.backend.batch_set_v1(hashes(2), ours.slots(2)))
    assert ours.backend.batch_exists(hashes(2)) == 2
    assert theirs.backend.batch_exists(hashes(2)) == 0
    assert theirs.backend.batch_get_v1(hashes(2), theirs.slots(2)) == [False] * 2


def test_formats_that_look_alike_as_bytes_never_meet(tmp_path: Path, serve: Serve) -> None:
    pool = f"file://{tmp_path}/pool"
    e4m3 = serve(pool, dtype=torch.float8_e4m3fn, kv_dtype="fp8_e4m3")
    e5m2 = serve(pool, dtype=torch.float8_e5m2, kv_dtype="fp8_e5m2")
    assert all(e4m3.backend.batch_set_v1(hashes(1), e4m3.slots(1)))
    assert (e4m3.backend.batch_exists(hashes(1)), e5m2.backend.batch_exists(hashes(1))) == (1, 0)


def test_ranks_of_mla_share_and_others_do_not(tmp_path: Path, serve: Serve) -> None:
    pool = f"file://{tmp_path}/pool"
    for kind, shared in (("mla", 2), ("mha", 0)):
        zero, one = (serve(pool, kind=kind, parallel={"tp_size": 2, "tp_rank": rank}) for rank in range(2))
        slots, into = zero.slots(2), one.slots(2)
        assert all(zero.backend.batch_set_v1(hashes(2), slots))
        assert one.backend.batch_exists(hashes(2)) == shared
        assert one.backend.batch_get_v1(hashes(2), into) == [bool(shared)] * 2
        assert (one.contents(into) == zero.contents(slots)) == bool(shared)


def test_only_the_leading_run_counts_and_half_a_page_is_none(tmp_path: Path, serve: Serve) -> None:
    pool = f"file://{tmp_path}/pool"
    server = serve(pool)
    keys, slots = hashes(5), server.slots(5)
    assert all(server.backend.batch_set_v1(keys, slots))
    with open_store(pool) as store:
        half = next(
            block.key
            for blocks in store.scan()
            for block in blocks
            if parse_key(block.key)[2:4] == (bytes.fromhex(keys[3]), 1)
        )
        assert store.delete_many([half]) == 1
    into = server.slots(5)
    assert server.backend.batch_exists(keys) == 3
    assert server.backend.batch_exists(keys[4:]) == 1
    assert not server.backend.exists(keys[3])
    assert server.backend.batch_get_v1(keys, into) == [True] * 3 + [False] * 2
    assert server.contents(into)[:3] == server.contents(slots)[:3]
    # It is stored again, by what is missing of it alone.
    assert server.backend.batch_set_v1(keys, slots) == [True] * 5
    assert server.backend.batch_exists(keys) == 5


def test_nothing_behind_a_hole_is_said_to_have_come(tmp_path: Path, serve: Serve) -> None:
    """In a load of several parts, where those behind the hole do come."""
    server = serve(f"file://{tmp_path}/pool", page_tokens=64, heads=16, layers=16)
    keys, slots = hashes(10, page_tokens=64), server.slots(10)
    whole = torch.cat([slots[: 3 * 64], slots[4 * 64 :]])
    assert all(server.backend.batch_set_v1(keys[:3] + keys[4:], whole))
    assert server.backend.batch_get_v1(keys, slots) == [True] * 3 + [False] * 7


class _Reluctant:
    """A transfer that goes on for a while after it was cancelled, as one that a kernel holds up."""

    def __init__(self, timeout_s: float) -> None:
        self._late_s, self._over_s = time.monotonic() + timeout_s, float("inf")

    def done(self) -> bool:
        return time.monotonic() >= self._over_s

    def cancel(self) -> None:
        self._over_s = min(self._over_s, time.monotonic() + 0.5)

    def given_up(self) -> bool:
        return time.monotonic() >= self._late_s or self._over_s < float("inf")

    def wait(self, timeout_s: float | None = None) -> list[bool]:
        raise StoreUnavailable("no answer")

    results = wait

    def settle(self, timeout_s: float) -> None:
        eventually(self.done, within_s=timeout_s)


class _ReluctantStore:
    """Answers the part of each call that has the page ``first``, and leaves the others to ``_Reluctant``."""

    def __init__(self, store: Any, first: str) -> None:
        self._store, self._first = store, first
        self.parts: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _part(self, submit: Callable[..., Any], *arguments: Any, **limits: float) -> Any:
        answers = self._first in arguments[0][0]
        self.parts.append(submit(*arguments, **limits) if answers else _Reluctant(limits["timeout_s"]))
        return self.parts[-1]

    def submit_get(self, *arguments: Any, **limits: float) -> Any:
        return self._part(self._store.submit_get, *arguments, **limits)

    def submit_put_absent(self, *arguments: Any, **limits: float) -> Any:
        return self._part(self._store.submit_put_absent, *arguments, **limits)


def test_a_call_returns_only_when_nothing_touches_host_memory_any_more(tmp_path: Path, serve: Serve) -> None:
    """SGLang gives the pages of a failed load to the next request at once."""
    server = serve(f"file://{tmp_path}/pool", page_tokens=64, heads=16, layers=16, lookup_timeout_s=BUDGET_S)
    keys, slots = hashes(12, page_tokens=64), server.slots(12)
    server.backend._mover._store = store = _ReluctantStore(server.backend._store, keys[0])
    # The first part is a miss, or kept; the others are under way when the call ends.
    for move, wanted in (
        (server.backend.batch_get_v1, [False] * 12),
        (server.backend.batch_set_v1, [True] * 2 + [False] * 10),
    ):
        store.parts.clear()
        assert move(keys, slots) == wanted
        assert len(store.parts) > 2
        assert all(part.done() for part in store.parts)


def test_a_pool_that_stands_still_costs_the_budget_and_comes_back(
    tmp_path: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool.sglang")
    with running("valkey-server", tmp_path) as pool:
        server, other = serve(pool.url, lookup_timeout_s=BUDGET_S), serve(pool.url, lookup_timeout_s=BUDGET_S)
        keys, slots, into = hashes(3), server.slots(3), server.slots(3)
        assert all(server.backend.batch_set_v1(keys, slots))
        pool.stop()
        try:
            # Each backend meets it with another call first.
            for call, wanted in (
                (lambda: server.backend.batch_get_v1(keys, into), [False] * 3),
                (lambda: server.backend.batch_exists(keys), 0),
                (lambda: other.backend.batch_exists(keys), 0),
            ):
                watch = Stopwatch()
                assert call() == wanted  # type: ignore[no-untyped-call]
                assert watch.ran_s() < BUDGET_S + MARGIN_S
            watch = Stopwatch()
            assert server.backend.batch_set_v1(hashes(2, start=999), slots[: 2 * PAGE_TOKENS]) == [False] * 2
            assert watch.ran_s() < 5 + MARGIN_S
        finally:
            pool.go_on()
        assert eventually(lambda: server.backend.batch_exists(keys) == 3)
        assert server.backend.batch_get_v1(keys, into) == [True] * 3
        assert server.contents(into) == server.contents(slots)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, text in said if "the pool is away" in text] == [
        "WARNING"
    ] * 2  # each backend once
    assert [level for level, text in said if "the pool is back" in text] == ["INFO"]  # that was asked again


def test_the_older_calls_move_flat_pages(pool: str, serve: Serve) -> None:
    ours, theirs = serve(pool, interface_v1=0), serve(pool, interface_v1=0)
    keys = hashes(3)
    pages = [torch.randint(0, 256, (ours.host.get_dummy_flat_data_page().numel() * 2,), dtype=torch.uint8)
             .view(torch.bfloat16) for _ in keys]  # fmt: skip
    assert theirs.backend.batch_get(keys) == [None] * 3
    assert ours.backend.batch_set(keys[:2], pages[:2])
    assert theirs.backend.batch_exists(keys) == 2
    targets = [theirs.host.get_dummy_flat_data_page() for _ in keys]
    got = theirs.backend.batch_get(keys, targets)
    assert got[:2] == targets[:2]
    assert got[2] is None
    for page, target in zip(pages[:2], targets, strict=False):
        assert torch.equal(page.view(torch.uint8), target.view(torch.uint8))
    assert not theirs.backend.exists(keys[2])
    assert theirs.backend.get(keys[2]) is None
    assert ours.backend.set(keys[2], pages[2])
    # Pages as they lie in host memory are other records.
    lying, others = serve(pool), hashes(1, start=10**6)
    assert all(lying.backend.batch_set_v1(others, lying.slots(1)))
    assert (lying.backend.batch_exists(keys), ours.backend.batch_exists(others)) == (0, 0)
    page = theirs.backend.get(keys[2])
    assert torch.equal(page.view(torch.uint8), pages[2].view(torch.uint8))


def test_clear_deletes_what_this_server_shares_and_nothing_else(pool: str, serve: Serve) -> None:
    ours, theirs = serve(pool), serve(pool, model_id="other")
    for server in (ours, theirs):
        assert all(server.backend.batch_set_v1(hashes(3), server.slots(3)))
    ours.backend.clear()
    assert (ours.backend.batch_exists(hashes(3)), theirs.backend.batch_exists(hashes(3))) == (0, 3)


def test_a_server_starts_before_its_pool_and_shares_when_it_comes(tmp_path: Path, serve: Serve) -> None:
    pool = StoreServer("valkey-server", tmp_path)
    early = serve(pool.url, start_without_pool=True)
    with started(pool):
        assert eventually(lambda: all(early.backend.batch_set_v1(hashes(3), early.slots(3))))
        assert early.backend.batch_exists(hashes(3)) == 3


def test_clear_says_when_it_could_not(tmp_path: Path, serve: Serve) -> None:
    with running("valkey-server", tmp_path) as pool:
        server = serve(pool.url)
    with pytest.raises(StoreUnavailable):
        server.backend.clear()


def test_statistics_are_those_that_sglang_takes(tmp_path: Path, serve: Serve) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector

    server = serve(f"file://{tmp_path}/pool", parallel={"tp_size": 8, "tp_rank": 7})
    keys, slots = hashes(4), server.slots(4)
    assert all(server.backend.batch_set_v1(keys[:3], slots[: 3 * PAGE_TOKENS]))
    assert server.backend.batch_exists(keys) == 3
    assert server.backend.batch_get_v1(keys, slots) == [True] * 3 + [False]
    metrics = server.backend.get_stats()
    assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([3], [3])
    assert min(metrics.prefetch_bandwidth + metrics.backup_bandwidth) > 0
    StorageMetricsCollector({"rank": "0"}).log_storage_metrics(metrics)
    assert server.backend.get_stats().prefetch_pgs == []

    def shown(name: str, **labels: str) -> float | None:
        return prometheus_client.REGISTRY.get_sample_value(name, {"rank": "7", **labels})

    assert shown("kvpool_stored_blocks_total") == 3
    assert shown("kvpool_loaded_blocks_total") == 3
    assert (
        shown("kvpool_loaded_bytes_total")
        == shown("kvpool_stored_bytes_total")
        == 3 * len(server.page(slots, 0))
    )
    assert shown("kvpool_load_requests_total", result="missing") == 1
    assert shown("kvpool_lookup_blocks_total") == 8


def missed(what: str) -> float:
    """How many calls, or pages, were faults of this kind so far, as SGLang's page shows."""
    name, label = what.split("/")
    return prometheus_client.REGISTRY.get_sample_value(name, {"rank": "0", label: "fault"}) or 0.0


NO_HASHES = [
    "no hash", "", "ab", "abc" * 11, "AB" * 32, "ab " * 32, "ab" * 65, None, 7, b"ab" * 32, ("ab" * 32,),
]  # fmt: skip


@pytest.mark.parametrize("bad", NO_HASHES, ids=repr)
def test_a_key_that_is_no_hash_is_a_miss_of_its_own(tmp_path: Path, serve: Serve, bad: Any) -> None:
    server = serve(f"file://{tmp_path}/pool")
    one, two = hashes(2)
    slots = server.slots(3)
    backend, before = server.backend, missed("kvpool_lookup_failures_total/cause")
    assert backend.batch_set_v1([one, bad, two], slots) == [True, False, True]
    assert backend.batch_exists([bad]) == 0
    assert not backend.exists(bad)
    assert backend.batch_exists([one, bad, two]) == 1
    into = server.slots(3)
    assert backend.batch_get_v1([one, bad, two], into) == [True, False, False]
    assert server.contents(into)[0] == server.contents(slots)[0]
    assert backend.batch_exists([one, two]) == 2
    assert backend.batch_get_v1([one, two], into[: 2 * PAGE_TOKENS]) == [True] * 2
    assert server.contents(into)[:2] == [server.contents(slots)[0], server.contents(slots)[2]]
    backend.get_stats()
    assert missed("kvpool_lookup_failures_total/cause") > before


def test_calls_that_make_no_sense_are_misses_and_are_counted(
    tmp_path: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(f"file://{tmp_path}/pool")
    backend, keys, slots = server.backend, hashes(2), server.slots(2)
    assert all(backend.batch_set_v1(keys, slots))
    before = server.contents(slots)
    outside = torch.arange(2 * PAGE_TOKENS) + server.host.size
    for indices in (None, "x", slots[:-1], slots[:PAGE_TOKENS], outside, outside - 10**6, slots.float()):
        assert backend.batch_get_v1(keys, indices) == [False] * 2
        assert backend.batch_set_v1(hashes(2, start=999), indices) == [False] * 2
    for nothing in (None, [], (), 7):
        assert backend.batch_exists(nothing) == 0
        assert backend.batch_get_v1(nothing, slots[:0]) == []
        assert backend.batch_set_v1(nothing, slots[:0]) == []
        assert backend.batch_get(nothing) == []
    for extra_info in (None, {}, 7, object()):
        assert backend.batch_exists(keys, extra_info) == 2
    assert server.contents(slots) == before
    assert backend.batch_get_v1([keys[0]] * 2, slots) == [True] * 2, "a key may come twice"
    assert backend.batch_set_v1([keys[1]] * 2, slots) == [True] * 2
    counted = ("kvpool_load_requests_total/result", "kvpool_store_skipped_blocks_total/cause")
    known = [missed(what) for what in counted]
    backend.get_stats()
    assert [missed(what) - was for what, was in zip(counted, known, strict=True)] == [7, 14]
    said = [record for record in caplog.records if "could not do" in record.getMessage()]
    assert len(said) == 1, "the first one tells, the others are counted"


def skipped() -> float:
    labels = {"rank": "0", "cause": "quota"}
    return prometheus_client.REGISTRY.get_sample_value("kvpool_store_skipped_blocks_total", labels) or 0.0


def test_over_its_quota_a_server_stores_nothing_and_loads(tmp_path: Path, serve: Serve) -> None:
    server = serve(f"file://{tmp_path}/pool")
    backend, keys, slots = server.backend, hashes(2), server.slots(2)
    assert backend.batch_set_v1(keys[:1], slots[:PAGE_TOKENS]) == [True]
    with open_store(f"file://{tmp_path}/pool") as store:
        write_quota(store, "default", 1)
        write_held(store, "default", 2, 60)
        backend._quota.turn()
        before = skipped()
        assert backend.batch_set_v1(keys[1:], slots[PAGE_TOKENS:]) == [False]
        backend.get_stats()
        assert skipped() == before + 1
        assert backend.batch_exists(keys) == 1
        assert backend.batch_get_v1(keys[:1], slots[PAGE_TOKENS:]) == [True]
        write_quota(store, "default", None)
        backend._quota.turn()
        assert backend.batch_set_v1(keys[1:], slots[PAGE_TOKENS:]) == [True]


def test_flat_pages_of_another_size_harm_nothing(tmp_path: Path, serve: Serve) -> None:
    """A record that is read into a buffer of another size is deleted, as one that is damaged."""
    server = serve(f"file://{tmp_path}/pool", interface_v1=0)
    backend, (one, two) = server.backend, hashes(2)
    page = server.host.get_dummy_flat_data_page()
    assert backend.set(one, page)
    for odd in (page[:-1], torch.cat([page, page]), None, "page", 7):
        assert backend.get(one, odd) is None or odd is None
        assert not backend.batch_set([two], [odd])
    assert not backend.batch_set([one, two], [page])
    assert not backend.set(two)
    assert backend.batch_get([one, two], [page]) == [None] * 2
    assert backend.batch_exists([one, two]) == 1
    assert backend.get(one) is not None


def test_what_a_store_raises_costs_one_call(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(f"file://{tmp_path}/pool")
    backend, keys, slots = server.backend, hashes(2), server.slots(2)
    assert all(backend.batch_set_v1(keys, slots))
    for number, name in enumerate(("submit_touch", "submit_get", "submit_put_absent"), 1):
        with monkeypatch.context() as patch:
            patch.setattr(backend._store, name, lambda *_, **__: 1 / 0)
            assert backend.batch_exists(keys) == (0 if name == "submit_touch" else 2)
            assert backend.batch_get_v1(keys, slots) == [name != "submit_get"] * 2
            others = hashes(2, start=number * 10**6)
            assert backend.batch_set_v1(others, slots) == [name != "submit_put_absent"] * 2
        assert backend.batch_exists(keys) == 2
        assert backend.batch_get_v1(keys, slots) == [True] * 2


def test_what_is_asked_for_counts_as_used(valkey: StoreServer, serve: Serve) -> None:
    valkey.client.flushall()
    server = serve(valkey.url)
    keys, slots = hashes(3), server.slots(3)
    assert all(server.backend.batch_set_v1(keys, slots))

    assert touched_by(valkey, lambda: server.backend.batch_exists(keys)) == 6
    assert touched_by(valkey, lambda: server.backend.batch_set_v1(keys, slots)) == 6, "keys and values"


def test_after_close_everything_is_a_miss(tmp_path: Path, serve: Serve) -> None:
    server = serve(f"file://{tmp_path}/pool")
    assert all(server.backend.batch_set_v1(hashes(2), server.slots(2)))
    server.backend.close()
    server.backend.close()
    assert server.backend.batch_exists(hashes(2)) == 0
    assert server.backend.batch_get_v1(hashes(2), server.slots(2)) == [False] * 2
    assert server.backend.batch_set_v1(hashes(2), server.slots(2)) == [False] * 2
    server.backend.get_stats()


# What is refused.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model_id": ""}, "model_id"),
        ({"poool": "x"}, 'unknown setting "poool"; did you mean "pool"?'),
        ({"pool": "memory://"}, "write file:///dev/shm/kvpool"),
        ({"fault_miss_ratio": 0.5}, "stop the pool's server"),
        ({"dtype": torch.float8_e4m3fn}, "kv_dtype"),
        ({"layout": "page_unified"}, "page_first"),
        ({"parallel": {"should_split_heads": True}}, "tp_lcm_size"),
        (
            {"kind": "mla", "parallel": {"dcp_size": 2, "tp_size": 2, "logical_page_size": 2 * PAGE_TOKENS}},
            "dcp",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Server(settings.pop("pool", f"file://{tmp_path}/pool"), **settings)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_server_that_no_thread_can_tell_leaves_no_connection(
    valkey: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: HiCacheConfig) -> None:
        raise NoThread("no thread could be started")

    monkeypatch.setattr("kvpool.sglang.backend.served_facts", refuse)
    with pytest.raises(NoThread) as caught:
        Server(valkey.url)
    assert eventually(lambda: not [one for one in valkey.client.client_list() if "kvpool:" in one["name"]])
    assert caught.tb, "it kept what the backend had"


def test_memory_of_which_sglang_names_only_a_part_is_refused(tmp_path: Path, serve: Serve) -> None:
    """As that of MXFP8, whose pages would come back without their scales."""
    from kvpool.sglang.pages import HostPages

    host = serve(f"file://{tmp_path}/pool").host
    size = host.get_size_per_token()
    host.get_size_per_token = lambda: size + 8
    with pytest.raises(EngineRefused, match="says where 24576 of them are"):
        HostPages(host, None)


def test_models_with_a_second_kind_of_cache_are_refused(tmp_path: Path, serve: Serve) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    server = serve(f"file://{tmp_path}/pool")
    server.backend.register_mem_host_pool_v2(server.host, PoolName.KV)
    with pytest.raises(EngineRefused, match="second kind of cache \\(mamba\\)"):
        server.backend.register_mem_host_pool_v2(server.host, PoolName.MAMBA)


def test_before_there_is_host_memory_all_is_a_miss(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    config = storage_config(extra(f"file://{tmp_path}/pool"))
    with closing(StorageBackendFactory.create_backend("dynamic", config, None)) as backend:
        assert backend.batch_exists(hashes(2)) == 0
        assert backend.batch_set_v1(hashes(2), torch.arange(2 * PAGE_TOKENS)) == [False] * 2
        backend.clear()


def test_the_recipe_in_the_documentation_is_what_both_sides_take(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.server_args import ServerArgs

    text = (Path(__file__).parents[2] / "docs" / "how-to" / "sglang.md").read_text()
    (command,) = re.findall(r"sglang\.launch_server (.*?)```", text, re.DOTALL)
    options, _, rest = command.partition("--hicache-storage-backend-extra-config '")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.parse_args(options.replace("\\\n", " ").split()).hicache_storage_backend == "dynamic"
    recipe = HybridCacheController.parse_storage_backend_extra_config(rest.rpartition("'")[0])[0]
    recipe["pool"] = f"file://{tmp_path}/pool"
    with closing(StorageBackendFactory.create_backend("dynamic", storage_config(recipe), None)) as backend:
        assert type(backend).__name__ == "KVPoolHiCache"
    (table,) = re.findall(r"\| setting \| type.*?\n\n", text, re.DOTALL)
    assert set(HiCacheConfig.model_fields) <= set(re.findall(r"`([a-z_]+)`", table))


# SGLang's own threads.


@pytest.mark.parametrize("interface_v1", [1, 0])
def test_a_prompt_that_one_server_backed_up_is_prefetched_by_another(pool: str, interface_v1: int) -> None:
    with (
        closing(Controller(pool, interface_v1=interface_v1)) as ours,
        closing(Controller(pool, interface_v1=interface_v1)) as theirs,
    ):
        prompt = tokens(200)  # more than one of SGLang's batches of 128 pages
        slots = ours.host.alloc(len(prompt))
        assert theirs.prefetch(prompt)[1] == 0
        assert ours.back_up(prompt, slots) == len(prompt)
        theirs.host.alloc(2 * PAGE_TOKENS)
        into, said, came = theirs.prefetch([*prompt, *tokens(1, start=10**6)])
        assert said == came == len(prompt)
        written, read = (
            one.host.kv_buffer[:, at].view(torch.uint8) for one, at in ((ours, slots), (theirs, into))
        )
        assert torch.equal(written, read)


def test_sglang_goes_on_with_a_pool_that_loses_and_damages_records(valkey: StoreServer) -> None:
    """A prompt's prefix comes back byte for byte up to the first record that is gone or a byte short."""
    valkey.client.flushall()
    draw = random.Random(3)
    with closing(Controller(valkey.url)) as ours, closing(Controller(valkey.url)) as theirs:
        slots = ours.host.alloc(len(tokens(40)))
        written = ours.host.kv_buffer[:, slots].view(torch.uint8)
        came = []
        for start in range(0, 10**6, 10**5):
            before = set(valkey.client.keys())
            assert ours.back_up(tokens(40, start=start), slots) == len(slots)
            for key in draw.sample(sorted(set(valkey.client.keys()) - before), 3):
                if draw.random() < 0.5:
                    valkey.client.delete(key)
                elif valkey.client.type(key) == b"string":
                    valkey.client.set(key, valkey.client.get(key)[:-1])
            into, said, got = theirs.prefetch(tokens(40, start=start))
            assert got <= said <= len(slots)
            read = theirs.host.kv_buffer[:, into[:got]].view(torch.uint8)
            assert torch.equal(written[:, :got], read)
            theirs.host.free(into)
            came.append(got)
        assert max(came) > 0
        assert min(came) < len(slots)


def test_sglang_goes_on_when_the_pool_is_lost(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as pool, closing(Controller(pool.url)) as controller:
        prompt = tokens(4)
        slots = controller.host.alloc(len(prompt))
        assert controller.back_up(prompt, slots) == len(prompt)
        pool.kill()
        assert controller.prefetch(prompt)[1] == 0
        assert controller.back_up(tokens(4, start=1000), slots) == 0
        pool.start()
        assert eventually(lambda: controller.back_up(prompt, slots) == len(prompt))
        assert controller.prefetch(prompt)[1:] == (len(prompt), len(prompt))
