"""A store on a server through Valkey GLIDE (valkey-glide-sync), for what the native client does not have.

GLIDE reconnects by itself, and makes a request wait for that until its timeout, without a word of why. So a link that
failed is asked for with redis-py first: a server that is away, or refuses us, is a fault at once, with its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.stores.blocking import BlockingStore, Command, Link, LinkFault, LinkRefused, Refusal
from kvpool.stores.redis import RedisLink
from kvpool.stores.url import StoreURL

if TYPE_CHECKING:
    import glide_sync

# Pauses between GLIDE's own dials: up to 10 ms * 2^6.
_RETRIES, _FACTOR_MS, _BASE = 6, 10, 2


class GlideStore(BlockingStore):
    """``valkey://host:6379?client=glide``: what ``ValkeyStore`` keeps, moved by Valkey GLIDE.

    Errors: ``ConfigError`` where it is not installed, too.
    """

    def __init__(self, url: StoreURL) -> None:
        try:
            import glide_sync
        except ImportError as error:
            raise ConfigError(
                "client=glide needs Valkey GLIDE, which is not installed: pip install 'kvpool[glide]'"
            ) from error
        glide_sync.Logger.init(glide_sync.LogLevel.ERROR)  # unless the program has set it up already
        super().__init__(url)

    def _link(self) -> Link:
        return _GlideLink(self._url)


class _GlideLink:
    def __init__(self, url: StoreURL) -> None:
        self._url = url
        self._client: glide_sync.GlideClient | None = None

    def dial(self, timeout_s: float) -> None:
        asking = RedisLink(self._url)
        asking.dial(timeout_s)
        asking.close()
        if self._client is None:
            self._client = _client(self._url, timeout_s)

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
        except glide_sync.ClosingError as error:
            self.close()
            raise LinkFault(str(error)) from error
        except glide_sync.GlideError as error:
            raise LinkFault(str(error)) from error
        return [
            Refusal(reply) if isinstance(reply, glide_sync.RequestError) else reply for reply in replies or ()
        ]

    def drop(self) -> None:
        pass  # late replies are GLIDE's to throw away, and the next connection is its to make

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _client(url: StoreURL, timeout_s: float) -> glide_sync.GlideClient:
    import glide_sync

    timeout_ms = max(1, int(timeout_s * 1e3))
    configuration = glide_sync.GlideClientConfiguration(
        [glide_sync.NodeAddress(url.host, url.port)],
        credentials=glide_sync.ServerCredentials(url.password, url.user or None) if url.password else None,
        database_id=url.database or None,
        protocol=glide_sync.ProtocolVersion.RESP2,
        request_timeout=timeout_ms,
        reconnect_strategy=glide_sync.BackoffStrategy(_RETRIES, _FACTOR_MS, _BASE),
        advanced_config=glide_sync.AdvancedGlideClientConfiguration(connection_timeout=timeout_ms),
    )
    try:
        return glide_sync.GlideClient.create(configuration)
    except glide_sync.GlideError as error:
        words = str(error).strip()
        if "permission" in words.lower():
            raise LinkRefused(f"{words} (GLIDE needs +info)") from error
        raise LinkFault(words) from error
