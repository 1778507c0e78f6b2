"""``RankAudits``: one rank's part of audits, from the block that a step computed to what is reported of it.

Where the operator wants it, both blocks of a finding are kept as a file, for a bug report: ``keep``.

Threads: the worker's model thread only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save
from vllm.logger import init_logger

from kvpool.transfer import Block, KVCacheMover
from kvpool.vllm.plan import AuditedPart, LayerDistance, PoolWorkerMetadata, count

logger = init_logger("vllm.kvpool")

MAX_KEPT = 16  # files in a directory
MAX_WAITING = 16  # audits whose blocks wait for the verdict
MAX_WRITES = 4  # findings whose blocks wait for the disk


@dataclass
class _Audit:
    unstaged: set[int]  # tags
    unended: set[int]


class _Payloads(NamedTuple):
    group: int
    writer: str
    payloads: tuple[bytes, ...]


class RankAudits:
    """``layer_names``: of a block's payload, by ``Block.group``. ``folder``: for blocks that are found wrong."""

    def __init__(
        self, mover: KVCacheMover, layer_names: Sequence[Sequence[str]], folder: str | None = None
    ) -> None:
        self._mover, self._layer_names = mover, layer_names
        self._folder = Path(folder) if folder else None
        mover.auditor.wants_payloads = self._folder is not None
        self._payloads: dict[int, list[_Payloads]] = {}  # by number
        self._audits: dict[int, _Audit] = {}  # by number
        self._blocks: dict[int, tuple[int, int]] = {}  # by tag: number, and group of the block
        self._tag = 0
        # Nothing waits for a disk: it may be slow, or hang.
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="kvpool-audit-keep")
        self._writes: list[Future[None]] = []  # that have not ended

    def begin(self, number: int, blocks: Sequence[Block]) -> None:
        """Copy and compare what the step has computed. It is reported once as staged, and once as ended.

        If it raises, the caller reports it.
        """
        tags = range(self._tag, self._tag + len(blocks))
        self._tag = tags.stop
        self._blocks |= {tag: (number, block.group) for tag, block in zip(tags, blocks, strict=True)}
        self._audits[number] = _Audit(set(tags), set(tags))
        try:
            self._mover.audit(blocks, tags)
        except Exception:
            del self._audits[number]
            raise

    def report(self, report: PoolWorkerMetadata) -> None:
        """Add what is known since the last call."""
        ended = self._mover.poll_audits()
        for tag in ended.staged:
            number, _ = self._blocks[tag]
            audit = self._audits[number]
            audit.unstaged.discard(tag)
            if not audit.unstaged:
                count(report.audit_staged, [number])
        for compared in ended.compared:
            number, group = self._blocks.pop(compared.tag)
            named = zip(self._layer_names[group], compared.distances, strict=False)  # none: it says nothing
            layers = [LayerDistance(name, *distance) for name, distance in named]
            part = AuditedPart(compared.why, compared.writer, layers)
            report.audited.setdefault(number, []).append(part)
            if compared.payloads:
                found = _Payloads(group, compared.writer.hex(), compared.payloads)
                self._payloads.setdefault(number, []).append(found)
                if len(self._payloads) > MAX_WAITING:
                    del self._payloads[next(iter(self._payloads))]
            audit = self._audits[number]
            audit.unended.discard(compared.tag)
            if not audit.unended:
                del self._audits[number]
                count(report.audit_ended, [number])

    def keep(self, number: int, what: str, rank: int) -> None:
        """Write both blocks of a finding into the folder, unless it has enough. Does not wait."""
        found = self._payloads.pop(number, [])
        self._writes = [write for write in self._writes if not write.done()]
        if found and self._folder is not None and len(self._writes) < MAX_WRITES:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                write = self._keeper.submit(_write, self._folder, found, self._layer_names, what, rank)
                self._writes.append(write)

    def give_up(self, report: PoolWorkerMetadata) -> None:
        """Report all as ended: nothing reads their blocks any more."""
        for number, audit in self._audits.items():
            count(report.audit_staged, [number] if audit.unstaged else [])
            report.audited.setdefault(number, []).append(AuditedPart("gone"))
            count(report.audit_ended, [number])
        self._audits.clear()
        self._blocks.clear()


def _write(
    folder: Path, found: Sequence[_Payloads], layer_names: Sequence[Sequence[str]], what: str, rank: int
) -> None:
    """One safetensors file: ``ours.N`` and ``pool.N`` are the bytes of part N, and the header says what they are."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(list(folder.glob("finding-*.safetensors"))) >= MAX_KEPT:
            logger.warning("kvpool: %s has %d findings, and takes no more", folder, MAX_KEPT)
            return
        tensors, header = {}, {"what": what}
        for part, one in enumerate(found):
            for name, payload in zip(("ours", "pool"), one.payloads, strict=True):
                tensors[f"{name}.{part}"] = np.frombuffer(payload, np.uint8)
            header[f"layers.{part}"] = " ".join(layer_names[one.group])
            header[f"writer.{part}"] = one.writer
        path = folder / f"finding-{time.time_ns()}-rank{rank}.safetensors"
        part_path = path.with_suffix(
            ".part"
        )  # half a file is of no use, and would stand for one of those it takes
        try:
            with open(part_path, "xb", opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(save(tensors, header))
            part_path.rename(path)
        finally:
            part_path.unlink(missing_ok=True)
        logger.info("kvpool: both blocks are in %s", path)
    except OSError as error:
        logger.warning("kvpool could not keep a finding in %s: %s", folder, error)
