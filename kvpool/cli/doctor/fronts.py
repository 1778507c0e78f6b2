"""What ``kvpool doctor`` sees in front of the workers: where requests are sent, and who picks a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvpool.cli.doctor.finding import Finding, fail, ok, warn
from kvpool.cli.doctor.http_page import get
from kvpool.cli.exits import in_options
from kvpool.cli.index_connection import IndexConnection
from kvpool.discovery.worker import Worker
from kvpool.errors import KVPoolError
from kvpool.index.client.channel import without_advice

TIMEOUT_S = 3.0


def front_findings(url: str, workers: Sequence[Worker], tls_ca: str | None) -> Iterator[Finding]:
    """Ask a front for its models. No request is sent through it, so it is not known which worker would be chosen."""
    page = get(f"{url}/v1/models", tls_ca)
    if isinstance(page, str):
        yield fail("front", f"{url} does not answer: {page}", "start it, or correct the URL")
        return
    if page.status in (401, 403):
        yield warn(
            "front", f"{url} answers, and wants a key ({page.status})", "ask it for /v1/models with the key"
        )
        return
    if page.status != 200:
        yield fail(
            "front",
            f"{url}/v1/models is answered with {page.status}: {_excerpt(page.body)}",
            "see that it reaches a worker, and its log",
        )
        return
    try:
        models = {str(one["id"]) for one in json.loads(page.body)["data"]}
    except (ValueError, KeyError, TypeError):
        yield fail("front", f"{url} is no front of vLLM workers: {_excerpt(page.body)}", "correct the URL")
        return
    yield ok("front", f"{url} answers; models: {', '.join(sorted(models)) or 'none'}")
    for model in sorted({worker.model for worker in workers if worker.address} - models):
        yield warn(
            "front",
            f'{url} does not list "{model}", which workers announce',
            "send the requests of this model to a front that has it, or add its workers to this one",
        )


def picker_findings(picker: IndexConnection) -> Iterator[Finding]:
    """Ask an endpoint picker for its health, as a gateway does."""
    try:
        serves = picker.is_serving(picker=True, timeout_s=TIMEOUT_S)
    except KVPoolError as error:
        yield fail(
            "picker",
            in_options(without_advice(error)).replace("no index answers", "no picker answers"),
            "start kvpool index with --ext-proc, or correct the address; until then requests are placed without "
            "prefixes",
        )
        return
    if serves:
        yield ok("picker", f"{picker.target} picks endpoints")
    else:
        yield fail(
            "picker",
            f"{picker.target} says that it does not serve: it warms up, or is ending",
            "ask again in some seconds; its log says for whom it waits",
        )


def _excerpt(body: bytes) -> str:
    return " ".join(body[:200].decode("utf-8", "replace").split()) or "nothing"
