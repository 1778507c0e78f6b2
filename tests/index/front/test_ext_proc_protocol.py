"""The endpoint picker's side of the protocol, message by message: what an Envoy does not do on request.

Over 400 lines because all are of one call.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvpool import BlockHasher
from kvpool.index import limits
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front import ext_proc, placement
from kvpool.index.front.placer import Placer
from kvpool.index.serve.auth import TokenAuth
from kvpool.v1 import ext_proc_pb2 as pb
from tests.support.credentials import write_tokens
from tests.support.deadlines import eventually, raises
from tests.support.ext_proc import (
    BODY,
    TOKENS,
    Call,
    body,
    calling,
    destinations,
    headers,
    picking,
    reserved,
    response,
    set_headers,
)
from tests.support.fleets import a_worker, joined, say
from tests.support.networks import KnownNames
from tests.support.wire import batch, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

DUPLEX = pb.ProcessingMode.FULL_DUPLEX_STREAMED


def test_an_ordered_list_and_decision_headers() -> None:
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.say(headers(), body())
        _, reply = next(call._replies), next(call._replies)
        assert destinations(reply) == ["127.0.0.1:9001", "127.0.0.1:9002"]
        assert set_headers(reply.request_body.response.header_mutation) == {
            "x-kvpool-worker": "a", "x-kvpool-reason": "prefix", "x-kvpool-matched-blocks": "4",
            "x-kvpool-prompt-blocks": "4", "x-gateway-destination-endpoint": "127.0.0.1:9001,127.0.0.1:9002",
        }  # fmt: skip
        shown = set_headers(call.ask(response()).response_headers.response.header_mutation)
        assert set(shown) == {
            "x-kvpool-worker", "x-kvpool-reason", "x-kvpool-matched-blocks", "x-kvpool-prompt-blocks"
        }  # fmt: skip


def test_headers_are_read_as_the_routers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp takes them for UTF-8 (PEP 383): a session has one name at both doors."""
    read: list[str] = []
    place = Placer.place

    async def seen(placer: Placer, path: str, headers: Any, *more: Any) -> Any:
        read.append(headers["x-session-id"])
        return await place(placer, path, headers, *more)

    monkeypatch.setattr(Placer, "place", seen)
    asked = headers()
    name = asked.request_headers.headers.headers.add(key="x-session-id", raw_value="naïve".encode() + b"\xff")
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.ask(asked)
        call.ask(body())
    assert read == [name.raw_value.decode(errors="surrogateescape")]


@pytest.mark.parametrize("status", ["401", "403", "404", "500", "302"])
def test_whom_a_worker_refuses_learns_nothing_of_what_is_held(status: str) -> None:
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.ask(headers())
        call.ask(body())
        assert not call.ask(response(status=status)).response_headers.response.header_mutation.set_headers


@pytest.mark.parametrize("mode", [pb.ProcessingMode.BUFFERED, pb.ProcessingMode.FULL_DUPLEX_STREAMED])
def test_a_request_that_needs_no_key_is_not_placed_by_its_body(mode: int) -> None:
    asked = headers(mode)
    next(one for one in asked.request_headers.headers.headers if one.key == ":method").raw_value = b"OPTIONS"
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.say(asked, body())
        replies = [next(call._replies), next(call._replies)]
        shown = set_headers(call.ask(response()).response_headers.response.header_mutation)
        assert set(shown) == {"x-kvpool-worker", "x-kvpool-reason"}
        assert not [one for one in replies if b"matched-blocks" in one.SerializeToString()]


