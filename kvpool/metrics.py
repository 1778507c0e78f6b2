"""Every metric of kvpool with its help text; no other module spells a metric's name.

``ALL`` are the connector's, ``ENCODER`` those of the one for encoders' outputs. Processes exchange their samples as
``{key: sample}``; the key is the metric's name, or ``name/value`` with a label (named by ``Metric.label``). A
counter's sample is a number, summed over ranks and time; a gauge's a number, of which the lowest counts; a
histogram's a list of observations.
``INDEX`` and the following belong to the index service, which reads them per scrape.

Over 400 lines because every metric stands here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Seconds of a wait for the pool: from a lookup in the same rack to a slow load of a long prompt.
WAIT_SECONDS = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MAX_OBSERVATIONS = 1024  # per histogram and label between two collections; a step has one per request
REPEAT_S = 30.0  # an unchanged gauge is sent again after this

Samples = dict[str, "float | list[float]"]


class Metric(NamedTuple):
    """``name`` as exported, its help text, and its only label's name or "".

    ``buckets``: of a histogram. ``values``: of the label, exported as 0 at start: ``rate()`` misses first
    values.
    """

    name: str
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    @property
    def is_gauge(self) -> bool:
        return not self.is_counter and not self.buckets


LOOKUP_REQUESTS = Metric("kvpool_lookup_requests_total", "Requests whose prefix was looked up in the pool.")
LOOKUP_FAILURES = Metric(
    "kvpool_lookup_failures_total",
    "Existence checks that ended without an answer, by cause.",
    "cause",
    values=("store_unavailable", "timeout"),
)
LOOKUP_BLOCKS = Metric("kvpool_lookup_blocks_total", "Keys that lookups were about.")
REQUEST_FAULTS = Metric(
    "kvpool_request_faults_total",
    "Requests that went on without the pool after a fault of kvpool, by what it did, such as lookup or load.",
    "where",
    values=("lookup", "offer", "load", "store", "hint", "audit"),
)
OFFERED_TOKENS = Metric("kvpool_offered_tokens_total", "Prompt tokens offered to the engine from the pool.")
OFFER_MISMATCHES = Metric(
    "kvpool_offer_mismatches_total", "Times that the engine took another number of tokens than was offered."
)
LOADED_BLOCKS = Metric(
    "kvpool_loaded_blocks_total", "Blocks loaded from the pool into the engine's KV cache."
)
LOADED_BYTES = Metric("kvpool_loaded_bytes_total", "Bytes loaded from the pool into the engine's KV cache.")
LOAD_REQUESTS = Metric(
    "kvpool_load_requests_total",
    "Loads of one request that ended, by result.",
    "result",
    values=("ok", "missing", "store_unavailable", "too_slow", "cancelled"),
)
STORED_BLOCKS = Metric("kvpool_stored_blocks_total", "Blocks written to the pool.")
STORED_BYTES = Metric("kvpool_stored_bytes_total", "Bytes written to the pool.")
STORE_SKIPPED_BLOCKS = Metric(
    "kvpool_store_skipped_blocks_total",
    "Blocks that were not written to the pool, by cause.",
    "cause",
    values=(
        "already_there",
        "staging_full",
        "pool_full",
        "store_unavailable",
        "refused",
        "queue_full",
        "evicted",
        "quota",
        "wrong_hash",
        "adapter",
    ),
)
QUOTA_FAILURES = Metric(
    "kvpool_quota_failures_total",
    "Times that the tenant's quota, or what it holds, could not be read, by cause; the last one holds for 10 minutes.",
    "cause",
    values=("store_unavailable", "unreadable"),
)
ADAPTER_REQUESTS = Metric(
    "kvpool_adapter_requests_without_pool_total",
    "Requests that went without the pool, for it is not known of which adapter they are, by cause.",
    "cause",
)
WEIGHTS = Metric(
    "kvpool_weights_measured_total",
    "Measures of the weights in memory after a reset or a call that may write, by what they found; off: NaN, or others "
    "than the engine's cache has blocks of, so it goes without the pool; silent: the watch found others, no call "
    "had said so.",
    "result",
    values=("same", "other", "off", "silent"),
)
AUDITS = Metric(
    "kvpool_audits_total",
    "Audited hits, by what they found. no_floor: it is not known yet how far honest blocks are from each other.",
    "verdict",
    values=(
        "same", "differs", "no_floor", "gone", "missing", "no_numbers", "no_room", "store_unavailable",
    ),
)  # fmt: skip
AUDIT_DISTANCE = Metric(
    "kvpool_audit_distance",
    "How far audited blocks are from what the engine computes: relative L2 distance over all layers.",
    buckets=(1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0),
)
REFUSED_KEYS = Metric(
    "kvpool_refused_keys_total",
    "Keys that were faults at once: the pool's server is known to be away, or to end connections for such blocks.",
)
GATE_DECISIONS = Metric(
    "kvpool_gate_decisions_total",
    "Times the cost gate was asked whether to offer a load, by result.",
    "result",
)
GATE_PREFILL_TOKENS = Metric(
    "kvpool_gate_prefill_tokens_total", "Tokens of the engine's large steps, which the cost gate has timed."
)
GATE_PREFILL_SECONDS = Metric("kvpool_gate_prefill_seconds_total", "Seconds that those steps took.")
GATE_LOAD_TOKENS = Metric(
    "kvpool_gate_load_tokens_total", "Tokens of the loads from the pool that the cost gate has timed."
)
GATE_LOAD_SECONDS = Metric(
    "kvpool_gate_load_seconds_total", "Seconds that those loads took, failed ones included."
)
GATE_NEAR_TOKENS = Metric(
    "kvpool_gate_near_tokens_total", "Tokens of the loads from the near pool that the cost gate has timed."
)
GATE_NEAR_SECONDS = Metric(
    "kvpool_gate_near_seconds_total", "Seconds that those loads took, failed ones included."
)
# Outcome of a request, and the source of its prompt's tokens.
REQUEST_RESULTS = (
    "hit", "miss", "engine_cache", "load_failed", "no_answer", "no_room", "too_slow", "too_short", "without",
    "switched_off",
)  # fmt: skip
TOKEN_SOURCES = ("pool", "engine_cache", "computed")
REQUESTS = Metric(
    "kvpool_requests_total",
    "Requests by what the pool was to them: hit is counted when the load has succeeded.",
    "result",
    values=REQUEST_RESULTS,
)
PROMPT_TOKENS = Metric(
    "kvpool_prompt_tokens_total",
    "Prompt tokens of these requests, by where the engine had them from; pool: once they are loaded.",
    "source",
    values=TOKEN_SOURCES,
)
# Why a prompt's full blocks were computed; the first five: the lookup found less.
MISS_REASONS = (
    "new", "not_stored", "evicted", "expired", "other_namespace", "opted_out", "role", "adapter", "audited", "gate",
    "too_slow", "unavailable", "no_room", "switched_off", "fault",
)  # fmt: skip
MISSED_TOKENS = Metric(
    "kvpool_missed_tokens_total",
    "Prompt tokens in full blocks that came neither from the engine's cache nor from the pool, by why.",
    "reason",
    values=MISS_REASONS,
)
HINT_ACTIONS = ("keep", "done", "priority", "prefetch", "unknown", "invalid")
HINTS = Metric(
    "kvpool_hints_total",
    "Hints of requests, by what they ask for. Unknown and invalid ones are ignored.",
    "action",
    values=HINT_ACTIONS,
)
KEPT_NBYTES = Metric(
    "kvpool_kept_bytes", "Records in the pool that this engine keeps because requests asked for it."
)
KEEPS_REFUSED = Metric(
    "kvpool_keeps_refused_total",
    "Prefixes that were not kept, or no longer, because keep_share, of the pool or the quota, has no room for them.",
)
DONE_KEYS = Metric(
    "kvpool_done_keys_total", "Keys whose time to live got short because a request was done with them."
)
LOADED_TOKENS = Metric("kvpool_loaded_tokens_total", "Prompt tokens whose load has succeeded.")
LOOKUP_WAIT_SECONDS = Metric(
    "kvpool_lookup_wait_seconds",
    "Seconds that a request was held back for the answer to its lookup, by result: answered or failed.",
    "result",
    buckets=(0.0, *WAIT_SECONDS),
    values=("answered", "failed"),
)
LOAD_DURATION_SECONDS = Metric(
    "kvpool_load_duration_seconds",
    "Seconds between the start and the end of the load of one request on one rank, by result.",
    "result",
    buckets=WAIT_SECONDS,
    values=("ok", "missing", "store_unavailable", "too_slow"),
)
HIT_RATIO = Metric(
    "kvpool_hit_ratio",
    "Share of the prompt tokens of a window that this engine did not compute: from its own cache or the pool.",
    "window",
)
ENABLED = Metric(
    "kvpool_enabled",
    "0: the engine goes without the pool until it is restarted or its caches are reset; its log says why.",
)
UP = Metric("kvpool_up", "0: some rank of the engine has no connection to any server of the pool.")
DAMAGES = (
    "truncated", "magic", "version", "flags", "length", "fingerprint", "hash", "group", "rank", "checksum",
)  # fmt: skip
DAMAGED_BLOCKS = Metric(
    "kvpool_damaged_blocks_total",
    "Blocks that were read and failed verification, which are misses, by what was wrong with them.",
    "cause",
    values=DAMAGES,
)
CONNECTIONS = Metric("kvpool_connections_total", "Connections to servers of the pool that were made.")
DISCONNECTIONS = Metric("kvpool_disconnections_total", "Connections to servers of the pool that were lost.")
FAILED_CONNECTIONS = Metric(
    "kvpool_failed_connections_total", "Tries to connect to a server of the pool that failed."
)
EVICTED_BLOCKS = Metric(
    "kvpool_evicted_blocks_total",
    "Blocks that this process removed from a pool in a directory to make room; a server does that by itself.",
)
NEAR_FAR_HITS = Metric(
    "kvpool_near_far_hits_total",
    "Records that loads found in the near pool, or in the far one behind it.",
    "pool",
    values=("near", "far"),
)
NEAR_FAR_FAULTS = Metric(
    "kvpool_near_far_faults_total",
    "Records that one of the two pools failed to read, write or find.",
    "pool",
    values=("near", "far"),
)
FILLED_RECORDS = Metric(
    "kvpool_filled_records_total",
    "Records that were found in the far pool, by whether they were copied into the near one.",
    "result",
    values=("filled", "prefetched", "no_room"),
)
PREFETCHED_NBYTES = Metric(
    "kvpool_prefetched_bytes_total",
    "What was copied near for waiting requests, by whether their loads used it.",
    "result",
    values=("used", "unused"),
)
BEHIND_RECORDS = Metric(
    "kvpool_behind_records_total",
    "Records of the near pool by what became of their copy to the far one; lost: evicted near before it was made.",
    "result",
    values=("stored", "present", "lost", "no_room", "refused"),
)
FAR_USES = Metric(
    "kvpool_far_uses_total",
    "Records that were used near, by what the far pool said when it was told; missing: they are copied there again.",
    "result",
    values=("told", "missing", "lost"),
)
BEHIND_WAITING = Metric(
    "kvpool_behind_waiting", "Records of the near pool that are on their way to the far one."
)

# Of images, clips and other items that an encoder turns into embeddings.
ENCODER_MISS_REASONS = (
    "absent", "too_slow", "unavailable", "no_room", "audited", "opted_out", "adapter", "put_away",
    "switched_off", "fault",
)  # fmt: skip
ENCODER_OUTPUTS = Metric(
    "kvpool_encoder_outputs_total",
    "Images, clips and other items that the engine had to have encoded, by where their outputs came from.",
    "source",
    values=("pool", "computed"),
)
ENCODER_MISSES = Metric(
    "kvpool_encoder_misses_total",
    "Items that the encoder ran for, by why their outputs did not come from the pool.",
    "reason",
    values=ENCODER_MISS_REASONS,
)
ENCODER_LOADED_BYTES = Metric(
    "kvpool_encoder_loaded_bytes_total", "Bytes of encoders' outputs that came from the pool."
)
ENCODER_STORED = Metric(
    "kvpool_encoder_stored_outputs_total", "Outputs of encoders that were written to the pool."
)
ENCODER_STORED_BYTES = Metric(
    "kvpool_encoder_stored_bytes_total", "Bytes of encoders' outputs that were written to the pool."
)
ENCODER_STORE_SKIPPED = Metric(
    "kvpool_encoder_store_skipped_outputs_total",
    "Outputs of encoders that were not written to the pool, by cause; unusable: of another shape than the item's.",
    "cause",
    values=("already_there", "staging_full", "pool_full", "store_unavailable", "quota", "unusable"),
)
ENCODER_WAIT_SECONDS = Metric(
    "kvpool_encoder_wait_seconds",
    "Seconds that a request was held back for outputs of encoders from the pool.",
    buckets=(0.0, *WAIT_SECONDS),
)
ENCODER_AUDITS = Metric(
    "kvpool_encoder_audits_total",
    "Outputs of encoders that were computed although the pool had them, by what the comparison found.",
    "verdict",
    values=("same", "differs", "no_floor", "gone"),
)
ENCODER_ENABLED = Metric(
    "kvpool_encoder_enabled",
    "0: outputs of encoders go without the pool; the engine's log says why.",
)
ENCODER: tuple[Metric, ...] = tuple(
    one for name, one in tuple(globals().items()) if isinstance(one, Metric) and name.startswith("ENCODER_")
)

# Every metric above of the other connectors.
ALL: tuple[Metric, ...] = tuple(
    one for one in tuple(globals().values()) if isinstance(one, Metric) and one not in ENCODER
)

# What every use of a pool tells of its store (``Store.count_health``), and of a tenant's quota.
OF_STORES = (
    UP, CONNECTIONS, DISCONNECTIONS, FAILED_CONNECTIONS, REFUSED_KEYS, DAMAGED_BLOCKS, EVICTED_BLOCKS, NEAR_FAR_HITS,
    NEAR_FAR_FAULTS, FILLED_RECORDS, BEHIND_RECORDS, BEHIND_WAITING, FAR_USES, QUOTA_FAILURES, REQUEST_FAULTS,
)  # fmt: skip

# What the connector of blocks tells of hints, and that of encoders where it is alone.
OF_HINTS = (HINTS, KEPT_NBYTES, KEEPS_REFUSED, DONE_KEYS, PREFETCHED_NBYTES)

# By the field of ``kvpool.index.answer.Totals`` shown.
INDEX: Mapping[str, Metric] = {
    "workers": Metric("kvpool_index_workers", "Workers that the index follows."),
    "ranks": Metric("kvpool_index_ranks", "Their data-parallel ranks."),
    "stale_ranks": Metric(
        "kvpool_index_stale_ranks", "Ranks that publish events, are awake, and not trusted now."
    ),
    "incomplete_ranks": Metric(
        "kvpool_index_incomplete_ranks", "Ranks that hold more than the index knows, for batches were lost."
    ),
    "blocks": Metric("kvpool_index_blocks", "Distinct blocks with a holder, summed over partitions."),
    "pool_media": Metric(
        "kvpool_index_pool_media", "Outputs of encoders that the pool has, summed over partitions."
    ),
    "memory_nbytes": Metric("kvpool_index_memory_bytes", "Memory of the prefix tables."),
    "batches": Metric("kvpool_index_batches_total", "Batches of events that were applied."),
    "gaps": Metric("kvpool_index_gaps_total", "Times that batches of a rank were missing."),
    "replays": Metric("kvpool_index_replays_total", "Gaps that a replay closed."),
    "resets": Metric("kvpool_index_resets_total", "Times that all a rank held was forgotten."),
    "malformed_batches": Metric("kvpool_index_malformed_batches_total", "Batches that were not applied."),
    "refused_blocks": Metric(
        "kvpool_index_refused_blocks_total", "Blocks that were not taken because there is no room."
    ),
    "evicted_blocks": Metric(
        "kvpool_index_evicted_blocks_total", "Cold blocks that were forgotten because the index is full."
    ),
}
INDEX_TIER_BLOCKS = Metric(
    "kvpool_index_tier_blocks",
    "Blocks that are held, by tier; once for each rank or near pool that holds one.",
    "tier",
)
INDEX_STALENESS_SECONDS = Metric(
    "kvpool_index_staleness_seconds", "Time since the index last knew that it had missed nothing of a rank."
)
INDEX_MAX_STALENESS_SECONDS = Metric(
    "kvpool_index_max_staleness_seconds", "The same of the rank that is furthest behind."
)
INDEX_RANK_LABELS = ("tenant", "worker", "rank")
# By the field of ``kvpool.index.follow.pool_reconciler.ReconcilerTotals``.
POOL_RECONCILER: Mapping[str, Metric] = {
    "notices": Metric("kvpool_index_pool_notices_total", "Keys of which the pool said that they changed."),
    "missed_notices": Metric(
        "kvpool_index_pool_missed_notices_total",
        "Times that changes may have been missed, the beginning of each connection among them.",
    ),
    "added": Metric("kvpool_index_pool_added_total", "Blocks that were found in the pool and not credited."),
    "removed": Metric("kvpool_index_pool_removed_total", "Blocks that were credited and not in the pool."),
    "rounds": Metric("kvpool_index_pool_rounds_total", "Times that all of the pool was looked through."),
    "failed_rounds": Metric("kvpool_index_pool_failed_rounds_total", "Times that this failed."),
    "notifications_down": Metric(
        "kvpool_index_pool_notifications_down",
        "1: some server of the pool does not say what it loses.",
    ),
    "round_s": Metric("kvpool_index_pool_round_seconds", "How long the last whole look took."),
    "max_staleness_s": Metric(
        "kvpool_index_pool_max_staleness_seconds",
        "When it rests, the index is right about the pool after so long, whatever was missed.",
    ),
}
# Of the pool's servers at ``kvpool.index.follow.pool_follower``'s last reading; by the field of ``Usage``.
POOL_SERVERS: Mapping[str, Metric] = {
    "up": Metric("kvpool_index_pool_up", "0: this server of the pool did not answer.", "server"),
    "used_nbytes": Metric("kvpool_index_pool_used_bytes", "Memory that it uses, all of it.", "server"),
    "capacity_nbytes": Metric(
        "kvpool_index_pool_capacity_bytes", "Memory that it may use; nothing: no limit is known.", "server"
    ),
    "keys": Metric("kvpool_index_pool_keys", "Keys that it holds: blocks, and a few others.", "server"),
    "evicted": Metric(
        "kvpool_index_pool_evicted_keys_total", "Keys that it has evicted since it started.", "server"
    ),
}
INDEX_HIT_RATIO = Metric(
    "kvpool_index_hit_ratio",
    "Share of the prompt tokens of a window that no engine computed, of all engines that share this pool and run now.",
    "window",
)
INDEX_HIT_RATIO_AT_SIZE = Metric(
    "kvpool_index_hit_ratio_at_size",
    "Share of the blocks that these engines were asked for in the last day or two that a pool of so many times today's "
    "size would have had, as LRU; all: a pool of any size.",
    "size",
)
INDEX_TENANT_HIT_RATIO_AT_SIZE = Metric(
    "kvpool_index_tenant_hit_ratio_at_size",
    "The same of one tenant, in a pool of its own of so many times what it has in the pool now.",
    "size",
)
INDEX_TENANT_SIZE_LABELS = ("tenant", "size")
# Of tenants with a quota, by the field of ``kvpool.discovery.quota.Standing``.
TENANT_STANDINGS: Mapping[str, Metric] = {
    "quota_nbytes": Metric(
        "kvpool_index_tenant_quota_bytes", "Bytes of records that the tenant may hold.", "tenant"
    ),
    "held_nbytes": Metric(
        "kvpool_index_tenant_held_bytes",
        "Bytes of records that the tenant holds, as last counted; nothing: not counted yet.",
        "tenant",
    ),
}
INDEX_LOOKUPS = Metric("kvpool_index_lookups_total", "Lookups, by result.", "result")
INDEX_LOOKUP_SECONDS = Metric(
    "kvpool_index_lookup_seconds", "Time in the index of lookups that were answered."
)
INDEX_MATCHED_RATIO = Metric(
    "kvpool_index_matched_ratio",
    "Share of a prompt's blocks that its best rank has leading: on the device, in any tier of the worker, in the pool.",
    "where",
)
INDEX_REFUSED = Metric(
    "kvpool_index_refused_requests_total", "Requests that ended without an answer, by status.", "status"
)
INDEX_STREAMS = Metric("kvpool_index_streams", "Streams of lookups that are open.")
INDEX_PLACEMENTS = Metric(
    "kvpool_index_placements_total",
    "Requests of proxies, by why they went where they did, or were refused.",
    "outcome",
)
INDEX_SESSION_REQUESTS = Metric(
    "kvpool_index_session_requests_total",
    "Requests that named a session: its first, stayed or moved to another rank, aside (shorter ones at another rank, "
    "as of sub-agents).",
    "result",
)
INDEX_PROMPTLESS = Metric(
    "kvpool_index_promptless_placements_total",
    "Requests of proxies that were placed without their prompt, by why.",
    "reason",
)
INDEX_TOKEN_CHECKS = Metric(
    "kvpool_index_token_checks_total",
    "Prompts whose tokens were made here and compared with those of a worker, by result.",
    "result",
)
INDEX_PLACEMENT_SECONDS = Metric(
    "kvpool_index_placement_seconds", "Time in the index until a proxy was told where to send a request."
)
# Of ``kvpool router`` alone.
ROUTER_REQUESTS = Metric("kvpool_router_requests", "Requests under way.")
ROUTER_RESPONSES = Metric(
    "kvpool_router_responses_total",
    "Requests by what came of them: the class of the worker's status; refused by the router; broken off by the worker; "
    "gone is the client.",
    "outcome",
)
ROUTER_RETRIES = Metric(
    "kvpool_router_retries_total",
    "Times that a request was sent again, by why: the worker was unreachable, the connection was lost before a "
    "response, or it answered with 503, 429 or (a response that it does not keep) 404.",
    "reason",
)
ROUTER_FIRST_BYTE_SECONDS = Metric(
    "kvpool_router_first_byte_seconds", "Time until the first byte of an answer."
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in (*ALL, *ENCODER)}


class Counters:
    """Samples since the last ``take``. Any thread; ``_lock`` guards all fields. ``clock``: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: Samples = {}
        self._totals: dict[str, float] = {}
        self._told: dict[str, tuple[float, float]] = {}  # of gauges: value, and time of the next repetition

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Add to a counter; pass ``label`` exactly for metrics that have one."""
        key = _key(metric, label)
        if amount:
            with self._lock:
                self._samples[key] = _number(self._samples.get(key, 0)) + amount

    def add_growth(self, metric: Metric, total: float, label: str = "") -> None:
        """Add the growth of ``total``, an external count, since the last call."""
        key = _key(metric, label)
        with self._lock:
            before, self._totals[key] = self._totals.get(key, 0), total
        self.add(metric, total - before, label)

    def observe(self, metric: Metric, value: float, label: str = "") -> None:
        """Add an observation to a histogram, up to ``MAX_OBSERVATIONS``."""
        with self._lock:
            observations = self._samples.setdefault(_key(metric, label), [])
            assert isinstance(observations, list)
            if len(observations) < MAX_OBSERVATIONS:
                observations.append(value)

    def set(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge, sampled on change and every ``REPEAT_S`` seconds."""
        key = _key(metric, label)
        now_s = self._clock()
        with self._lock:
            told, again_s = self._told.get(key, (value, now_s))
            if value != told or now_s >= again_s:
                self._told[key] = (value, now_s + REPEAT_S)
                self._samples[key] = value

    def take(self) -> Samples:
        with self._lock:
            samples, self._samples = self._samples, {}
        return samples


