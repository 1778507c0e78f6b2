"""``kvpool lookup``: one lookup, as a table with a bar for each worker's rank."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpool.cli.options import IndexConnection
from kvpool.cli.settings import LookupOptions
from kvpool.cli.tables import Column, add_row, console, fitted, show
from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.index import Chat, Lookup, Pick, Prompt, Ranking, Row
from kvpool.index.prompt import PromptFields
from kvpool.key.hashing import Multimodal

MAX_FILE_NBYTES = 128 << 20
STANDARD_INPUT = ("-", "@-")
MAX_U32, MAX_U64 = (1 << 32) - 1, (1 << 64) - 1
BAR_CELLS = 20

_NOBODY = 'no worker of model "{}" that was asked about is there now'
_WORD = re.compile(r"[^\s,]+")
_DECIMAL = re.compile(r"[0-9]{1,20}")
_ITEM = re.compile(r"(.+):([0-9]{1,8}):([0-9]{1,8})", re.DOTALL)
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,16}")


def run_lookup(options: LookupOptions, index: IndexConnection) -> None:
    """Print a table of at most ``most`` rows (0: all) or JSON.

    Errors: ``ConfigError`` for the arguments; those of ``IndexClient``.
    """
    prompt = _prompt(options)
    asked = {"model": options.model, "tenant": options.tenant}
    with index.open(options.timeout) as client:
        if options.route:
            ranking = client.route(prompt, preview=True)
            if options.as_json:
                print(json.dumps(asked | {"picks": [_pick_json(pick) for pick in ranking.picks]}))
            else:
                _print_ranking(options.model, ranking)
            return
        answer = client.lookup(prompt)
    rows = sorted(answer, key=lambda row: (-row.device_blocks, -row.local_blocks, -row.pool_blocks, *row[:2]))
    if options.as_json:
        print(json.dumps(asked | {"rows": [row._asdict() for row in rows]}))
    else:
        _print(options.model, rows, answer, options.most, len({item[0] for item in prompt.multimodal}))


def _prompt(of: LookupOptions) -> Prompt:
    if sum(given is not None for given in (of.token_ids, of.hashes, of.text, of.chat)) != 1:
        raise ConfigError(
            "give the prompt as --text WORDS, --token-ids, --hashes or --chat, or as @FILE of one, and only once"
        )
    if (of.lora_name is None) != (of.lora_path is None):
        raise ConfigError("--lora-name and --lora-path go together: both are in the hash")
    if of.hashes is not None and (of.lora_name is not None or of.cache_salt is not None):
        raise ConfigError("--hashes: an adapter and a salt are in the hashes already")
    fields: PromptFields = {"tenant": of.tenant, "workers": of.worker or None, "cache_salt": of.cache_salt}
    if of.media:
        if of.token_ids is None and of.hashes is None:
            raise ConfigError("--media goes with --token-ids or --hashes: a text or a chat has none")
        fields["multimodal"] = [_item(text) for text in of.media]
    if of.lora_name is not None and of.lora_path is not None:
        fields["lora"] = (of.lora_name, of.lora_path)
    if of.token_ids is not None:
        fields["token_ids"] = read_numbers(of.token_ids, "--token-ids", "token id", MAX_U32)
    elif of.hashes is not None:
        numbers = read_numbers(of.hashes, "--hashes", "block hash", MAX_U64)
        fields["hashes64"] = struct.pack(f"<{len(numbers)}Q", *numbers)
    elif of.text is not None:
        fields["text"] = _text(of.text, "--text")
    elif of.chat is not None:
        fields["chat"] = _chat(of.chat, "--chat")
    return Prompt(of.model, **fields)


def _item(text: str) -> Multimodal:
    match = _ITEM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--media is IDENTIFIER:OFFSET:LENGTH, the last two in tokens of the prompt, not {_shown(text)}"
        )
    return match[1], int(match[2]), int(match[3])


def _chat(source: str, option: str) -> Chat:
    """The chat as ``_text`` reads it. Blocking. Errors: ``ConfigError``."""
    where, text = _where(source, option), _text(source, option)
    try:
        return Chat.of_request(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply for a chat") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_numbers(source: str, option: str, what: str, most: int) -> list[int]:
    """The whole numbers from 0 to ``most`` in what ``_text`` reads.

    JSON, or decimal and 0x numbers between spaces, lines or commas. Blocking. Errors: ``ConfigError``.
    """
    where, text = _where(source, option), _text(source, option)
    if text.lstrip().startswith("["):
        numbers = _of_json(text, where, what, most)
    else:
        numbers = []
        for word in _WORD.finditer(text):
            number = _number(word[0], most)
            if number is None:
                line = text.count("\n", 0, word.start()) + 1
                column = word.start() - text.rfind("\n", 0, word.start())
                raise ConfigError(
                    f"{where}, line {line}, column {column}: {_shown(word[0])} is no {what}{_hint(most, where)}"
                )
            numbers.append(number)
    if not numbers:
        raise ConfigError(f"{where} holds no {what}")
    return numbers


def _where(source: str, option: str) -> str:
    return "standard input" if source in STANDARD_INPUT else source[1:] if source.startswith("@") else option


def _text(source: str, option: str) -> str:
    """``source`` itself; ``@FILE``: the file's text; ``-``: that of standard input. As curl's ``--data``.

    Blocking. Errors: ``ConfigError``, also for words that name a file: earlier versions took its name alone.
    """
    where = _where(source, option)
    try:
        if source in STANDARD_INPUT:
            raw = sys.stdin.buffer.read(MAX_FILE_NBYTES + 1)
        elif source.startswith("@"):
            raw = read_file(where, MAX_FILE_NBYTES)
        elif _is_file(source):
            raise ConfigError(
                f"{option} {source} names a file: write {option} @{source} for what is in it, or send these very "
                f"words by standard input with {option} -"
            )
        else:
            return source
    except OSError as error:
        raise ConfigError(f"{option} {source}: {error.strerror}") from error
    if len(raw) > MAX_FILE_NBYTES:
        raise ConfigError(f"{where} is larger than {MAX_FILE_NBYTES} bytes: this is not one prompt")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}, byte {error.start + 1}: this is not text") from error


def _is_file(words: str) -> bool:
    try:
        return Path(words).exists() and not Path(words).is_dir()
    except (OSError, ValueError):  # longer than a name may be, or with a null byte
        return False


def _of_json(text: str, where: str, what: str, most: int) -> list[int]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{where} is no JSON list of numbers") from error
    numbers = []
    for place, item in enumerate(items):
        number = item if type(item) is int and 0 <= item <= most else None
        if isinstance(item, str):
            number = _number(item, most)
        if number is None:
            raise ConfigError(f"{where}, item {place + 1}: {_shown(item)} is no {what}{_hint(most, where)}")
        numbers.append(number)
    return numbers


def _number(word: str, most: int) -> int | None:
    if _DECIMAL.fullmatch(word):
        number = int(word)
    elif most > MAX_U32 and _HEX.fullmatch(word):
        number = int(word, 16)
    else:
        return None
    return number if number <= most else None


def _shown(item: object) -> str:
    text = str(item)
    return repr(text if len(text) <= 40 else text[:39] + "…")


def _hint(most: int, where: str) -> str:
    of_hashes = ", or hexadecimal with 0x in front" if most > MAX_U32 else ""
    of_files = ", or @FILE" if where.startswith("--") else ""
    return f": write whole numbers from 0 to {most}{of_hashes}{of_files}"


def _print(model: str, rows: Sequence[Row], answer: Lookup, most: int, items: int) -> None:
    """``items``: of the prompt, different ones."""
    out = console()
    if not rows:
        show(out, _NOBODY.format(model))
        return
    if not any(answer.prompt_blocks):
        tokens = min(answer.block_tokens, default=0)
        show(out, f"a prompt shorter than a block, of {tokens} tokens: no worker can hold any of it")
        return
    marks = "█▓░·" if (out.encoding or "").lower().startswith("utf") else "#+-."
    lengths = sorted(set(answer.prompt_blocks))
    show(
        out,
        f"{' or '.join(map(str, lengths))} blocks: {marks[0]} on the device, {marks[1]} in other tiers or "
        f"the near pool of the worker, {marks[2]} in the pool",
    )
    shown = rows[: most or None]
    table, *missing = fitted(_columns(rows, shown, marks, items), out.width)
    summary = [_summary(left)] if (left := rows[len(shown) :]) else []
    show(out, table, *summary, *missing)


def _named(rows: Sequence[Row | Pick]) -> list[str]:
    """Their workers' names, with the rank where one has several."""
    several = len({row.worker for row in rows}) != len(rows)
    return [f"{row.worker} rank {row.dp_rank}" if several else row.worker for row in rows]


