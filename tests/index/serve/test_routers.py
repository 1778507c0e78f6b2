"""Routers that are about, each asking as its source says (see ``docs/reference/protocol.md``), and real publishers."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest

from kvpool import BlockHasher
from kvpool.index.fleet import Fleet
from kvpool.index.follow.subscriber import Subscriber
from tests.support.deadlines import eventually
from tests.support.feeds import Misbehaving, misbehaving
from tests.support.fleets import Served, a_worker, say, serving
from tests.support.wire import batch, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

SEED = "7"  # PYTHONHASHSEED of the index and the engines
TOKENS = list(range(1000, 1100))  # six blocks of 16, and four tokens
HASHES = [int.from_bytes(digest[-8:], "big") for digest in BlockHasher(16, seed=SEED).hashes(TOKENS)]
ZEROS = {
    "longest_matched": 0, "gpu": 0, "dp": {"3": 0}, "cpu": 0, "disk": 0,
    "rank_matches": {"3": {"gpu": 0, "cpu": 0, "disk": 0}},
}  # fmt: skip


class Caller:
    """One connection; what it sends and gets is ``media``."""

    def __init__(self, address: str, media: str = "application/json") -> None:
        self.media = media
        host, port = address.split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)

    def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        is_msgpack = self.media == "application/msgpack"
        raw = msgpack.packb(fields) if is_msgpack else json.dumps(fields).encode()
        self.connection.request("POST", path, raw, {"Content-Type": self.media})
        reply = self.connection.getresponse()
        said = reply.read()
        assert reply.headers["content-type"] == self.media
        return reply.status, msgpack.unpackb(said) if is_msgpack else json.loads(said)


class MooncakeProxy(Caller):
    """Mooncake's cache-aware proxy: of July 2026 in JSON, since 3 August 2026 in msgpack with packed tokens."""

    def register(self, instance_id: str, publisher: Misbehaving, **profile: str) -> tuple[int, Any]:
        return self.post(
            "/register", endpoint=publisher.publisher.events, type="vLLM", modelname="m", instance_id=instance_id,
            block_size=16, dp_rank=3, tenant_id="default", lora_name="",
            hash_profile={
                "strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": SEED,
                "index_projection": "low64_be", **profile,
            },
        )  # fmt: skip

    def query(self, tokens: Sequence[int]) -> Any:
        """By instance, as it reads an answer; it routes round robin when there is none such."""
        packed = struct.pack(f"<{len(tokens)}i", *tokens)
        status, reply = self.post(
            "/query", model="m", block_size=16, tenant_id="default", lora_name="",
            token_ids=packed if self.media == "application/msgpack" else list(tokens),
        )  # fmt: skip
        assert status == 200, reply
        assert all(type(one["longest_matched"]) is int for one in reply["instances"].values())
        return reply["instances"]


@contextmanager
def asking(address: str, kind: type[Caller], *media: str) -> Iterator[Any]:
    caller = kind(address, *media)
    try:
        yield caller
    finally:
        caller.connection.close()


@pytest.fixture
def served() -> Iterator[Served]:
    fleet = Fleet(seed=SEED)
    with serving(fleet, feed=Subscriber(), http=True) as running:
        try:
            yield running
        finally:
            running.fleet.close()


@pytest.mark.parametrize("media", ["application/json", "application/msgpack"])
def test_mooncakes_proxy_finds_who_holds_most(served: Served, media: str) -> None:
    with misbehaving() as first, misbehaving() as second, asking(served.http, MooncakeProxy, media) as proxy:
        first.publish(batch(stored(HASHES[:2]), dp_rank=3))
        second.publish(batch(stored(HASHES[:4]), dp_rank=3))
        for name, publisher in (("a", first), ("b", second)):
            registered = {"status": "registered successfully", "instance_id": name}
            assert proxy.register(name, publisher) == (200, registered)
            assert proxy.register(name, publisher) == (200, registered), "as a proxy that was started anew"

        def matched() -> dict[str, int]:
            return {name: one["longest_matched"] for name, one in proxy.query(TOKENS).items()}

        # Without a replay endpoint a rank is trusted from the first batch that comes live.
        def heard() -> bool:
            first.publish(batch(dp_rank=3))
            second.publish(batch(dp_rank=3))
            return sum(not rank.stale for one in served.fleet.workers() for rank in one.publishers) == 2

        assert eventually(heard)
        first.publish(batch(stored(HASHES[:2]), dp_rank=3))
        second.publish(batch(stored(HASHES[:4]), dp_rank=3))
        assert eventually(lambda: matched() == {"a": 32, "b": 64}), matched()
        assert proxy.query([]) == {"a": ZEROS, "b": ZEROS}, "as Mooncake has it"
        removed = {"status": "unregistered successfully", "removed_instances": ["a|default|3"]}
        assert proxy.post("/unregister", instance_id="a", tenant_id="default", dp_rank=3) == (200, removed)
        assert list(proxy.query(TOKENS)) == ["b"]


