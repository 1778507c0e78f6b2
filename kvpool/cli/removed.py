"""Names that the command line no longer has, each with the sentence that says what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

_CHECKOUT = "run python -m benchmarks {} in a checkout of kvpool"
COMMANDS = {
    "demo": "run make demo in a checkout of kvpool",
    "bench hash": _CHECKOUT.format("hash"),
    "bench device": _CHECKOUT.format("device"),
    "bench index": _CHECKOUT.format("index"),
    "bench fleet": _CHECKOUT.format("fleet"),
    "bench e2e": _CHECKOUT.format("e2e"),
}
# By command and option.
OPTIONS = {
    ("bench store", "--peers"): _CHECKOUT.format("store --peers"),
    ("bench store", "--peers-folder"): _CHECKOUT.format("store --peers"),
    ("bench store", "--plot"): _CHECKOUT.format("store --plot"),
}


def removed_command(words: Sequence[str]) -> str | None:
    """The refusal of a command line that begins with a removed command."""
    for name, instead in COMMANDS.items():
        if list(words[: len(name.split())]) == name.split():
            return f"{name} is not in the package any more: {instead}"
    return None


def removed_option(command: str, option: str) -> str | None:
    """The refusal of an option that ``command`` had."""
    instead = OPTIONS.get((command, option))
    return None if instead is None else f"{option} is no option any more: {instead}"
