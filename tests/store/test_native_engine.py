"""What only Python can show of the native engine: buffers, the interpreter lock, signals."""

import contextlib
import fcntl
import gc
import signal
import threading
import time
from pathlib import Path

import pytest

from kvpool import _native
from tests.support.conformance import MIB, key, payload
from tests.support.deadlines import eventually

WAIT_S = 60.0


def run(engine, op, keys, buffers=None, timeout_s=WAIT_S):
    batch = engine.submit(op, keys, buffers, timeout_s)
    assert batch.wait(WAIT_S)
    return list(batch.results())


def get(engine, i, nbytes=1000):
    """OK only with the right bytes."""
    buffer = bytearray(nbytes)
    status = run(engine, _native.GET, [key(i)], [buffer])[0]
    if status == _native.OK:
        assert buffer == payload(i, nbytes)
    return status


def is_held(buffer):
    """Whether somebody holds the buffer of a bytearray."""
    try:
        buffer.append(0)
    except BufferError:
        return True
    buffer.pop()
    return False


@contextlib.contextmanager
def eviction_elsewhere(root):
    """As if another process ran an eviction pass: puts wait, each until its deadline."""
    with (Path(root) / "usage").open("rb+") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        yield usage


@pytest.fixture
def open_engine(tmp_path):
    engines = []

    def open_one(root=None, capacity_nbytes=64 * MIB, threads=2):
        engine = _native.open_file_executor(
            str(root or tmp_path / "pool"), capacity_nbytes, threads, lock_patience_s=WAIT_S
        )
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        assert engine.close(WAIT_S)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "pool"


def test_buffers_are_held_until_the_batch_is_done(open_engine, root):
    engine = open_engine(threads=1)
    buffers = [bytearray(1000), bytearray(1000)]
    with eviction_elsewhere(root):
        batch = engine.submit(_native.PUT, [key(1), key(2)], buffers, WAIT_S)
        assert not batch.done()
        assert not batch.wait(0.01)
        assert all(map(is_held, buffers))
        with pytest.raises(RuntimeError, match="not done"):
            batch.results()
        with pytest.raises(RuntimeError, match="not done"):
            batch.error()
    assert batch.wait(WAIT_S)
    assert not any(map(is_held, buffers))
    assert list(batch.results()) == [_native.OK, _native.OK]
    assert batch.error() is None


def test_cancel_gives_the_buffers_back(open_engine, root):
    engine = open_engine(threads=1)
    running, queued = bytearray(1000), bytearray(1000)
    with eviction_elsewhere(root):
        first = engine.submit(_native.PUT, [key(1)], [running], WAIT_S)
        second = engine.submit(_native.PUT, [key(2)], [queued], WAIT_S)
        assert eventually(lambda: engine.counters()["queued"] == 1)  # the first one is running
        second.cancel()
        assert second.done()  # nobody had started it, though the only thread is busy
        assert not is_held(queued)
        first.cancel()
        assert is_held(running) or first.done()  # never given back before its thread has let go
        assert first.wait(WAIT_S)
        assert not is_held(running)
    assert list(first.results() + second.results()) == [_native.CANCELLED, _native.CANCELLED]
    assert engine.counters()["cancelled"] == 2
    assert list((root / "tmp").iterdir()) == []
    assert get(engine, 1) == get(engine, 2) == _native.MISS


def test_the_deadline_gives_the_buffers_back(open_engine, root):
    engine = open_engine(threads=1)
    running, queued = bytearray(1000), bytearray(1000)
    with eviction_elsewhere(root):
        first = engine.submit(_native.PUT, [key(1)], [running], WAIT_S)
        assert eventually(lambda: engine.counters()["queued"] == 0)
        second = engine.submit(_native.GET, [key(2)], [queued], 0.02)
        assert second.wait(WAIT_S)  # though the only thread is busy
        assert list(second.results()) == [_native.TIMED_OUT]
        assert not is_held(queued)
        assert is_held(running)
        assert not first.done()
        third = engine.submit(_native.PUT, [key(1)], [queued], 0.02)
        first.cancel()
        assert first.wait(WAIT_S)
        assert third.wait(WAIT_S)
        assert not is_held(queued)
        assert not is_held(running)


def test_a_dropped_batch_goes_on_with_its_buffers(open_engine, root):
    engine = open_engine(threads=1)
    buffer = bytearray(payload(1, 1000))
    with eviction_elsewhere(root):
        engine.submit(_native.PUT, [key(1)], [buffer], WAIT_S)
        gc.collect()
        engine.counters()
        assert is_held(buffer)
    assert eventually(lambda: engine.counters()["puts"] == 1)
    assert eventually(lambda: engine.counters() and not is_held(buffer))
    assert get(engine, 1) == _native.OK


def test_a_refused_batch_holds_nothing(open_engine):
    engine = open_engine()
    good = bytearray(1000)
    for keys, buffers in [
        ([key(1), "bad"], [good, good]),
        ([key(1), key(2)], [good]),
        ([key(1), key(2)], [good, b""]),
        ([key(1), key(2)], [good, memoryview(bytearray(100))[::2]]),
        ([key(1), key(2)], [good, 7]),
        ([key(1), key(2)], [good, b"read-only"]),
    ]:
        with pytest.raises((ValueError, BufferError, TypeError)):
            engine.submit(_native.GET, keys, buffers, 1.0)
        assert not is_held(good)
    assert not any(engine.counters()[name] for name in ("get_hits", "get_misses", "faults"))


def test_buffers_outlive_the_engine_object(tmp_path):
    buffer = bytearray(payload(1, 1000))
    engine = _native.open_file_executor(str(tmp_path), MIB, 1)
    batch = engine.submit(_native.PUT, [key(1)], [buffer], WAIT_S)
    del engine
    gc.collect()
    assert batch.done()  # closing completes every batch
    assert not is_held(buffer)


def test_waiting_releases_the_interpreter(open_engine, root):
    engine = open_engine()
    with eviction_elsewhere(root) as usage:
        batch = engine.submit(_native.PUT, [key(1)], [bytes(1000)], WAIT_S)

        def spin():
            until = time.monotonic() + 0.2  # long enough for the other thread to be inside wait()
            while time.monotonic() < until:
                pass
            # Nobody else unlocks: if wait() kept the interpreter, the put would time out.
            fcntl.flock(usage, fcntl.LOCK_UN)

        spinner = threading.Thread(target=spin)
        spinner.start()
        assert batch.wait(WAIT_S)
        spinner.join()
    assert list(batch.results()) == [_native.OK]


def test_a_signal_gets_through_to_a_waiting_thread(open_engine, root):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    engine = open_engine()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with eviction_elsewhere(root):
            batch = engine.submit(_native.PUT, [key(1)], [bytes(1000)], WAIT_S)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(Alarm):
                batch.wait(WAIT_S)
            assert not batch.done()
        assert batch.wait(WAIT_S)
    finally:
        signal.signal(signal.SIGALRM, before)