@pytest.mark.parametrize("media", ["application/json", "application/msgpack"])
def test_tiers_reach_on_from_one_another_as_in_mooncakes_conductor(media: str) -> None:
    """Its own case: two blocks on the device, a third in main memory, a fourth on disk."""
    fleet = Fleet(seed=SEED)
    fleet.add(a_worker("ordered", hash_seed_id=fleet.seed_id), "flag")
    told = batch(stored(HASHES[:2]), stored(HASHES[2:3], medium="CPU"), stored(HASHES[3:4], medium="DISK"))
    say(fleet, "default/ordered", 0, 0, told)
    with serving(fleet, http=True) as served, asking(served.http, MooncakeProxy, media) as proxy:
        assert proxy.query(TOKENS) == {
            "ordered": {
                "longest_matched": 64, "gpu": 32, "dp": {"0": 32}, "cpu": 48, "disk": 64,
                "rank_matches": {"0": {"gpu": 32, "cpu": 48, "disk": 64}},
            }
        }  # fmt: skip


def test_tiers_reach_on_from_one_another_as_in_dynamo() -> None:
    """Its own case, of two ranks (lib/kv-router/src/services/overlap.rs), which are in no tier but the one."""
    fleet = Fleet(seed=SEED)
    fleet.add(a_worker("7", ranks=2, hash_seed_id=fleet.seed_id), "flag")
    first = batch(stored(HASHES[:2]), stored(HASHES[2:3], medium="CPU"), stored(HASHES[3:5], medium="DISK"))
    say(fleet, "default/7", 0, 0, first)
    say(fleet, "default/7", 1, 0, batch(stored(HASHES[:1]), stored(HASHES[1:2], medium="DISK")))
    with serving(fleet, http=True) as served, asking(served.http, Caller) as caller:
        status, reply = caller.post("/query", model_name="m", token_ids=TOKENS)
        assert (status, reply["scores"]) == (200, {"7": {"0": 32, "1": 16}})
        assert reply["instances"] == {
            "7": {"longest_matched": 80, "gpu": 32, "dp": {"0": 32, "1": 16}, "cpu": 48, "disk": 80}
        }
        empty = {"longest_matched": 0, "gpu": 0, "dp": {"0": 0, "1": 0}, "cpu": 0, "disk": 0}
        for path, prompt in (("/query", {"token_ids": []}), ("/query_by_hash", {"block_hashes": []})):
            assert caller.post(path, model_name="m", **prompt)[1]["instances"] == {"7": empty}


def test_dynamos_statuses(served: Served) -> None:
    rank = {"instance_id": 7, "model_name": "m", "routing_group": "g"}
    with misbehaving() as publisher, asking(served.http, Caller) as caller:
        endpoint = publisher.publisher.events
        assert caller.post("/register", **rank, endpoint=endpoint, block_size=16) == (201, {"status": "ok"})
        assert [one.worker.id for one in served.fleet.workers()] == ["g/7"]
        assert caller.post("/query", model_name="m", token_ids=TOKENS)[0] == 404
        assert caller.post("/query", model_name="m", token_ids=TOKENS, routing_group="g")[0] == 200
        assert caller.post("/unregister", **rank) == (200, {"status": "ok"})
        assert caller.post("/unregister", **rank)[0] == 404


@pytest.mark.parametrize("media", ["application/json", "application/msgpack"])
@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ({"algorithm": "sha256"}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"algorithm": "md5"}, 'unknown hash algorithm "md5"'),
        ({"python_hash_seed": "0"}, 'python_hash_seed "0" is not the seed of this index'),
        ({"strategy": "sglang_v1"}, "only vllm_v1 is"),
    ],
)
def test_a_worker_whose_hashes_no_prompt_has_is_refused(
    served: Served, media: str, profile: dict[str, str], says: str
) -> None:
    with misbehaving() as publisher, asking(served.http, MooncakeProxy, media) as proxy:
        status, reply = proxy.register("w", publisher, **profile)
    assert (status, list(reply)) == (400, ["error"])
    assert says in reply["error"]
    assert served.fleet.workers() == []


def test_what_is_refused_is_said_in_msgpack_to_who_asks_in_it(served: Served) -> None:
    with asking(served.http, Caller, "application/msgpack") as caller:
        for path, fields, status, says in (
            ("/query", {"model": "m", "token_ids": [-1]}, 400, "whole numbers"),
            ("/query", {"model": "m", "token_ids": b"123"}, 400, "4 each and little-endian"),
            ("/query", {"model": "m", "token_ids": [1]}, 404, 'unknown model "m"'),
            ("/query_by_hash", {"model": "m", "seq_hashes": [1]}, 400, "send hashes in JSON"),
            ("/nowhere", {}, 404, "Not Found"),
        ):
            answered, reply = caller.post(path, **fields)
            assert (answered, list(reply)) == (status, ["error"])
            assert says in reply["error"]
