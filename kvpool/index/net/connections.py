"""``Connections``: how callers reach a port of an index. Immutable."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.index.net.tls import ServerTls


class Connections(NamedTuple):
    """``tls``: None: without. ``age_s``: after so long, a tenth more or less, a caller is asked to reconnect, so that
    a new replica gets its part; calls go on. ``grace_s``: its streams end so much later. 0, of either: never.
    """

    tls: ServerTls | None = None
    age_s: float = 0.0
    grace_s: float = 0.0


PLAIN = Connections()