@pytest.mark.parametrize(
    ("held", "rank", "ports"),
    [
        ([("one", 0, 64)], None, [9001, 9002, 9003]),
        ([("two", 1, 64), ("too", 0, 48)], "1", [9002]),
        ([("too", 1, 64), ("two", 1, 48)], "1", [9003, 9002]),
    ],
)
def test_only_endpoints_of_the_rank_that_is_told_are_named(
    held: list[tuple[str, int, int]], rank: str | None, ports: list[int]
) -> None:
    fleet = Fleet()
    for place, (name, ranks) in enumerate((("one", 1), ("two", 2), ("too", 2))):
        address = f"http://127.0.0.1:{9001 + place}"
        fleet.add(a_worker(name, ranks=ranks, port=6000 + 10 * place, address=address), "flag")
        for dp_rank in range(ranks):
            fleet.rank(f"default/{name}", dp_rank).heard()
    for name, dp_rank, tokens in held:
        say(fleet, f"default/{name}", dp_rank, 0, batch(stored(BlockHasher(16).hashes(TOKENS[:tokens]))))
    with picking(fleet=fleet) as index, calling(index) as channel:
        call = Call(channel)
        call.ask(headers(sent=[("x-data-parallel-rank", "7")]))
        reply = call.ask(body())
        mutation = reply.request_body.response.header_mutation
        told = set_headers(mutation)
        assert told.get("x-data-parallel-rank") == rank
        assert list(mutation.remove_headers) == ([] if rank else ["x-data-parallel-rank"])
        named = [f"127.0.0.1:{port}" for port in ports]
        assert sorted(destinations(reply)) == sorted(named)
        assert destinations(reply)[0] == named[0]
        assert told["x-gateway-destination-endpoint"] == ",".join(destinations(reply))


def test_decision_headers_can_be_left_out() -> None:
    with picking("a", place={"shows": False}) as index, calling(index) as channel:
        call = Call(channel)
        call.say(headers(), body())
        _, reply = next(call._replies), next(call._replies)
        assert set_headers(reply.request_body.response.header_mutation) == {
            "x-gateway-destination-endpoint": "127.0.0.1:9001"
        }
        assert not call.ask(response()).response_headers.response.header_mutation.set_headers


@pytest.mark.parametrize("listed", [True, False])
def test_only_endpoints_of_a_subset_are_picked(listed: bool) -> None:
    with picking("a", "b", "c") as index, calling(index) as channel:

        def within(*endpoints: str) -> pb.ProcessingRequest:
            asked = headers()
            hint = asked.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({ext_proc.SUBSET: list(endpoints) if listed else ", ".join(endpoints)})
            return asked

        assert Call(channel).place(within("127.0.0.1:9002", "127.0.0.1:9003"), body())[0] in (
            "127.0.0.1:9002", "127.0.0.1:9003",
        )  # fmt: skip
        assert Call(channel).place(within("127.0.0.1:9003", "127.0.0.1:1"), body()) == ["127.0.0.1:9003"]
        for none in (("127.0.0.1:1",), ()):
            call = Call(channel)
            call.ask(within(*none))
            refused = call.ask(body()).immediate_response
            assert refused.status.code == 503
            assert "at any of the endpoints" in json.loads(refused.body)["error"]["message"]


def test_a_reservation_ends_with_the_response() -> None:
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.place()
        assert reserved(index) == 1
        call.ask(response())
        assert reserved(index) == 0


def test_a_reservation_of_a_stream_ends_when_the_metrics_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with picking("a", "b") as index, calling(index) as channel:
        for shown_s, left in ((600.0, 1), (0.0, 1)):
            monkeypatch.setattr("kvpool.index.front.placer.SHOWN_S", shown_s)
            call = Call(channel)
            call.place()
            before = reserved(index)
            call.ask(response("text/event-stream; charset=utf-8"))
            assert reserved(index) == before, "its prompt may not be computed yet"
            call.end()
            assert eventually(lambda left=left: reserved(index) == left)


def test_a_reservation_ends_where_another_endpoint_has_served() -> None:
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.place()
        call.ask(response("text/event-stream", served="127.0.0.1:9002"))
        assert reserved(index) == 0


def test_a_list_is_of_one_pool_so_an_endpoint_of_another_one_blames_no_worker() -> None:
    """A proxy that goes on to another InferencePool asks its picker; here a gateway tells the first one of it."""
    with picking("a", "b") as index, calling(index) as channel:
        for _ in range(4):
            call = Call(channel)
            assert call.place() == ["127.0.0.1:9001", "127.0.0.1:9002"]
            call.ask(response(served="10.0.0.7:8000", status="200"))
            assert reserved(index) == 0
            call.end()


def test_a_call_that_is_broken_off_leaves_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.index.front.placer.SHOWN_S", 0.5)
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.place()
        call._replies.cancel()
        assert eventually(lambda: reserved(index) == 0)
        call = Call(channel)
        call.ask(headers())
        call._replies.cancel()
        assert eventually(lambda: reserved(index) == 0)


