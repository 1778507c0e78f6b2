"""Connections to an index: ``Access``, the channel, and its errors."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvpool.discovery.worker import PUSH_GONE
from kvpool.errors import AccessDenied, ConfigError, IndexUnavailable, KVPoolError, UnknownModel
from kvpool.index.answer import Lookup
from kvpool.index.client.calls import Answer, Call
from kvpool.index.net.tls import channel_credentials
from kvpool.index.protocol.messages import (
    MAX_REPLY_NBYTES,
    MAX_REQUEST_NBYTES,
    MAX_TOKEN_CHARS,
    REPLIES,
    SERVICE,
    decode_lookup,
)
from kvpool.text import parse_address
from kvpool.v1 import index_pb2 as pb

DEFAULT_TIMEOUT_S = 1.0
MAX_TIMEOUT_S = 3600.0
MAX_DETAIL_CHARS = 300
PICKER = "envoy.service.ext_proc.v3.ExternalProcessor"

OPTIONS = (
    ("grpc.max_send_message_length", MAX_REQUEST_NBYTES),
    ("grpc.max_receive_message_length", MAX_REPLY_NBYTES),
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is not meant for an index next door
    # An index that comes back is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The longest attempt to connect: a busy index takes more than a second.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection that died silently, as by a lost host, is replaced within 30 s; the kernel takes 15 minutes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # of gRPC's own pings, before whose answer it sends no other
)


_OTHER_HOST = "its certificate is not for this host: dial a name or address that it holds"
# gRPC's words for a failed handshake -> the fault, and its remedy. The first match counts.
_TLS_ADVICE = {
    "certificate has expired": "its certificate has expired: renew it",
    "certificate is not yet valid": "its certificate is not yet valid: correct it, or this host's clock",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of no authority in tls_ca: name the one that signed it",
    "Hostname Verification Check failed": _OTHER_HOST,
    "is not in peer certificate": _OTHER_HOST,  # gRPC 1.75
    "WRONG_VERSION_NUMBER": "what listens there speaks no TLS: leave tls_ca out",
    "handshake failed": "the handshake has failed; see that an index serves TLS there",
    "Socket closed": "it was closed at once. If the index serves TLS, name its authority with tls_ca; if it demands a "
    "certificate, add tls_cert and tls_key, of an authority that it trusts and not expired",
}

NOTHING_LISTENS = "nothing listens there"
_START, _CHECK = "; start one: kvpool index --listen ", "; check the address"
# The same for a failed connection.
_WHY = {
    "Connection refused": NOTHING_LISTENS,
    "Domain name not found": "the name of its host is not known",
    "lookup error": "the name of its host cannot be resolved",
    "No route to host": "there is no route to its host",
    "Network is unreachable": "its network cannot be reached",
    "imed out": "its host does not answer",
    "imeout": "its host does not answer",
}

_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{MAX_TOKEN_CHARS}}}")
# grpc.health.v1: each message has one field, so a client needs no package for it.
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse.status = SERVING
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Access:
    """``token``: the bearer token; None: none.

    ``tls_ca``: PEM file of the authorities of the index's certificate; None: no TLS. ``tls_cert``,
    ``tls_key``: of this client, if demanded. Blocking: reads these files. Errors: ``ConfigError``.
    """

    def __init__(
        self, token: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
    ) -> None:
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: a certificate and its private key")
        if tls_cert is not None and tls_ca is None:
            raise ConfigError("tls_cert needs tls_ca: the authority of the index's own certificate")
        self.metadata = () if token is None else (("authorization", f"Bearer {check_token(token)}"),)
        self._credentials = (
            None if tls_ca is None else channel_credentials(tls_ca, tls_cert or "", tls_key or "")
        )

    def open(self, transport: Any, target: str, options: Any) -> Any:
        """A channel to ``HOST:PORT``. ``transport``: the module ``grpc`` or ``grpc.aio``."""
        if self._credentials is None:
            return transport.insecure_channel(target, options=options)
        return transport.secure_channel(target, self._credentials, options=options)


def check_token(token: str) -> str:
    """Errors: ``ConfigError``, which does not show the token."""
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        raise ConfigError(f"a token is 1 to {MAX_TOKEN_CHARS} printable ASCII characters without spaces")
    return token


def _packed(request: Any) -> bytes:
    packed: bytes = request.SerializeToString()
    return packed


def check_target(target: str) -> str:
    """Returns a valid ``HOST:PORT``. Errors: ``ConfigError``."""
    _, port = parse_address(target)
    if port == 0:
        raise ConfigError(f"{target}: port 0 is for listening; write the port that kvpool index has printed")
    return target


def check_timeout_s(timeout_s: float) -> float:
    """Errors: ``ConfigError``."""
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not 0 < timeout_s <= MAX_TIMEOUT_S
    ):
        raise ConfigError(
            f"timeout_s is more than 0 and at most {MAX_TIMEOUT_S:g} seconds, not {timeout_s!r:.40}"
        )
    return timeout_s


def open_calls(channel: Any, access: Access) -> dict[str, Any]:
    """The index's methods by name; for either kind of channel."""
    return {
        name: partial(
            channel.unary_unary(f"/{SERVICE}/{name}", request_serializer=_packed),
            metadata=access.metadata,
        )
        for name in REPLIES
    }


