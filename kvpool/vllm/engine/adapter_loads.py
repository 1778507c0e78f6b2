"""``AdapterLoads``: of which files a worker's vLLM has loaded its adapters.

Digests of files are taken when an adapter is first asked for (``adapters``), and files may have been replaced since
vLLM loaded them: by a trainer's next checkpoint, or before vLLM loads an adapter again that it dropped. So the worker
looks at the files when vLLM loads them, before and after, and moves no block of an adapter that was loaded of files in
another state than those of the digest.

Threads: the worker's, which is vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from kvpool.vllm.engine import internals
from kvpool.vllm.engine.adapters import MAX_ADAPTERS, files_state
from kvpool.vllm.plan import AdapterFiles

logger = init_logger("vllm.kvpool")

MIN_AGE_S = 0.05  # a file's times change with a write, but a clock's tick is up to 10 ms long
MIN_AGE_OF_SECONDS_S = 2.0  # of file systems whose times are whole seconds


class AdapterLoads:
    """``files``: by name and path, the state of the files that were loaded; None: of several, or not known."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], bytes | None] = {}
        self._numbers: dict[
            int, tuple[str, str]
        ] = {}  # by vLLM's number of an adapter: what it stands for now
        self._all_known = internals.watch_adapter_loads(self)  # what is not in ``_files`` is not loaded
        self._said = False

    def has(self, adapter: AdapterFiles) -> bool:
        """Whether what is computed for this adapter is of these files."""
        is_same = (
            self._files.get(adapter.key) == adapter.state and self._numbers.get(adapter.number) == adapter.key
        )
        return is_same and self._is_shown()

    def may_have(self, adapter: AdapterFiles) -> bool:
        """Whether it is, or vLLM loads it when it is first computed for."""
        known = adapter.key in self._files or adapter.number in self._numbers
        return self.has(adapter) if known else self._all_known and self._is_shown()

    def _is_shown(self) -> bool:
        shown = internals.shows_adapter_loads()
        if not (shown or self._said):
            self._said = True
            logger.warning(
                "kvpool: adapters go without the pool, for code from outside vLLM loads them here: no files say what "
                "their weights are"
            )
        return shown

    def begins(self, name: str, path: str) -> bytes | None:
        """vLLM is about to load an adapter: the state of its files, for ``ended``. Waits for at most ``MIN_AGE_S``."""
        try:
            return _settled_state(Path(path).expanduser())
        except Exception as error:  # never reaches the engine
            logger.info("kvpool: the files of adapter %s cannot be looked at: %s", name, error)
            return None

    def ended(self, number: int, name: str, path: str, before: bytes | None) -> None:
        """vLLM has loaded it."""
        key = (name, path)
        after = None
        if before is not None:
            try:
                after, _ = files_state(Path(path).expanduser())
            except Exception as error:  # they are gone, or being replaced
                logger.info("kvpool: adapter %s: %s", name, error)
        state = before if before == after else None
        other = self._numbers.get(number, key)
        if other != key:  # in place of another one, which has requests yet
            self._files[other] = None
        if key in self._files or len(self._files) < MAX_ADAPTERS:
            self._files[key] = state if self._files.get(key, state) == state else None
            self._numbers[number] = key
        else:
            self._all_known = False


def _settled_state(path: Path, sleep: Callable[[float], Any] = time.sleep) -> bytes | None:
    """The state of files that are old enough for a later write to show; None: they are too new."""
    for _ in range(2):
        state, changed_ns = files_state(path)
        least_s = MIN_AGE_S if changed_ns % 1_000_000_000 else MIN_AGE_OF_SECONDS_S
        age_s = (time.time_ns() - changed_ns) / 1e9
        if age_s >= least_s:
            return state
        sleep(min(MIN_AGE_S, max(0.0, least_s - age_s)))
    return None
