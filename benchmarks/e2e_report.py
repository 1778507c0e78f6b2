"""The report of ``python -m benchmarks e2e``: figures, tables, plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.contest import percentile
from benchmarks.plot import new_figure, save_figure

OFF = "pool off"
HOST = "host tier only"
OWN = "kvpool"
LMCACHE = "LMCache"
SHARED = (OWN, LMCACHE)  # another engine computed everything before
KINDS = {"chat": "chats", "document": "documents"}
PROBES = ("probe", "again")
NEEDED_SHARE = 0.9  # of a probe's full blocks, from the pool


@dataclass(frozen=True)
class Answer:
    """One answer in one arm. ``kind``: chat, document, probe (new) or again (right after it).

    ``number``: of the request or probe, the same prompt in all arms. ``cached_tokens``: of the prompt, not
    computed; ``loaded_tokens`` of these came through the arm's connector. ``identical``: to the first
    engine's tokens.
    """

    arm: str
    kind: str
    number: int
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    answer_tokens: int
    first_token_s: float
    finished_s: float
    identical: bool


@dataclass(frozen=True)
class Row:
    """One arm's requests of one kind. Throughput is tokens of prompts and answers over the requests' time.
    ``hit_ratio``: cached tokens over prompt tokens; ``loaded_ratio``: loaded over prompt tokens.
    """

    arm: str
    kind: str
    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    tokens_per_s: float
    hit_ratio: float
    loaded_ratio: float
    compared_tokens: int
    different_answers: int


@dataclass(frozen=True)
class Probes:
    """Medians of one arm's probes, and of their ratios to ``OFF`` with the same prompt.

    ``first_s``: time to the first token of a new prompt: computed, or loaded; ``again_s``: right after, from
    its prefix cache. ``over_recompute``: ``first_s`` over the computing arm's; ``over_local_hit``:
    ``first_s`` over its ``again_s``. None: this arm computed too.
    """

    arm: str
    count: int
    first_s: float
    again_s: float
    loaded_ratio: float
    over_recompute: float | None
    over_local_hit: float | None


@dataclass(frozen=True)
class Report:
    """``unavailable``: reasons, by arm. ``pool``: without secrets."""

    pool: str
    seed: int
    prompt_tokens: int
    block_tokens: int
    held_tokens: int  # by a cache of all requests' full blocks
    kv_cache_tokens: int
    unavailable: dict[str, str]
    answers: list[Answer]

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(answer.arm for answer in self.answers))

    @property
    def faults(self) -> list[str]:
        """Why this run is invalid; empty when valid."""
        found = []
        for arm in self.arms:
            different = [one for one in self.answers if one.arm == arm and not one.identical]
            if different:
                found.append(f"{arm} gave other tokens for {len(different)} of its requests")
        least = NEEDED_SHARE * (self.prompt_tokens // self.block_tokens) * self.block_tokens
        missed = [
            one
            for one in self.answers
            if one.arm == OWN and one.kind == "probe" and one.loaded_tokens < least
        ]
        if missed:
            found.append(f"{OWN} did not find {len(missed)} of the probes in the pool")
        return found

    def rows(self) -> list[Row]:
        return [
            _row(arm, kind, chosen)
            for arm in self.arms
            for kind in KINDS
            if (chosen := [one for one in self.answers if (one.arm, one.kind) == (arm, kind)])
        ]

    def probes(self) -> list[Probes]:
        return [_probes(self, arm) for arm in self.arms if self._times(arm, "probe")]

    def _times(self, arm: str, kind: str) -> list[float]:
        chosen = [one for one in self.answers if (one.arm, one.kind) == (arm, kind)]
        return [one.first_token_s for one in sorted(chosen, key=lambda one: one.number)]


def _row(arm: str, kind: str, answers: Sequence[Answer]) -> Row:
    times = sorted(one.first_token_s for one in answers)
    prompt_tokens = sum(one.prompt_tokens for one in answers)
    answer_tokens = sum(one.answer_tokens for one in answers)
    return Row(
        arm=arm,
        kind=kind,
        requests=len(answers),
        ttft_p50_s=percentile(times, 0.5),
        ttft_p99_s=percentile(times, 0.99),
        tokens_per_s=(prompt_tokens + answer_tokens) / sum(one.finished_s for one in answers),
        hit_ratio=sum(one.cached_tokens for one in answers) / prompt_tokens,
        loaded_ratio=sum(one.loaded_tokens for one in answers) / prompt_tokens,
        compared_tokens=answer_tokens,
        different_answers=sum(not one.identical for one in answers),
    )


def _probes(report: Report, arm: str) -> Probes:
    first, again = (report._times(arm, kind) for kind in PROBES)
    computed, local = (report._times(OFF, kind) for kind in PROBES)
    chosen = [one for one in report.answers if (one.arm, one.kind) == (arm, "probe")]
    return Probes(
        arm=arm,
        count=len(first),
        first_s=statistics.median(first),
        again_s=statistics.median(again),
        loaded_ratio=sum(one.loaded_tokens for one in chosen) / sum(one.prompt_tokens for one in chosen),
        over_recompute=_ratio(first, computed) if arm in SHARED else None,
        over_local_hit=_ratio(first, local) if arm in SHARED else None,
    )


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def show(report: Report, as_json: bool) -> None:
    """Print JSON of ``Report`` with ``rows``, ``probes`` and ``faults``, or tables."""
    if as_json:
        more = {
            "rows": [asdict(row) for row in report.rows()],
            "probes": [asdict(each) for each in report.probes()],
            "faults": report.faults,
        }
        print(json.dumps(asdict(report) | more))
        return
    console = Console()
    console.print(_workload_table(report))
    console.print(_probe_table(report))
    for arm, reason in report.unavailable.items():
        console.print(f"{arm}: unavailable here: {reason}", highlight=False, markup=False)
    for fault in report.faults:
        console.print(f"This run proves nothing: {fault}.", style="bold red", markup=False)


def _workload_table(report: Report) -> Table:
    table = Table(
        title=f"{report.pool}: one request after the other, {report.held_tokens:,} different tokens of prompts, "
        f"{report.kv_cache_tokens:,} fit an engine's KV cache. ttft: ms to the first token. hits: of the prompts' "
        "tokens, not computed; loaded: by the connector. tok/s: of prompts and answers. compared: tokens that had to "
        "be those of another engine.",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("arm", "asked", "n", "ttft p50", "p99", "tok/s", "hits", "loaded", "compared"):
        table.add_column(name, justify="left" if name in ("arm", "asked") else "right", no_wrap=True)
    for row in report.rows():
        same = f"{row.different_answers} WRONG" if row.different_answers else f"{row.compared_tokens:,}"
        table.add_row(
            row.arm, KINDS[row.kind], f"{row.requests}", _ms(row.ttft_p50_s), _ms(row.ttft_p99_s),
            f"{row.tokens_per_s:,.0f}", f"{row.hit_ratio:.2f}", f"{row.loaded_ratio:.2f}", same,
        )  # fmt: skip
    return table


def _probe_table(report: Report) -> Table:
    table = Table(
        title=f"Prompts of {report.prompt_tokens:,} tokens that the engine never had, and at once again: ms to the "
        "first token, medians; the ratios are medians over the prompts.",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("arm", "n", "first", "again", "loaded", "over recompute", "over local hit"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for each in report.probes():
        table.add_row(
            each.arm, f"{each.count}", _ms(each.first_s), _ms(each.again_s), f"{each.loaded_ratio:.2f}",
            _number(each.over_recompute), _number(each.over_local_hit),
        )  # fmt: skip
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(report: Report | None, path: Path) -> None:
    """Write a PNG; without a report, check that this is possible. Errors: ``ConfigError``."""
    figure = new_figure(15, 4)
    panels = figure.subplots(1, len(KINDS) + 1)
    if report is not None:
        for panel, (kind, name) in zip(panels, KINDS.items(), strict=False):
            for arm in report.arms:
                times = sorted(report._times(arm, kind))
                parts = [(number + 1) / len(times) for number in range(len(times))]
                panel.step([0.0, *times], [0.0, *parts], where="post", label=arm)
            panel.set_title(f"{name}: part with a first token within")
            panel.set_xlabel("seconds")
            panel.grid(alpha=0.3)
            panel.legend()
        probes = report.probes()
        panel = panels[-1]
        for shift, name in ((-0.2, "first_s"), (0.2, "again_s")):
            heights = [getattr(each, name) for each in probes]
            panel.bar([number + shift for number in range(len(probes))], heights, 0.4, label=name[:-2])
        panel.set_xticks(range(len(probes)), [each.arm for each in probes])
        panel.set_title(f"probes of {report.prompt_tokens:,} tokens")
        panel.set_ylabel("seconds to the first token")
        panel.legend()
    save_figure(figure, path)
