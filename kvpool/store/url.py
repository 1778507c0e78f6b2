"""A store's URL, parsed and checked once.

Over 400 lines because each part of a URL has its check and its sentence here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.store.tls import Tls
from kvpool.text import format_nbytes, parse_nbytes, redact, unknown

TLS_SCHEMES = ("rediss", "valkeys")
MANY_SERVERS = ("valkey+cluster", "valkey+sentinel")
SERVER_SCHEMES = ("redis", "valkey", "valkey+unix", *TLS_SCHEMES, *MANY_SERVERS)
SCHEMES = ("file", *SERVER_SCHEMES)
AVAILABLE = "file:///dir, valkey://host:6379, valkeys://host:6379 or valkey+unix:///socket"
MIN_CAPACITY_NBYTES = _native.MIN_CAPACITY_NBYTES
DEFAULT_FILE_CAPACITY = "10GiB"
DEFAULT_THREADS = 2
MAX_THREADS = 64
DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
MAX_NODES = 64
DEFAULT_TTL_S = 86400
CLIENTS = ("native", "glide", "redis")
FAR = ("all", "reused")
MAX_TTL_S = 366 * 86400
MAX_DATABASE = 65535
MAX_URL_CHARS = 4096
MAX_PASSWORD_NBYTES = 4096

_SYSTEM_DIRECTORIES = frozenset({
    "/", "/bin", "/boot", "/dev", "/dev/shm", "/etc", "/home", "/lib", "/lib64", "/proc", "/root",  # noqa: S108
    "/run", "/run/user", "/sbin", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local",  # noqa: S108
    "/usr/share", "/var", "/var/cache", "/var/lib", "/var/log", "/var/run", "/var/tmp",  # noqa: S108
})  # fmt: skip

_URL = re.compile(
    r"(?P<scheme>[^:/?#]*)://(?P<host>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?", re.DOTALL
)
_OF_SERVERS, _OF_TLS = ("client", "connections", "password_file", "ttl"), ("ca", "cert", "key")
_OF_SENTINELS = ("sentinel_password", "sentinel_password_file", "sentinel_user")
_PARAMETERS = {
    "file": ("capacity", "far", "threads"),
    "valkey+unix": ("db", *_OF_SERVERS),
    **dict.fromkeys(("redis", "valkey"), _OF_SERVERS),
    **dict.fromkeys(TLS_SCHEMES, (*_OF_SERVERS, *_OF_TLS)),
    "valkey+cluster": ("tls", *_OF_SERVERS, *_OF_TLS),
    "valkey+sentinel": (*_OF_SENTINELS, "tls", *_OF_SERVERS, *_OF_TLS),
}
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?"
)
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,253}")
_PLAIN = re.compile(r"[A-Za-z0-9.+_/-]{0,30}")
_DURATION = re.compile(r"([0-9]{1,9})([smhd]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class StoreURL:
    """The parts of a store URL.

    ``path``: absolute directory of a file store. ``capacity_nbytes``: the limit of a directory that has none yet, 0
    where the server decides; ``says_capacity``: it stands in the URL. ``threads``: native threads that move bytes, 1
    to 64, each with its own connection to each server. ``host``, ``port``: of a server; empty and 0 with a Unix
    socket, which is ``path``. ``nodes``: (host, port) of a cluster's nodes, or of the sentinels of ``service``.
    ``password``, ``sentinel_password``: not in ``repr``; in place of each, a file that is read at each dial.
    ``ttl_s``: a value's life on a server. ``client``: of ``CLIENTS``. ``opened_by``: names the connections; not in a
    URL. ``tls``: None: in plain. ``near``: the directory that is asked before this pool. ``far``: of ``FAR``, in a
    near one: what goes on to the far pool; empty: all.
    """

    scheme: str
    path: str = ""
    capacity_nbytes: int = 0
    threads: int = DEFAULT_THREADS
    host: str = ""
    port: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    ttl_s: int = 0
    client: str = CLIENTS[0]
    tls: Tls | None = None
    nodes: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)
    opened_by: str = ""
    password_file: str = ""
    sentinel_password_file: str = ""
    near: StoreURL | None = None
    far: str = ""
    says_capacity: bool = field(default=False, compare=False)

    @property
    def servers(self) -> tuple[str, ...]:
        """The URL's servers, as ``host:port`` each, or the path of a directory or socket."""
        if self.path:
            return (self.path,)
        nodes = self.nodes or ((self.host, self.port),)
        return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in nodes)

    def pools(self) -> list[StoreURL]:
        """Each pool by itself: the near one first, where there is one."""
        return [self] if self.near is None else [self.near, replace(self, near=None)]

    def password_now(self) -> str:
        """The password of a dial; reads its file. Errors: ``ConfigError``."""
        if not self.password_file:
            return self.password
        try:
            text = read_file(self.password_file, MAX_PASSWORD_NBYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"{self.password_file}: the password cannot be read: {error.strerror}"
            ) from error
        password = text.rstrip(b"\r\n").decode(errors="replace")
        if not password or len(text) > MAX_PASSWORD_NBYTES or "\ufffd" in password:
            raise ConfigError(f"{self.password_file}: it holds no password: one line of UTF-8")
        return password

    @classmethod
    def parse(cls, url: str) -> StoreURL:
        """Parse one of these::

            file:///dir[?capacity=10GiB][&threads=2]
            valkey://[[user]:password@]host[:6379][/db][?ttl=1d][&connections=2][&client=native]
            valkeys://...[&ca=/path.pem][&cert=/path.pem&key=/path.pem]
            valkey://[user@]host?password_file=/path
            valkey+unix://[[user]:password@]/socket[?db=0]
            valkey+cluster://[[user]:password@]host[:6379],...
            valkey+sentinel://[[user]:password@]host[:26379],.../service[/db][?sentinel_user=..&sentinel_password=..]

        ``redis`` and ``rediss`` are synonyms. Clusters and sentinels take ``tls=true`` with the files of TLS.

        Two with a space between them are a near pool, which is a directory, and the far pool behind it::

            file:///dir[?capacity=10GiB][&far=reused] valkey://host

        Errors: ``ConfigError`` that says what to write instead, and never shows a password.
        """
        if isinstance(url, str) and " " in url and url.count("://") > 1 and len(url) <= 2 * MAX_URL_CHARS:
            return cls._near_and_far(url.split())
        if (found := cls._one(url)).far:
            change = "write it in the first URL of two, or leave it away"
            raise ConfigError(f"{redact(url)}: far= says what a near pool sends on to a far one; {change}")
        return found

    @classmethod
    def _one(cls, url: str) -> StoreURL:
        match = _URL.fullmatch(url) if isinstance(url, str) and len(url) <= MAX_URL_CHARS else None
        if match is None or not url.isprintable():
            raise ConfigError(
                f"{_shown(url)} is not a store URL: {_meant(url)}write {AVAILABLE}; percent-encode spaces, # and ?"
            )
        scheme = match["scheme"]
        if scheme == "memory":
            raise ConfigError(
                "memory:// is no pool; write file:///dev/shm/kvpool?capacity=SIZE, a size for which /dev/shm has room"
            )
        if scheme not in SCHEMES:
            raise ConfigError(f"{redact(url)}: {_unknown('store', scheme, SCHEMES)}")
        query = _query(url, match["query"] or "", _PARAMETERS[scheme])
        if scheme in SERVER_SCHEMES:
            server = _server(url, scheme, match["host"], match["path"], query)
            return replace(server, password_file=query.get("password_file", ""))
        if match["host"] or not match["path"]:
            is_plain = match["host"] and "@" not in match["host"] + match["path"]
            wanted = f"/{match['host']}{match['path']}" if is_plain else "/absolute/path"
            raise ConfigError(
                f"{redact(url)}: a directory is written file:///absolute/path, with three slashes; "
                f"perhaps file://{wanted}"
            )
        path = _decoded(url, "a directory's name", match["path"])
        _check_own_directory(url, path)
        capacity_nbytes = _capacity(url, query)
        if (far := query.get("far", "")) not in ("", *FAR):
            raise ConfigError(f"{redact(url)}: {_unknown('choice of far', far, FAR)}")
        return cls(
            scheme=scheme,
            path=path,
            capacity_nbytes=capacity_nbytes,
            says_capacity="capacity" in query,
            threads=_threads(url, query, "threads"),
            far=far,
        )

    @classmethod
    def _near_and_far(cls, urls: Sequence[str]) -> StoreURL:
        if len(urls) != 2:
            raise ConfigError(f"{redact(' '.join(urls))}: a pool is one URL, or two: near, a space, far")
        near, far = cls._one(urls[0]), cls.parse(urls[1])
        if near.scheme != "file":
            raise ConfigError(f"{redact(urls[0])}: a near pool is a directory of the host: file:///dir")
        if far.client != CLIENTS[0]:
            raise ConfigError(
                f"{redact(urls[1])}: behind a near pool only the native client serves; leave client away"
            )
        if far.scheme == "file" and posixpath.normpath(near.path) == posixpath.normpath(far.path):
            raise ConfigError(f"{redact(urls[1])}: the near pool and the far one are the same directory")
        return replace(far, near=near)


