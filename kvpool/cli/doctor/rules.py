"""Each finding of ``kvpool doctor``: its level, condition, sentence and remedy.

``fail``: absent or broken. ``warn``: costs speed, memory or knowledge. ``subjects.py`` has what they
judge; other modules gather it. Rules of a server's settings agree with ``deploy/valkey.conf``, as a test of real
servers proves. Over 400 lines because it is one list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from kvpool.cli.doctor import subjects
from kvpool.discovery.worker import Worker
from kvpool.index.fleet.rank import ASLEEP, LOOKAHEAD, LOOKAHEAD_OFF, ONE_SEED, UNHASHED
from kvpool.store.file_system import FileSystem
from kvpool.store.server.notices import ADVICE
from kvpool.store.server.server import COSTS, MissingRight

Level = Literal["ok", "warn", "fail"]  # as in --json; a table has OK, WARN and FAIL
MIB = 1 << 20
Subject = TypeVar("Subject")


class Finding(NamedTuple):
    """``about``: the part of the deployment. ``change``: the remedy; empty: none needed."""

    level: Level
    about: str
    says: str
    change: str = ""


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """``when``: applies to a subject. In the sentences ``of`` is the subject, ``it`` the value of ``when``."""

    level: Level
    when: Callable[[Subject], object]
    says: str
    change: str = ""


Rules = Sequence[Rule[Subject]]


def judge(about: str, rules: Rules[Subject], subject: Subject, *, first: bool = False) -> Iterator[Finding]:
    """The findings of all rules that apply, or of the first."""
    for rule in rules:
        if it := rule.when(subject):
            says, change = (text.format(of=subject, it=it) for text in (rule.says, rule.change))
            yield Finding(rule.level, about, says, change)
            if first:
                return


def always(subject: object) -> bool:
    """The condition of a last rule under ``first``."""
    return True


_ACL = "allow this user all commands on kvpool:{of.tenant}:* (docs/how-to/valkey.md has the rule)"
EVENTS_ON = (
    "start it with --kv-events-config "
    '\'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}}\', with ports of its own for each engine of a host'
)

POOL: Rules[subjects.Pool] = (
    Rule("fail", lambda of: of.error, "{it}", "run the doctor again then: nothing else of the pool was examined"),
    Rule("fail", lambda of: of.unreadable, "announcements cannot be read: {it}", _ACL),
)  # fmt: skip
TRIAL: Rules[subjects.Trial] = (
    Rule("fail", lambda of: of.error, "a block cannot be put and read back: {it}", _ACL),
    Rule("fail", lambda of: not of.kept, "it is full and keeps nothing new", "raise its capacity, or let it evict"),
    Rule("fail", lambda of: not of.found, "a block that was just put is not there", "see whether it has any memory "
         "left"),
    Rule("ok", always, "{of.name:.200} keeps blocks: 64 KiB written and read back in {of.took_ms:.1f} ms"),
)  # fmt: skip
DIRECTORY: Rules[subjects.Directory] = (
    Rule("fail", lambda of: of.closed, "this user cannot write in {it}", "run as the user of the workers, or give "
         "this one the right; mount it writable"),
    Rule("ok", lambda of: not of.closed, "{of.path} is a pool, with {of.stored_mib:,.1f} MiB in it"),
    Rule("warn", lambda of: of.differs, "its capacity is {of.capacity} for all its processes, and not the {of.of_url} "
         "of this URL", "write ?capacity={of.capacity} in this URL, or kvpool capacity --pool file://{of.path} "
         "{of.of_url} for all"),
    Rule("warn", lambda of: not of.is_said, "no capacity stands in it: each process has its URL's", "start a worker of "
         "this kvpool, which writes its own"),
    Rule("fail", lambda of: of.too_large, "its capacity is {of.capacity}, and the file system {of.place} holds "
         "{of.total_gib:,.2f} GiB in all, of which a pool leaves {of.reserve_gib:,.2f} GiB free for others",
         "kvpool capacity --pool file://{of.path} SIZE makes it smaller; write that in the URLs of all its processes"),
    Rule("fail", lambda of: of.room_mib < 1, "others fill {of.place}: it has no room there, and keeps nothing new",
         "make room on {of.place}, or move the pool"),
    Rule("warn", lambda of: of.too_full and not of.too_large and of.room_mib >= 1, "its capacity is {of.capacity}, and "
         "others leave it room for {of.room_mib:,.0f} MiB on {of.place}: beyond that it evicts", "kvpool capacity "
         "--pool file://{of.path} SIZE makes it smaller; or make room on {of.place}"),
    Rule("ok", lambda of: not of.too_full, "capacity {of.capacity}; {of.free_gib:,.1f} GiB are free on {of.place}, of "
         "which a pool leaves {of.reserve_gib:,.2f} GiB to others"),
)  # fmt: skip
NETWORK_KINDS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "glusterfs", "fuse.sshfs", "fuse.s3fs")
)  # fmt: skip
_REMOUNT = "mount -o remount,huge=within_size {of.place} (and the same option where it is mounted at boot)"
# Below it, a prefill of 10,000 tokens a second of 40 KiB each waits for its loads.
SLOW_DISK_GBS = 0.4
DISK: Rules[subjects.Disk] = (
    Rule("warn", lambda of: of.kind in NETWORK_KINDS, "{of.place} is {of.kind}, which comes over a network: its locks "
         "may not hold, and it may hang", "a directory on a disk of this host; for several hosts a Valkey server"),
    Rule("warn", lambda of: not of.direct, "{of.place} ({of.kind}) reads nothing past the page cache: each record "
         "takes twice the CPU, and memory of others", "ext4 or xfs on a local NVMe disk"),
    Rule("warn", lambda of: of.read_gbs is not None and of.read_gbs < SLOW_DISK_GBS, "{of.place} ({of.kind}) reads "
         "records of {of.record} at {of.read_gbs:.2f} GB/s, one after the other: computing may be faster", "kvpool "
         "size --model MODEL --prefill TOKENS says what yours needs, kvpool bench store --pool URL what several at a "
         "time bring; larger records (blocks_per_record), a faster disk, or a smaller pool on tmpfs"),
    Rule("ok", lambda of: of.read_gbs is not None, "{of.place} ({of.kind}) reads records of {of.record} at "
         "{of.read_gbs:.2f} GB/s, one after the other, past the page cache"),
    Rule("ok", always, "{of.place} ({of.kind}) is a disk; how fast it reads is told when records are there, "
         "or by kvpool bench store --pool URL"),
)  # fmt: skip
TMPFS: Rules[FileSystem] = (
    Rule("warn", lambda of: of.huge == "always", "{of.place} is mounted with huge=always: a block smaller than 2 MiB "
         "takes 2 MiB of memory", _REMOUNT),
    # Measured on Linux 6.18: benchmarks/journal.md.
    Rule("warn", lambda of: of.huge != "within_size", "{of.place} is mounted with huge={of.huge}: with larger pages "
         "than 4 KiB, puts of 512 KiB or more were 2.5 times as fast, and gets twice", _REMOUNT),
)  # fmt: skip
SHARING: Rules[subjects.Sharing] = (
    Rule("ok", lambda of: of.other is None, 'workers of model {of.model} have one namespace, {of.first.hex:.8}: '
         "they share"),
    Rule("ok", lambda of: of.is_left, 'workers of model {of.model} in namespace {of.first.hex:.8} (here) do not share '
         "{of.other.hex:.8} (there), which has no announced worker: {of.differences}", "none, if it is of a past "
         "set-up; its record goes after 30 days"),
    Rule("warn", always, 'model {of.model} has workers that do not share, in namespaces {of.first.hex:.8} '
         "(here{of.here}) and {of.other.hex:.8} (there{of.there}): {of.differences}", "make these "
         "the same where they should share; records of past set-ups go after 30 days"),
)  # fmt: skip
QUOTA: Rules[subjects.Quota] = (
    Rule("warn", lambda of: of.error, "it cannot be read whether tenant {of.tenant} has a quota, so there is no limit: "
         "{it}", "allow this user to read kvpool-quota:{of.tenant}:* (docs/how-to/valkey.md has the rule)"),
    Rule("warn", lambda of: of.standing.is_unreadable and not of.standing.is_said, "the quota of tenant {of.tenant} "
         "makes no sense, so there is no limit", "kvpool quota {of.tenant} SIZE, or --remove"),
    Rule("warn", lambda of: of.standing.quota_nbytes is not None and of.standing.held_nbytes is None, "tenant "
         "{of.tenant} has a quota of {of.quota}, and no index counts what it holds, so there is no limit",
         "start kvpool index or kvpool router with this pool, or wait until it has counted"),
    Rule("warn", lambda of: of.standing.is_over, "tenant {of.tenant} holds {of.held} of a quota of {of.quota}: its "
         "workers store nothing new", "kvpool quota {of.tenant} SIZE raises it; kvpool purge --tenant {of.tenant} "
         "makes room; a shorter ttl= in its workers' URL lets unused records go sooner"),
    Rule("ok", lambda of: of.standing.quota_nbytes is not None, "tenant {of.tenant} holds {of.held} of a quota of "
         "{of.quota}"),
)  # fmt: skip
HOST: Rules[str] = (
    # Measured on one host: 2 MiB puts 2.2 GB/s against 2.5 with cubic, gets 2.9 against 3.4; 512 KiB gets 2.1
    # against 3.1.
    Rule("warn", lambda of: of.startswith("bbr") and of, "TCP on this host uses {it}, which paces what is sent: in a "
         "data centre blocks move 15 to 35 % slower. It slows what workers of this host put; what they get, the "
         "server's host sends", "sysctl -w net.ipv4.tcp_congestion_control=cubic, on the workers' hosts and on the "
         "server's"),
)  # fmt: skip

WORKER: Rules[subjects.Announcement] = (
    Rule("warn", lambda of: not of.has_events, "worker {of.worker.label} publishes no KV events, so no index knows "
         "what it holds", EVENTS_ON),
    Rule("fail", lambda of: of.silent, "worker {of.worker.label} announces its events at {it}, where nothing answers",
         'see that it runs; if so, set its "advertise_host" to a name that other hosts can reach, and open the port'),
    Rule("warn", lambda of: not of.has_replay, "worker {of.worker.label} has no replay endpoint: what an index misses "
         "once stays unknown", 'add "replay_endpoint": "tcp://*:5657" to its --kv-events-config, with a port of its '
         "own for each engine of a host"),
    Rule("ok", always, 'worker {of.worker.label} of model "{of.worker.model}": blocks of {of.worker.block_tokens} '
         "tokens, {of.worker.hash_algorithm}, events at {of.events}"),
)  # fmt: skip
AWAY: Rules[subjects.Away] = (
    Rule("warn", lambda of: of.follower, "worker {of.name} answers nowhere from this host: {of.places}. The index {it} "
         "hears it", "run the doctor on a host that reaches the workers, or open their ports to this one"),
    Rule("fail", always, "worker {of.name} answers nowhere: {of.places}", 'start it again. If it runs: its '
         '"advertise_host" is a name that other hosts reach, its "http_port", if set, the number of its --port; open '
         "both ports. If it is to stay away: it is forgotten when its lease ends, one of --worker with the flag"),
)  # fmt: skip
WORKERS: Rules[str] = (
    Rule("fail", always, "no worker of tenant {of} has announced itself in the pool",
         "start vLLM with KVPoolConnector and this pool (docs/how-to/vllm.md), or name the --tenant of those that "
         "run; a record lasts for its lease only"),
)  # fmt: skip
RECORD: Rules[str] = (
    Rule("fail", lambda of: of, "{it}", "see docs/explanation/prefix-index.md#how-it-finds-workers"),
)
HASHING: Rules[subjects.Hashing] = (
    Rule("fail", lambda of: of.differing, 'workers {of.one.label} and {of.other.label} of model "{of.model}" hash '
         "in different ways, so they never share", "give them the same {it}"),
)  # fmt: skip
OFF = (
    'look for "goes without the pool until" or "kvpool is off for this engine" in its log, and do as it says'
)
SERVING: Rules[subjects.Served] = (
    Rule("warn", lambda of: not of.worker.address, "worker {of.worker.name} does not say where it serves requests: "
         "no router can send it any", "address=http://HOST:PORT in its --worker"),
    Rule("warn", lambda of: of.away, "{of.where} does not answer: {it}; no router can send it requests",
         'see that its server runs there; its "http_port", if set, is the number of its --port, its "advertise_host" '
         "a name that others reach"),
    Rule("warn", lambda of: of.status != 200, "{of.where} answers with {of.status} to /metrics", "see what listens "
         "there, and its log"),
    Rule("warn", lambda of: not of.samples, "{of.where} answers, and its metrics have nothing of kvpool",
         "start it with KVPoolConnector and without --disable-log-stats"),
    Rule("fail", lambda of: of.off, "{of.where} goes without the pool: {of.figures}", OFF),
    Rule("warn", lambda of: of.faults, "{of.where}: {of.figures}; with faults since its start: {it}", "its log says "
         "which; the lines about the pool and the server above may say why"),
    Rule("ok", always, "{of.where}: {of.figures}; no fault"),
)  # fmt: skip
FRONT: Rules[subjects.Front] = (
    Rule("fail", lambda of: of.away, "{of.url} does not answer: {it}", "start it, or correct the URL"),
    Rule("warn", lambda of: of.status in (401, 403), "{of.url} answers, and wants a key ({of.status})",
         "ask it for /v1/models with the key"),
    Rule("fail", lambda of: of.status != 200, "{of.url}/v1/models is answered with {of.status}: {of.excerpt}",
         "see that it reaches a worker, and its log"),
    Rule("fail", lambda of: of.models is None, "{of.url} is no front of vLLM workers: {of.excerpt}", "correct the URL"),
    Rule("ok", always, "{of.url} answers; models: {of.names}"),
)  # fmt: skip
FRONT_UNASKED: Rules[subjects.Front] = (
    Rule("warn", always, "{of.url} answers, and no picker placed its request, so prompts go to any worker", "name the "
         "index as its picker: an InferencePool without endpointPickerRef asks none. Under --no-place-headers this "
         "cannot be told"),
)  # fmt: skip
FRONT_MODEL: Rules[subjects.Front] = (
    Rule("warn", always, '{of.url} does not list "{of.model}", which workers announce', "send the requests of this "
         "model to a front that has it, or add its workers to this one"),
)  # fmt: skip
_WARMS_UP = "ask again in some seconds; its log says for whom it waits"
PICKER: Rules[subjects.Picker] = (
    Rule("fail", lambda of: of.away, "{it}", "start kvpool index with --ext-proc, or correct the address; until then "
         "requests are placed without prefixes"),
    Rule("fail", lambda of: not of.serves, "{of.target} says that it does not serve: it warms up, or is ending",
         _WARMS_UP),
    Rule("ok", always, "{of.target} picks endpoints"),
)  # fmt: skip

INDEX_AWAY: Rules[subjects.IndexAway] = (
    Rule("fail", lambda of: of.denied, "{of.says}", "give a token with the right to read: --token-file"),
    Rule("fail", lambda of: of.nothing_listens, "{of.says}", "start it: kvpool index --listen {of.target} --pool "
         "URL; or correct --index"),
    Rule("fail", lambda of: of.says.startswith("no index answers"), "{of.says}", "correct --index"),
    Rule("fail", always, "{of.says}", "see what runs there and its log; or correct --index and the options of TLS"),
)  # fmt: skip
INDEX: Rules[subjects.Index] = (
    Rule("ok", always, "{of.target} answers: it follows {of.workers} with {of.ranks}"),
    Rule("fail", lambda of: not of.followed, "it follows no worker, so it cannot place prompts", "name the pool of "
         "the workers with its --pool, or each stock vLLM with --worker"),
    Rule("warn", lambda of: of.followed and not of.serves, "{of.target} says that it does not serve yet: it warms "
         "up, or is ending", _WARMS_UP),
)  # fmt: skip
INDEX_MUTE: Rules[Worker] = (
    Rule("warn", always, "worker {of.label} publishes no KV events: it is known and not followed", EVENTS_ON),
)
INDEX_HASHING: Rules[str] = (Rule("fail", lambda of: of, "{it}", "or ask it by block hashes"),)
INDEX_LACKS: Rules[Worker] = (
    Rule("fail", always, "worker {of.label} of tenant {of.tenant} is in the pool and not in the index",
         "start the index with the same --pool; it looks every second. If it has, its log says why it does not "
         "follow this worker (docs/explanation/prefix-index.md)"),
)  # fmt: skip
_RANK = "rank {of.dp_rank} of worker {of.label}"
RANK: Rules[subjects.Rank] = (
    Rule("fail", lambda of: of.problem == LOOKAHEAD and LOOKAHEAD_OFF, _RANK + ": {of.problem}", "{it}"),
    Rule("warn", lambda of: of.stale and of.problem == ASLEEP, _RANK + " is {of.problem}: what it holds is not counted",
         "none, if it is to sleep; awake, it is heard from with its first batch"),
    Rule("fail", lambda of: of.stale and of.events and (of.problem or "it was not heard from"),
         _RANK + " is stale: {it}", "see whether its events are on and {of.events} can be reached from the index; "
         "without a replay endpoint it is heard from with its first batch"),
    Rule("fail", lambda of: of.stale and (of.problem or "it was not heard from"), _RANK + " is stale: {it}",
         EVENTS_ON),
    Rule("fail", lambda of: of.problem.startswith(UNHASHED) and ONE_SEED, _RANK + ": {of.problem}", "{it}"),
    Rule("warn", lambda of: of.resets and (of.problem or "it was started anew"),
         "what " + _RANK + " holds was forgotten {of.resets} times: {it}", "give it a replay endpoint, if it has none"),
    Rule("warn", lambda of: of.problem, _RANK + ": {it}", "it tells all it holds in its next step where it is asked; "
         "stock vLLM cannot be asked"),
)  # fmt: skip
REPLICA_RANK: Rules[subjects.Difference] = (
    Rule("fail", always, "after the same batch of rank {of.dp_rank} of worker {of.worker}, {of.here} knows of "
         "{of.blocks[0]} blocks and {of.there} of {of.blocks[1]}, and not of the same", "the one that has missed "
         "batches (resets in ListWorkers) knows less: start it anew with --bootstrap of the other"),
)  # fmt: skip
REPLICA_WORKER: Rules[subjects.Difference] = (
    Rule("warn", always, "worker {of.worker} is not followed well, or as the same start, by both {of.here} and "
         "{of.there}", "give both the same --pool and --worker"),
)  # fmt: skip
REPLICAS: Rules[subjects.Replicas] = (
    Rule("warn", lambda of: of.full, "not compared are {it}: an index that is full has forgotten blocks of theirs",
         "raise its --max-blocks or --max-memory"),
    Rule("ok", lambda of: of.is_same, "{of.here} and {of.there} know the same of {of.compared}"),
)  # fmt: skip

SERVER: Rules[subjects.Server] = (
    Rule("ok", always, "{of.name}"),
    Rule("fail", lambda of: of.info.get("role") == "slave", "it is a replica, which takes no writes",
         "name its primary in the pool's URL"),
    Rule("fail", lambda of: of.info.get("cluster_enabled") == 1 and not of.in_cluster, "it is a node of a cluster: "
         "keys of other nodes cannot be reached", "write valkey+cluster:// in the pool's URL"),
    Rule("warn", lambda of: int(of.info.get("evicted_clients", 0)), "it ended {it:,} connections because all clients "
         "together held more than maxmemory-clients; their batches failed", "raise it: each connection that puts "
         "needs twice the size of a block (CONFIG RESETSTAT starts the count anew)"),
    Rule("warn", lambda of: of.unknown, "CONFIG is not allowed, as on managed servers: most settings cannot be judged",
         "check in its console, under the names that it has for them: {it}; or allow +config|get"),
)  # fmt: skip
NO_INFO = Finding(
    "warn", "", "INFO is not allowed to this user, so nothing is known of its memory", "allow +info"
)
SHARDS: Rules[subjects.Shards] = (
    Rule("ok", lambda of: of.slots == of.all_slots, "{of.shards} shards serve all {of.slots:,} slots of the cluster"),
    Rule("fail", always, "{of.shards} shards serve {of.slots:,} of {of.all_slots:,} slots: keys of the others are "
         "misses", "start the nodes that are missing, or assign their slots (CLUSTER NODES shows who has which)"),
)  # fmt: skip
RIGHT: Rules[MissingRight] = (
    Rule("fail", lambda of: COSTS[of.command].startswith("nothing") and of.command.lower(), "{of.says}",
         "allow +{it} to this user"),
    Rule("warn", lambda of: of.command.lower(), "{of.says}", "allow +{it} to this user"),
)  # fmt: skip
NOTICES: Rules[str] = (
    Rule("warn", lambda of: of, "it does not tell this user which keys change ({it}): an index with this user sees "
         "evictions later, when it looks through the pool", f"for the user of an index, {ADVICE}"),
)  # fmt: skip

# The values of deploy/valkey.conf.
WANTED = {
    "maxmemory": "1gb", "maxmemory-policy": "allkeys-lru", "save": '""', "appendonly": "no",
    "client-output-buffer-limit": "normal 256mb 64mb 10", "maxmemory-clients": "20%", "lazyfree-lazy-user-flush": "yes",
    "proto-max-bulk-len": "512mb", "client-query-buffer-limit": "1gb",
    "hash-max-listpack-value": "64", "timeout": "0", "tcp-keepalive": "60",
}  # fmt: skip
# A connection that puts a value holds up to twice its size on the server while the value arrives: 8 MiB for 4 MiB.
_LEAST_CLIENTS_NBYTES = 32 * MIB
# A reply above the hard limit ends its connection, however fast the reader is.
_LEAST_REPLY_NBYTES = 16 * MIB
# A block is one value of a put; below it a server ends the connection.
_LEAST_VALUE_NBYTES = 16 * MIB
_MOST_LISTPACK_NBYTES = 4096


def _reply_limits(of: subjects.Setting) -> tuple[int, int] | None:
    words = of.value.split()
    if "normal" not in words:
        return None
    hard, soft = map(int, words[words.index("normal") + 1 :][:2])
    return hard, soft


def _short_mib(of: subjects.Setting) -> str:
    """A limit of values below a block's size; else empty."""
    return f"{int(of.value) / MIB:.3g}" if int(of.value) < _LEAST_VALUE_NBYTES else ""