def test_a_caller_that_asks_twice_in_one_call_has_one_reservation() -> None:
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.place()
        call.place()
        assert reserved(index) == 1
        assert call.ask(body()) == pb.ProcessingResponse(request_body=pb.BodyResponse())
        assert reserved(index) == 1
        call.ask(response())
        assert reserved(index) == 0


def test_streamed_bodies_are_handed_back_with_trailers() -> None:
    with picking("a", "b") as index, calling(index) as channel:
        call = Call(channel)
        call.say(
            headers(DUPLEX, back=DUPLEX), body(BODY[:10], end=False), body(BODY[10:], end=False),
            pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
        )  # fmt: skip
        replies = [next(call._replies) for _ in range(3)]
        assert [reply.WhichOneof("response") for reply in replies] == [
            "request_headers", "request_body", "request_trailers",
        ]  # fmt: skip
        assert destinations(replies[0])[0] == "127.0.0.1:9001"
        named = set_headers(replies[0].request_headers.response.header_mutation)
        assert named["x-gateway-destination-endpoint"] == ",".join(destinations(replies[0]))
        part = replies[1].request_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (BODY, False), "the trailers end it"
        call.ask(response())
        for data, end in ((b"one", False), (b"", True)):
            reply = call.ask(pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end)))
            part = reply.response_body.response.body_mutation.streamed_response
            assert (part.body, part.end_of_stream) == (data, end)
        reply = call.ask(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
        assert reply.WhichOneof("response") == "response_trailers"
        assert call.end() == []


@pytest.mark.parametrize("mode", [pb.ProcessingMode.NONE, pb.ProcessingMode.STREAMED])
def test_without_the_body_a_request_is_placed_by_load(mode: int) -> None:
    with picking("a", "b") as index, calling(index) as channel:
        reply = Call(channel).ask(headers(mode))
        assert set(destinations(reply)) == {"127.0.0.1:9001", "127.0.0.1:9002"}
        said = set_headers(reply.request_headers.response.header_mutation)
        assert said["x-kvpool-reason"] != "prefix"


def test_bodies_have_a_limit_each_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_BODY_NBYTES", 100_000)
    with picking("a") as index, calling(index) as channel:
        # Half for all bodies, and three quarters of that for those of one host.
        monkeypatch.setattr(index.fleet.limits, "limit_nbytes", 402_000)
        call = Call(channel)
        call.say(headers(DUPLEX), body(bytes(60_000), end=False), body(bytes(60_000), end=False))
        refused = next(call._replies).immediate_response
        assert refused.status.code == 413
        assert "retry-after" not in set_headers(refused.headers)
        call.end()
        holding = [Call(channel) for _ in range(3)]
        for one in holding:
            one.say(headers(DUPLEX), body(bytes(50_000), end=False))
        call = Call(channel)

        def full() -> bool:
            call = Call(channel)
            call.say(headers(DUPLEX), body(b"x" * 1000, end=True))
            return next(call._replies).immediate_response.status.code == 503

        assert eventually(full)
        for one in holding:
            one._replies.cancel()
        assert eventually(lambda: not full()), "what was held is let go"


def test_who_may_ask_and_about_whom(tmp_path: Any) -> None:
    tokens = write_tokens(
        tmp_path / "tokens.toml",
        proxy=(["read"], ["default"]), all=(["read"], ["*"]), worker=(["publish"], ["*"]),
    )  # fmt: skip
    fleet = Fleet()
    joined(fleet, a_worker("w", tenant="t", address="http://127.0.0.1:9100"))
    auth = TokenAuth(str(tmp_path / "tokens.toml"))
    with picking("a", fleet=fleet, auth=auth) as index, calling(index) as channel:

        def place(token: str, tenant: str = "") -> list[str]:
            metadata = [("authorization", f"Bearer {token}")] * bool(token)
            return Call(channel, metadata + [("x-kvpool-tenant", tenant)] * bool(tenant)).place()

        assert place(tokens["proxy"]) == ["127.0.0.1:9001"]
        assert place(tokens["all"], "t") == ["127.0.0.1:9100"]
        for token, tenant, code in (
            ("", "", grpc.StatusCode.UNAUTHENTICATED),
            ("wrong", "", grpc.StatusCode.UNAUTHENTICATED),
            (tokens["worker"], "", grpc.StatusCode.PERMISSION_DENIED),
            (tokens["proxy"], "t", grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                place(token, tenant)
            assert refused.value.code() == code


def test_health_by_the_names_that_probes_use() -> None:
    warm: list[bool] = []
    with picking("a", is_warm=lambda: bool(warm)) as index, calling(index) as channel:

        def says(name: str) -> int:
            asked = health_pb2.HealthCheckRequest(service=name)
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )
            return int(check(asked, timeout=60).status)

        serving_, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert says("liveness") == serving_
        assert {says("readiness"), says(ext_proc.SERVICE)} == {not_serving}
        warm.append(True)
        assert eventually(lambda: {says("readiness"), says(ext_proc.SERVICE)} == {serving_})
        index.drain()
        assert {says("readiness"), says(ext_proc.SERVICE)} == {not_serving}
        assert says("liveness") == serving_, "it still answers"


def test_an_index_that_knows_no_worker_yet_lets_the_proxy_choose() -> None:
    warm: list[bool] = []
    with picking(is_warm=lambda: bool(warm)) as index, calling(index) as channel:
        call = Call(channel)
        call.ask(headers(sent=[("x-gateway-destination-endpoint", "10.0.0.1:1")]))
        reply = call.ask(body())
        assert "envoy.lb" not in reply.dynamic_metadata
        removed = reply.request_body.response.header_mutation.remove_headers
        assert list(removed) == ["x-gateway-destination-endpoint"], "not where the client wants it"
        warm.append(True)

        def refused() -> bool:
            call = Call(channel)
            call.ask(headers())
            return call.ask(body()).immediate_response.status.code == 503

        assert eventually(refused)


def test_more_requests_than_may_be_under_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PLACEMENTS", limits.PLACEMENTS._replace(of_host=3))
    with picking("a") as index, calling(index) as channel:
        held = [Call(channel) for _ in range(3)]
        for one in held:
            one.ask(headers())
        with pytest.raises(grpc.RpcError) as refused:
            Call(channel).place()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        held[0].end()
        assert eventually(lambda: not raises(grpc.RpcError, lambda: Call(channel).place()))


def test_names_are_numbers_in_answers_and_one_that_fails_is_left_out() -> None:
    names = KnownNames(one="10.0.0.1", two="fd00::2")
    fleet = Fleet()
    for place, name in enumerate(("one", "two", "three")):
        joined(fleet, a_worker(name, port=6000 + 2 * place, address=f"http://{name}:8000"))
    with (
        picking(fleet=fleet, place={"resolver": names, "timeout_s": 0.3}) as index,
        calling(index) as channel,
    ):
        assert sorted(Call(channel).place()) == ["10.0.0.1:8000", "[fd00::2]:8000"]
        names.hanging = {name: Future() for name in ("one", "two", "three")}
        assert sorted(Call(channel).place()) == ["10.0.0.1:8000", "[fd00::2]:8000"], "what was known last"
        names.hanging, names.known = {}, {}
        assert sorted(Call(channel).place()) == ["10.0.0.1:8000", "[fd00::2]:8000"]


def test_where_no_name_resolves_the_reason_is_said() -> None:
    fleet = Fleet()
    fleet.add(a_worker("one", address="http://nowhere:8000"), "flag")
    with picking(fleet=fleet, place={"resolver": KnownNames()}) as index, calling(index) as channel:
        call = Call(channel)
        call.ask(headers())
        refused = call.ask(body()).immediate_response
        assert refused.status.code == 503
        assert json.loads(refused.body)["error"]["message"] == (
            "no worker can be addressed: the name nowhere does not resolve"
        )


def test_metrics_count_placements_by_outcome() -> None:
    from kvpool.index.request_stats import OUTCOMES, RequestStats

    stats = RequestStats()
    with picking("a", stats=stats) as index, calling(index) as channel:
        Call(channel).place()
        Call(channel).place(headers(), body(b"{"))
        told = stats.totals()
        assert set(told.placements) == set(OUTCOMES)
        assert {name: count for name, count in told.placements.items() if count} == {
            "prefix": 1,
            "unreadable": 1,
        }
        assert sum(told.placement_seconds.counts) == 2
