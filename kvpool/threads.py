"""``start_thread`` starts a thread, or says which limit this process has reached; ``TurnThread`` takes turns on one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from kvpool.errors import NoThread

NO_THREAD = "no thread could be started"
ADVICE = "raise the limit of processes and threads (ulimit -u, pids of the container), or of memory"
CLOSE_S = 5.0


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``. Errors: ``NoThread``; it may be started again later."""
    try:
        thread.start()
    except RuntimeError as error:
        if "can't start" not in str(error):
            raise
        raise NoThread(f"{NO_THREAD} ({thread.name}); {ADVICE}") from error


class TurnThread(ABC):
    """A thread that calls ``_turn`` until closed. Start it with ``start_thread(self._thread)``.

    ``_woken``: any thread sets it to begin the next turn.
    """

    def __init__(self, name: str) -> None:
        self._closing = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self) -> None:
        """End the thread after ``_end``; blocks for at most ``CLOSE_S`` seconds. Idempotent."""
        self._closing = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing:
            self._woken.clear()
            if not self._closing:
                wait_s = self._turn()
                if not self._closing:  # the turn may have waited, and cleared the event
                    self._woken.wait(wait_s)
        self._end()

    @abstractmethod
    def _turn(self) -> float:
        """Take a turn; the seconds until the next one."""

    @abstractmethod
    def _end(self) -> None:
        """The last turn."""
