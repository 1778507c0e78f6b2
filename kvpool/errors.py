"""The one error tree: everything that kvpool raises on purpose derives from ``KVPoolError``."""

from __future__ import annotations


class KVPoolError(Exception):
    """Base of all errors raised by kvpool; its text is one line that says what to do next."""


class ConfigError(KVPoolError, ValueError):
    """A setting, URL, key or argument is wrong; nothing was started and nothing was changed."""


class EngineRefused(ConfigError):
    """The inference engine is configured in a way that kvpool does not support; names the setting."""


class StoreUnavailable(KVPoolError):
    """The store could not answer in time or at all; a caller treats every key of the batch as a miss."""


class AnnouncementsRefused(StoreUnavailable):
    """The server answers, but not about these announcements: no right, keys of another kind, or far too many bytes.

    Others of the same server may be read and written.
    """


class RepliesTooLarge(StoreUnavailable):
    """A server says more than its caller takes; the rest was not read. What others keep there may be read."""


class StoreClosed(StoreUnavailable):
    """The store was closed by this process; no further call on it will succeed."""


class MalformedEvents(KVPoolError, ValueError):
    """A batch of KV events is not what an engine sends; nothing of it was applied. Names the byte."""


class SnapshotRefused(KVPoolError, ValueError):
    """A snapshot of an index is damaged, too old, or of another version; the index starts without it."""


class IndexUnavailable(KVPoolError):
    """The index could not answer in time or at all; a router goes on without it. Says which and what to do."""


class AccessDenied(IndexUnavailable):
    """The index does not let this caller in: no token, a wrong one, or one without the right for this tenant."""


class UnknownModel(KVPoolError, LookupError):
    """The index knows no worker of this model and tenant, or cannot hash tokens as any of them does."""
