"""``Route``, ``Release`` and prompts as text through the service and its clients, as a router uses them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool import BlockHasher, Chat, ConfigError, IndexClient, Load, UnknownModel
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol.messages import MAX_TEXT_NBYTES, decode_route
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.v1 import index_pb2 as pb
from tests.support.calls import refused
from tests.support.fleets import Served, a_worker, joined, serving
from tests.support.tiny_tokenizer import write_tokenizer
from tests.support.wire import stored

pytestmark = pytest.mark.usefixtures("grpc_started")

TOKENS = list(range(100, 180))
CHAT = [{"role": "system", "content": "the system " * 20}, {"role": "user", "content": "the user asks"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        assert transformers.AutoTokenizer
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load("m", str(write_tokenizer(folder)))


@pytest.fixture
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with an_index(tokenizer) as running:
        yield running


@contextmanager
def an_index(tokenizer: Tokenizer) -> Iterator[Served]:
    """Worker b holds three blocks of TOKENS; a those of a text, c those of a chat."""
    fleet = Fleet()
    prompts = {
        "a": tokenizer.of_text("a tool says 42 " * 20),
        "b": TOKENS[:48],
        "c": tokenizer.of_chat(Chat(CHAT)),
    }
    for place, (name, tokens) in enumerate(prompts.items()):
        joined(fleet, a_worker(name, port=5000 + 2 * place), stored(BlockHasher(16).hashes(tokens)))
    fleet.add(a_worker("x", model="other", port=6000), "flag")
    tokenizers = Tokenizers({"m": tokenizer})
    with closing(tokenizers), serving(fleet, router=Router(fleet), tokenizers=tokenizers) as running:
        yield running


def test_a_router_places_a_request(served: Served) -> None:
    with IndexClient(served.target, 60) as index:
        route = index.route("m", token_ids=TOKENS, reserve_s=60)
        best = route.picks[0]
        assert (best.worker, best.dp_rank, best.address) == ("b", 0, "http://b:8000")
        assert (best.trust, best.cost, best.prefill_cost, best.row.device_blocks) == ("exact", 32, 32, 3)
        loads = [Load("b", running=100, queued_tokens=5000, kv_usage=0.125)]
        hashes64 = BlockHasher(16).hashes64(TOKENS)
        (first,) = index.route("m", hashes64=hashes64, loads=loads, limit=1, prompt_tokens=83).picks
        assert (first.worker, first.prefill_cost) == ("a", 83), "b is busy"
        (busy,) = index.route("m", token_ids=TOKENS, workers=["b"]).picks
        assert (busy.running, busy.queued_tokens, busy.kv_usage_permille) == (100, 5000, 125)
        assert busy.load_source == "reported"
        assert busy.reserved_cost == 64, "and the 32 tokens are in flight: this request computes them no more"
        assert index.release(route.reservation) is True
        assert index.release(route.reservation) is False
        assert index.route("m", token_ids=TOKENS, workers=["b"]).picks[0].reserved_cost == 0
        assert index.route("m", token_ids=TOKENS, workers=["nobody"]).picks == ()
        with pytest.raises(UnknownModel, match='unknown model "y"'):
            index.route("y", token_ids=TOKENS)


def test_a_session_stays_where_it_is(served: Served) -> None:
    """The worker of its first prompt does not announce a block."""
    with IndexClient(served.target, 60) as index:
        fresh = list(range(5000, 5800))
        home = index.route("m", token_ids=fresh, session_id="s").picks[0].worker
        assert {index.route("m", token_ids=fresh, session_id="s").picks[0].worker for _ in range(6)} == {home}
        first, *others = index.route("m", token_ids=fresh, session_id="s").picks
        assert (first.cost, first.move_cost) == (0, 0)
        assert {(one.cost, one.move_cost) for one in others} == {(800 + 1600, 1600)}
        keyed = [index.route("m", token_ids=fresh, prompt_cache_key="k").picks[0].worker for _ in range(6)]
        assert len(set(keyed)) == 3, "nobody knows whether there is room"
        for name in "abc":
            served._options["router"].loads.size(f"default/{name}", 0, 10_000)
        alike = [index.route("m", token_ids=fresh, prompt_cache_key="k").picks for _ in range(6)]
        assert len({picks[0].worker for picks in alike}) == 1
        assert {pick.move_cost for picks in alike for pick in picks} == {0}
        assert len({index.route("m", token_ids=fresh).picks[0].worker for _ in range(6)}) == 3
    assert served._stats.totals().sessions == {"first": 1, "stayed": 7, "moved": 0, "aside": 0}


def test_text_and_chats_find_who_holds_them(served: Served, tokenizer: Tokenizer) -> None:
    with IndexClient(served.target, 60) as index:
        text = "a tool says 42 " * 20
        tokens = tokenizer.of_text(text)
        assert index.lookup("m", text=text).device_blocks == (len(tokens) // 16, 0, 0)
        assert index.lookup("m", text=text, cache_salt="s").device_blocks == (0, 0, 0)
        assert index.lookup("m", chat=CHAT).device_blocks == (0, 0, len(tokenizer.of_chat(Chat(CHAT))) // 16)
        longer = [*CHAT, {"role": "assistant", "content": "the assistant answers"}]
        assert index.lookup("m", chat=Chat(longer, add_generation_prompt=False)).device_blocks[2] > 0
        best = index.route("m", chat=CHAT).picks[0]
        assert best.worker == "c"
        assert best.prefill_cost == len(tokenizer.of_chat(Chat(CHAT))) % 16
        assert index.route("m", text=text).picks[0].worker == "a"
        long = "the user asks the system " * 10_000
        assert index.lookup("m", text=long).prompt_blocks[0] == len(tokenizer.of_text(long)) // 16


CHANNEL = [("grpc.max_send_message_length", -1)]
SCOPE = pb.Scope(model="m")
USER = pb.ChatMessage(role="user", content=["x"])


@pytest.mark.allow_leaks("the index is there for all of them")
@pytest.mark.parametrize(
    ("method", "request_", "code", "says"),
    [
        ("Route", b"", "INVALID_ARGUMENT", "a request holds a prompt"),
        ("Route", b"\xff", "INVALID_ARGUMENT", "the request is not a kvpool.v1.RouteRequest"),
        ("Release", b"\xff", "INVALID_ARGUMENT", "the request is not a kvpool.v1.ReleaseRequest"),
        ("Release", pb.ReleaseRequest(tenant="/"), "INVALID_ARGUMENT", "tenant"),
        ("Route", pb.RouteRequest(scope=pb.Scope(model="y"), text="x"), "NOT_FOUND", 'unknown model "y"'),
        ("Lookup", pb.LookupRequest(scope=pb.Scope(model="other"), text="x"), "INVALID_ARGUMENT",
         'this index has no tokenizer for "other": start it with --tokenizer other=FOLDER, or send token_ids'),
        ("Lookup", pb.LookupRequest(scope=SCOPE, text=""), "INVALID_ARGUMENT", "a prompt as text has 1 to"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, text="x" * (MAX_TEXT_NBYTES + 1)), "INVALID_ARGUMENT",
         "a prompt as text has 1 to 4194304 bytes, not 4194305"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, chat=pb.ChatPrompt()), "INVALID_ARGUMENT", "as chat has 1 to"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, chat=pb.ChatPrompt(tools_json="[]")), "INVALID_ARGUMENT",
         "a chat holds messages"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, chat=pb.ChatPrompt(messages=[USER], tools_json="{}")),
         "INVALID_ARGUMENT", "tools_json is a JSON list"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, chat=pb.ChatPrompt(messages=[USER], tools_json="[" * 100_000)),
         "INVALID_ARGUMENT", "tools_json is no JSON"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, chat=pb.ChatPrompt(messages=[USER], template_options_json="x")),
         "INVALID_ARGUMENT", "template_options_json is no JSON"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, chat=pb.ChatPrompt(
            messages=[USER], template_options_json='{"tokenize": true}')), "INVALID_ARGUMENT", "cannot hold tokenize"),
        ("Route", pb.RouteRequest(scope=SCOPE, text="x", loads=[pb.RankLoad(kv_usage_permille=1001)]),
         "INVALID_ARGUMENT", "kv_usage is from 0 to 1"),
        ("Route", pb.RouteRequest(scope=SCOPE, text="x", reserve_ms=600_001), "INVALID_ARGUMENT",
         "a reservation is for"),
        ("Route", pb.RouteRequest(scope=SCOPE, block_hashes=bytes(7)), "INVALID_ARGUMENT", "8 bytes each"),
        ("Lookup", pb.LookupRequest(scope=SCOPE, block_hashes=bytes(range(16)) * 9), "INVALID_ARGUMENT",
         "a prompt's block hashes are all different"),
        ("Route", pb.RouteRequest(scope=SCOPE, block_hashes=bytes(range(16)) * 9), "INVALID_ARGUMENT",
         "a prompt's block hashes are all different"),
        ("Route", pb.RouteRequest(scope=SCOPE, block_hashes=bytes(8), loads=[pb.RankLoad()] * 32769),
         "INVALID_ARGUMENT", "at most 32768 loads"),
    ],
)  # fmt: skip
def test_what_is_refused(served: Served, method: str, request_: Any, code: str, says: str) -> None:
    with grpc.insecure_channel(served.target, options=CHANNEL) as channel:
        found, text = refused(channel, method, request_)
    assert found == code, text
    assert says in text


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({}, "give a prompt as token_ids, hashes64, text or chat, and only once"),
        ({"text": "x", "token_ids": [1]}, "and only once"),
        ({"text": b"\xff"}, "cannot be sent"),
        ({"text": "\ud800"}, "cannot be sent"),
        ({"chat": "x"}, "a chat is a list of messages"),
        ({"chat": [3]}, "a chat is a list of messages with a role"),
        ({"chat": [{"content": "x"}]}, "a chat is a list of messages with a role"),
        ({"chat": [{"role": "user", "content": [{"type": "image_url"}]}]}, "send what is not as token ids"),
        ({"chat": Chat([{"role": "user"}], template_options={"x": object()})}, "not JSON serializable"),
        ({"token_ids": [1], "limit": 0}, "limit is the number of picks"),
        ({"token_ids": [1], "limit": 1 << 40}, "cannot be sent"),
        ({"token_ids": [1], "reserve_s": 0}, "a reservation is a number of seconds"),
        ({"token_ids": [1], "loads": ["x"]}, "cannot be sent"),
        ({"token_ids": [1], "prompt_tokens": -1}, "cannot be sent"),
    ],
)
def test_what_a_client_does_not_even_send(wishes: dict[str, Any], says: str) -> None:
    with IndexClient("127.0.0.1:1") as index, pytest.raises(ConfigError, match=says) as caught:
        index.route("m", **wishes)
    assert "\n" not in str(caught.value)


def test_a_reply_that_makes_no_sense() -> None:
    row = pb.LookupResponse(
        worker=["w"], dp_rank=[0], address=[""], block_tokens=[16], prompt_blocks=[1], device_blocks=[0],
        local_blocks=[0], pool_blocks=[0], sequence=[0], staleness_ms=[0], stale=[False],
    )  # fmt: skip
    columns = (
        "trust", "cost", "prefill_cost", "fetch_cost", "queue_cost", "running", "waiting", "queued_tokens",
        "kv_usage_permille", "reserved_cost", "load_source", "load_age_ms", "asleep",
    )  # fmt: skip
    good = pb.RouteResponse(rows=row, **{name: [1] for name in columns})
    pick = decode_route(good).picks[0]
    assert pick.trust == "exact"
    assert (pick.row.loadable_blocks, pick.unreachable) == (0, False), "of an index that does not say it"
    for name in columns:
        short = pb.RouteResponse()
        short.CopyFrom(good)
        short.ClearField(name)
        with pytest.raises(ValueError, match="differ in length"):
            decode_route(short)
    for name in ("trust", "load_source"):
        odd = pb.RouteResponse()
        odd.CopyFrom(good)
        getattr(odd, name)[0] = 77
        with pytest.raises(ValueError, match="has no name"):
            decode_route(odd)