def _columns(rows: Sequence[Row], shown: Sequence[Row], marks: str, items: int) -> list[Column]:
    """Blocks and trust stay on a narrow screen."""
    columns = [
        Column("worker", left=True), Column("leading blocks", drop=2, left=True), Column("device"), Column("local"),
        Column("pool"), Column("loadable", drop=1), Column("media"), Column("sequence", drop=4), Column("age", drop=3),
        Column("state", left=True),
    ]  # fmt: skip
    for row, name in zip(shown, _named(rows), strict=False):
        add_row(
            columns, name, _bar(row, marks), row.device_blocks, row.local_blocks, row.pool_blocks, row.loadable_blocks,
            f"{row.pool_media}/{items}", row.sequence, f"{row.staleness_ms / 1000:.1f} s",
            "stale" if row.stale else "ok",
        )  # fmt: skip
    # For most prompts it is the larger of local and pool.
    if not any(row.loadable_blocks > max(row.local_blocks, row.pool_blocks) for row in rows):
        columns = [column for column in columns if column.name != "loadable"]
    return columns if items else [column for column in columns if column.name != "media"]


def _summary(left: Sequence[Row]) -> str:
    some = sum(1 for row in left if row.loadable_blocks)
    stale = sum(row.stale for row in left)
    said = [f"{some} of them have blocks of it" if some else "none of them has a block of it"]
    if stale:
        said.append(f"{stale} are stale" if stale > 1 else "1 is stale")
    return f"and {len(left)} more: {', '.join(said)}; --most 0 shows all"