def _check_own_directory(url: str, path: str) -> None:
    """Refuse the system's own directories by name, full or empty, because a pool writes and deletes."""
    place = posixpath.normpath("/" + path.lstrip("/"))
    if place in _SYSTEM_DIRECTORIES or place.startswith(("/proc/", "/sys/")):
        raise ConfigError(
            f"{redact(url)}: {place} is the system's; name a directory of the pool's own, such as "
            f"file://{'' if place == '/' or place.startswith(('/proc', '/sys')) else place}/kvpool"
        )


def check_threads(threads: int) -> int:
    """Return ``threads`` if it is 1 to 64. Errors: ``ConfigError``."""
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads is a whole number from 1 to {MAX_THREADS}, not {threads!r}")
    return threads


def _shown(url: object) -> str:
    if not isinstance(url, str):
        return f"a {type(url).__name__}"
    return repr(redact(url)) if len(url) <= MAX_URL_CHARS else f"text of {len(url)} characters"


def _meant(url: object) -> str:
    """The question whether only the scheme is missing, for the middle of a line."""
    if not isinstance(url, str) or len(url) > MAX_URL_CHARS:
        return ""
    host = _HOST.fullmatch(url)
    if host and not url.isdecimal() and int(host["port"] or DEFAULT_PORT) <= 65535:
        return f"did you mean valkey://{url}? Else "
    return f"did you mean file://{url}? Else " if re.fullmatch(r"(/[\w.-]+)+", url, re.ASCII) else ""


