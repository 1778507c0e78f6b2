"""The pages that ``--help`` prints: options in groups, each text whole, 80 to 120 columns wide.

Typer's own pages of panels cut long names and squeeze texts into a third of the width, and its plain pages know no
groups. These are plain, and take the groups from ``rich_help_panel``.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

# Contexts of commands take these from the one of their group.
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
OTHER = "Other"


class Command(TyperCommand):
    """A command whose help has the options in the groups of their ``rich_help_panel``, those without one last.

    What its parser refuses has its context, so that the failure names this command's own page.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse them. The parser knows no context, and click gives its errors none where an argument is missing."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write them."""
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """The same for a group of commands, which come before its options, in the groups of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write commands and options."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                panels.setdefault(_name(panel, "Commands"), []).append((name, command.short_help or ""))
        widest = max((len(name) for rows in panels.values() for name, _ in rows), default=0)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows])
        _write_options(self, ctx, formatter)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            is_argument = parameter.param_type_name == "argument"
            panel = _name(getattr(parameter, "rich_help_panel", None), "Arguments" if is_argument else OTHER)
            panels.setdefault(panel, []).append(record)
    last = panels.pop(OTHER, None)
    if last is not None:
        panels["Options" if panels.keys() <= {"Arguments"} else OTHER] = last
    for panel, records in panels.items():
        with formatter.section(panel):
            formatter.write_dl(records)


def _name(panel: object, otherwise: str) -> str:
    return panel if isinstance(panel, str) and panel else otherwise
