"""What a user of a server may not do of all that a store asks, found out without leaving anything behind.

The commands are queued in a transaction that is never carried out: the server judges each when it is queued, by the
user's rights and by its own list of commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from kvpool.key.key import KEY_PREFIX
from kvpool.store.server.connection import connect
from kvpool.store.url import StoreURL

TIMEOUT_S = 2.0

_KEY = f"{KEY_PREFIX}:rights"  # only its name matters; it belongs to no tenant
_BEGIN = (("MULTI",), ("EXEC",))
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("HMGET", _KEY, "h", "b"),
    ("EXISTS", _KEY),
    ("TOUCH", _KEY),
    ("PTTL", _KEY),
    ("HSET", _KEY, "b", ""),
    ("PEXPIRE", _KEY, "1"),
    ("UNLINK", _KEY),
)
# command -> what it costs not to have it
COSTS = {
    "MULTI": "nothing can be put",
    "EXEC": "nothing can be put",
    "HMGET": "nothing can be loaded",
    "EXISTS": "nothing can be looked up",
    "TOUCH": "a lookup does not keep a block from being evicted",
    "PTTL": "a block expires while it is in use",
    "HSET": "nothing can be put",
    "PEXPIRE": "nothing can be put",
    "UNLINK": "damaged blocks stay",
}


class Refused(NamedTuple):
    """A command that this user may not use, or that the server does not have; in its words."""

    command: str
    words: str

    @property
    def says(self) -> str:
        return f"{COSTS[self.command]}: the server refuses {self.command} to this user ({self.words})"


def refused_commands(url: StoreURL) -> list[Refused]:
    """The commands among those of ``COSTS`` that the server of ``url`` refuses to its user.

    Blocking, for two round trips on a connection of its own. Errors: redis-py's, and ``ValueError`` for nonsense.
    """
    with connect(url, timeout_s=TIMEOUT_S, role="rights") as server:
        connection: Any = server.connection_pool.make_connection()
        try:
            connection.connect()
            refused = _asked(connection, _BEGIN)
            if not refused:  # else what follows would be carried out
                refused = _asked(connection, (("MULTI",), *_COMMANDS))
            return refused
        finally:
            connection.disconnect()  # and so the transaction is over


def _asked(connection: Any, commands: Sequence[tuple[str, ...]]) -> list[Refused]:
    connection.send_packed_command(connection.pack_commands(commands), False)
    refused = []
    for command in commands:
        try:
            connection.read_response()
        except redis.ResponseError as error:
            # Rights about keys do not matter: this key belongs to no tenant.
            if "command" in str(error):
                refused.append(Refused(command[0], str(error)))
    return refused
