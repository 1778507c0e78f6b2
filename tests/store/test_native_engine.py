"""What only Python can show of the native engine: buffers, the interpreter lock, processes, arguments.

Over 400 lines because the rules of one class are tested side by side.
"""

import array
import contextlib
import fcntl
import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from pathlib import Path

import numpy
import pytest

from kvpool import _native

MIB = 1 << 20
NAMESPACE = "0f" * 16
WAIT_S = 60.0


def key(i, *, tenant="t"):
    return f"kvpool:{tenant}:{NAMESPACE}:{i * 2654435761 % 2**32:08x}{i:024x}:0:0"


def payload(i, nbytes):
    return (i.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


def temporaries(root):
    return list((Path(root) / "tmp").iterdir())


def eventually(condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        os.sched_yield()


def run(engine, op, keys, buffers=None, timeout_s=WAIT_S):
    batch = engine.submit(op, keys, buffers, timeout_s)
    assert batch.wait(WAIT_S)
    return list(batch.results())


def put(engine, i, nbytes=1000):
    return run(engine, _native.PUT, [key(i)], [payload(i, nbytes)])[0]


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


def count_threads():
    return len(list(Path("/proc/self/task").iterdir()))


def count_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _nothing_leaks():
    gc.collect()
    threads, descriptors = count_threads(), count_descriptors()
    yield
    gc.collect()
    # "At most": numpy's BLAS ends its own threads when the process forks.
    eventually(lambda: count_threads() <= threads and count_descriptors() <= descriptors)


@pytest.fixture
def open_engine(tmp_path):
    engines = []

    def open_one(root=None, capacity_nbytes=64 * MIB, threads=2):
        engines.append(_native.open_file_executor(str(root or tmp_path / "pool"), capacity_nbytes, threads))
        return engines[-1]

    yield open_one
    for engine in engines:
        assert engine.close(WAIT_S)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "pool"


# ---- buffers -------------------------------------------------------------------------------------


def test_any_contiguous_buffer_is_bytes(open_engine):
    engine = open_engine()
    rows = numpy.arange(600, dtype=numpy.float16).reshape(20, 30)
    assert run(engine, _native.PUT, [key(1)], [rows]) == [_native.OK]
    out = numpy.zeros((30, 20), dtype=numpy.int16)
    assert run(engine, _native.GET, [key(1)], [out]) == [_native.OK]
    assert out.tobytes() == rows.tobytes()
    assert run(engine, _native.PUT, [key(2)], [memoryview(rows)[3:5]]) == [_native.OK]
    words = array.array("Q", bytes(120))
    assert run(engine, _native.GET, [key(2)], [words]) == [_native.OK]
    assert words.tobytes() == rows[3:5].tobytes()


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
        eventually(lambda: engine.counters()["queued"] == 1)  # the first one is running
        second.cancel()
        assert second.done()  # nobody had started it, though the only thread is busy
        assert not is_held(queued)
        first.cancel()
        assert is_held(running) or first.done()  # never given back before its thread has let go
        assert first.wait(WAIT_S)
        assert not is_held(running)
    assert list(first.results() + second.results()) == [_native.CANCELLED, _native.CANCELLED]
    assert engine.counters()["cancelled"] == 2
    assert temporaries(root) == []
    assert get(engine, 1) == get(engine, 2) == _native.MISS


def test_the_deadline_gives_the_buffers_back(open_engine, root):
    engine = open_engine(threads=1)
    running, queued = bytearray(1000), bytearray(1000)
    with eviction_elsewhere(root):
        first = engine.submit(_native.PUT, [key(1)], [running], WAIT_S)
        eventually(lambda: engine.counters()["queued"] == 0)
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


def test_a_running_put_meets_its_deadline(open_engine, root):
    engine = open_engine(threads=1)
    buffer = bytearray(1000)
    with eviction_elsewhere(root):
        batch = engine.submit(_native.PUT, [key(1)], [buffer], 0.02)
        assert batch.wait(WAIT_S)
        assert list(batch.results()) == [_native.TIMED_OUT]
        assert not is_held(buffer)


def test_a_dropped_batch_goes_on_with_its_buffers(open_engine, root):
    engine = open_engine(threads=1)
    buffer = bytearray(payload(1, 1000))
    with eviction_elsewhere(root):
        engine.submit(_native.PUT, [key(1)], [buffer], WAIT_S)
        gc.collect()
        engine.counters()
        assert is_held(buffer)
    eventually(lambda: engine.counters()["puts"] == 1)
    eventually(lambda: engine.counters() and not is_held(buffer))
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


def test_buffers_come_back_from_cancelled_loads_at_any_moment(open_engine):
    engine = open_engine(threads=2)
    for i in range(8):
        assert put(engine, i, MIB) == _native.OK
    for pause in range(30):
        buffers = [bytearray(MIB) for _ in range(8)]
        batch = engine.submit(_native.GET, [key(i) for i in range(8)], buffers, WAIT_S)
        batch.wait(pause * 1e-4)
        batch.cancel()
        assert batch.wait(WAIT_S)
        assert not any(map(is_held, buffers))
        for i, status in enumerate(batch.results()):
            assert status in (_native.OK, _native.CANCELLED)
            if status == _native.OK:
                assert buffers[i] == payload(i, MIB)


def test_buffers_outlive_the_engine_object(tmp_path):
    buffer = bytearray(payload(1, 1000))
    engine = _native.open_file_executor(str(tmp_path), MIB, 1)
    batch = engine.submit(_native.PUT, [key(1)], [buffer], WAIT_S)
    del engine
    gc.collect()
    assert batch.done()  # closing completes every batch
    assert not is_held(buffer)


# ---- completion ----------------------------------------------------------------------------------


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


def test_close(open_engine):
    engine = open_engine()
    assert put(engine, 1) == _native.OK
    batch = engine.submit(_native.PUT, [key(i) for i in range(64)], [bytes(MIB)] * 64, WAIT_S)
    threads, descriptors = count_threads(), count_descriptors()
    assert engine.close(WAIT_S)
    assert batch.done()
    assert set(batch.results()) <= {_native.OK, _native.CANCELLED}
    assert count_threads() == threads - 3  # two for files, one for deadlines
    assert count_descriptors() < descriptors
    assert engine.close(0)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(_native.DELETE, [key(1)], None, 1.0)
    assert engine.counters()["puts"] >= 1


def test_a_forked_child_is_told(open_engine):
    engine = open_engine()
    assert put(engine, 1) == _native.OK
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork() with threads, from Python 3.12
        child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.submit(_native.CONTAINS, [key(1)], None, 1.0)
        except RuntimeError as error:
            code = 0 if "fork" in str(error) and engine.close(1.0) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get(engine, 1) == _native.OK


# ---- bad arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, 3601])
def test_bad_timeouts(open_engine, timeout_s):
    engine = open_engine()
    with pytest.raises(ValueError, match="timeout_s"):
        engine.submit(_native.CONTAINS, [key(1)], None, timeout_s)


@pytest.mark.parametrize(
    ("op", "keys", "buffers", "error"),
    [
        (9, [key(1)], None, ValueError),
        (-1, [key(1)], None, ValueError),
        (_native.PUT, [key(1)], None, ValueError),
        (_native.GET, [key(1)], None, ValueError),
        (_native.CONTAINS, [key(1)], [b"x"], ValueError),
        (_native.DELETE, [key(1)], [], ValueError),
        (_native.CONTAINS, key(1), None, TypeError),
        (_native.CONTAINS, [key(1).encode()], None, TypeError),
        (_native.CONTAINS, 7, None, TypeError),
        (_native.CONTAINS, [key(1) + "\n"], None, ValueError),
        (_native.CONTAINS, [key(1, tenant="..")], None, ValueError),
        (_native.CONTAINS, ["\ud800"], None, ValueError),
        (_native.PUT, [key(1)], [b""], ValueError),
        (_native.PUT, [key(1)], [], ValueError),
        (_native.PUT, [key(1)], 7, TypeError),
    ],
)
def test_bad_batches(open_engine, op, keys, buffers, error):
    engine = open_engine()
    with pytest.raises(error):
        engine.submit(op, keys, buffers, 1.0)


def test_a_full_queue_is_refused(open_engine, root):
    engine = open_engine(threads=1)
    with eviction_elsewhere(root):
        blocker = engine.submit(_native.PUT, [key(1)], [b"x"], WAIT_S)
        # One batch is refused as a whole: nothing of it is queued.
        with pytest.raises(RuntimeError, match="queue full"):
            engine.submit(_native.CONTAINS, [key(1)] * (1_048_576 + 1), None, 1.0)
        blocker.cancel()
    assert blocker.wait(WAIT_S)


def test_bad_ways_to_open(tmp_path):
    with pytest.raises(ValueError, match="capacity_nbytes"):
        _native.open_file_executor(str(tmp_path), 0, 1)
    for threads in (0, 257):
        with pytest.raises(ValueError, match="threads"):
            _native.open_file_executor(str(tmp_path), MIB, threads)
    with pytest.raises(ValueError, match="root"):
        _native.open_file_executor("", MIB, 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError) as caught:
        _native.open_file_executor(str(tmp_path / "file"), MIB, 1)
    assert caught.value.filename.startswith(str(tmp_path / "file"))


# ---- the file system ------------------------------------------------------------------------


@pytest.fixture
def small_mount(tmp_path):
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount_point)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_a_full_file_system_makes_room_or_says_no(small_mount):
    engine = _native.open_file_executor(str(small_mount / "pool"), 64 * MIB, 2)
    for i in range(30):  # the capacity is far above what there is: old records make room for new ones
        assert put(engine, i, MIB) == _native.OK
    assert get(engine, 29, MIB) == _native.OK
    assert engine.counters()["evicted"] >= 20
    assert run(engine, _native.DELETE, [key(i) for i in range(30)]).count(_native.OK) >= 5
    (small_mount / "foreign").write_bytes(bytes(15 * MIB // 2))
    for i in range(3):
        assert put(engine, i, MIB) == _native.NO_ROOM
        assert temporaries(small_mount / "pool") == []
    (small_mount / "foreign").unlink()
    assert put(engine, 1, MIB) == get(engine, 1, MIB) == _native.OK
    assert engine.counters()["faults"] == 0
    assert engine.counters()["stored_nbytes"] == MIB + 64
    assert engine.close(WAIT_S)


PERMISSIONS = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from kvpool import _native
    sys.path.insert(0, sys.argv[2])
    from test_native_engine import WAIT_S, key, payload, put, get, temporaries
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    root = Path(sys.argv[1])
    (root / "closed").mkdir(mode=0o500)
    try:
        _native.open_file_executor(str(root / "closed"), 1 << 20, 1)
    except PermissionError as error:
        assert error.filename == str(root / "closed/kvpool-pool"), error.filename
    else:
        raise AssertionError("opened")
    engine = _native.open_file_executor(str(root / "open"), 1 << 20, 1)
    assert put(engine, 1) == _native.OK
    (root / "open/tmp").chmod(0o500)
    batch = engine.submit(_native.PUT, [key(2)], [payload(2, 1000)], WAIT_S)
    assert batch.wait(WAIT_S) and list(batch.results()) == [_native.FAULT]
    assert batch.error().startswith("put /") and batch.error().endswith(": Permission denied"), batch.error()
    (root / "open/tmp").chmod(0o700)
    (root / "open/blocks").chmod(0o600)
    batch = engine.submit(_native.GET, [key(1)], [bytearray(1000)], WAIT_S)
    assert batch.wait(WAIT_S) and list(batch.results()) == [_native.FAULT]
    assert batch.error().startswith("get /") and batch.error().endswith(": Permission denied"), batch.error()
    (root / "open/blocks").chmod(0o700)
    assert get(engine, 1) == _native.OK and put(engine, 2) == _native.OK
    assert engine.counters()["faults"] == 2 and engine.counters()["stored_nbytes"] == 2 * 1064
    assert temporaries(root / "open") == []
    assert engine.close(WAIT_S)
    """
)


def test_no_permission_is_a_fault_in_words():
    with tempfile.TemporaryDirectory() as directory:  # pytest's own directories are closed to other users
        Path(directory).chmod(0o777)
        here = str(Path(__file__).parent)
        subprocess.run([sys.executable, "-c", PERMISSIONS, directory, here], check=True, timeout=60)
