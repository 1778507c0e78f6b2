"""The example in docs/how-to/run-an-index.md of an index inside a router, as it stands there, with a real publisher."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from kvpool import BlockHasher, Worker
from kvpool.index import Lookup, Ranking
from kvpool.key.hashing import seed_id
from tests.support.deadlines import eventually
from tests.support.feeds import misbehaving
from tests.support.wire import batch, stored

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "run-an-index.md"
TOKENS = list(range(64))


def test_the_example_of_an_index_inside_a_router() -> None:
    (example,) = re.findall(r"## Inside a router\n.*?```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    start, ask, end = re.split(r"(?m)^(?=rows = |fleet\.close)", example)
    with misbehaving() as publisher:
        publisher.publish(batch(stored(BlockHasher(16).hashes(TOKENS)[:3])))
        worker = Worker("w", "MODEL", 16, seed_id(None), (publisher.publisher,))
        names: dict[str, Any] = {"worker": worker, "token_ids": TOKENS}
        exec(start, names)

        def found() -> bool:
            exec(ask, names)
            rows = names["rows"]
            assert isinstance(rows, Lookup)
            return rows.device_blocks == (3,)

        try:
            assert eventually(found)
            assert isinstance(names["route"], Ranking)
            (pick,) = names["route"].picks
            assert (pick.worker, pick.prefill_cost, pick.trust) == ("w", 16, "exact")
        finally:
            exec(end, names)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpool-subscriber"]
