from __future__ import annotations

from typing import Any

import pytest

from kvpool import open_store
from kvpool.errors import ConfigError
from kvpool.store.tls import Tls
from kvpool.store.url import StoreURL
from kvpool.text import far_url, joined_urls

GIB = 1 << 30


def of_files(path: str, capacity_nbytes: int = 10 * GIB, threads: int = 2) -> StoreURL:
    return StoreURL(scheme="file", path=path, capacity_nbytes=capacity_nbytes, threads=threads)


def on_server(scheme: str, host: str = "", port: int | None = None, **more: Any) -> StoreURL:
    """One that keeps values for a day, on the usual port of its host."""
    if port is None:
        port = 6379 if host else 0
    return StoreURL(scheme=scheme, host=host, port=port, **{"ttl_s": 86400, **more})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///var/kv", of_files("/var/kv")),
        ("file:///b/?capacity=1048576", of_files("/b/", capacity_nbytes=1 << 20)),
        ("file:///dev/shm/kvpool", of_files("/dev/shm/kvpool")),
        ("file:///a?capacity=2TiB&threads=64", of_files("/a", capacity_nbytes=2 << 40, threads=64)),
        ("file:///a?threads=1&capacity=500MB", of_files("/a", capacity_nbytes=500_000_000, threads=1)),
        ("file:///a%20b%3F", of_files("/a b?")),
        ("file:///a@b:c", of_files("/a@b:c")),
        ("valkey://h", on_server("valkey", "h")),
        ("redis://10.0.0.1:7/", on_server("redis", "10.0.0.1", 7)),
        ("valkey://[::1]:7/3", on_server("valkey", "::1", 7, database=3)),
        (
            "valkey://u%40:p%2Fw%3A@h?ttl=2h&connections=4",
            on_server("valkey", "h", threads=4, user="u@", password="p/w:", ttl_s=7200),
        ),
        ("valkey://:p@h?ttl=1", on_server("valkey", "h", password="p", ttl_s=1)),
        (
            "valkey+unix:///run/a%20b?db=2&ttl=366d",
            on_server("valkey+unix", path="/run/a b", database=2, ttl_s=31622400),
        ),
        ("valkey://h?client=native", on_server("valkey", "h")),
        ("redis://h?client=glide&ttl=1m", on_server("redis", "h", ttl_s=60, client="glide")),
        (
            "valkey+unix:///s?client=redis&db=1",
            on_server("valkey+unix", path="/s", database=1, client="redis"),
        ),
        (
            "valkey+unix:///s?client=glide",
            on_server("valkey+unix", path="/s", client="glide"),
        ),
        (
            "valkey+sentinel://a/x?client=glide",
            on_server("valkey+sentinel", nodes=(("a", 26379),), service="x", client="glide"),
        ),
        (
            "valkey+cluster://a?client=redis",
            on_server("valkey+cluster", nodes=(("a", 6379),), client="redis"),
        ),
        (
            "valkey+cluster://u:p@a,[::1]:7,10.0.0.1:8?ttl=2h&connections=4",
            on_server(
                "valkey+cluster",
                threads=4,
                user="u",
                password="p",
                ttl_s=7200,
                nodes=(("a", 6379), ("::1", 7), ("10.0.0.1", 8)),
            ),
        ),
        (
            "valkey+sentinel://a,b:7/my-pool/2?sentinel_user=s&sentinel_password=q%26?client=native",
            on_server(
                "valkey+sentinel",
                database=2,
                nodes=(("a", 26379), ("b", 7)),
                service="my-pool",
                sentinel_user="s",
                sentinel_password="q&?client=native",
            ),
        ),
        (
            "valkey+cluster://a?tls=true&ca=/x",
            on_server("valkey+cluster", tls=Tls("/x"), nodes=(("a", 6379),)),
        ),
        ("valkeys://h", on_server("valkeys", "h", tls=Tls())),
        ("valkey://u@h?password_file=/p%20q", on_server("valkey", "h", user="u", password_file="/p q")),
        (
            "valkey+sentinel://a/x?sentinel_user=s&sentinel_password_file=/p&password_file=/q",
            on_server(
                "valkey+sentinel",
                nodes=(("a", 26379),),
                service="x",
                sentinel_user="s",
                sentinel_password_file="/p",
                password_file="/q",
            ),
        ),
        (
            "rediss://u:p@[::1]:7/1?ca=/a%20b.pem&cert=/c&key=/k&client=redis",
            on_server(
                "rediss",
                "::1",
                7,
                user="u",
                password="p",
                database=1,
                client="redis",
                tls=Tls("/a b.pem", "/c", "/k"),
            ),
        ),
        ("valkey+unix://u:p@/run/s", on_server("valkey+unix", path="/run/s", user="u", password="p")),
    ],
)
def test_parse(url: str, expected: StoreURL) -> None:
    assert StoreURL.parse(url) == expected


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("valkey://u:hunter2@h", ("h:6379",)),
        ("valkeys://[::1]:7000/3", ("[::1]:7000",)),
        ("valkey+cluster://:hunter2@a:1,[::1]", ("a:1", "[::1]:6379")),
        ("valkey+sentinel://a,b:2/x", ("a:26379", "b:2")),
        ("valkey+unix:///run/valkey", ("/run/valkey",)),
        ("file:///var/kv", ("/var/kv",)),
    ],
)
def test_the_servers_that_it_names(url: str, servers: tuple[str, ...]) -> None:
    assert StoreURL.parse(url).servers == servers


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("flie:///x", 'unknown store "flie"; did you mean "file"?'),
        ("Valkeyy://", 'unknown store "Valkeyy"; did you mean "valkey"?'),
        ("http://x", 'unknown store "http"; known are file, redis'),
        ("file://rel", "three slashes; perhaps file:///rel"),
        ("file://host/dir", "file:///absolute/path, with three slashes; perhaps file:///host/dir"),
        ("file://", "perhaps file:///absolute/path"),
        ("file:///", "/ is the system's; name a directory of the pool's own, such as file:///kvpool"),
        ("file:////", "/ is the system's"),
        ("file:///x/..", "/ is the system's"),
        ("file:///var", "/var is the system's; name a directory of the pool's own, such as file:///var/"),
        ("file:///dev/shm/", "such as file:///dev/shm/kvpool"),
        ("file:///dev/%73hm", "such as file:///dev/shm/kvpool"),
        ("file:///tmp", "such as file:///tmp/kvpool"),
        ("file:///proc/self/cwd/x", "/proc/self/cwd/x is the system's"),
        ("memory://?capacity=1GiB", "write file:///dev/shm/kvpool?capacity=SIZE, a size for which /dev/shm"),
        ("file:///x?capcity=1GiB", 'unknown parameter "capcity"; did you mean "capacity"?'),
        ("file:///x?capacity=1GiB&capacity=2GiB", "capacity is given twice"),
        ("file:///x?capacity=1gb", '"1gb" is not a size'),
        ("file:///x?capacity=", '"" is not a size'),
        ("file:///x?capacity=-1", '"-1" is not a size'),
        ("file:///x?capacity=1.5GiB", '"1.5GiB" is not a size'),
        ("file:///x?capacity=99999999TiB", "too large"),
        ("file:///x?capacity=1023KiB", "capacity is at least 1MiB"),
        ("file:///x?threads=0", "1 to 64"),
        ("file:///x?threads=65", "1 to 64"),
        ("file:///x?threads=two", "1 to 64"),
        ("file:///x%00y", "zero byte"),
        ("file:///x%ff", "UTF-8"),
        ("localhost:99999", "is not a store URL: write file:///dir, "),
        ("6379", "is not a store URL: write file:///dir, "),
        ("/" + "a" * 9000, "is not a store URL: write file:///dir, "),
        (":hunter2@127.0.0.1:6379", "':***@127.0.0.1:6379' is not a store URL"),
        ("bob:hunter2@10.0.0.1:6379", "'bob:***@10.0.0.1:6379' is not a store URL"),
        ("/var/a@b", "'/var/a@b' is not a store URL"),
        ("127.0.0.1:6379", "did you mean valkey://127.0.0.1:6379? Else write file:///dir, "),
        ("[::1]:6379", "did you mean valkey://[::1]:6379? "),
        ("/var/kv", "did you mean file:///var/kv? Else write file:///dir, valkey://host:6379, "),
        ("/var/kv?", "is not a store URL: write file:///dir, valkey://host:6379, "),
        ("valkey://", "write valkey://host:6379"),
        ("valkey://h:0", "with a port from 1 to 65535"),
        ("valkey://h:65536", "with a port from 1 to 65535"),
        ("valkey://::1:6379", "write valkey://host:6379"),
        ("redis://h h", "write redis://host:6379"),
        ("valkey://h/x", "a database is a whole number"),
        ("valkey://h/65536", "a database is a whole number from 0 to 65535"),
        ("valkey://h?ttl=0", "ttl is a time such as 3600s, 12h or 7d"),
        ("valkey://h?ttl=367d", "at most 366d"),
        ("valkey://h?ttl=1w", "ttl is a time"),
        ("valkey://h?connections=65", "connections is a whole number from 1 to 64"),
        (
            "valkey://h?capacity=1GiB",
            'unknown parameter "capacity"; known are client, connections, password_file, ttl',
        ),
        ("valkey://h?client=redi", 'unknown client "redi"; did you mean "redis"?'),
        ("valkey://h?client=", 'unknown client ""; known are glide, native, redis'),
        ("valkey://h?ca=/x", 'unknown parameter "ca"; known are client, connections, password_file, ttl'),
        ("valkeys://h?ca=x.pem", "ca is the absolute path of a PEM file"),
        ("valkeys://h?ca=", "ca is the absolute path of a PEM file"),
        ("valkeys://h?ca=/x%00", "ca is the absolute path of a PEM file"),
        ("valkeys://h?cert=/x", "cert and key go together"),
        ("rediss://h?key=/x", "cert and key go together"),
        ("valkeys://h?verify=none", 'unknown parameter "verify"; known are ca, cert, client, '),
        ("valkeys:///s", "write valkeys://host:6379"),
        ("file:///x?client=redis", 'unknown parameter "client"; known are capacity, far, threads'),
        (
            "file:///x/y?far=all",
            "far= says what a near pool sends on to a far one; write it in the first URL of two",
        ),
        ("valkey+cluster://", "write valkey+cluster://host:6379,host:6379, with 1 to 64 hosts"),
        ("valkey+cluster://a,,b", "write valkey+cluster://host:6379,host:6379"),
        ("valkey+cluster://a,b:0", "ports from 1 to 65535"),
        ("valkey+cluster://" + ",".join(["a"] * 65), "1 to 64 hosts"),
        ("valkey+cluster://a/1", "in a cluster kvpool uses database 0; leave the path away"),
        ("valkey+cluster://a?db=1", 'unknown parameter "db"; known are ca, cert, client, connections, key'),
        ("valkey+cluster://a?tls=yes", "tls is true or false, not 'yes'"),
        ("valkey+cluster://a?ca=/x", "ca is for TLS; add tls=true"),
        ("valkey+sentinel://a/x?tls=true&cert=/x", "cert and key go together"),
        ("valkey+sentinel://a", "name the service that the sentinels watch: valkey+sentinel://host:26379/"),
        ("valkey+sentinel:///x", "write valkey+sentinel://host:26379,host:26379/service"),
        ("valkey+sentinel://a/x/y", "a database is a whole number"),
        ("valkey+sentinel://a/x%20y", "name the service"),
        ("valkey+sentinel://a/x?sentinel_user=s", "a sentinel_user needs a sentinel_password"),
        ("valkey+sentinel://a/x?sentinel_password=hunter2&db=1", 'unknown parameter "db"'),
        ("valkey://u:hunter2@h?password_file=/p", "the password is given twice; write user@ beside"),
        (
            "valkey+sentinel://a/x?sentinel_password=hunter2&sentinel_password_file=/p",
            "password is given twice",
        ),
        ("valkey+unix:///s?password_file=p", "password_file is the absolute path of a file"),
        ("file:///x?password_file=/p", 'unknown parameter "password_file"'),
        ("valkey://hunter2@h", "write user:password@ or :password@"),
        ("valkey://u:hunter2/x@h", "percent-encode"),
        ("valkey://u:hunter2%00@h", "cannot hold a zero byte"),
        ("valkey+unix://", "with three slashes"),
        ("valkey+unix://h/x", "with three slashes"),
        ("file:/x", "is not a store URL"),
        ("file:///x#y", "percent-encode"),
        ("file:///x\ny", "is not a store URL"),
        ("", "is not a store URL"),
        (None, "a NoneType is not a store URL"),
        ("file:///" + "x" * 5000, "text of 5008 characters is not a store URL"),
        # A secret in a wrong place, or under a wrong name.
        ("valkey://h?pasword=hunter2", 'unknown parameter "pasword"; did you mean'),
        ("file:///x?password=hunter2", 'unknown parameter "password"'),
        ("valkey://h?hunter2", "a parameter is written NAME=VALUE"),
        ("valkey://h?hunter2=", "a parameter is written NAME=VALUE"),
        ("valkey://h?password:hunter2=1", "unknown parameter; known are"),
        ("valkey://h?connections=2;password=hunter2", "connections is a whole number from 1 to 64"),
        ("valkey://h?client=native;password=hunter2", "unknown client; known are"),
        ("valkey://h?client=native,pw=hunter2", "unknown client; known are"),
        ("valkey://h?ttl=1d;password=hunter2", "ttl is a time"),
        ("file:///x?capacity=1GiB;password=hunter2", "capacity is a size"),
        ("file:///x?far=all;password=hunter2", "unknown choice of far; known are"),
        ("valkey+cluster://h?tls=true;password=hunter2", "tls is true or false"),
        ("valkey://h?password_file=hunter2", "password_file is the absolute path"),
        ("valkeys://h?key=hunter2", "key is the absolute path"),
        ("valkey://h#hunter2", "is not a store URL"),
        ("valkey://h/0&password=hunter2", "a database is a whole number"),
        ("valkey://h/password=hunter2", "a database is a whole number"),
        ("valkey+cluster://h/:hunter2", "leave the path away"),
        ("valkey+sentinel://h/password=hunter2", "name the service"),
        ("valkey://u:hunter2", "with a port from 1 to 65535"),
        ("valkey://:hunter2", "with a port from 1 to 65535"),
        ("valkey://u%3Ahunter2%40h", "with a port from 1 to 65535"),
        ("valkey+cluster://a:1,u:hunter2", "with 1 to 64 hosts"),
        ("file://u:hunter2@h/x", "with three slashes"),
        ("//u:hunter2@h", "is not a store URL"),
        ("valkey:/u:hunter2@h", "is not a store URL"),
        ("u:hunter2@h", "is not a store URL"),
        ("u:hunter2@valkey://h", "is not a store URL"),
        ("file:///x?pw=hunter2 valkey://h", 'unknown parameter "pw"'),
        ("file:///x valkey://h?pw=hunter2", 'unknown parameter "pw"'),
        ("valkey://u:hunter2@h valkey://u:hunter2@h", "a near pool is a directory"),
        ("valkey://u:hunter2@h file:///x file:///y", "a pool is one URL, or two"),
    ],
)
def test_refuse(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_far_one_of_two_urls() -> None:
    far = "valkey://u:p@h?ttl=1d"
    for joined in (
        far,
        joined_urls([far]),
        joined_urls(["file:///a/b?far=reused", far]),
        f"file:///a/b  {far} ",
    ):
        assert far_url(str(joined)) == far


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in repr(StoreURL.parse("valkey://u:hunter2@h"))
    assert "hunter2" not in repr(StoreURL.parse("valkey+sentinel://h/x?sentinel_password=hunter2"))


@pytest.mark.parametrize("threads", [0, 65, True, 2.0])
def test_threads_are_checked(threads: Any) -> None:
    with pytest.raises(ConfigError, match="threads is a whole number from 1 to 64"):
        open_store("file:///var/kv", threads=threads)
