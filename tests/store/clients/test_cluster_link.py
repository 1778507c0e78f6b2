"""``ClusterLink`` on links that do what a test says: time, redirects, and what befalls one server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpool.store.clients.cluster import MAX_HOPS, MAX_STRANGERS, ClusterLink
from kvpool.store.clients.link import (
    Command,
    ErrorReply,
    LinkEnded,
    LinkFault,
    LinkRefused,
    LinkSilent,
    Unanswered,
)
from kvpool.store.clients.shards import Address, Shards, slot_of
from kvpool.store.server.topology import Primary

A, B = ("10.0.0.1", 6379), ("10.0.0.2", 6379)
PRIMARIES = [Primary(*A, [(0, 8191)]), Primary(*B, [(8192, 16383)])]
OF_A, OF_B = b"kvpool:t:9", b"kvpool:t:2"
Answer = Callable[[Command], Any]


class Scripted:
    """A link whose ``answer`` tells the reply to a command, or raises for the exchange."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Command] = []
        self.limits_s: list[float] = []
        self.dials = self.drops = 0

    def dial(self, timeout_s: float) -> None:
        self.dials += 1
        self.answer((b"DIAL",))

    def is_stale(self) -> bool:
        return False

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        self.limits_s.append(timeout_s)
        self.asked += commands
        return [self.answer(command) for command in commands]

    def drop(self) -> None:
        self.drops += 1

    close = drop


