"""``StoredResponses``: which worker keeps a response of ``/v1/responses``, as only that one can continue, show or
cancel it. Learnt from the workers' own answers. One event loop.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec

RESPONSES = "/v1/responses"
MAX_STORED = 65536  # responses of all tenants, then the oldest is forgotten
SEARCHED_NBYTES = 64 << 10  # of an answer, or of one part of a stream
_ID = rb"(resp_[\w-]{1,128})"  # vllm/entrypoints/openai/responses/protocol.py
_ANSWERED = re.compile(rb'"id"\s*:\s*"' + _ID + rb'"')
_AT_PATH = re.compile(RESPONSES.encode() + b"/" + _ID + rb"(?:/|$)")


class _Named(msgspec.Struct):
    previous_response_id: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


def is_of_responses(path: str) -> bool:
    """``path``: of ``engine_path``."""
    return path == RESPONSES or path.startswith(RESPONSES + "/")


class StoredResponses:
    """``_workers``: names by tenant and response."""

    def __init__(self) -> None:
        self._workers: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def learn(self, tenant: str, worker: str, answered: bytes) -> bool:
        """From the beginning of a good answer; False: it names no response. The first to name one keeps it."""
        found = _ANSWERED.search(answered, 0, SEARCHED_NBYTES)
        if found is None:
            return False
        self._workers.setdefault((tenant, found[1]), worker)
        if len(self._workers) > MAX_STORED:
            self._workers.popitem(last=False)
        return True

    def worker(self, tenant: str, path: str, body: bytes) -> str | None:
        """That keeps what the request names; None: it names none, or an unknown one."""
        if not is_of_responses(path):
            return None
        if found := _AT_PATH.match(path.encode(errors="replace")):
            return self._workers.get((tenant, found[1]))
        try:
            named = _NAMED.decode(body).previous_response_id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return self._workers.get((tenant, named.encode())) if named else None
