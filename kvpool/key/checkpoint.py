"""The digest of a checkpoint identifies the weights in a folder, wherever it is mounted and whatever its
name.

The digest covers each weights file's name, size, and header (safetensors) or head and tail (other formats).
It also covers the start of every tensor, and 4 KiB at 16,384 places spread over all files. Checkpoints up to
64 MiB are read in full. Differences in fewer places can go unnoticed.

It also covers the configuration without its origin fields, code that the configuration names
(``auto_map``), and which files an index chooses, where it leaves any out. Formats: safetensors
(https://github.com/huggingface/safetensors), zip files of ``torch.save`` (the directory at the end has a CRC
per tensor), gguf.

Threads: each call makes its own daemon threads; ``_Reading._lock`` guards its fields, reads happen outside of
it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.errors import ConfigError
from kvpool.files import open_file, read_file
from kvpool.key.order import ORDERED
from kvpool.threads import start_thread

TIMEOUT_S = 60.0
WHOLE_NBYTES = 64 << 20  # smaller checkpoints are read in full
SPOTS = 16_384
SPOT_NBYTES = 4096
TENSOR_SPOT_NBYTES = 1024
EDGE_NBYTES = 1 << 20  # head and tail of files other than safetensors
MAX_HEADER_NBYTES = 128 << 20  # safetensors itself allows 100 MB
MAX_TEXT_NBYTES = 16 << 20  # of a configuration or a code file
PIECE_SPOTS = 512  # read at a time by one thread
PIECE_NBYTES = 64 << 20
READ_NBYTES = 1 << 20
THREADS = 8  # so that waits on a cold or distant disk overlap

# By load format: the files that vLLM's and SGLang's loaders read, of the first pattern that has any in the folder.
_SAFETENSORS, _MISTRAL = ("*.safetensors",), ("consolidated*.safetensors",)
_HF = (*_SAFETENSORS, "*.bin", "*.pt")
LOADED_PATTERNS = {
    **dict.fromkeys(("auto", "bitsandbytes"), _HF),
    **dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor", "sharded_state"), _SAFETENSORS),
    "mistral": _MISTRAL,
    "pt": ("*.pt",),
    "gguf": ("*.gguf",),
}
AUTO_PATTERNS_OF_VLLM = (*_MISTRAL, *_HF)
_ANY = (*_HF, "*.gguf")
# Files beside the weights that inference does not load (``filter_files_not_needed_for_inference`` of vLLM).
_NOT_WEIGHTS = frozenset(("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"))
# A loader reads only the safetensors files that an index names (``filter_duplicate_safetensors_files``).
_INDICES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")
MAX_INDEX_NBYTES = 128 << 20  # 10 MB for 1 T of experts
_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_WHERE_IT_CAME_FROM = frozenset(
    ("_name_or_path", "_commit_hash", "transformers_version", "base_model_name_or_path", "revision")
)


class CheckpointDigest(NamedTuple):
    """``hex``: 32 lowercase hex digits. ``files``, ``nbytes``: of weights. ``read_nbytes``: the bytes read."""

    hex: str
    files: int
    nbytes: int
    read_nbytes: int


def checkpoint_digest(
    path: Path,
    *,
    patterns: Sequence[str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> CheckpointDigest:
    """The digest of the weights in ``path``: the folder of a checkpoint or an adapter, or a single file.

    In a folder, the first of ``patterns`` with any files decides, as in an engine; None, for a loader that is
    not known: files of every kind count. Blocks for at most ``timeout_s`` seconds, even on a hanging disk; up
    to 8 reads at a time. Errors: ``ConfigError``: no weights, an unreadable or truncated file, or out of time;
    ``NoThread``.
    """
    reading = _Reading(Path(path), patterns, time.monotonic() + timeout_s)
    digest = reading.wait()
    if digest is None:
        raise ConfigError(
            f"the digest of the weights in {path} was not made within {timeout_s:g} s; look at the disk, or set "
            "model_id"
        )
    return digest


def served_digest(engine_path: str, named_path: str | None, patterns: Sequence[str] | None = None) -> str:
    """The digest of an engine's weights where only the model's name is known, which is no identity.

    32 hex digits; "" when no folder is named and the engine's path has no weights (a hub's name, or "").

    ``named_path``: the operator's, which wins. Errors: ``ConfigError``: it has no weights, or its weights
    cannot be read in time; ``NoThread``.
    """
    if named_path is not None:
        return checkpoint_digest(Path(named_path), patterns=patterns).hex
    if not engine_path:
        return ""
    path = Path(engine_path)
    try:
        found = path.is_file() or any(_matching(path, pattern) for pattern in patterns or _ANY)
    except OSError:  # a name too long for a path
        return ""
    return checkpoint_digest(path, patterns=patterns).hex if found else ""


def refuse_later_changes(path: Path, since_ns: int, *, patterns: Sequence[str] | None = None) -> None:
    """Refuse a checkpoint that was changed after ``since_ns``, by the clock of its files: a process that has loaded it
    since may have read what was there before. Errors: ``ConfigError``.
    """
    try:
        files = [file.path for file in _weights_files(path, patterns)]
        if path.is_dir():
            files += [*_configs(path), *(path / name for name in _INDICES), *path.glob("*.py")]
            files = [file for file in files if file.exists()]
        later = [file for file in files if file.stat().st_ctime_ns > since_ns]
    except OSError as error:
        raise ConfigError(
            f"the weights in {path} went away ({error}): start again when they are there"
        ) from error
    if later:
        raise ConfigError(
            f"{later[0]} was changed while this engine loaded its weights, which may be those before: start it again, "
            "and give other weights another path"
        )


class _OutOfTime(Exception):
    """The deadline has passed."""


class _File(NamedTuple):
    name: str
    path: Path
    nbytes: int


class _Piece(NamedTuple):
    file: _File
    spots: Sequence[tuple[int, int]]  # (offset, bytes), ascending


class _Reading:
    """One digest in progress, on daemon threads: a hanging disk must not keep the process alive."""

    def __init__(self, path: Path, patterns: Sequence[str] | None, until: float) -> None:
        self._path, self._patterns, self._until = path, patterns, until
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pieces: Iterator[tuple[int, _Piece]] = iter(())
        self._hashes: dict[int, bytes] = {}
        self._digest: CheckpointDigest | None = None
        self._error: Exception | None = None

    def wait(self) -> CheckpointDigest | None:
        """None: out of time."""
        self._start(self._make)
        self._ended.wait(max(0.0, self._until - time.monotonic()))
        with self._lock:
            digest, error = self._digest, self._error
        self._until = 0.0  # threads that still read end at their next place
        if isinstance(error, OSError):
            raise ConfigError(
                f"the weights in {self._path} cannot be read ({error}); name a folder that this user can read"
            ) from error
        if error is not None and not isinstance(error, _OutOfTime):
            raise error
        return digest

    @staticmethod
    def _start(work: Any) -> threading.Thread:
        thread = threading.Thread(target=work, name="kvpool-checkpoint", daemon=True)
        start_thread(thread)
        return thread

    def _make(self) -> None:
        try:
            digest = self._made()
        except Exception as error:
            with self._lock:
                self._error = self._error or error
        else:
            with self._lock:
                self._digest = digest
        self._ended.set()

    def _made(self) -> CheckpointDigest:
        files = _weights_files(self._path, self._patterns)
        nbytes = sum(file.nbytes for file in files)
        pieces = list(enumerate(self._cut(files, nbytes)))
        with self._lock:
            self._pieces = iter(pieces)
        for thread in [self._start(self._read) for _ in range(min(THREADS, len(pieces)))]:
            thread.join()
        with self._lock:
            if self._error is not None:
                raise self._error
        said: list[object] = [["kvpool checkpoint", 1, nbytes <= WHOLE_NBYTES]]
        said += [[file.name, file.nbytes] for file in files]
        said += [[piece.file.name, self._hashes[number].hex()] for number, piece in pieces]
        said += _chosen(self._path, files)
        said += _configuration(self._path)
        text = json.dumps(said, ensure_ascii=True, separators=(",", ":"))
        read_nbytes = sum(length for _, piece in pieces for _, length in piece.spots)
        return CheckpointDigest(
            hashlib.sha256(text.encode()).hexdigest()[:32], len(files), nbytes, read_nbytes
        )

    def _cut(self, files: Sequence[_File], nbytes: int) -> Iterator[_Piece]:
        for file in files:
            if nbytes <= WHOLE_NBYTES:
                for start in range(0, file.nbytes, PIECE_NBYTES):
                    yield _Piece(file, [(start, min(PIECE_NBYTES, file.nbytes - start))])
            else:
                spots = _spots(file, max(16, math.ceil(SPOTS * file.nbytes / nbytes)))
                for first in range(0, len(spots), PIECE_SPOTS):
                    yield _Piece(file, spots[first : first + PIECE_SPOTS])

    def _read(self) -> None:
        try:
            while True:
                with self._lock:
                    number, piece = next(self._pieces, (-1, None))
                    if piece is None or self._error is not None:
                        return
                digest = self._hash(piece)
                with self._lock:
                    self._hashes[number] = digest
        except Exception as error:
            with self._lock:
                self._error = self._error or error

    def _hash(self, piece: _Piece) -> bytes:
        found = hashlib.sha256()
        descriptor = os.open(piece.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if len(piece.spots) > 1:  # read-ahead would fetch bytes that are not sampled
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for offset, length in piece.spots:
                for start in range(offset, offset + length, READ_NBYTES):
                    if time.monotonic() > self._until:
                        raise _OutOfTime
                    wanted = min(READ_NBYTES, offset + length - start)
                    data = os.pread(descriptor, wanted, start)
                    if len(data) != wanted:
                        raise ConfigError(
                            f"{piece.file.path} became shorter while it was read; start again when it is whole"
                        )
                    found.update(data)
        finally:
            os.close(descriptor)
        return found.digest()


def _weights_files(path: Path, patterns: Sequence[str] | None = None) -> list[_File]:
    """The weights files of ``path``, by name; links are followed. Errors: ``ConfigError``; ``OSError``."""
    if path.is_dir():
        if patterns is None:
            found = sorted(one for pattern in _ANY for one in _matching(path, pattern))
        else:
            found = next(filter(None, (_matching(path, pattern) for pattern in patterns)), [])
        if found:
            return [_file(one) for one in found]
        raise ConfigError(
            f"there are no weights in {path}: no file is {', '.join(_ANY if patterns is None else patterns)}"
        )
    if not path.exists():
        raise ConfigError(f"there are no weights in {path}: it is not there")
    return [_file(path)]


def _matching(path: Path, pattern: str) -> list[Path]:
    """By name. Hidden files are no weights, for engines too: a half-copied one, or what macOS keeps of a file."""
    return sorted(
        one for one in path.glob(pattern) if one.name not in _NOT_WEIGHTS and not one.name.startswith(".")
    )


def _chosen(path: Path, files: Sequence[_File]) -> list[object]:
    """What the folder's indices choose of ``files``; empty where these, or no index, choose all."""
    names = [file.name for file in files if file.path.suffix == ".safetensors"]
    said: list[object] = []
    for index in (path / name for name in _INDICES if names and (path / name).is_file()):
        try:
            named = set(json.loads(_text(index, MAX_INDEX_NBYTES))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index} is no index of safetensors; fetch the checkpoint again") from error
        chosen = [name for name in names if name in named]
        if chosen and chosen != names:  # none: it is of other files
            said.append([index.name, chosen])
    return said


