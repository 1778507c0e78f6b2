"""A link through redis-py: where the native client cannot be used, and for comparison.

redis-py's own packer copies large values; its pure-Python one, always used, sends a memoryview as is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.connection import PythonRespSerializer

from kvpool.store.clients.link import Command, ErrorReply, LinkEnded, LinkFault, LinkRefused, LinkSilent
from kvpool.store.server.connection import HUNG_UP, Bounded, deadline
from kvpool.store.server.replies import words_of
from kvpool.store.url import StoreURL

MAX_STEP_S = 60.0  # each call has a shorter deadline of its own
PACKER_CUTOFF_NBYTES = 6000  # shorter parts are joined before sending, as in redis-py


class RedisLink:
    """One redis-py connection; see ``Link``."""

    def __init__(self, url: StoreURL) -> None:
        self._url = url
        self._connection: Any = None  # redis-py's connections have no types

    def dial(self, timeout_s: float) -> None:
        try:
            with deadline(timeout_s):
                if self._connection is None:
                    packer = PythonRespSerializer(PACKER_CUTOFF_NBYTES, _encoded)
                    self._connection = Bounded(
                        url=self._url, role="values", step_s=MAX_STEP_S, protocol=2, command_packer=packer
                    )
                    self._connection.connect()
                self._exchange([(b"PING",)])
        except redis.AuthenticationError as error:
            self.drop()
            raise LinkRefused(f"AUTH: {_words(error)}") from _alone(error)
        except redis.ResponseError as error:
            self.drop()
            is_ours = type(error) in (redis.ResponseError, redis.exceptions.NoPermissionError)
            raise (LinkRefused if is_ours else LinkFault)(_words(error)) from _alone(error)
        except (redis.RedisError, OSError) as error:
            self.drop()
            raise LinkFault(_words(error)) from _alone(error)
        except BaseException:
            self.drop()
            raise

    def is_stale(self) -> bool:
        try:
            return bool(self._connection.can_read(0))
        except redis.RedisError:
            return True

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        assert self._connection is not None
        link = self._connection.socket
        try:
            with deadline(timeout_s):
                return self._exchange(commands)
        except (redis.TimeoutError, TimeoutError) as error:
            # While bytes move, the server is slow but not silent.
            is_silent = time.monotonic() - link.moved_s >= timeout_s / 2
            raise (LinkSilent if is_silent else LinkFault)(_words(error)) from _alone(error)
        except (redis.ConnectionError, OSError) as error:
            words = _words(error)
            raise LinkEnded(words, words.endswith(HUNG_UP)) from _alone(error)
        except redis.RedisError as error:
            raise LinkFault(_words(error)) from _alone(error)

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
        self._connection = None

    close = drop

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """``exchange`` with redis-py's errors."""
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        return [_reply(connection) for _ in commands]


def _reply(connection: Any) -> Any:
    try:
        reply = connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        return ErrorReply(_words(error))
    if isinstance(reply, list):  # EXEC's list may hold errors
        return [ErrorReply(_words(one)) if isinstance(one, redis.ResponseError) else one for one in reply]
    return reply


def _alone(error: Exception) -> Exception:
    """Strip tracebacks: redis-py keeps some errors in cycles with its frames, and so callers' buffers."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
    return error


def _words(error: redis.RedisError | OSError) -> str:
    """The server's words, or the system's."""
    return words_of(error).strip() or type(error).__name__


def _encoded(value: object) -> bytes | memoryview:
    if isinstance(value, (bytes, memoryview)):
        return value
    return str(value).encode()
