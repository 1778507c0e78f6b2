"""``ListWorkers`` in pages: nobody is left out or listed twice, and every page is bounded."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool import IndexClient, IndexUnavailable
from kvpool.index.client import calls
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol.messages import SERVICE
from kvpool.index.serve import worker_pages
from kvpool.index.serve.auth import TokenAuth
from kvpool.v1 import index_pb2 as pb
from tests.support.calls import grpc_server
from tests.support.credentials import write_tokens
from tests.support.fleets import a_worker, serving

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
NAMES = [("a", "w-1"), ("a", "w/2"), ("a", "\u00e4"), ("b", "w-1"), ("b", "w-2"), ("b", "w-3"), ("c", "w")]


def a_fleet() -> Fleet:
    fleet = Fleet()
    for tenant, name in reversed(NAMES):
        fleet.add(a_worker(name, tenant=tenant, model=f"model-{tenant}", ranks=2), "flag")
    return fleet


def listed(target: str, token: str = "", **fields: Any) -> tuple[list[tuple[str, str]], str]:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ListWorkers")
        packed = pb.ListWorkersRequest(**fields).SerializeToString()
        reply = pb.ListWorkersResponse.FromString(call(packed, timeout=WAIT_S, metadata=metadata))
    assert reply.index.instance_id
    return [(one.worker.tenant, one.worker.name) for one in reply.workers], reply.next_page_token


def all_pages(target: str, **fields: Any) -> list[list[tuple[str, str]]]:
    pages, token = [], ""
    while not pages or token:
        page, token = listed(target, page_token=token, **fields)
        pages.append(page)
    return pages


def test_pages_hold_every_worker_once() -> None:
    with serving(a_fleet()) as served:
        assert listed(served.target) == (NAMES, ""), "an earlier client asks for no pages, and gets all"
        for size in range(1, 9):
            pages = all_pages(served.target, page_size=size)
            assert [len(page) for page in pages[:-1]] == [size] * (len(pages) - 1)
            assert list(chain(*pages)) == NAMES
        assert all_pages(served.target, page_size=2, tenant="b") == [NAMES[3:5], NAMES[5:6]]
        assert all_pages(served.target, page_size=2, model="model-a") == [NAMES[:2], NAMES[2:3]]
        assert all_pages(served.target, page_size=2, tenant="d") == [[]]


def test_workers_that_come_and_go_between_pages_move_no_other() -> None:
    with serving(a_fleet()) as served:
        first, token = listed(served.target, page_size=3)
        served.fleet.remove("a/\u00e4")  # where the next page begins
        served.fleet.remove("a/w-1")
        served.fleet.add(a_worker("0", tenant="a"), "flag")  # before it
        served.fleet.add(a_worker("z", tenant="c"), "flag")
        second, end = listed(served.target, page_size=100, page_token=token)
        assert (first + second, end) == ([*NAMES, ("c", "z")], "")


def test_a_page_is_bounded_in_bytes_and_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(a_fleet()) as served:
        monkeypatch.setattr(worker_pages, "MAX_PAGE_SIZE", 4)
        assert [len(page) for page in all_pages(served.target, page_size=1000)] == [4, 3]
        monkeypatch.setattr(worker_pages, "MAX_PAGE_NBYTES", 1)
        assert all_pages(served.target, page_size=1000) == [[name] for name in NAMES]


def test_a_page_token_that_was_made_up_is_refused() -> None:
    with serving(a_fleet()) as served, pytest.raises(grpc.RpcError) as caught:
        listed(served.target, page_size=1, page_token="x")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "next_page_token" in caught.value.details()


def test_a_page_token_shows_nothing_of_other_tenants(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = write_tokens(path, b=(["read"], ["b"]))
    with serving(a_fleet(), auth=TokenAuth(str(path))) as served:
        assert listed(served.target, tokens["b"], page_size=2) == (NAMES[3:5], "b/w-2")
        assert listed(served.target, tokens["b"], page_size=9, page_token="a/w-1") == (NAMES[3:6], "")


def test_clients_turn_pages_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PAGE_SIZE", 2)
    with serving(a_fleet()) as served, IndexClient(served.target, WAIT_S) as client:
        status = client.status(tenant="b")
        assert [(one.worker.tenant, one.worker.name) for one in client.workers()] == NAMES
        assert [one.worker.name for one in status.workers] == ["w-1", "w-2", "w-3"]
        assert status.index.instance_id == client.status().index.instance_id


def test_pages_that_never_end_end_with_the_deadline() -> None:
    page = pb.ListWorkersResponse(next_page_token="a/w").SerializeToString()
    with (
        grpc_server(lambda *_: page) as target,
        IndexClient(target, 0.3) as client,
        pytest.raises(IndexUnavailable, match="did not answer within"),
    ):
        client.workers()


def test_each_start_of_an_index_has_an_id_of_its_own() -> None:
    ids = set()
    for _ in range(2):
        with serving(a_fleet()) as served, IndexClient(served.target, WAIT_S) as client:
            ids |= {client.status().index.instance_id for _ in range(2)}
    assert len(ids) == 2
    assert all(ids)