def _file(path: Path) -> _File:
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"{path} is not a file of weights")
    return _File(path.name, path, info.st_size)


def _spots(file: _File, count: int) -> list[tuple[int, int]]:
    """Places of a file, ascending: its descriptive ends, its tensors' starts, and ``count`` spread evenly."""
    spots = []
    start = 0
    if file.path.suffix == ".safetensors":
        start, tensors = _safetensors(file)
        spots.append((0, start))
        spots += tensors
    else:
        edge = min(EDGE_NBYTES, file.nbytes)
        spots += [(0, edge), (file.nbytes - edge, edge)]
    stride = (file.nbytes - start) / count
    for index in range(count):
        # Unequal distances, because rows of a matrix are equally spaced.
        within = (index * 2654435761 % (1 << 32)) / (1 << 32)
        offset = int(start + (index + within) * stride)
        spots.append((offset, min(SPOT_NBYTES, file.nbytes - offset)))
    return sorted(set(spots))


def _safetensors(file: _File) -> tuple[int, list[tuple[int, int]]]:
    """(start of the data, start of each tensor) of a safetensors file."""
    with open_file(file.path) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(MAX_HEADER_NBYTES, file.nbytes - 8):
            raise ConfigError(f"{file.path} is not a whole safetensors file; fetch the checkpoint again")
        text = opened.read(length)
    start = 8 + length
    try:
        tensors = [
            (start + begin, min(TENSOR_SPOT_NBYTES, end - begin))
            for name, tensor in json.loads(text).items()
            if name != "__metadata__"
            for begin, end in [tensor["data_offsets"]]
            if begin < end
        ]
        whole = all(start <= offset and offset + length <= file.nbytes for offset, length in tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file.path} has no header of safetensors; fetch the checkpoint again") from error
    if not whole:
        raise ConfigError(f"{file.path} is shorter than its header says; fetch the checkpoint again")
    return start, tensors


