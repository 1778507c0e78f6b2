"""Ask every service of the cluster once; ends with 0 when each has answered, with 1 and one line when one has not.

python ready.py POOL_URL WORKER_URL...
"""

from __future__ import annotations

import json
import sys
import urllib.request

import kvpool

TIMEOUT_S = 10.0


def main() -> None:
    pool, *workers = sys.argv[1:]
    try:
        _ask_pool(pool)
        for worker in workers:
            _ask_worker(worker)
    except (kvpool.KVPoolError, OSError, ValueError) as failure:
        sys.exit(f"not ready: {failure}")
    print("ready", flush=True)


def _ask_pool(url: str) -> None:
    # Asked for a block that nobody has: the answer is no, but it is one.
    keys = kvpool.Namespace("default", {"model": "ready"}).keys([bytes(32)], group=0, rank=0)
    with kvpool.open_store(url) as store:
        store.contains_many(keys, timeout_s=TIMEOUT_S)
    print("the pool answers", flush=True)


def _ask_worker(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S) as reply:  # noqa: S310
        models = [model["id"] for model in json.load(reply)["data"]]
    print(f"{url} serves {', '.join(models)}", flush=True)


if __name__ == "__main__":
    main()