def add_samples(into: Samples, samples: Mapping[str, float | list[float]]) -> None:
    """Merge ``samples`` into ``into``: sums of counters, lowest of gauges, all observations."""
    for key, sample in samples.items():
        if (had := into.get(key)) is None:
            into[key] = sample
        elif isinstance(had, list) or isinstance(sample, list):
            assert isinstance(had, list)
            assert isinstance(sample, list)
            into[key] = (had + sample)[:MAX_OBSERVATIONS]
        else:
            metric = BY_NAME.get(key.partition("/")[0])
            into[key] = min(had, sample) if metric is not None and metric.is_gauge else had + sample


def export(samples: Mapping[str, Any], child: Callable[[Metric, str], Any]) -> None:
    """Add ``samples`` to prometheus_client's metrics; ``child``: that of a metric and label.

    Unknown metrics of a newer kvpool are ignored.
    """
    for key, sample in samples.items():
        name, _, label = key.partition("/")
        if (metric := BY_NAME.get(name)) is None:
            continue
        shown = child(metric, label)
        if metric.is_counter:
            shown.inc(sample)
        elif metric.is_gauge:
            shown.set(sample)
        else:
            for value in sample:
                shown.observe(value)


def _key(metric: Metric, label: str) -> str:
    assert bool(label) == bool(metric.label), metric.name
    return f"{metric.name}/{label}" if label else metric.name


def _number(sample: float | list[float]) -> float:
    assert not isinstance(sample, list)
    return sample