def _clients_mib(of: subjects.Setting) -> float:
    """Memory for all clients; where a share of no maxmemory is no limit, as much as is needed."""
    if not of.value.endswith("%"):
        return int(of.value) / MIB
    most_nbytes = int(of.info["maxmemory"])
    return int(of.value[:-1]) * most_nbytes // 100 / MIB if most_nbytes else _LEAST_CLIENTS_NBYTES / MIB


def advised_io_threads(cores: int) -> int:
    """For a server that has so many cores to itself, the first thread included (docs/how-to/valkey.md says why)."""
    return max(1, min(8, cores * 3 // 4))


# By setting.
SETTINGS: dict[str, Rules[subjects.Setting]] = {
    "maxmemory": (
        Rule("fail", lambda of: of.value == "0", "maxmemory is 0: it grows until the host runs out of memory"),
        Rule("fail", lambda of: 0 < int(of.info.get("total_system_memory", 0)) < int(of.value), "maxmemory is more "
             "than the memory of its host: it is killed before it is full"),
    ),
    "maxmemory-policy": (
        Rule("fail", lambda of: of.value == "noeviction", "maxmemory-policy is noeviction: once it is full, nothing "
             "new can be kept"),
        Rule("fail", lambda of: of.value in ("allkeys-random", "volatile-random", "volatile-ttl"), "maxmemory-policy "
             "is {of.value}: once it is full, it evicts announcements of live workers, and blocks in use as soon as "
             "others"),
    ),
    "save": (
        Rule("warn", lambda of: of.value, "save is on: a cache is written to disk for nothing, the fork for it takes "
             "memory, and when the disk is full the server refuses to keep anything"),
    ),
    "appendonly": (
        Rule("warn", lambda of: of.value != "no", "appendonly is on: every block is written to disk as well, for "
             "nothing"),
    ),
    "client-output-buffer-limit": (
        Rule("warn", lambda of: _reply_limits(of) == (0, 0), "client-output-buffer-limit has none for normal "
             "clients: readers that stall fill its memory with replies, and blocks are evicted for them"),
        Rule("fail",
             lambda of: (limits := _reply_limits(of)) and 0 < limits[0] < _LEAST_REPLY_NBYTES and limits[0] / MIB,
             "client-output-buffer-limit ends connections at {it:.3g} MiB of replies: larger blocks can never be read"),
    ),
    "maxmemory-clients": (
        Rule("warn", lambda of: of.value == "0", "maxmemory-clients is 0: what clients have in flight can push out "
             "the data"),
        Rule("fail", lambda of: _clients_mib(of) < _LEAST_CLIENTS_NBYTES / MIB and f"{_clients_mib(of):.3g}",
             "maxmemory-clients allows {it} MiB for all clients together: it ends connections on which large blocks "
             "arrive, each of which takes twice its size"),
    ),
    "proto-max-bulk-len": (
        Rule("fail", _short_mib,
             "proto-max-bulk-len is {it} MiB: it ends connections on which larger blocks arrive, and never keeps one"),
    ),
    "client-query-buffer-limit": (
        Rule("fail", _short_mib,
             "client-query-buffer-limit is {it} MiB: it ends connections of larger blocks without a word"),
    ),
    "lazyfree-lazy-user-flush": (
        Rule("warn", lambda of: of.value != "yes", "lazyfree-lazy-user-flush is no: a FLUSHALL blocks all clients "
             "for a tenth of a second for each GiB"),
    ),
    "hash-max-listpack-value": (
        Rule("warn", lambda of: int(of.value) > _MOST_LISTPACK_NBYTES, "hash-max-listpack-value is {of.value}: "
             "blocks up to this size take 1.25 times their memory"),
    ),
    "io-threads": (  # which few servers take by CONFIG SET
        Rule("warn", lambda of: 0 < of.cores < int(of.value) and advised_io_threads(of.cores), "io-threads is "
             "{of.value}, and this host has {of.cores} cores: threads without a core of their own slow everything down",
             "write io-threads {it}, or fewer beside other programs, into its configuration, and start it anew"),
    ),
    "timeout": (
        Rule("warn", lambda of: of.value != "0", "timeout is {of.value}: connections that are idle so many seconds "
             "are ended, and the next batch of their worker begins with dialling, or fails when it is sent in that "
             "moment"),
    ),
    "tcp-keepalive": (
        Rule("warn", lambda of: of.value == "0", "tcp-keepalive is 0: connections of hosts that vanished stay, with "
             "what they hold, for ever"),
    ),
}  # fmt: skip
