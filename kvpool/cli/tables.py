"""Tables without loss: full width off a terminal, without the least columns on a narrow terminal; and no commands.

Rich takes 80 columns for a pipe and cuts the rest. A table for a program or ``grep`` has to be whole.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, Task
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvpool.text import printable

WIDE = 10_000  # columns off a terminal
LEAST_WRAPPED = 24  # columns for a wrapped text, before others are left out
LEAST = 6  # columns for it when no other is left


@dataclass
class Column:
    """One column. ``drop``: the highest is left out first on a narrow terminal, before it all that are 0 in each row;
    0: never.

    ``wraps``: text over several lines; others never wrap, except names in the first column.
    """

    name: str
    drop: int = 0
    wraps: bool = False
    left: bool = False
    cells: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        natural = max(map(cell_len, (self.name, *self.cells)))
        return min(natural, LEAST_WRAPPED) if self.wraps else natural

    @property
    def is_zero(self) -> bool:
        return self.drop > 0 and set(self.cells) == {"0"}


class _Console(Console):
    """Prints names and words of others (models, workers, servers) without what a terminal would obey."""

    @property
    def is_screen(self) -> bool:
        """Whether it shows what moves. ``FORCE_COLOR`` makes no screen of a pipe, only colours."""
        return self.file.isatty() and not self.is_dumb_terminal

    def on_broken_pipe(self) -> None:
        raise  # rich would end the process with 1

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def console(*, stderr: bool = False) -> _Console:
    """As wide as its terminal, else as ``COLUMNS`` says, else without a limit."""
    made = _Console(stderr=stderr)
    if made.width == 0 or not (made.file.isatty() or os.environ.get("COLUMNS", "").isdigit()):
        made.width = WIDE
    return made


class _Count(ProgressColumn):
    """So many of all, which may be unknown."""

    def __init__(self, of: str) -> None:
        self._of = of
        super().__init__()

    def render(self, task: Task) -> Text:
        of_all = "" if task.total is None else f" of {task.total:,.0f}"
        return Text(f"{task.completed:,.0f}{of_all} {self._of}")


@contextmanager
def progress_bar(counts: str = "") -> Iterator[Progress]:
    """On standard error, while that is a terminal. ``counts``: what it counts aloud, such as ``blocks``."""
    out = _Console(stderr=True)
    columns = [*Progress.get_default_columns(), *([_Count(counts)] if counts else [])]
    bar = Progress(*columns, console=out, transient=True, disable=not out.is_screen)
    with termination_interrupts(), bar:
        yield bar


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` inside, as Ctrl-C does: a hidden cursor comes back. Main thread only."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def add_row(columns: Sequence[Column], *cells: object) -> None:
    for column, cell in zip(columns, cells, strict=True):
        column.cells.append(str(cell))


def kept(columns: Sequence[Column], width: int) -> list[Column]:
    """Those for which ``width`` has room."""
    left = list(columns)
    while len(left) > 1 and _taken(left) > width:
        least = max(left, key=lambda one: (one.is_zero, one.drop))
        if not least.drop:
            break
        left.remove(least)
    return left


def fitted(columns: Sequence[Column], width: int) -> list[RenderableType]:
    """A table of at most ``width`` columns, and a line that names those left out, if any."""
    shown = kept(columns, width)
    over = max(0, _taken(shown) - width)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, one in enumerate(shown):
        folds = one.wraps or number == 0
        least_width = min(one.width, 12) if number == 0 else max(LEAST, one.width - over)
        table.add_column(
            one.name,
            justify="left" if one.left or one.wraps else "right",
            no_wrap=not folds,
            overflow="fold",
            min_width=least_width if folds else one.width,
        )
    for cells in zip(*(one.cells for one in shown), strict=True):
        table.add_row(*map(Text, cells))
    names = {one.name for one in shown}
    missing = [one for one in columns if one.name not in names]
    if not missing:
        return [table]
    zeros = ", ".join(one.name for one in missing if one.is_zero)
    others = [one.name for one in missing if not one.is_zero]
    said = ", ".join([*([f"{zeros} (0 in all rows)"] if zeros else []), *others])
    return [table, Text(f"no room for {said}; --json has all")]


def _taken(columns: Sequence[Column]) -> int:
    """Of them, with two between each."""
    return sum(one.width + 2 for one in columns) - 2


def show(out: Console, *parts: RenderableType) -> None:
    """Print tables and lines. A table that does not fit keeps its width: a terminal breaks its lines."""
    for part in parts:
        if isinstance(part, Table):
            unlimited = out.options.update(width=WIDE)
            for column in part.columns:
                if column.no_wrap:  # rich cuts these on a narrow terminal
                    cells = (Measurement.get(out, unlimited, cell) for cell in (column.header, *column.cells))
                    column.min_width = max(one.maximum for one in cells)
            needed = Measurement.get(out, unlimited, part)
            with out.capture() as shown:
                out.print(part, width=max(out.width, needed.minimum), crop=False)
            # Rich fills the last column with blanks.
            out.file.write("".join(f"{line.rstrip(' ')}\n" for line in shown.get().splitlines()))
        else:
            out.print(part, highlight=False, markup=False, soft_wrap=out.width >= WIDE)
