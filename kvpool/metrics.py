"""Every metric name of kvpool, with its help text: the only place where one is spelled.

``ALL`` are of the connector. A sample of them travels between processes as ``{key: number}`` where the key is the
metric's name, or ``name/value`` when the metric has a label (its label name is in ``Metric.label``). They are counters,
summed over ranks and over time. ``INDEX`` and what follows it are of the index service, read when its page is asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """``name`` as exported (``_total``: a counter), its help text, and the name of its only label or "".

    ``former_name``: exported, too, for one version; empty: none.
    """

    name: str
    help: str
    label: str = ""
    former_name: str = ""


LOOKUP_REQUESTS = Metric("kvpool_lookup_requests_total", "Requests whose prefix was looked up in the pool.")
LOOKUP_FAILURES = Metric(
    "kvpool_lookup_failures_total", "Existence checks that ended without an answer, by cause.", "cause"
)
LOOKUP_BLOCKS = Metric("kvpool_lookup_blocks_total", "Keys that lookups were about.")
REQUEST_FAULTS = Metric(
    "kvpool_request_faults_total",
    "Requests that went on without the pool after a fault of kvpool, by what it did: lookup, offer, load or store.",
    "where",
)
OFFERED_TOKENS = Metric("kvpool_offered_tokens_total", "Prompt tokens offered to the engine from the pool.")
OFFER_MISMATCHES = Metric(
    "kvpool_offer_mismatches_total", "Times that the engine took another number of tokens than was offered."
)
LOADED_BLOCKS = Metric(
    "kvpool_loaded_blocks_total", "Blocks loaded from the pool into the engine's KV cache."
)
LOADED_BYTES = Metric("kvpool_loaded_bytes_total", "Bytes loaded from the pool into the engine's KV cache.")
LOAD_SECONDS = Metric("kvpool_load_seconds_total", "Seconds between the start and the end of loads, summed.")
LOAD_REQUESTS = Metric("kvpool_load_requests_total", "Loads of one request that ended, by result.", "result")
STORED_BLOCKS = Metric("kvpool_stored_blocks_total", "Blocks written to the pool.")
STORED_BYTES = Metric("kvpool_stored_bytes_total", "Bytes written to the pool.")
STORE_SKIPPED_BLOCKS = Metric(
    "kvpool_store_skipped_blocks_total", "Blocks that were not written to the pool, by cause.", "cause"
)
ADAPTER_REQUESTS = Metric(
    "kvpool_adapter_requests_without_pool_total",
    "Requests that went without the pool, for it is not known of which adapter they are, by cause.",
    "cause",
)
EPOCHS = Metric(
    "kvpool_epochs_total",
    "Times that the engine left its namespace for one of its own, since its weights may have changed, by cause.",
    "cause",
)
REFUSED_KEYS = Metric(
    "kvpool_refused_keys_total",
    "Keys that were faults at once, because the pool's server is known to be away.",
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
    "kvpool_gate_load_tokens_total", "Tokens of the loads that the cost gate has timed."
)
GATE_LOAD_SECONDS = Metric(
    "kvpool_gate_load_seconds_total", "Seconds that those loads took, failed ones included."
)

ALL: tuple[Metric, ...] = (
    LOOKUP_REQUESTS,
    LOOKUP_FAILURES,
    LOOKUP_BLOCKS,
    REQUEST_FAULTS,
    OFFERED_TOKENS,
    OFFER_MISMATCHES,
    LOADED_BLOCKS,
    LOADED_BYTES,
    LOAD_SECONDS,
    LOAD_REQUESTS,
    STORED_BLOCKS,
    STORED_BYTES,
    STORE_SKIPPED_BLOCKS,
    ADAPTER_REQUESTS,
    EPOCHS,
    REFUSED_KEYS,
    GATE_DECISIONS,
    GATE_PREFILL_TOKENS,
    GATE_PREFILL_SECONDS,
    GATE_LOAD_TOKENS,
    GATE_LOAD_SECONDS,
)

# By the field of ``kvpool.index.answer.Totals`` that it shows.
INDEX: Mapping[str, Metric] = {
    "workers": Metric("kvpool_index_workers", "Workers that the index follows."),
    "ranks": Metric("kvpool_index_ranks", "Their data-parallel ranks."),
    "stale_ranks": Metric("kvpool_index_stale_ranks", "Ranks that are not trusted now, and not credited."),
    "incomplete_ranks": Metric(
        "kvpool_index_incomplete_ranks", "Ranks that hold more than the index knows, for batches were lost."
    ),
    "blocks": Metric("kvpool_index_blocks", "Distinct blocks with a holder, summed over partitions."),
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
    "kvpool_index_tier_blocks", "Blocks that are held, by tier; once for each rank that holds one.", "tier"
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
        former_name="kvpool_index_pool_deaf",
    ),
    "round_s": Metric("kvpool_index_pool_round_seconds", "How long the last whole look took."),
    "max_staleness_s": Metric(
        "kvpool_index_pool_max_staleness_seconds",
        "When it rests, the index is right about the pool after so long, whatever was missed.",
        former_name="kvpool_index_pool_bound_seconds",
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
    "response, or it answered with 503.",
    "reason",
)
ROUTER_FIRST_BYTE_SECONDS = Metric(
    "kvpool_router_first_byte_seconds", "Time until the first byte of a response's body."
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in ALL}


class Counters:
    """Sums of samples since the last ``take``; used by one thread."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Add ``amount``; ``label`` must be given exactly for the metrics that have one."""
        assert bool(label) == bool(metric.label), metric.name
        if amount:
            key = f"{metric.name}/{label}" if label else metric.name
            self._sums[key] = self._sums.get(key, 0) + amount

    def add_growth(self, metric: Metric, total: float) -> None:
        """Add what ``total``, a count kept elsewhere, has grown by since the last call."""
        self.add(metric, total - self._totals.get(metric.name, 0))
        self._totals[metric.name] = total

    def take(self) -> dict[str, float]:
        """Return the sums and start again from nothing."""
        sums, self._sums = self._sums, {}
        return sums


def add_samples(into: dict[str, float], samples: Mapping[str, float]) -> None:
    """Sum ``samples`` into ``into``, key by key."""
    for key, amount in samples.items():
        into[key] = into.get(key, 0) + amount
