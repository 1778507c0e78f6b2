"""Calls of Envoy's ``ext_proc``, as a proxy makes them, and an index that answers these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from kvpool import BlockHasher
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front import ext_proc
from kvpool.v1 import ext_proc_pb2 as pb
from tests.support.fleets import Served, a_worker, say, serving
from tests.support.wire import batch, stored

TOKENS = list(range(1, 65))
BODY = json.dumps({"model": "m", "prompt": TOKENS}).encode()
PROCESS = f"/{ext_proc.SERVICE}/Process"


def headers(
    mode: int = pb.ProcessingMode.BUFFERED, *, end: bool = False, **more: Any
) -> pb.ProcessingRequest:
    listed = [(":path", "/v1/completions"), (":method", "POST"), *more.pop("sent", ())]
    return pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(
            headers=pb.HeaderMap(
                headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in listed]
            ),
            end_of_stream=end,
        ),
        protocol_config=pb.ProtocolConfiguration(
            request_body_mode=mode, response_body_mode=more.pop("back", 0)
        ),
        **more,
    )


def body(data: bytes = BODY, *, end: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end))


def response(kind: str = "application/json", served: str = "", status: str = "200") -> pb.ProcessingRequest:
    sent = {":status": status, "content-type": kind}
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in sent.items()]
    told = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values)))
    if served:
        told.metadata_context.filter_metadata["envoy.lb"].update({ext_proc.SERVED: served})
    return told


class Call:
    """One request of a proxy."""

    def __init__(self, channel: grpc.Channel, metadata: Any = ()) -> None:
        self._said: SimpleQueue[pb.ProcessingRequest | None] = SimpleQueue()
        self._replies = channel.stream_stream(
            PROCESS, pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )(self._requests(), timeout=60, metadata=metadata)

    def _requests(self) -> Iterator[pb.ProcessingRequest]:
        while True:
            try:
                said = self._said.get(timeout=0.02)
            except Empty:
                if not self._replies.is_active():
                    return
                continue
            if said is None:
                return
            yield said

    def say(self, *requests: pb.ProcessingRequest) -> None:
        for request in requests:
            self._said.put(request)

    def ask(self, *requests: pb.ProcessingRequest) -> pb.ProcessingResponse:
        self.say(*requests)
        return next(self._replies)

    def end(self) -> list[pb.ProcessingResponse]:
        self._said.put(None)
        return list(self._replies)

    def place(self, *requests: pb.ProcessingRequest) -> list[str]:
        """Where a buffered request goes."""
        assert self.ask(*(requests[:1] or [headers()])).WhichOneof("response") == "request_headers"
        return destinations(self.ask(*(requests[1:] or [body()])))


def destinations(reply: pb.ProcessingResponse) -> list[str]:
    told: str = reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    return told.split(",")


def set_headers(mutation: pb.HeaderMutation) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


@contextmanager
def picking(
    *names: str, fleet: Fleet | None = None, place: dict[str, Any] | None = None, **more: Any
) -> Iterator[Served]:
    """Workers at 127.0.0.1, from port 9001 on; the first one holds TOKENS."""
    fleet = fleet or Fleet()
    for place_, name in enumerate(names):
        fleet.add(a_worker(name, port=5557 + 2 * place_, address=f"http://127.0.0.1:{9001 + place_}"), "flag")
        fleet.rank(f"default/{name}", 0).heard()
    if names:
        say(fleet, f"default/{names[0]}", 0, 0, batch(stored(BlockHasher(16).hashes(TOKENS))))
    more.setdefault("router", Router(fleet))
    with serving(fleet, place={"timeout_s": 60, **(place or {})}, **more) as running:
        yield running


@contextmanager
def calling(index: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(index.ext_proc) as channel:
        yield channel


def reserved(index: Served) -> int:
    return len(index._options["router"]._reservations)
