"""Ask every service of the cluster once; ends with 0 when each has answered, with 1 and one line when one has not.

python ready.py POOL_URL INDEX WORKER_URL...
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

import kvpool

TIMEOUT_S = 10.0
FOLLOWED_S = 30.0


def main() -> None:
    pool, index, *workers = sys.argv[1:]
    try:
        _ask_pool(pool)
        for worker in workers:
            _ask_worker(worker)
        _ask_index(index, workers)
    except (kvpool.KVPoolError, OSError, ValueError) as failure:
        sys.exit(f"not ready: {failure}")
    print("ready", flush=True)


def _ask_pool(url: str) -> None:
    # Asked for a block that no worker has: the answer is no, but it is an answer.
    keys = kvpool.Namespace("default", {"model": "ready"}).keys([bytes(32)], group=0, rank=0)
    with kvpool.open_store(url) as store:
        store.contains_many(keys, timeout_s=TIMEOUT_S)
    print("the pool answers", flush=True)


def _ask_worker(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S) as reply:  # noqa: S310
        models = [model["id"] for model in json.load(reply)["data"]]
    print(f"{url} serves {', '.join(models)}", flush=True)


def _ask_index(target: str, workers: list[str]) -> None:
    """Wait until the index follows every worker: it reads their announcements about once a second."""
    deadline_s = time.monotonic() + FOLLOWED_S
    with kvpool.IndexClient(target, timeout_s=TIMEOUT_S) as index:
        while True:
            followed = {
                status.worker.address
                for status in index.workers()
                if status.publishers and not any(publisher.stale for publisher in status.publishers)
            }
            missing = [worker for worker in workers if worker not in followed]
            if not missing:
                break
            if time.monotonic() > deadline_s:
                raise ValueError(f"the index at {target} does not follow {', '.join(missing)}")
            time.sleep(0.5)
    print(f"the index follows {', '.join(workers)}", flush=True)


if __name__ == "__main__":
    main()
