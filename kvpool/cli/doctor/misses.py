"""Why prompts were computed, for ``kvpool doctor``: the reason of most tokens of all workers, and a remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from kvpool import metrics
from kvpool.cli.doctor.rules import OFF, Finding, Rule, Rules, always, judge
from kvpool.cli.doctor.subjects import Misses
from kvpool.discovery.worker import Worker

FEW = 0.1  # of the prompts' tokens
ENOUGH_REQUESTS = 100  # for advice: the first prompts of a fleet are all new

# By the reason of most missed tokens; the first that applies.
_FEW: Rule[Misses] = Rule("ok", lambda of: of.share < FEW, "{of.figures}")
_EARLY: Rule[Misses] = Rule("ok", lambda of: of.requests < ENOUGH_REQUESTS, "{of.figures}. Advice needs "
              f"{ENOUGH_REQUESTS} requests; these were {{of.requests:,.0f}}")  # fmt: skip
_RULES: dict[str, Rules[Misses]] = {
    "new": (
        Rule("warn", lambda of: of.apart, '{of.figures}. Workers of model "{it}" are in several namespaces: blocks of '
             "one are new to another", "make the same what differs: the lines about sharing say what"),
        _EARLY,
        Rule("ok", always, "{of.figures}. Most are of blocks that no lookup of their worker asked for before",
             "where prompts do repeat, other workers' blocks may be gone before they are looked for: see what a larger "
             "pool would bring (kvpool size), and keep sessions at their workers (kvpool index)"),
    ),
    "not_stored": (
        _EARLY,
        Rule("warn", lambda of: of.skipped, "{of.figures}. Most were asked for before, and never known in the pool; "
             "blocks that were not stored: {it}", "docs/reference/metrics.md says what each cause of "
             "kvpool_store_skipped_blocks_total is"),
        Rule("warn", always, "{of.figures}. Most were asked for before, and never known in the pool", "see "
             "min_requests_to_store and store_policy of the workers, and store in the requests' kv_transfer_params"),
    ),
    "evicted": (
        _EARLY,
        Rule("warn", always, "{of.figures}. Most were in the pool, and lost before their time", "give the pool more "
             "memory (kvpool size says what it would bring), or store less: min_requests_to_store"),
    ),
    "expired": (
        _EARLY,
        Rule("warn", always, "{of.figures}. Most were in the pool, and not used until they expired", "write a larger "
             "?ttl= into the URL of the workers' pool"),
    ),
    "other_namespace": (
        Rule("warn", always, "{of.figures}. Most are in namespaces that their worker has left, because its weights "
             "changed", "after an update nothing is to be done: workers that hold the same new weights share. Start a "
             "worker anew whose log says that it goes on in a namespace of its own"),
    ),
    "audited": (
        Rule("ok", always, "{of.figures}. Most are of blocks that were computed to audit hits", "a smaller "
             "audit_share in the workers' settings, where one was set; without it, one hit in 256 is"),
    ),
    "opted_out": (
        Rule("warn", always, "{of.figures}. Most are of requests that opted out of the pool", "see who sends "
             "kv_transfer_params (the workers' log names a misspelt one), prompt_logprobs, or skips caches"),
    ),
    "role": (
        Rule("ok", always, "{of.figures}. Most are of workers that only store", 'kv_role "kv_both" where they should '
             "load, too"),
    ),
    "adapter": (
        Rule("warn", always, "{of.figures}. Most are of adapters of unknown weights",
             "kvpool_adapter_requests_without_pool_total says why"),
    ),
    "gate": (
        _EARLY,
        Rule("warn", always, "{of.figures}. Most were in the pool, where loading is slower than computing", "more "
             "threads in the workers' settings, a faster network; kvpool bench store measures the pool"),
    ),
    "too_slow": (
        Rule("warn", always, "{of.figures}. Most were given up, because the pool answered too late", "look at the load "
             "of its servers and of the network; lookup_timeout_s and max_load_s bound the waits"),
    ),
    "unavailable": (
        Rule("warn", always, "{of.figures}. Most were asked for while the pool was away", "the lines about the pool "
             "and the server may say why, and the workers' log"),
    ),
    "no_room": (
        _EARLY,
        Rule("warn", always, "{of.figures}. Most were in the pool, while loads under way filled the KV cache",
             "a larger --gpu-memory-utilization or a smaller --max-num-seqs"),
    ),
    "switched_off": (
        Rule("warn", always, "{of.figures}. Most are of a time without the pool", OFF),
    ),
    "fault": (
        Rule("warn", always, "{of.figures}. Most met an error inside kvpool, or a load that was broken off",
             "report it, with the stack from the workers' log"),
    ),
}  # fmt: skip
MISSES = {reason: (_FEW, *rules) for reason, rules in _RULES.items()}


def miss_findings(sums: Mapping[str, Mapping[str, float]], workers: Sequence[Worker]) -> Iterator[Finding]:
    """``sums``: of the workers' samples since their starts, by the metric's name and its label's value."""
    tokens = sum(sums.get(metrics.PROMPT_TOKENS.name, {}).values())
    missed = [(part, reason) for reason, part in sums.get(metrics.MISSED_TOKENS.name, {}).items() if part]
    known = [(part, reason) for part, reason in missed if reason in MISSES]  # a newer worker may have others
    if not tokens or not known:
        return
    lost = sum(part for part, _ in missed)
    reasons = ", ".join(f"{reason} {part / lost:.0%}" for part, reason in sorted(missed, reverse=True))
    skipped = sums.get(metrics.STORE_SKIPPED_BLOCKS.name, {}).items()
    namespaces: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for worker in workers:
        namespaces[worker.model, worker.tenant] |= {worker.namespace} - {""}
    subject = Misses(
        share=lost / tokens,
        requests=sum(sums.get(metrics.REQUESTS.name, {}).values()),
        figures=f"{lost / tokens:.0%} of {tokens:,.0f} prompt tokens were computed, where a pool might have had them: "
        + reasons,
        skipped=", ".join(
            f"{cause} {count:,.0f}" for cause, count in skipped if count and cause != "already_there"
        ),
        apart=next((model for (model, _), found in sorted(namespaces.items()) if len(found) > 1), ""),
    )
    yield from judge("misses", MISSES[max(known)[1]], subject, first=True)
