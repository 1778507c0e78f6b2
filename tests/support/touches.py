"""What a server was asked to count as used."""

from __future__ import annotations

from collections.abc import Callable

import redis

from tests.support.servers import Server


def touched_by(server: Server, act: Callable[[], object]) -> int:
    """How many keys TOUCH names while ``act`` runs: one command may have many."""
    with redis.Redis(port=server.port, protocol=2, socket_timeout=60) as own, own.monitor() as heard:
        act()
        server.client.echo("over")
        touched = 0
        for one in heard.listen():
            name, *words = one["command"].split()
            if name == "ECHO":
                return touched
            touched += len(words) if name == "TOUCH" else 0
    raise AssertionError("the server went away")
