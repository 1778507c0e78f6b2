"""What the rules of ``kvpool doctor`` judge: a class for each table of ``rules.py``.

A text that says what is wrong is empty where nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvpool.discovery.quota import Standing
from kvpool.discovery.worker import Worker
from kvpool.key.key import Namespace


class Pool(NamedTuple):
    """``error``: why it does not open. ``unreadable``: why its announcements cannot be read."""

    tenant: str = ""
    error: str = ""
    unreadable: str = ""


class Trial(NamedTuple):
    """A block that was put and read back."""

    name: str
    tenant: str
    error: str = ""
    kept: bool = False
    found: bool = False
    took_ms: float = 0.0


class Disk(NamedTuple):
    """Below a directory. ``direct``: it reads past the page cache. ``read_gbs``: None: too little is there to tell.

    ``record``: the mean size of the records that were read.
    """

    place: str
    kind: str
    direct: bool
    read_gbs: float | None
    record: str = ""


class Directory(NamedTuple):
    """A file store. ``closed``: its folders that this user cannot use. ``of_url``: the URL's capacity.

    ``is_said``: the capacity stands in the pool. ``differs``: not the one that the URL names.
    """

    path: str
    closed: str
    stored_mib: float
    capacity: str
    of_url: str
    is_said: bool
    differs: bool
    place: str
    too_large: bool
    too_full: bool
    total_gib: float
    free_gib: float
    reserve_gib: float
    room_mib: float


class Sharing(NamedTuple):
    """Two namespaces of a model. ``other``: None: it has one only. ``is_left``: no announced worker is in it.

    ``here``, ``there``: behind a colon, some of the workers in each.
    """

    model: str
    first: Namespace
    other: Namespace | None
    differences: str
    is_left: bool = False
    here: str = ""
    there: str = ""


class Quota(NamedTuple):
    """``error``: why it cannot be read. ``quota``, ``held``: as sizes."""

    tenant: str
    error: str
    standing: Standing
    quota: str
    held: str


class Announcement(NamedTuple):
    """A worker's record. ``silent``: an endpoint of events that does not answer. ``events``: some of them."""

    worker: Worker
    has_events: bool
    silent: str
    has_replay: bool
    events: str


class Away(NamedTuple):
    """A worker that answers nowhere. ``follower``: an index that hears it."""

    name: str
    places: str
    follower: str


class Hashing(NamedTuple):
    """Two workers of a model. ``differing``: in what their hashes differ."""

    model: str
    one: Worker
    other: Worker
    differing: str


class Served(NamedTuple):
    """A worker's metrics. ``away``: why there are none. ``samples``: by name, summed over labels.

    ``labelled``: name, value of kvpool's own label, and value of each sample. ``off``: whether an engine of it is, now.
    ``faults``: counted since its start.
    """

    worker: Worker
    where: str = ""
    away: str = ""
    status: int = 0
    samples: Mapping[str, float] = {}
    labelled: Sequence[tuple[str, str, float]] = ()
    figures: str = ""
    off: bool = False
    faults: str = ""


class Audits(NamedTuple):
    """Of all engines that audit hits, since their starts. ``differing``: of ``judged``."""

    engines: str
    judged: int
    differing: int


class Auditor(NamedTuple):
    """One engine. ``purge``: a command. ``unjudged``: blocks that it compared and cannot judge, as it knows no floor.

    ``learns``: it has judged some.
    """

    name: str
    purge: str
    doubts: str
    unjudged: int
    learns: bool


class Suspect(NamedTuple):
    """Findings that have a writer in common. ``whose``: their blocks. ``findings``: how many, and of which engines.

    ``last``: where and how far, of the last one. ``what``: is wrong, and who puts it away. ``is_recent``: it was today.
    """

    whose: str
    findings: str
    ago: str
    last: str
    what: str
    remedy: str
    is_recent: bool


class Misses(NamedTuple):
    """Prompts that were computed. ``share``: of their tokens. ``skipped``: blocks that were not stored, by cause.

    ``apart``: a model whose workers are in several namespaces.
    """

    share: float
    requests: float
    figures: str
    skipped: str
    apart: str


class Front(NamedTuple):
    """``away``: why it does not answer. ``models``: None: its answer lists none. ``model``: one that it lacks."""

    url: str
    away: str
    status: int
    models: set[str] | None
    names: str
    excerpt: str
    model: str = ""


class Picker(NamedTuple):
    target: str
    away: str = ""
    serves: bool = False


class IndexAway(NamedTuple):
    """An index that says nothing of its workers, and what it says instead."""

    target: str
    denied: bool
    says: str
    nothing_listens: bool


class Index(NamedTuple):
    """``workers``, ``ranks``: counted in words. ``followed``: there are some."""

    target: str
    workers: str
    ranks: str
    followed: bool
    serves: bool


class Rank(NamedTuple):
    """``events``: its endpoint. ``resets``: how often all that was known of it was forgotten."""

    label: str
    dp_rank: int
    problem: str
    stale: bool
    resets: int
    events: str


class Difference(NamedTuple):
    """A worker that two indexes do not both follow, or a rank of which they know different ``blocks``."""

    here: str
    there: str
    worker: str
    dp_rank: int = 0
    blocks: tuple[int, int] = (0, 0)


class Replicas(NamedTuple):
    """Two indexes. ``full``: ranks that were not compared. ``compared``: those that were, in words."""

    here: str
    there: str
    full: str
    is_same: bool
    compared: str


class Server(NamedTuple):
    """``info``: its answer to INFO. ``unknown``: settings that cannot be judged, and what they should be."""

    name: str
    info: Mapping[str, Any]
    in_cluster: bool
    unknown: str


class Shards(NamedTuple):
    """Of a cluster; ``slots``: that they serve."""

    shards: int
    slots: int
    all_slots: int


class Setting(NamedTuple):
    """``value``: as in CONFIG GET: sizes in bytes, lists in one string. ``info``: as in INFO.

    ``cores``: of the server's host, where it is this one, else 0: no server tells them.
    """

    value: str
    info: Mapping[str, Any]
    cores: int
