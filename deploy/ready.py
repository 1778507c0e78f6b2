"""Ask every service of the cluster once; ends with 0 when each has answered, with 1 and one line when one has not.

python ready.py --index HOST:PORT... --front URL WORKER_URL...     KVPOOL_POOL: the pool's URL
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import kvpool
from kvpool.files import read_file

TIMEOUT_S = 10.0
FOLLOWED_S = 30.0


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--index", action="append", required=True)
    asked.add_argument("--front", required=True)
    asked.add_argument("--tls-ca", help="of the indexes and the front; without: no TLS")
    asked.add_argument("--token-file", help="for the indexes")
    asked.add_argument("workers", nargs="+")
    given = asked.parse_args()
    try:
        token = read_file(given.token_file, 4096).decode().strip() if given.token_file else None
        _ask_pool(os.environ["KVPOOL_POOL"])
        models = [_ask_worker(worker) for worker in given.workers]
        for index in given.index:
            _ask_index(index, given.workers, token, given.tls_ca)
        _ask_front(given.front, models[0], given.tls_ca)
    except (kvpool.KVPoolError, OSError, ValueError) as failure:
        sys.exit(f"not ready: {failure}")
    print("ready", flush=True)


def _ask_pool(url: str) -> None:
    # Asked for blocks that no worker has: the answer is no, but it is an answer. So many that each shard has some.
    keys = kvpool.Namespace("default", {"model": "ready"}).keys(
        [bytes(31) + bytes([number]) for number in range(64)], group=0, rank=0
    )
    with kvpool.open_store(url) as store:
        store.contains_many(keys, timeout_s=TIMEOUT_S)
    print("the pool answers", flush=True)


def _ask_worker(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S) as reply:  # noqa: S310
        models: list[str] = [model["id"] for model in json.load(reply)["data"]]
    print(f"{url} serves {', '.join(models)}", flush=True)
    return models[0]


def _ask_index(target: str, workers: list[str], token: str | None, tls_ca: str | None) -> None:
    """Wait until the index follows every worker: it reads their announcements about once a second."""
    with kvpool.IndexClient(target, timeout_s=TIMEOUT_S, token=token, tls_ca=tls_ca) as index:

        def missing() -> str:
            followed = {
                status.worker.address
                for status in index.workers()
                if status.publishers and not any(publisher.stale for publisher in status.publishers)
            }
            names = [worker for worker in workers if worker not in followed]
            return f"the index at {target} does not follow {', '.join(names)}" if names else ""

        _wait_until_none(missing)
    print(f"the index at {target} follows {', '.join(workers)}", flush=True)


def _ask_front(url: str, model: str, tls_ca: str | None) -> None:
    """Wait until a request is served and was placed: Envoy sees by its health checks who can be asked."""
    tls = None if tls_ca is None else ssl.create_default_context(cafile=tls_ca)
    body = json.dumps({"model": model, "prompt": "ready", "max_tokens": 1}).encode()

    def missing() -> str:
        request = urllib.request.Request(  # noqa: S310
            f"{url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls) as reply:  # noqa: S310
                placed = reply.headers.get("x-kvpool-worker")
        except urllib.error.HTTPError as failure:
            with failure:
                return f"{url} answers with {failure.code}: {failure.read(500)!r}"
        return "" if placed else f"no index has placed a request to {url}"

    _wait_until_none(missing)
    print(f"{url} places requests", flush=True)


def _wait_until_none(missing: Callable[[], str]) -> None:
    ends_s = time.monotonic() + FOLLOWED_S
    while what := missing():
        if time.monotonic() > ends_s:
            raise ValueError(what)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