def _query(url: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    query: dict[str, str] = {}
    for part in filter(None, text.split("&")):
        name, _, value = part.partition("=")
        if not value and name not in known:  # perhaps a secret in a wrong place
            raise ConfigError(
                f"{redact(url)}: a parameter is written NAME=VALUE; known are {', '.join(sorted(known))}"
            )
        if name not in known:
            raise ConfigError(f"{redact(url)}: {_unknown('parameter', unquote(name), known)}")
        if name in query:
            raise ConfigError(f"{redact(url)}: {name} is given twice")
        query[name] = unquote(value)
    return query


def _capacity(url: str, query: Mapping[str, str]) -> int:
    text = query.get("capacity", DEFAULT_FILE_CAPACITY)
    if not _PLAIN.fullmatch(text):
        raise ConfigError(f"{redact(url)}: capacity is a size, such as 10GiB or 500MB")
    try:
        capacity_nbytes = parse_nbytes(text)
    except ConfigError as error:
        raise ConfigError(f"{redact(url)}: capacity {error}") from error
    if capacity_nbytes < MIN_CAPACITY_NBYTES:
        raise ConfigError(f"{redact(url)}: capacity is at least {format_nbytes(MIN_CAPACITY_NBYTES)}")
    return capacity_nbytes


def _threads(url: str, query: Mapping[str, str], name: str) -> int:
    return _whole(url, query, name, DEFAULT_THREADS, 1, MAX_THREADS)


def _whole(url: str, query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    if name not in query:
        return default
    text = query[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        raise ConfigError(
            f"{redact(url)}: {name} is a whole number from {least} to {most}, not {_plain(text)}"
        )
    return int(text)


def _plain(text: str) -> str:
    """A wrong value as it is, unless it may hold a secret from elsewhere in the URL."""
    return repr(text) if _PLAIN.fullmatch(text) else "what stands there"


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    if _PLAIN.fullmatch(name):
        return unknown(kind, name, known)
    return f"unknown {kind}; known are {', '.join(sorted(known))}"


def _decoded(url: str, what: str, text: str) -> str:
    try:
        decoded = unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{redact(url)}: {what} is UTF-8 text") from error
    if "\0" in decoded:
        raise ConfigError(f"{redact(url)}: {what} cannot hold a zero byte")
    return decoded


def _server(url: str, scheme: str, host: str, path: str, query: Mapping[str, str]) -> StoreURL:
    if "@" in path:
        raise ConfigError(f"{redact(url)}: percent-encode / @ and : in a password")
    userinfo, at, host = host.rpartition("@")
    user, _, password = userinfo.partition(":")
    user, password = _decoded(url, "a user's name", user), _decoded(url, "a password", password)
    password_file = _file(url, query, "password_file")
    if password and password_file:
        raise ConfigError(f"{redact(url)}: the password is given twice; write user@ beside password_file")
    if at and not (password or (user and password_file)):
        raise ConfigError(f"{redact(url)}: write user:password@ or :password@ before the host")
    threads, ttl_s = _threads(url, query, "connections"), _ttl_s(url, query)
    client = query.get("client", CLIENTS[0])
    if client not in CLIENTS:
        raise ConfigError(f"{redact(url)}: {_unknown('client', client, CLIENTS)}")
    common = StoreURL(
        scheme=scheme, user=user, password=password, threads=threads, ttl_s=ttl_s, client=client
    )
    if scheme == "valkey+unix":
        if host or not path.strip("/"):
            raise ConfigError(
                f"{redact(url)}: a socket is written {scheme}:///absolute/path, with three slashes"
            )
        path = _decoded(url, "a socket's path", path)
        database = _whole(url, query, "db", 0, 0, MAX_DATABASE)
        return replace(common, path=path, database=database)
    if scheme in MANY_SERVERS:
        return _many_servers(url, host, path, query, common)
    found = _host(host, DEFAULT_PORT)
    if found is None:
        raise ConfigError(f"{redact(url)}: write {scheme}://host:{DEFAULT_PORT}, with a port from 1 to 65535")
    name, port = found
    database = _database(url, path[1:])
    tls = _tls(url, query) if scheme in TLS_SCHEMES else None
    return replace(common, host=name, port=port, database=database, tls=tls)


def _many_servers(url: str, hosts: str, path: str, query: Mapping[str, str], common: StoreURL) -> StoreURL:
    """A cluster by some of its nodes, or a service by its sentinels."""
    is_cluster = common.scheme == "valkey+cluster"
    port = DEFAULT_PORT if is_cluster else DEFAULT_SENTINEL_PORT
    nodes = [_host(host, port) for host in hosts.split(",")]
    if not all(nodes) or len(nodes) > MAX_NODES:
        shape = f"host:{port},host:{port}" + ("" if is_cluster else "/service")
        raise ConfigError(
            f"{redact(url)}: write {common.scheme}://{shape}, with 1 to {MAX_NODES} hosts and ports from 1 to 65535"
        )
    common = replace(common, nodes=tuple(node for node in nodes if node), tls=_tls_of_many(url, query))
    if is_cluster:
        if path not in ("", "/"):
            raise ConfigError(f"{redact(url)}: in a cluster kvpool uses database 0; leave the path away")
        return common
    service, _, database = path[1:].partition("/")
    if not _SERVICE.fullmatch(service):
        raise ConfigError(
            f"{redact(url)}: name the service that the sentinels watch: {common.scheme}://host:{port}/service"
        )
    user, password = query.get("sentinel_user", ""), query.get("sentinel_password", "")
    password_file = _file(url, query, "sentinel_password_file")
    if password and password_file:
        raise ConfigError(f"{redact(url)}: the sentinels' password is given twice")
    if user and not (password or password_file):
        raise ConfigError(f"{redact(url)}: a sentinel_user needs a sentinel_password")
    return replace(
        common,
        service=service,
        database=_database(url, database),
        sentinel_user=user,
        sentinel_password=password,
        sentinel_password_file=password_file,
    )


def _host(text: str, default_port: int) -> tuple[str, int] | None:
    match = _HOST.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    return (match["v6"] or match["name"], port) if match and 1 <= port <= 65535 else None


def _database(url: str, text: str) -> int:
    return _whole(url, {"a database": text} if text else {}, "a database", 0, 0, MAX_DATABASE)


def _tls_of_many(url: str, query: Mapping[str, str]) -> Tls | None:
    if query.get("tls", "false") not in ("true", "false"):
        raise ConfigError(f"{redact(url)}: tls is true or false, not {_plain(query['tls'])}")
    if query.get("tls") == "true":
        return _tls(url, query)
    if files := sorted({"ca", "cert", "key"} & set(query)):
        raise ConfigError(f"{redact(url)}: {files[0]} is for TLS; add tls=true")
    return None


def _tls(url: str, query: Mapping[str, str]) -> Tls:
    ca, cert, key = (_file(url, query, name, "a PEM file") for name in _OF_TLS)
    if ("cert" in query) != ("key" in query):
        raise ConfigError(f"{redact(url)}: cert and key go together: a certificate and its private key")
    return Tls(ca, cert, key)


def _file(url: str, query: Mapping[str, str], name: str, of: str = "a file") -> str:
    path = query.get(name, "")
    if (name in query and not path.startswith("/")) or "\0" in path:
        raise ConfigError(f"{redact(url)}: {name} is the absolute path of {of}")
    return path


def _ttl_s(url: str, query: Mapping[str, str]) -> int:
    if "ttl" not in query:
        return DEFAULT_TTL_S
    match = _DURATION.fullmatch(query["ttl"])
    ttl_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise ConfigError(f"{redact(url)}: ttl is a time such as 3600s, 12h or 7d, at most 366d")
    return ttl_s
