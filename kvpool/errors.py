"""The error tree: every deliberate error of kvpool derives from ``KVPoolError``."""

from __future__ import annotations

# With "default_properties = fips=yes" and no provider that has it.
NO_PROVIDER = (
    "OpenSSL's configuration wants a provider that is not active, as for FIPS: activate it in the file that "
    "OPENSSL_CONF names, or name another file for this process"
)


class KVPoolError(Exception):
    """Base of all errors; its text is one line that says what to do next."""


class ConfigError(KVPoolError, ValueError):
    """A setting, URL, key or argument is wrong; nothing was started or changed."""


class EngineRefused(ConfigError):
    """kvpool does not support the engine's configuration; names the setting."""


class StoreUnavailable(KVPoolError):
    """The store did not answer in time; a caller treats every key of the batch as a miss."""


class AnnouncementsRefused(StoreUnavailable):
    """The server answers, but not for these announcements: no right, foreign types, or too many bytes.

    Other announcements on the server stay usable.
    """


class RepliesTooLarge(StoreUnavailable):
    """A server's reply exceeds the limit and was not read to its end. Other data there stays readable."""


class NoThread(StoreUnavailable):
    """The system starts no further thread for this process; what the thread was for did not begin."""


class StoreClosed(StoreUnavailable):
    """This process closed the store; every further call fails."""


class MalformedEvents(KVPoolError, ValueError):
    """A batch of KV events is malformed and was not applied. Names the byte."""


class SnapshotRefused(KVPoolError, ValueError):
    """An index snapshot is damaged, too old, or of another version; the index starts without it."""


class IndexUnavailable(KVPoolError):
    """The index did not answer in time; a router continues without it. Says which index and what to do."""


class AccessDenied(IndexUnavailable):
    """The index rejects this caller: a missing or wrong token, or no right for this tenant."""


class UnknownModel(KVPoolError, LookupError):
    """The index has no worker of this model and tenant, or cannot hash as its workers do."""
