"""A fleet with a load: a real ``kvpool index`` on a real Valkey, workers that are scripted but for all that an index
sees of them (announcements, ZMQ publishers, metrics pages, blocks in the pool), and clients that ask where to go.

A worker keeps the blocks that were used last, and tells of those that come and go. A prompt takes it time for each
block that it has to compute. Nothing that the page shows is made up here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from kvpool import BlockHasher, Namespace, open_store
from kvpool.discovery.announcer import Announcer, TrafficAnnouncer
from kvpool.discovery.audit_news import AuditNews
from kvpool.discovery.quota import write_quota
from kvpool.discovery.traffic_slots import Traffic
from kvpool.discovery.worker import Publisher, Worker
from kvpool.index.follow.metrics_page import EngineLoad
from kvpool.key.hashing import seed_id
from kvpool.store.store import Store
from tests.support.deadlines import eventually
from tests.support.ext_proc import Call, body, headers
from tests.support.feeds import Misbehaving
from tests.support.index_process import running as running_index
from tests.support.metrics_pages import PageServer
from tests.support.servers import running as running_server
from tests.support.tiny_tokenizer import write_tokenizer
from tests.support.wire import batch, removed, stored

MODEL = "org/chat-8b"
BLOCK = 16
VALUE = bytes(2048)
HASHER = BlockHasher(BLOCK)
NAMESPACE = Namespace("default", {"model": MODEL})
BLOCK_S = 0.004  # to compute one
QUOTA_NBYTES = 64 << 20  # of its one tenant
SYSTEMS = 5  # prompts that many conversations begin with
SYSTEM_TOKENS = 24 * BLOCK


class NearPool:
    """Of the workers of a host; ``name``: 32 hex digits. It keeps so many ``blocks``, which were stored last."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name, self._blocks = name, blocks
        self._lock = threading.Lock()  # of the fields below
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._changes: list[dict[str, object]] = []

    def lacks(self, hashes: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            return [one for one in hashes if one not in self._held]

    def put(self, hashes: Sequence[bytes]) -> None:
        told = {"medium": "CPU", "ownership": "kvpool", "locality": "LOCAL"}
        with self._lock:
            if came := [one for one in hashes if one not in self._held]:
                self._changes.append(stored(came, parent=came[0], **told))
            self._held.update(dict.fromkeys(came))
            if gone := [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._blocks)]:
                self._changes.append(removed(gone, **told))

    def changes(self, since: int) -> list[dict[str, object]]:
        """Events of what came and went, but for the first ones: each worker tells all."""
        with self._lock:
            return self._changes[since:]