class Servers:
    """A link to each server, made when it is first wanted."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = {A: answers.get("a", says(1)), B: answers.get("b", says(1))}
        self.links: dict[Address, Scripted] = {}
        self.probed: list[Address] = []
        self.shards = Shards(self.probe)
        self.shards.install(PRIMARIES)
        self.link = ClusterLink(self.shards, self.link_to)

    def link_to(self, server: Address) -> Scripted:
        made = self.links[server] = Scripted(self.answers.get(server, says(1)))
        return made

    def probe(self, server: Address) -> None:
        self.probed.append(server)
        self.link_to(server).dial(1)


def says(reply: Any) -> Answer:
    return lambda _: reply


def fails(error: Exception, *, at: bytes = b"") -> Answer:
    def answer(command: Command) -> Any:
        if not at or command[0] == at:
            raise error
        return 1

    return answer


def sends_on(words: str) -> Answer:
    return lambda command: None if command[0] == b"DIAL" else ErrorReply(words)


def test_the_slots_are_those_of_servers() -> None:
    assert slot_of(b"123456789") == 0x31C3 % 16384  # CRC16 of the protocol's own example
    assert slot_of(OF_A) <= 8191 < slot_of(OF_B)


def test_each_key_goes_to_its_server_and_replies_keep_their_places() -> None:
    servers = Servers(a=lambda command: command[1:], b=lambda command: command[1:])
    commands: list[Command] = [(b"EXISTS", OF_B), (b"EXISTS", OF_A), (b"HMGET", OF_B, b"h")]
    assert servers.link.exchange(commands, 1.0) == [(OF_B,), (OF_A,), (OF_B, b"h")]
    assert servers.links[A].asked == commands[1:2]
    assert servers.links[B].asked == [commands[0], commands[2]]


def test_what_befalls_a_server_befalls_its_keys_alone() -> None:
    servers = Servers(a=fails(LinkSilent("it is silent"), at=b"EXISTS"))
    commands: list[Command] = [(b"EXISTS", OF_A), (b"EXISTS", OF_B)]
    for _ in range(3):
        first, second = servers.link.exchange(commands, 1.0)
        assert isinstance(first, Unanswered)
        assert first == "10.0.0.1:6379: it is silent"
        assert second == 1
    assert len(servers.links[A].asked) == 1, "a server that is away is asked for nothing"


def test_a_server_that_is_away_is_probed_and_comes_back() -> None:
    servers = Servers(a=fails(LinkFault("refused"), at=b"DIAL"))
    assert isinstance(servers.link.exchange([(b"EXISTS", OF_A)], 1.0)[0], Unanswered)
    assert servers.shards.wait_until_stale(0)
    servers.shards.install(PRIMARIES)
    assert servers.probed == [A]
    assert servers.shards.why_away(A) == "refused"
    servers.answers[A] = says(1)
    servers.shards.install(PRIMARIES)
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [1]
    assert not servers.shards.wait_until_stale(0)


def test_a_store_is_connected_while_one_server_answers() -> None:
    servers = Servers()
    counters = {"up_connections": 2, "puts": 1}
    for server, up in ((None, 2), (A, 2), (B, 0)):
        if server is not None:
            servers.shards.fell_away(server, "silent")
        assert servers.shards.counted(counters) == {"up_connections": up, "puts": 1, "moved": 0, "asked": 0}


def test_what_is_closed_reads_nothing_more() -> None:
    servers = Servers()
    servers.shards.fell_away(A, "silent")
    servers.shards.close()
    assert not servers.shards.wait_until_stale(60)
    servers.shards.install(PRIMARIES)
    assert servers.probed == []


def test_a_link_is_checked_after_its_server_was_away() -> None:
    servers = Servers()
    servers.link.exchange([(b"EXISTS", OF_A)], 1.0)
    link = servers.links[A]
    servers.shards.fell_away(A, "another thread says so")
    servers.shards.install(PRIMARIES)
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [1]
    assert link.dials == 2


def test_a_server_has_half_of_the_time_that_is_left() -> None:
    servers = Servers()
    servers.link.exchange([(b"EXISTS", OF_A), (b"EXISTS", OF_B)], 8.0)
    assert all(3.0 < limit_s <= 4.0 for link in servers.links.values() for limit_s in link.limits_s)


def test_behind_a_silent_server_there_is_time_for_another_and_an_end() -> None:
    def sleeps(command: Command) -> Any:
        if command[0] != b"DIAL":
            time.sleep(0.6)
            raise LinkSilent("no answer")

    servers = Servers(a=sleeps, b=sleeps)
    first, second = servers.link.exchange([(b"EXISTS", OF_A), (b"EXISTS", OF_B)], 0.2)
    assert first == "10.0.0.1:6379: no answer"
    assert second == "10.0.0.2:6379: no time left for it behind silent servers"
    assert servers.shards.why_away(B) == "", "nothing is known of it"


@pytest.mark.parametrize(("word", "count"), [("MOVED", "moved"), ("ASK", "asked")])
@pytest.mark.parametrize("host", ["10.0.0.2", "10.9.9.9", "::1"])
def test_a_redirect_is_followed(word: str, count: str, host: str) -> None:
    servers = Servers(a=sends_on(f"{word} 12 {host}:6379"))
    put: list[Command] = [(b"MULTI",), (b"HSET", OF_A, b"b", b""), (b"PEXPIRE", OF_A, b"1"), (b"EXEC",)]
    assert servers.link.exchange(put, 1.0) == [1] * 4
    asked = servers.links[host, 6379].asked
    assert asked == ([(b"ASKING",)] if word == "ASK" else []) + put
    assert servers.shards.counted({"up_connections": 2})[count] == 1
    assert servers.shards.wait_until_stale(0) == (word == "MOVED")


@pytest.mark.parametrize(
    "words",
    ["MOVED", "MOVED 1", "MOVED 1 x", "MOVED 1 host.example:6379", "MOVED 1 10.0.0.3:0",
     "MOVED 1 10.0.0.3:65536", "MOVED 1 10.0.0.3:x", "ASK 1 a b:6379"],
)  # fmt: skip
def test_a_redirect_to_nowhere_or_to_an_unknown_name_is_its_reply(words: str) -> None:
    servers = Servers(a=sends_on(words))
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [words]
    assert set(servers.links) == {A}


def test_a_redirect_without_a_host_is_to_the_same_one() -> None:
    servers = Servers(a=sends_on("MOVED 12 :7000"))
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [1]
    assert A[0] in {host for host, port in servers.links if port == 7000}


@pytest.mark.parametrize("word", ["READONLY", "CLUSTERDOWN", "MASTERDOWN", "OOM"])
def test_a_server_that_is_not_what_it_was_has_the_map_read_again(word: str) -> None:
    servers = Servers(a=sends_on(f"{word} and more"))
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [f"{word} and more"]
    assert servers.shards.wait_until_stale(0) == (word != "OOM")


def test_redirects_end() -> None:
    servers = Servers(a=sends_on("MOVED 12 10.0.0.2:6379"), b=sends_on("MOVED 12 10.0.0.1:6379"))
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == ["MOVED 12 10.0.0.2:6379"] or MAX_HOPS % 2
    assert len(servers.links[A].asked) + len(servers.links[B].asked) == MAX_HOPS + 1


def test_links_to_servers_that_only_redirects_name_are_bounded() -> None:
    servers = Servers()
    for number in range(3 * MAX_STRANGERS):
        servers.answers[A] = sends_on(f"MOVED 12 10.1.0.{number}:6379")
        if A in servers.links:
            servers.links[A].answer = servers.answers[A]
        assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [1]
        assert len(servers.link._links) <= MAX_STRANGERS + 2


def test_links_to_servers_that_the_map_has_no_more_end() -> None:
    servers = Servers(a=sends_on("ASK 12 10.1.0.1:6379"))
    servers.link.exchange([(b"EXISTS", OF_A), (b"EXISTS", OF_B)], 1.0)
    named, gone, kept = servers.links["10.1.0.1", 6379], servers.links[A], servers.links[B]
    servers.shards.install([Primary(*B, [(0, 16383)])])
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [1]
    assert (named.drops, gone.drops, kept.drops) == (1, 1, 0)
    assert set(servers.link._links) == {B}


def test_a_slot_without_a_node_is_said_and_has_the_map_read_again() -> None:
    servers = Servers()
    servers.shards.install(PRIMARIES[:1])
    assert servers.link.exchange([(b"EXISTS", OF_B)], 1.0) == ["no node of the cluster serves its slot"]
    assert servers.shards.wait_until_stale(0)


@pytest.mark.parametrize("ended", ["in an exchange", "before it"])
def test_a_connection_that_ended_has_the_map_read_again(ended: str) -> None:
    """By now another server may be at its address, or this one a replica."""
    servers = Servers()
    servers.link.exchange([(b"EXISTS", OF_A)], 1.0)
    assert not servers.shards.wait_until_stale(0)
    if ended == "in an exchange":
        servers.links[A].answer = fails(LinkEnded("closed"), at=b"EXISTS")
    else:
        servers.links[A].is_stale = lambda: True  # type: ignore[method-assign]
    servers.link.exchange([(b"EXISTS", OF_A), (b"EXISTS", OF_B)], 1.0)
    assert servers.shards.wait_until_stale(0)


def test_what_a_link_sees_while_the_map_is_read_counts() -> None:
    servers = Servers()
    servers.shards.look_again()
    assert servers.shards.wait_until_stale(0)
    servers.shards.look_again()  # perhaps after the servers were asked
    servers.shards.install(PRIMARIES)
    assert servers.shards.wait_until_stale(0)
    assert not servers.shards.wait_until_stale(0)


GONE, REFUSED = fails(LinkFault("gone")), fails(LinkRefused("WRONGPASS"))


def test_a_dial_fails_where_nobody_answers_and_is_refused_if_one_refuses() -> None:
    Servers(a=GONE).link.dial(1.0)
    Servers(a=REFUSED).link.dial(1.0)
    with pytest.raises(LinkFault, match="gone"):
        Servers(a=GONE, b=GONE).link.dial(1.0)
    with pytest.raises(LinkRefused, match="WRONGPASS"):
        Servers(a=GONE, b=REFUSED).link.dial(1.0)


@pytest.mark.parametrize("error", [LinkRefused("WRONGPASS no"), RuntimeError("a client's own")])
def test_a_server_that_cannot_be_used_costs_its_keys_alone(error: Exception) -> None:
    servers = Servers(a=fails(error, at=b"DIAL"))
    for _ in range(3):
        first, second = servers.link.exchange([(b"EXISTS", OF_A), (b"EXISTS", OF_B)], 1.0)
        assert str(error) in first
        assert second == 1
    assert servers.links[A].dials == 1, "it is away until a probe is answered"
    servers.shards.install(PRIMARIES)
    assert servers.probed == [A]
    assert servers.shards.why_away(A)


def test_only_a_connection_that_ends_beside_one_key_is_told_as_such() -> None:
    servers = Servers(a=fails(LinkEnded("closed"), at=b"EXISTS"))
    with pytest.raises(LinkEnded):
        servers.link.exchange([(b"EXISTS", OF_A)], 1.0)
    commands: list[Command] = [(b"EXISTS", OF_A), (b"EXISTS", OF_B)]
    assert servers.link.exchange(commands, 1.0) == ["10.0.0.1:6379: closed", 1]
    assert servers.shards.why_away(A) == "", "the next dial says whether it is there"


def test_too_few_replies_cost_the_link() -> None:
    servers = Servers()
    servers.link.exchange([(b"EXISTS", OF_A)], 1.0)
    link = servers.links[A]
    link.exchange = lambda commands, timeout_s: []  # type: ignore[method-assign]
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0)[0].endswith("too few replies or too many")
    assert link.drops == 1
    assert servers.link.exchange([(b"EXISTS", OF_A)], 1.0) == [1]