def _configuration(path: Path) -> list[object]:
    """The folder's configuration; empty for a single file."""
    if not path.is_dir():
        return []
    said: list[object] = []
    code = False
    for file in _configs(path):
        try:
            config = json.loads(_text(file))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not JSON; fetch the checkpoint again") from error
        code |= isinstance(config, dict) and "auto_map" in config
        said.append([file.name, _without_origin(config)])
    if code:
        said += [[one.name, hashlib.sha256(_text(one)).hexdigest()] for one in sorted(path.glob("*.py"))]
    return said


def _configs(path: Path) -> list[Path]:
    """The configurations that are in a folder, by name."""
    names = {*_CONFIGS, *(one.name for one in path.glob("*quant*.json"))}
    return [path / name for name in sorted(names) if (path / name).exists()]


def _text(path: Path, max_nbytes: int = MAX_TEXT_NBYTES) -> bytes:
    try:
        return read_file(path, max_nbytes)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _without_origin(value: Any, in_order: bool = False) -> Any:
    if isinstance(value, dict):
        names = [name for name in (value if in_order else sorted(value)) if name not in _WHERE_IT_CAME_FROM]
        return {name: _without_origin(value[name], name in ORDERED) for name in names}
    return [_without_origin(inner) for inner in value] if isinstance(value, list) else value