class LiveWorker:
    """``blocks``: that its cache holds."""

    def __init__(self, name: str, store: Store, blocks: int, near: NearPool | None = None) -> None:
        self.name, self._store, self._blocks, self._near = name, store, blocks, near
        self._publisher = Misbehaving()
        self._pages = PageServer(lambda connection: None)
        self.address = self._pages.address
        self._lock = threading.Lock()  # of the fields below
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._running = 0
        self._is_away = False
        self._told = 0  # changes of its near pool
        self.is_asleep = False
        self.show()
        events = self._publisher.publisher
        self._announcer = Announcer(
            store,
            a_worker(
                name,
                self.address,
                Publisher(0, events.events, events.replay),
                near="" if near is None else near.name,
            ),
        )
        self._traffic, self._traffic_announcer = Traffic(), TrafficAnnouncer(store, "default", every_s=1.0)

    def tell_audits(self, news: AuditNews) -> None:
        self._traffic_announcer.tell_audits(news)

    def show(self) -> None:
        """Its metrics as they are now."""
        running = min(self._running, 4)
        usage = len(self._held) / self._blocks
        self._pages.show({0: EngineLoad(running, self._running - running, round(usage, 3), self.is_asleep)})

    @property
    def events(self) -> str:
        """Where it publishes."""
        return self._publisher.publisher.events

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether its cache has all blocks of a prompt now."""
        with self._lock:
            return all(one in self._held for one in HASHER.hashes(tokens))

    def serve(self, hashes: Sequence[bytes]) -> None:
        """One request, until its prompt is computed."""
        with self._lock:
            if self._is_away:
                return
            self._running += 1
            self._count(hashes)
            missing = [one for one in hashes if one not in self._held]
            self.show()
        computed = missing if self._near is None else self._near.lacks(missing)
        time.sleep(BLOCK_S * len(computed))
        with self._lock:
            self._running -= 1
            if self._is_away:
                return
            for one in reversed(hashes):  # the last ones go first
                self._held[one] = None
                self._held.move_to_end(one)
            events = [stored(missing)] if missing else []
            gone = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._blocks)]
            if gone:
                events.append(removed(gone))
            if self._near is not None:
                self._near.put(missing)
                changes = self._near.changes(self._told)
                self._told += len(changes)
                events += changes
            if events:
                self._publisher.publish(batch(*events))
            self.show()
        if missing:
            self._store.put_many(NAMESPACE.keys(missing, group=0, rank=0), [VALUE] * len(missing))

    def _count(self, hashes: Sequence[bytes]) -> None:
        tokens = len(hashes) * BLOCK
        salt = int(NAMESPACE.hex[:16], 16)
        self._traffic.add(
            b"".join(hashes), len(hashes[0]), salt=salt, block_tokens=BLOCK, prompt_tokens=tokens
        )
        spared = sum(one in self._held for one in hashes)
        self._traffic.spare(spared * BLOCK)
        self._traffic_announcer.tell(self._traffic.windows(), self._traffic.sampled())

    def go_away(self) -> None:
        """Neither events nor metrics come from now on, and its announcement stays."""
        with self._lock:
            self._is_away = True
        self._publisher.close()
        self._pages.close()

    def close(self) -> None:
        self._announcer.close()
        self._traffic_announcer.close()
        if not self._is_away:
            self.go_away()


def a_worker(name: str, address: str, publisher: Publisher, **more: str) -> Worker:
    fields = {"model": MODEL, "namespace": NAMESPACE.hex, "address": address, "incarnation": "one", **more}
    return Worker(
        name=name, block_tokens=BLOCK, hash_seed_id=seed_id(None), publishers=(publisher,), **fields
    )


class LiveFleet:
    """``url``: of the status page."""

    def __init__(self, ready: str, store: Store, workers: Sequence[LiveWorker]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.store = store
        self.target = ready.split()[3].rstrip(",")
        self.url = f"http://127.0.0.1:{_port(ready, 'HTTP')}/status"
        self._picker = f"127.0.0.1:{_port(ready, 'ext_proc')}"
        self._by_endpoint = {one.address.removeprefix("http://"): one for one in workers}

    @contextmanager
    def load(self, clients: int = 4, conversations: int = 120) -> Iterator[None]:
        """Conversations go on in the block, each turn where the index places it."""
        ended = threading.Event()
        threads = [
            threading.Thread(target=self._talk, args=(ended, number, conversations // clients))
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join(60)

    def prompt(self, number: int = 0) -> list[int]:
        """The beginning of a conversation, which many share."""
        return random.Random(f"system {number}").choices(range(50_000), k=SYSTEM_TOKENS)

    def _talk(self, ended: threading.Event, client: int, conversations: int) -> None:
        chance = random.Random(f"client {client}")
        said: dict[int, list[int]] = {}
        with grpc.insecure_channel(self._picker) as channel:
            while not ended.wait(0.02):
                number = min(int(chance.paretovariate(1.1)) - 1, conversations - 1)
                prompt = said.get(number) or self.prompt(chance.randrange(SYSTEMS))
                prompt = prompt + chance.choices(range(50_000), k=chance.randrange(2, 8) * BLOCK)
                said[number] = prompt if len(prompt) < 2000 else []
                self._ask(channel, prompt)

    def _ask(self, channel: grpc.Channel, prompt: list[int]) -> None:
        call = Call(channel)
        asked = json.dumps({"model": MODEL, "prompt": prompt}).encode()
        try:
            place = call.place(headers(), body(asked))[0]
        except (grpc.RpcError, KeyError, ValueError):  # a worker went away while it was asked about
            place = ""
        if (worker := self._by_endpoint.get(place)) is not None:
            worker.serve(HASHER.hashes(prompt))
        with contextlib.suppress(grpc.RpcError):
            call.end()


@contextmanager
def live_fleet(
    folder: Path,
    names: Sequence[str],
    *options: str,
    blocks: int = 700,
    memory: str = "12mb",
    nears: Sequence[NearPool] = (),
) -> Iterator[LiveFleet]:
    """``options``: of the index. ``memory``: of the pool. ``nears``: of the hosts, which workers have in turn."""
    (folder / "pool").mkdir()
    with ExitStack() as parts:
        server = parts.enter_context(
            running_server(
                "valkey-server", folder / "pool", "--maxmemory", memory, "--maxmemory-policy", "allkeys-lru"
            )
        )
        store = parts.enter_context(open_store(server.url))
        write_quota(store, "default", QUOTA_NBYTES)
        hosts = itertools.cycle(nears or [None])
        workers = [LiveWorker(name, store, blocks, near) for name, near in zip(names, hosts, strict=False)]
        for worker in workers:
            parts.callback(worker.close)
        index = parts.enter_context(
            running_index(
                "--pool", server.url, "--http", "127.0.0.1:0", "--ext-proc", "127.0.0.1:0",
                "--tokenizer", f"{MODEL}={write_tokenizer(folder / 'tokenizer')}", *options,
            )
        )  # fmt: skip
        yield LiveFleet(index.ready, store, workers)


def _port(ready: str, what: str) -> int:
    found = re.search(rf"{what} on port ([0-9]+)", ready)
    assert found is not None, ready
    return int(found[1])


def seen(fleet: LiveFleet, count: int, token: str = "") -> bool:
    """Whether the index follows so many workers well."""
    import urllib.request

    headers_ = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(fleet.url + "/data", headers=headers_)

    def good() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["fleet"]["health"]["healthy"] == count
        return False

    return eventually(good)
