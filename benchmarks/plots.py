"""``python -m benchmarks plots``: the documentation's pictures, drawn from ``benchmarks/results``.

Each is an SVG with its own background, which follows the reader's light or dark theme.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.plot import new_figure
from kvpool.errors import ConfigError

RESULTS = Path(__file__).parent / "results"
SIZE = (7.2, 4.1)

# Colours by role, in the light and in the dark theme: 4.5 to 1 on the background, lines 3 to 1. matplotlib
# draws with stand-ins (#0a0a01, ...), replaced by CSS variables.
COLOURS = {
    "back": ("#ffffff", "#1e2129"),
    "ink": ("#22262e", "#e3e6ee"),
    "line": ("#c9ced8", "#454b59"),
    "own": ("#3448c5", "#9aa8ff"),
    "slow": ("#b5342b", "#ff8f84"),
    "good": ("#1d7a4c", "#5fd39a"),
    "other": ("#8a5a00", "#f0b84a"),
    "fourth": ("#6b4fa0", "#c3a6ff"),
}
STAND_INS = {name: f"#0a0a{number:02x}" for number, name in enumerate(COLOURS, 1)}
Result = Mapping[str, Any]


def draw_all(folder: Path) -> list[Path]:
    """Write every picture into ``folder``, from the result of its name. Errors: ``ConfigError``."""
    drawn = []
    for name, (result, draw) in PICTURES.items():
        try:
            kept = json.loads((RESULTS / f"{result}.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{RESULTS / result}.json is no result ({error}): python -m benchmarks keep writes one"
            ) from error
        figure = new_figure(*SIZE)
        figure.set_facecolor(STAND_INS["back"])
        title = draw(figure, kept["result"])
        for axes in figure.axes:
            _dress(axes)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=STAND_INS["ink"])
        figure.supxlabel(_machine(kept), fontsize=8, color=STAND_INS["ink"], x=0.99, ha="right")
        path = folder / f"{name}.svg"
        _save(figure, path, title)
        drawn.append(path)
    return drawn


def _machine(kept: Result) -> str:
    about = kept["machine"]
    return f"{about['cores']} cores of an {about['cpu']}, Linux {about['kernel']}, {kept['date']}"


def _dress(axes: Any) -> None:
    ink, line = STAND_INS["ink"], STAND_INS["line"]
    axes.set_facecolor(STAND_INS["back"])
    axes.title.set_color(ink)
    axes.grid(axis="y", color=line, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(line)
    axes.tick_params(colors=ink, labelsize=9)
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)
    legend = axes.get_legend()
    if legend is not None:
        legend.get_frame().set_facecolor(STAND_INS["back"])
        legend.get_frame().set_edgecolor(STAND_INS["line"])
        for text in legend.get_texts():
            text.set_color(ink)


def _save(figure: Any, path: Path, title: str) -> None:
    from io import StringIO

    import matplotlib

    written = StringIO()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.family": "sans-serif"}
    ):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    text = written.getvalue()
    for name, stand_in in STAND_INS.items():
        text = text.replace(stand_in, f"var(--{name})")
    light, dark = (";".join(f"--{name}:{pair[at]}" for name, pair in COLOURS.items()) for at in (0, 1))
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    text = re.sub(r"(<svg [^>]*>)", rf"\1{style}", text, count=1)
    text = re.sub(r"font: ([\d.]+)px[^;\"]*", r"font: \1px system-ui, sans-serif", text)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _lengths(figure: Any, result: Result) -> str:
    axes = figure.subplots()
    rows = result["rows"]
    lengths = sorted({row["prompt_tokens"] for row in rows})
    for how, colour, label in (
        ("computed", "slow", "computed (no pool)"),
        ("pool", "own", "loaded from the pool"),
        ("local", "good", "hit in the engine's own cache"),
    ):
        times = [
            [
                1e3 * row["first_token_s"]
                for row in rows
                if (row["prompt_tokens"], row["how"]) == (length, how)
            ]
            for length in lengths
        ]
        middle = [statistics.median(each) for each in times]
        axes.plot(lengths, middle, color=STAND_INS[colour], marker="o", linewidth=2, label=label)
        axes.vlines(lengths, [min(each) for each in times], [max(each) for each in times],
                    color=STAND_INS[colour], linewidth=1)  # fmt: skip
        axes.annotate(f"{middle[-1]:,.0f}", (lengths[-1], middle[-1]), xytext=(6, 4),
                      textcoords="offset points", fontsize=9, color=STAND_INS[colour])  # fmt: skip
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlim(0, lengths[-1] * 1.08)
    axes.set_ylim(0)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("ms to the first token")
    axes.legend(loc="upper left", fontsize=9)
    return "Time to the first token of a prompt"


def _outage(figure: Any, result: Result) -> str:
    axes = figure.subplots()
    moments = result["moments"]
    phases = list(dict.fromkeys(moment["server"] for moment in moments))
    edges = [next(m["at_s"] for m in moments if m["server"] == phase) for phase in phases]
    edges.append(moments[-1]["at_s"] + 1)
    most = 1e3 * max(moment["first_token_s"] for moment in moments)
    for from_pool, colour, label in ((True, "own", "loaded from the pool"), (False, "slow", "computed")):
        of = [moment for moment in moments if (moment["pool_tokens"] > 0) == from_pool]
        axes.scatter([moment["at_s"] for moment in of], [1e3 * moment["first_token_s"] for moment in of],
                     s=20, color=STAND_INS[colour], label=label, zorder=3)  # fmt: skip
    computed = 1e3 * statistics.median(result["computed_s"])
    axes.axhline(computed, color=STAND_INS["ink"], linewidth=1, linestyle="--", zorder=2)
    axes.annotate("computed, median", (edges[2], computed), xytext=(2, 4),
                  textcoords="offset points", fontsize=8, color=STAND_INS["ink"])  # fmt: skip
    for phase, start, end in zip(phases, edges, edges[1:], strict=False):
        if phase in ("is stopped", "is killed"):
            axes.axvspan(start - 0.5, end - 0.5, color=STAND_INS["line"], alpha=0.4, zorder=1)
        axes.text(
            (start + end) / 2, most * 1.22, f"server {phase}", ha="center", fontsize=9, color=STAND_INS["ink"]
        )
    axes.set_xlim(-1, edges[-1])
    axes.set_ylim(0, most * 1.35)
    axes.set_xlabel("seconds; a prompt each second that the engine never had")
    axes.set_ylabel("ms to the first token")
    axes.legend(loc="upper right", fontsize=9, bbox_to_anchor=(1, 0.86))
    return f"Prompts of {result['prompt_tokens']:,} tokens while the pool's server fails"


def _store(figure: Any, result: Result) -> str:
    rows = result["rows"]
    sizes = sorted({row["value_nbytes"] // 1024 for row in rows})
    panels = figure.subplots(1, 2, sharey=True)
    for axes, mood, name in zip(
        panels, ("idle", "busy"), ("alone", "beside a busy interpreter"), strict=True
    ):
        for client, colour, label in (
            ("kvpool", "own", "kvpool"),
            ("lmcache", "other", "LMCache's native client"),
            ("bare loop", "good", "bare loop, nothing verified"),
            ("redis plain", "slow", "redis-py"),
        ):
            of = sorted((row for row in rows if row["client"] == client), key=lambda row: row["value_nbytes"])
            axes.plot([row["value_nbytes"] / 1024 for row in of], [row["gb_per_s"][f"get_{mood}"] for row in of],
                      marker="o", markersize=4, color=STAND_INS[colour], linewidth=2, label=label)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size} KiB" if size < 1024 else f"{size // 1024} MiB" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("size of a value")
    panels[0].set_ylabel("GB/s of gets, one client, one server")
    panels[1].legend(loc="upper left", fontsize=8)
    return "Gets from a Valkey server by size of a value"


def _fleet(figure: Any, result: Result) -> str:
    axes = figure.subplots()
    rows = result["rows"]
    for policy, colour, label in (
        ("shared index", "own", "ask the shared index"),
        ("own history", "other", "each router's own history"),
        ("least load", "fourth", "least load"),
        ("random", "slow", "random"),
    ):
        of = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["routers"])
        axes.plot([row["routers"] for row in of], [row["followup_hit_ratio"] for row in of], marker="o",
                  linewidth=2, color=STAND_INS[colour], label=label)  # fmt: skip
    routers = sorted({row["routers"] for row in rows})
    axes.set_xticks(routers, [f"{count}" for count in routers])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("routers that share the requests")
    axes.set_ylabel("hit ratio of a session's next turn")
    axes.legend(loc="center left", fontsize=9, bbox_to_anchor=(0.02, 0.4))
    return "Hits of sessions, by what routers know (simulated fleet, real index)"


def _agents(figure: Any, result: Result) -> str:
    rows = result["rows"]
    workers = sorted({row["workers"] for row in rows})
    hits, waits = figure.subplots(1, 2)
    for policy, colour, label in (
        ("none", "slow", "no pool, in turns"),
        ("pool", "good", "pool, in turns"),
        ("load", "other", "pool, least load"),
        ("precise", "fourth", "no pool, by blocks"),
        ("kvpool", "own", "kvpool: pool, blocks, sessions"),
    ):
        of = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["workers"])
        for axes, column in ((hits, "hits_of_ideal"), (waits, "ttft_p90_s")):
            axes.plot(range(len(of)), [row[column] for row in of], marker="o", linewidth=2,
                      color=STAND_INS[colour], label=label)  # fmt: skip
    for axes, title in ((hits, "hits over the ideal"), (waits, "seconds to the first token, p90")):
        axes.set_xticks(range(len(workers)), [f"{count}" for count in workers])
        axes.set_xlabel("workers")
        axes.set_title(title, fontsize=10)
    hits.set_ylim(0, 1.05)
    waits.set_yscale("log")
    hits.legend(loc="lower left", fontsize=8, bbox_to_anchor=(0.0, 0.5))
    return "Sessions of a coding agent (simulated engines, real index and pool)"


PICTURES: dict[str, tuple[str, Callable[[Any, Result], str]]] = {
    "first-token": ("lengths", _lengths),
    "outage": ("outage", _outage),
    "store": ("store", _store),
    "routers": ("fleet", _fleet),
    "agents": ("agents", _agents),
}
