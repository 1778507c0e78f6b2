"""``Answer``: of a worker to one request, as its bytes come: whether it has begun, and what it tells of its engine.

``denies_model``: of its answer with status 404. Pure.
"""

from __future__ import annotations

import re

EVENTS = "text/event-stream"

# Comments keep a connection alive while a prompt waits (vLLM's --sse-keep-alive-interval): they are no answer.
_COMMENT = b":"
_TOLD = re.compile(rb"(?:\A|[\r\n])[^:\r\n]")  # a line that is no comment, and not blank

# How vLLM tells an error after a stream's status (vllm/entrypoints/generate/base/serving.py; of /v1/messages
# vllm/entrypoints/anthropic/serving.py, whose error has no code); its end is a good one.
_FAULT = re.compile(
    rb'(?:\A|\n)(?:data: \{"error"|event: error\n)[^\n]*'
)  # text within JSON has no such lines
_END_OF_EVENT = b"\n\n"
MAX_FAULT_NBYTES = 4096  # of an event that is read in parts, from its begin on
_OF_ENGINE = re.compile(rb'"code": ?5\d\d|"type": ?"(?:InternalServerError|internal_error)"')

# vllm/entrypoints/serve/engine/serving.py. Whole: an answer may repeat a caller's words, but not its quotes.
_NO_MODEL = re.compile(rb'"message"\s*:\s*"The model `[^`]{0,8192}` does not exist')


class Answer:
    """``media``: its content type. ``has_begun``: more has come than comments and blank lines of an event stream."""

    def __init__(self, status: int, media: str) -> None:
        self._is_good = status // 100 == 2
        self._has_events = media.partition(";")[0].strip().lower() == EVENTS
        self._is_amid = False  # in a comment
        self._event = b""  # what has come of one
        self._fault: re.Match[bytes] | None = None
        self.has_begun = False

    def read(self, part: bytes) -> None:
        """The next bytes."""
        if not self.has_begun:
            self.has_begun = bool(part) and (not self._has_events or self._tells(part))
        if self._has_events and self._fault is None:
            whole, end, rest = (self._event + part).rpartition(_END_OF_EVENT)
            self._fault = _FAULT.search(whole) if end else None
            self._event = rest[:MAX_FAULT_NBYTES]

    def served(self, *, is_broken: bool) -> bool | None:
        """At its end, or where it breaks off: False: the engine has failed. None: nobody knows."""
        fault = self._fault or _FAULT.search(self._event)
        if is_broken or (fault and _OF_ENGINE.search(fault[0])):
            return False
        return True if self._is_good and self.has_begun and not fault else None

    def _tells(self, part: bytes) -> bool:
        lines = _COMMENT + part if self._is_amid else part
        self._is_amid = not lines.endswith((b"\r", b"\n"))
        return _TOLD.search(lines) is not None


def denies_model(body: bytes) -> bool:
    """Of an answer with status 404: whether it is for the request's model, not for its path or response."""
    return _NO_MODEL.search(body) is not None
