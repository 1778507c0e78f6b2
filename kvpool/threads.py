"""``start_thread``: starts a thread, or says which limit this process has reached."""

from __future__ import annotations

import threading

from kvpool.errors import NoThread

NO_THREAD = "no thread could be started"
ADVICE = "raise the limit of processes and threads (ulimit -u, pids of the container), or of memory"


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``. Errors: ``NoThread``; it may be started again later."""
    try:
        thread.start()
    except RuntimeError as error:
        if "can't start" not in str(error):
            raise
        raise NoThread(f"{NO_THREAD} ({thread.name}); {ADVICE}") from error