def _bar(row: Row, marks: str) -> str:
    """Each mark as far as its tier reaches; a nearer tier covers a farther one."""
    cells = ""
    for blocks, mark in zip((row.device_blocks, row.local_blocks, row.loadable_blocks), marks, strict=False):
        reach = -(-blocks * BAR_CELLS // row.prompt_blocks) if row.prompt_blocks else 0
        cells += mark * (reach - len(cells))
    return cells + marks[3] * (BAR_CELLS - len(cells))


def _print_ranking(model: str, ranking: Ranking) -> None:
    """Cost, blocks and trust stay on a narrow screen."""
    out = console()
    if not ranking.picks:
        show(out, _NOBODY.format(model))
        return
    columns = [
        Column("worker", left=True), Column("cost"), Column("prefill", drop=1), Column("fetch", drop=2),
        Column("encode", drop=2), Column("queue", drop=3), Column("held"), Column("run", drop=5),
        Column("wait", drop=4), Column("trust", left=True),
    ]  # fmt: skip
    for pick, name in zip(ranking.picks, _named(ranking.picks), strict=True):
        row, known = pick.row, pick.load_source != "none"
        add_row(
            columns, name, pick.cost, pick.prefill_cost, pick.fetch_cost, pick.encode_cost, pick.queue_cost,
            f"{row.device_blocks}/{row.local_blocks}/{row.loadable_blocks}", pick.running if known else "?",
            pick.waiting if known else "?",
            "unreachable" if pick.unreachable else "asleep" if pick.asleep else pick.trust,
        )  # fmt: skip
    encode = "encode + " if any(pick.encode_cost for pick in ranking.picks) else ""
    if not encode:
        columns = [column for column in columns if column.name != "encode"]
    show(
        out,
        f"cost = prefill + fetch + {encode}queue, in tokens; held: device/local/loadable blocks",
        *fitted(columns, out.width),
    )


def _pick_json(pick: Pick) -> dict[str, Any]:
    fields = pick._asdict()
    return {**fields.pop("row")._asdict(), **fields}
