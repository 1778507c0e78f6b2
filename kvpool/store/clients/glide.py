"""A link through Valkey GLIDE (valkey-glide-sync), for features that the native client lacks.

GLIDE reconnects silently and holds requests meanwhile; it keeps silent connections. So a failed client is
closed, and redis-py asks the server before the next is made: an absent server is a fault at once, in its
words. Each client leaves a hook for forks behind (2 KB): one a failure. Clients connect lazily, so in a child
the hook of a living one dials nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.store.clients.link import Command, ErrorReply, LinkEnded, LinkFault, LinkRefused, LinkSilent
from kvpool.store.clients.redis import RedisLink
from kvpool.store.server.connection import introduction
from kvpool.store.server.replies import first_word
from kvpool.store.tls import MAX_PEM_NBYTES, Tls
from kvpool.store.url import StoreURL
from kvpool.text import with_extra

if TYPE_CHECKING:
    import glide_sync

# GLIDE replaces the first word of error replies that it classifies, and puts a colon behind others.
_KIND = re.compile(
    r"(?:Standalone connect failed - IoError: )?(?:Received error for address `[^`]*`: )?"
    r"(?:An error was signalled by the server: - )?([A-Za-z]+): "
)
_WORDS = {
    "Ask": "ASK", "BusyLoadingError": "LOADING", "ClusterDown": "CLUSTERDOWN", "ExecAbortError": "EXECABORT",
    "MasterDown": "MASTERDOWN", "Moved": "MOVED", "PermissionDenied": "NOPERM", "ReadOnly": "READONLY",
    "ResponseError": "ERR", "TryAgain": "TRYAGAIN",
}  # fmt: skip

# Pauses between GLIDE's own dials: up to 10 ms * 2^6.
_RETRIES, _FACTOR_MS, _BASE = 6, 10, 2


class GlideLink:
    """One GLIDE client; see ``Link``. Errors: ``ConfigError`` where GLIDE is not installed."""

    def __init__(self, url: StoreURL) -> None:
        try:
            import glide_sync
        except ImportError as error:
            raise ConfigError(
                f"client=glide needs Valkey GLIDE, which is not installed: {with_extra('glide')}"
            ) from error
        glide_sync.Logger.init(glide_sync.LogLevel.ERROR)  # unless the program has configured it
        self._url = url
        self._client: glide_sync.GlideClient | None = None

    def dial(self, timeout_s: float) -> None:
        asking = RedisLink(self._url)
        asking.dial(timeout_s)
        asking.close()
        if self._client is not None:
            with contextlib.suppress(LinkFault):
                if self.exchange([(b"PING",)], timeout_s) == [b"PONG"]:
                    return
            self.drop()
        self._client = _client(self._url, timeout_s)
        try:
            self._connect(timeout_s)
        except BaseException:
            self.drop()
            raise
        # GLIDE's own setting fails for users without the right. Its own redials have no name.
        with contextlib.suppress(LinkFault):
            self.exchange(
                [tuple(map(str.encode, words)) for words in introduction(self._url, "values")], timeout_s
            )

    def _connect(self, timeout_s: float) -> None:
        try:
            (reply,) = self.exchange([(b"PING",)], timeout_s)
        except LinkFault as error:
            if first_word(str(error)) == "NOPERM":
                raise LinkRefused(f"{error} (GLIDE needs +info)") from error
            raise
        if isinstance(reply, ErrorReply):
            raise LinkRefused(reply)

    def is_stale(self) -> bool:
        return False  # GLIDE watches its connection

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        import glide_sync

        assert self._client is not None
        batch = glide_sync.Batch(is_atomic=False)
        for command in commands:
            batch.custom_command(list(command))
        options = glide_sync.BatchOptions(timeout=max(1, int(timeout_s * 1e3)))
        try:
            replies = self._client.exec(batch, raise_on_error=False, options=options)
        except glide_sync.TimeoutError as error:
            raise LinkSilent(_words(error)) from error
        except (glide_sync.ConnectionError, glide_sync.ClosingError) as error:
            raise LinkEnded(_words(error)) from error
        except glide_sync.GlideError as error:
            raise LinkFault(_words(error)) from error
        return [_reply(reply) for reply in replies or ()]

    def drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    close = drop


def _client(url: StoreURL, timeout_s: float) -> glide_sync.GlideClient:
    import glide_sync

    timeout_ms = max(1, int(timeout_s * 1e3))
    password = url.password_now()
    at = (
        glide_sync.NodeAddress(unix_socket_path=url.path)
        if url.path
        else glide_sync.NodeAddress(url.host, url.port)
    )
    configuration = glide_sync.GlideClientConfiguration(
        [at],
        credentials=glide_sync.ServerCredentials(password, url.user or None) if password else None,
        database_id=url.database or None,
        protocol=glide_sync.ProtocolVersion.RESP2,
        request_timeout=timeout_ms,
        reconnect_strategy=glide_sync.BackoffStrategy(_RETRIES, _FACTOR_MS, _BASE),
        use_tls=url.tls is not None,
        lazy_connect=True,
        advanced_config=glide_sync.AdvancedGlideClientConfiguration(
            connection_timeout=timeout_ms, tls_config=_tls(url.tls) if url.tls is not None else None
        ),
    )
    return glide_sync.GlideClient.create(configuration)


def _tls(tls: Tls) -> glide_sync.TlsAdvancedConfiguration:
    import glide_sync

    def contents(path: str) -> bytes | None:
        return read_file(path, MAX_PEM_NBYTES) if path else None

    try:
        return glide_sync.TlsAdvancedConfiguration(
            root_pem_cacerts=contents(tls.ca),
            client_cert_pem=contents(tls.cert),
            client_key_pem=contents(tls.key),
        )
    except OSError as error:
        raise LinkFault(f"{error.filename}: {error.strerror}") from error


def _reply(reply: Any) -> Any:
    import glide_sync

    if isinstance(reply, list):  # EXEC's may hold errors
        return [_reply(one) for one in reply]
    return ErrorReply(_words(reply)) if isinstance(reply, glide_sync.RequestError) else reply


def _words(error: Exception) -> str:
    """The server's words with their first word, or GLIDE's."""
    text = str(error).strip()
    kind = _KIND.match(text)
    word = _WORDS.get(kind[1], kind[1] if kind[1].isupper() else "") if kind is not None else ""
    return f"{word} {text[kind.end() :]}" if kind is not None and word else text
