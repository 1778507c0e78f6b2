"""Requests of browsers' pages at ``kvpool router``: those of other sites may not change a worker's state."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.fronts import ProxyCluster, proxy_cluster
from tests.support.http_client import Reply, get
from tests.support.index_process import RouterProcess, running

pytestmark = pytest.mark.usefixtures("grpc_started")

BODY = json.dumps({"model": "m", "prompt": [1, 2, 3]}).encode()
TEXT, JSON = "text/plain", "application/json; charset=utf-8"


@pytest.fixture
def there(grpc_started: None) -> Iterator[ProxyCluster]:
    with proxy_cluster("a", proxy={"names": ["Router.example.com"]}) as cluster:
        yield cluster


def posted(url: str, path: str = "/sleep", **headers: str) -> Reply:
    sent = {"content-type": TEXT, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return get(url + path, BODY, sent)


HOSTS = [
    ("page.example:8080", 403),
    ("127.0.0.1.page.example", 403),
    ("router.example.com", 200),
    ("ROUTER.example.com.:8080", 200),
    ("127.0.0.1:1", 200),
    ("[::1]:1", 200),
    ("router", 200),
    ("router.kvpool.svc:8080", 200),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_a_page_whose_name_leads_to_a_router_changes_nothing(
    there: ProxyCluster, host: str, status: int
) -> None:
    """DNS rebinding: to its browser the page is of this site, and may send any body."""
    taken = len(there.workers["a"].bodies)
    for kind in (TEXT, JSON):
        for site in ({}, {"sec_fetch_site": "same-origin"}):
            reply = posted(there.url, host=host, origin=f"http://{host}", content_type=kind, **site)
            assert reply.status == status
    assert len(there.workers["a"].bodies) - taken == (4 if status == 200 else 0)
    assert posted(there.url, host=host).status == 200, "no browser"
    assert get(f"{there.url}/v1/models", headers={"host": host}).status == 200


def test_the_refusal_of_a_name_says_what_to_do(there: ProxyCluster) -> None:
    reply = posted(there.url, host="page.example", origin="http://page.example")
    assert json.loads(reply.body)["error"] == {
        "message": "this router is not called page.example by pages: start it with --http-name, or ask its address",
        "type": "PermissionDeniedError", "param": None, "code": 403,
    }  # fmt: skip


@pytest.mark.parametrize(
    "site",
    [{"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}, {}],
    ids=["cross-site", "same-site", "older browser"],
)
def test_a_simple_request_of_another_site_is_refused_and_one_with_a_preflight_is_the_worker_s(
    there: ProxyCluster, site: dict[str, str]
) -> None:
    """vLLM's calls for operators, such as /sleep, take any body and no key."""
    for origin in ("https://page.example", "null"):
        taken = len(there.workers["a"].bodies)
        page = {"origin": origin, **site}
        for kind in (TEXT, "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            assert posted(there.url, content_type=kind, **page).status == 403
        assert len(there.workers["a"].bodies) == taken
        assert posted(there.url, content_type=JSON, **page).status == 200
        assert posted(there.url, authorization="Bearer sk", **page).status == 200


def test_a_router_is_called_by_the_names_of_its_command() -> None:
    with running("--http-name", "Router.example.com", kind=RouterProcess) as router:
        url = f"http://{router.target}"
        for host, status in (("router.example.com", 503), ("page.example", 403)):  # there is no worker
            assert posted(url, host=host, origin=f"http://{host}").status == status


def test_paths_between_engines_are_not_for_callers_however_they_are_spelled(there: ProxyCluster) -> None:
    taken = len(there.workers["a"].bodies)
    for path in (
        "/inference/v1/abort_requests", "//inference/v1/x", "/v1/../inference/v1/x", "/%69nference/v1/x",
        "/inference%2Fv1", "/.//inference/x", "/v1/%2e%2e%2finference/x", "/inference%5Cv1",
    ):  # fmt: skip
        assert posted(there.url, path).status == 404, path
    assert len(there.workers["a"].bodies) == taken
    assert posted(there.url, "/v1/inference/x").status == 200
