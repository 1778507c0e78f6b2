"""Tokens over the wire: whoever has none, a wrong one or one for something else gets one line and nothing more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvpool import AsyncIndexClient, ConfigError, IndexClient, UnknownModel
from kvpool.errors import AccessDenied
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import Snapshot, unpack
from kvpool.index.protocol.messages import SERVICE
from kvpool.index.serve.auth import TokenAuth
from kvpool.v1 import index_pb2 as pb
from tests.support.credentials import write_tokens
from tests.support.deadlines import eventually, raises
from tests.support.fleets import Served, a_worker, say, serving
from tests.support.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
METHODS = pb.DESCRIPTOR.services_by_name["IndexService"].methods


class Closed:
    """An index that asks for tokens; of tenants a and b."""

    def __init__(self, served: Served, path: Path, tokens: dict[str, str]) -> None:
        self.served, self.target, self.path, self.tokens = served, served.target, path, tokens

    def client(self, name: str) -> IndexClient:
        return IndexClient(self.target, WAIT_S, token=self.tokens[name])


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Closed]:
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(
        path,
        router=(["read"], ["a"]),
        worker=(["publish"], ["a"]),
        owner=(["read", "admin"], ["a"]),
        root=(["read", "publish", "admin"], ["*"]),
    )
    fleet = Fleet()
    for tenant in ("a", "b"):
        fleet.add(a_worker(f"w-{tenant}", tenant=tenant, model=f"model-{tenant}"), "flag")
        say(fleet, f"{tenant}/w-{tenant}", 0, 4, batch(stored([1, 2])))

    def take() -> Snapshot:
        return Snapshot(1.0, "", fleet.snapshot())

    with serving(fleet, take=take, auth=TokenAuth(str(path))) as served:
        yield Closed(served, path, tokens)


def refused(channel: grpc.Channel, method: str, request: bytes, token: str | None) -> tuple[str, str]:
    """Name of the status code, and its text."""
    metadata = [("authorization", f"Bearer {token}")] if token is not None else []
    streams = next(one for one in METHODS if one.name == method)
    path = f"/{SERVICE}/{method}"
    options: dict[str, Any] = {"timeout": WAIT_S, "metadata": metadata}
    call: Any
    if streams.client_streaming:
        call = partial(next, channel.stream_stream(path)(iter([request]), **options))
    elif streams.server_streaming:
        call = partial(next, channel.unary_stream(path)(request, **options))
    else:
        call = partial(channel.unary_unary(path), request, **options)
    with pytest.raises(grpc.RpcError) as caught:
        call()
    text = caught.value.details()
    assert "\n" not in text
    assert not token or token not in text
    return caught.value.code().name, text


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_every_call_asks_for_a_token(closed: Closed, method: str) -> None:
    with grpc.insecure_channel(closed.target) as channel:
        for request in (b"", b"\xff"):
            assert refused(channel, method, request, None) == (
                "UNAUTHENTICATED", "this index asks for a token: send authorization: Bearer TOKEN",
            )  # fmt: skip
            assert refused(channel, method, request, "x" * 43) == (
                "UNAUTHENTICATED", "this index does not know this token",
            )  # fmt: skip


def test_health_is_open_and_reflection_is_not_there(closed: Closed) -> None:
    with grpc.insecure_channel(closed.target) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            next(
                reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                    iter([ask]), timeout=WAIT_S
                )
            )
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_snapshot_is_for_who_administers_all(closed: Closed) -> None:
    with closed.client("root") as client:
        assert unpack(client.snapshot()).written_at_s == 1.0
    for name in HOLDERS:
        with closed.client(name) as client, pytest.raises(AccessDenied):
            client.snapshot()


def test_pushing_events_is_refused_with_what_to_do(closed: Closed) -> None:
    with grpc.insecure_channel(closed.target) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Publish")(iter([b"x"]), timeout=60)
        with pytest.raises(grpc.RpcError, match="let the worker announce itself") as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def publisher() -> None:
        async with AsyncIndexClient(closed.target) as client:
            client.publisher(None)

    with pytest.raises(ConfigError, match="let the worker announce itself"):
        asyncio.run(publisher())


def scope(tenant: str, model: str = "m") -> Any:
    return pb.Scope(model=model, tenant=tenant)


def requests(tenant: str) -> dict[str, Any]:
    return {
        "Lookup": pb.LookupRequest(scope=scope(tenant), block_hashes=bytes(8)),
        "LookupStream": pb.LookupRequest(scope=scope(tenant), block_hashes=bytes(8)),
        "RegisterWorker": pb.RegisterWorkerRequest(worker=pb.Worker(name="x", tenant=tenant)),
        "RemoveWorker": pb.RemoveWorkerRequest(name="x", tenant=tenant),
        "ListWorkers": pb.ListWorkersRequest(tenant=tenant),
        "HitCurve": pb.HitCurveRequest(tenant=tenant),
    }


RIGHT = {
    "Lookup": "read", "LookupStream": "read", "ListWorkers": "read", "HitCurve": "read",
    "RegisterWorker": "publish", "RemoveWorker": "admin",
}  # fmt: skip
HOLDERS = {"router": {"read"}, "worker": {"publish"}, "owner": {"read", "admin"}}


@pytest.mark.parametrize("method", RIGHT)
def test_each_call_takes_its_right(closed: Closed, method: str) -> None:
    with grpc.insecure_channel(closed.target) as channel:
        for name, rights in HOLDERS.items():
            if RIGHT[method] not in rights:
                found = refused(
                    channel, method, requests("a")[method].SerializeToString(), closed.tokens[name]
                )
                assert found == ("PERMISSION_DENIED", f'this token does not have the right "{RIGHT[method]}"')


@pytest.mark.parametrize("method", RIGHT)
def test_tenants_cannot_ask_about_each_other(closed: Closed, method: str) -> None:
    """In the same words whether the other one is there or not."""
    name = next(name for name, rights in HOLDERS.items() if RIGHT[method] in rights)
    with grpc.insecure_channel(closed.target) as channel:
        for tenant in ("b", "nobody", "default", "b/w-b", "*"):
            code, text = refused(
                channel, method, requests(tenant)[method].SerializeToString(), closed.tokens[name]
            )
            whom = "all tenants" if tenant == "*" else f"tenant '{tenant}'"
            assert (code, text) == ("PERMISSION_DENIED", f"this token is not for {whom}")


def test_the_curve_of_all_is_for_who_sees_all(closed: Closed) -> None:
    with closed.client("root") as client:
        assert client.hit_curve().sizes == ()
    with closed.client("router") as client:
        assert client.hit_curve("a").sizes == ()
        with pytest.raises(AccessDenied, match="not for all tenants"):
            client.hit_curve()


def test_what_a_tenant_is_told_names_no_other(closed: Closed) -> None:
    with closed.client("router") as client:
        assert client.lookup("model-a", hashes64=packed64([1, 2]), tenant="a").device_blocks == (2,)
        with pytest.raises(UnknownModel) as caught:
            client.lookup("model-b", hashes64=packed64([1]), tenant="a")
        assert str(caught.value) == 'unknown model "model-b"; did you mean "model-a"?'
        assert [status.worker.tenant for status in client.workers()] == ["a"]
        assert [status.worker.tenant for status in client.workers(tenant="a")] == ["a"]
        assert client.workers(model="model-b") == []
    with closed.client("root") as client:
        assert [status.worker.tenant for status in client.workers()] == ["a", "b"]
        assert client.remove("w-b", tenant="b") is True
        client.register(a_worker("w-c", tenant="c"), 60)
    with closed.client("worker") as client:
        client.register(a_worker("w-a2", tenant="a"), 60)
        with pytest.raises(
            AccessDenied, match="does not let this client in: this token is not for tenant 'b'"
        ):
            client.register(a_worker("x", tenant="b"))
    with closed.client("owner") as client:
        assert client.remove("w-a2", tenant="a") is True


@pytest.mark.anyio
async def test_a_token_that_is_taken_away_ends_streams_as_well(closed: Closed) -> None:
    token = closed.tokens["router"]
    async with AsyncIndexClient(closed.target, WAIT_S, token=token) as client, client.stream() as stream:
        asked: dict[str, Any] = {"hashes64": packed64([1, 2]), "tenant": "a"}
        assert (await stream.lookup("model-a", **asked)).device_blocks == (2,)
        write_tokens(closed.path, other=(["read"], ["*"]))
        with IndexClient(closed.target, WAIT_S, token=token) as blocking:
            assert await asyncio.to_thread(eventually, lambda: raises(AccessDenied, blocking.workers))
        with pytest.raises(AccessDenied, match="does not know this token"):
            await stream.lookup("model-a", **asked)


def test_a_client_shows_its_token_to_its_index_only(closed: Closed) -> None:
    with IndexClient(closed.target, WAIT_S, token=closed.tokens["root"]) as client:
        assert len(client.workers()) == 2
        assert closed.tokens["root"] not in repr(client)
    with IndexClient(closed.target, WAIT_S) as client, pytest.raises(AccessDenied, match="asks for a token"):
        client.workers()
    with pytest.raises(ConfigError, match="printable ASCII characters without spaces"):
        IndexClient(closed.target, token="not a token")


@pytest.mark.parametrize(
    ("listen", "tokens", "says"),
    [
        ("127.0.0.1:0", False, ""),
        ("localhost:0", False, ""),
        ("[::1]:0", False, ""),
        ("0.0.0.0:0", False, "may ask about every tenant, and register and remove workers: give it --tokens"),
        ("0.0.0.0:0", True, "tokens cross the network in the clear to 0.0.0.0:0: give it --tls-cert"),
    ],
)
def test_what_others_could_do_is_said_at_the_start(
    listen: str, tokens: bool, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvpool.index")
    write_tokens(tmp_path / "tokens", a=(["read"], ["*"]))
    with serving(target=listen, auth=TokenAuth(str(tmp_path / "tokens") if tokens else None)):
        pass
    assert len(caplog.messages) == bool(says)
    assert says in caplog.text