def open_stream(channel: Any, access: Access, method: str = "LookupStream") -> Any:
    """A running call of a method with streams on both sides."""
    call = channel.stream_stream(f"/{SERVICE}/{method}", request_serializer=_packed)
    return call(metadata=access.metadata)


def open_snapshot(channel: Any, access: Access, timeout_s: float) -> Any:
    """The chunks of a ``Snapshot``, as they arrive."""
    call = channel.unary_stream(
        f"/{SERVICE}/Snapshot",
        request_serializer=_packed,
        response_deserializer=pb.SnapshotChunk.FromString,
    )
    return call(pb.SnapshotRequest(), timeout=timeout_s, metadata=access.metadata)


def is_serving(target: str, service: str, access: Access, timeout_s: float) -> bool:
    """Whether the server at ``target`` reports "serving" for ``service`` (empty: itself). Blocking.

    Errors: ``ConfigError``, ``IndexUnavailable``.
    """
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    opened = access.open(grpc, check_target(target), OPTIONS)
    try:
        reply: bytes = opened.unary_unary(_HEALTH_CHECK)(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise error_of(target, timeout_s, error) from error
    finally:
        opened.close()
    return reply == _SERVING


def read(target: str, call: Call[Answer], reply: bytes) -> Answer:
    """The reply's value. Errors: ``IndexUnavailable`` for a malformed reply."""
    try:
        return call.decode(reply)
    except (DecodeError, ValueError) as error:
        raise unreadable(target, call.method, error) from error


def answer(target: str, timeout_s: float, reply: Any) -> Lookup | KVPoolError:
    """The rows of a ``LookupResponse``, or its refusal."""
    if reply.status.code:
        code = _CODES.get(reply.status.code, grpc.StatusCode.INTERNAL)
        return refusal(target, timeout_s, code, reply.status.message)
    try:
        return decode_lookup(reply)
    except ValueError as error:
        return unreadable(target, "Lookup", error)


def unreadable(target: str, method: str, error: Exception) -> KVPoolError:
    return IndexUnavailable(
        f"what {target} replied to {method} is no reply of a kvpool index of this version: {error}"
    )


def closed(target: str) -> KVPoolError:
    return IndexUnavailable(f"this client of the index at {target} was closed")


def no_push() -> KVPoolError:
    """For a caller of an earlier version."""
    return ConfigError(PUSH_GONE)


def late(target: str, timeout_s: float) -> KVPoolError:
    return IndexUnavailable(
        f"the index at {target} did not answer within {timeout_s:g} s: it is busy or stuck, or something else "
        "listens there; allow it more time, or go on without it"
    )


def ended(target: str) -> KVPoolError:
    return IndexUnavailable(f"this stream of lookups to the index at {target} has ended; make another")


def unanswered(target: str, count: int) -> KVPoolError:
    """Too many lookups wait on the stream."""
    return IndexUnavailable(
        f"{count} lookups wait for the index at {target} on this stream; no more are sent"
    )


def without_advice(error: KVPoolError) -> str:
    """An error's text without its "start one", for a caller with its own advice."""
    return str(error).partition(_START)[0].partition(_CHECK)[0]


def _away(target: str, words: str) -> KVPoolError:
    """The index does not answer; the reason in our words, as gRPC's do not help operators."""
    why = next((why for sign, why in _WHY.items() if sign in words), "")
    advice = f"{_START}{target}" if why == NOTHING_LISTENS else _CHECK
    return IndexUnavailable(f"no index answers on {target}{why and ': '}{why}{advice}")


def error_of(target: str, timeout_s: float, error: grpc.RpcError) -> KVPoolError:
    code: Any = error.code()
    return refusal(target, timeout_s, code, error.details() or "")


def refusal(target: str, timeout_s: float, code: grpc.StatusCode, text: str) -> KVPoolError:
    """Maps a status of gRPC's, of a call or of one request on a stream."""
    words = " ".join(text.split())
    detail = words[:MAX_DETAIL_CHARS]
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return ConfigError(detail)
    if code is grpc.StatusCode.NOT_FOUND:
        return UnknownModel(detail)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return late(target, timeout_s)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return IndexUnavailable(f"what listens on {target} is no kvpool index: {detail}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessDenied(f"the index at {target} does not let this client in: {detail}")
    if code is grpc.StatusCode.UNAVAILABLE:
        if "failed to connect" in words:
            for sign, advice in _TLS_ADVICE.items():
                if sign in words:
                    return IndexUnavailable(f"no connection to the index at {target}: {advice}")
        if "http1" in detail or "HTTP" in detail or "SETTINGS" in detail:
            return IndexUnavailable(f"what listens on {target} does not speak gRPC: it is no kvpool index")
        return _away(target, words)
    return IndexUnavailable(f"the index at {target} failed ({code.name}): {detail}")
