"""Settings of workers, and what is refused.

Over 400 lines because each setting has its refusal here.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from kvpool.config import HiCacheConfig, PoolConfig, TierConfig, hash_seed, redact
from kvpool.errors import ConfigError
from kvpool.text import format_nbytes, nearest, parse_nbytes

URL = "file:///var/kv"


def load(mapping: dict[str, Any] | None = None, **environ: str) -> PoolConfig:
    return PoolConfig.load({"pool": URL} if mapping is None else mapping, environ)


def test_defaults() -> None:
    assert load().model_dump() == {
        "pool": URL,
        "tenant": "default",
        "model_id": None,
        "lookup_timeout_s": 0.5,
        "max_load_s": 10.0,
        "staging_nbytes": None,
        "max_store_nbytes_per_s": 0,
        "threads": None,
        "advertise_host": None,
        "http_port": None,
        "worker": None,
        "lease_s": 10.0,
        "store_policy": "write_through",
        "min_requests_to_store": 1,
        "blocks_per_record": 1,
        "share_across_tp": None,
        "keep_share": 0.1,
        "audit_share": 1 / 256,
        "audit_keep": None,
        "prefetch_share": 0.25,
        "store_decode": True,
        "start_without_pool": False,
        "cost_gate": True,
    }


def test_every_field_from_the_dict() -> None:
    given = {
        "pool": "file:///pool", "tenant": "team_a", "model_id": "m", "lookup_timeout_s": 60, "max_load_s": 1.5,
        "staging_nbytes": "1GiB", "max_store_nbytes_per_s": 500, "threads": 64,
        "advertise_host": "fd00::7", "http_port": 65535, "worker": "node-1:5557", "lease_s": 3,
        "store_policy": "write_through", "min_requests_to_store": 2, "blocks_per_record": 4, "store_decode": False,
        "start_without_pool": True, "keep_share": 0.25, "prefetch_share": 0.5,
        "audit_share": 1.0, "audit_keep": "/var/kvpool",
        "cost_gate": False, "share_across_tp": 8,
    }  # fmt: skip
    config = load(given)
    assert config.model_dump() == {**given, "staging_nbytes": 1 << 30}
    assert type(config.lookup_timeout_s) is float


def test_every_field_from_the_environment() -> None:
    config = PoolConfig.load(
        None,
        {
            "KVPOOL_POOL": "file:///pool", "KVPOOL_TENANT": "7", "KVPOOL_MODEL_ID": "8",
            "KVPOOL_LOOKUP_TIMEOUT_S": "0.25",
            "KVPOOL_MAX_LOAD_S": "3", "KVPOOL_STAGING_NBYTES": "64MiB",
            "KVPOOL_MAX_STORE_NBYTES_PER_S": "1000000",
            "KVPOOL_ADVERTISE_HOST": "10.0.0.7", "KVPOOL_HTTP_PORT": "8001", "KVPOOL_WORKER": "w",
            "KVPOOL_LEASE_S": "30", "KVPOOL_THREADS": "4", "KVPOOL_STORE_POLICY": "write_back",
            "KVPOOL_MIN_REQUESTS_TO_STORE": "2", "KVPOOL_STORE_DECODE": "false", "KVPOOL_COST_GATE": "0",
            "KVPOOL_START_WITHOUT_POOL": "1",
            "KVPOOL_BLOCKS_PER_RECORD": "1", "KVPOOL_KEEP_SHARE": "0", "KVPOOL_PREFETCH_SHARE": "0.75",
            "KVPOOL_SHARE_ACROSS_TP": "4", "KVPOOL_AUDIT_SHARE": "0.5", "KVPOOL_AUDIT_KEEP": "/a b",
            "PATH": "/bin", "KVPOOL_SERVICE_HOST": "10.0.0.1", "KVPOOL_PORT": "tcp://10.0.0.1:1",
        },
    )  # fmt: skip
    assert config.model_dump() == {
        "pool": "file:///pool", "tenant": "7", "model_id": "8", "lookup_timeout_s": 0.25, "max_load_s": 3.0,
        "staging_nbytes": 64 << 20, "max_store_nbytes_per_s": 1_000_000, "threads": 4,
        "advertise_host": "10.0.0.7", "http_port": 8001, "worker": "w", "lease_s": 30.0,
        "store_policy": "write_back", "min_requests_to_store": 2, "blocks_per_record": 1, "store_decode": False,
        "start_without_pool": True, "keep_share": 0.0, "prefetch_share": 0.75,
        "audit_share": 0.5, "audit_keep": "/a b",
        "cost_gate": False, "share_across_tp": 4,
    }  # fmt: skip
    assert config.model_dump().keys() == PoolConfig.model_fields.keys()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_CONFIG", raising=False)
    monkeypatch.setenv("KVPOOL_POOL", "file:///pool")
    assert PoolConfig.load().pool == "file:///pool"
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    assert hash_seed() == "17"
    assert hash_seed({}) is None


def test_the_dict_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text(
        'pool = "file:///from/file"\ntenant = "file"\nthreads = 3\nlookup_timeout_s = 1\nstaging_nbytes = "2MiB"\n'
    )
    config = PoolConfig.load(
        {"pool": "file:///from/dict"},
        {"KVPOOL_CONFIG": str(path), "KVPOOL_POOL": "file:///from/env", "KVPOOL_TENANT": "environment"},
    )
    assert (config.pool, config.tenant, config.threads, config.lookup_timeout_s, config.staging_nbytes) == (
        "file:///from/dict", "environment", 3, 1.0, 2 << 20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('pol = "file:///pool"', 'unknown setting "pol"; did you mean "pool"?'),
        ("threads = 0", 'setting "threads": should be greater than or equal to 1, got 0'),
        ("threads = ", "not TOML: "),
        ("[kvpool]\nthreads = 2", 'unknown setting "kvpool"'),
        (b"\xff", "not TOML: "),
        (b"#" * (1 << 20) + b"#", "larger than 1048576 bytes"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load(KVPOOL_CONFIG=str(path))
    assert f"{path}: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"KVPOOL_CONFIG={tmp_path}/x: No such file or directory"):
        load(KVPOOL_CONFIG=f"{tmp_path}/x")


def test_a_file_without_a_reader_of_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_toml(name: str, package: str | None = None) -> Any:
        if name in ("tomllib", "tomli"):
            raise ModuleNotFoundError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_toml)
    with pytest.raises(ConfigError, match=r"needs Python 3\.11 or the package tomli"):
        load(KVPOOL_CONFIG=str(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"pol": URL}, 'unknown setting "pol"; did you mean "pool"?'),
        ({"Tenant": "x"}, 'unknown setting "Tenant"; did you mean "tenant"?'),
        ({"zzzz": 1}, 'unknown setting "zzzz"; known are advertise_host, audit_keep, '),
        ({5: 1}, 'unknown setting "5"; known are '),
        ({"pool": None}, 'setting "pool": should be a valid string'),
        ({"pool": "/var/kv"}, 'setting "pool": write a store URL such as file:///dir or valkey://host:6379'),
        ({"tenant": "a b"}, "setting \"tenant\": tenant 'a b' is not allowed: use 1 to 64 letters"),
        ({"worker": "a b"}, "setting \"worker\": worker name 'a b' is not allowed: use 1 to 128"),
        ({"advertise_host": "::"}, 'setting "advertise_host": write the host name or IP address'),
        ({"advertise_host": "a:b"}, 'setting "advertise_host": write the host name or IP address'),
        ({"http_port": 0}, 'setting "http_port": should be greater than or equal to 1, got 0'),
        ({"lease_s": 2}, 'setting "lease_s": should be greater than or equal to 3, got 2'),
        ({"model_id": ""}, 'setting "model_id": String should have at least 1 character'),
        (
            {"store_policy": "lazy"},
            "setting \"store_policy\": should be 'write_through' or 'write_back', got",
        ),
        (
            {"min_requests_to_store": 0},
            'setting "min_requests_to_store": should be greater than or equal to 1',
        ),
        (
            {"blocks_per_record": 0},
            'setting "blocks_per_record": should be greater than or equal to 1, got 0',
        ),
        (
            {"blocks_per_record": 65},
            'setting "blocks_per_record": should be less than or equal to 64, got 65',
        ),
        (
            {"blocks_per_record": 2, "store_policy": "write_back"},
            'setting "blocks_per_record": "store_policy" "write_back" stores blocks one by one',
        ),
        ({"store_decode": 1}, 'setting "store_decode": should be a valid boolean, got 1'),
        ({"lookup_timeout_s": "1"}, "setting \"lookup_timeout_s\": should be a valid number, got '1'"),
        ({"lookup_timeout_s": 0}, 'setting "lookup_timeout_s": should be greater than 0, got 0'),
        (
            {"lookup_timeout_s": 60.1},
            'setting "lookup_timeout_s": should be less than or equal to 60, got 60.1',
        ),
        (
            {"lookup_timeout_s": float("nan")},
            'setting "lookup_timeout_s": should be a finite number, got nan',
        ),
        ({"max_load_s": -1}, 'setting "max_load_s": should be greater than 0, got -1'),
        ({"threads": True}, 'setting "threads": should be a valid integer, got True'),
        ({"threads": 2.0}, 'setting "threads": should be a valid integer, got 2.0'),
        ({"threads": "2"}, "setting \"threads\": should be a valid integer, got '2'"),
        ({"threads": 65}, 'setting "threads": should be less than or equal to 64, got 65'),
        ({"staging_nbytes": "256Mb"}, 'setting "staging_nbytes": "256Mb" is not a size: write a whole'),
        ({"staging_nbytes": 1000}, 'setting "staging_nbytes": should be greater than or equal to 1048576'),
        ({"max_store_nbytes_per_s": -1}, 'setting "max_store_nbytes_per_s": should be greater than or'),
    ],
)
def test_refuse(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"pool": URL, **wrong})
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_two_urls_are_a_list_or_a_text_with_a_space() -> None:
    near, far = "file:///mnt/kvpool?capacity=1GiB", "valkey://:geheim@host"
    for config in (load({"pool": [near, far]}), load({}, KVPOOL_POOL=f"{near} {far}")):
        assert config.pool == f"{near} {far}"
        assert "geheim" not in repr(config)
        assert near in repr(config)
    assert load({"pool": [near]}).pool == near
    for wrong in ([], [near, 3], [f"{near} {far}"]):
        with pytest.raises(ConfigError, match=r'setting "pool": (String )?should '):
            load({"pool": wrong})


def test_a_pool_that_nobody_names_is_asked_for() -> None:
    with pytest.raises(
        ConfigError, match='"pool" is missing: set "pool" in kv_connector_extra_config or KVPOOL_POOL'
    ):
        load({})


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("KVPOOL_TENNANT", "x", 'unknown variable "KVPOOL_TENNANT"; did you mean "KVPOOL_TENANT"?'),
        ("KVPOOL_Tenant", "x", 'unknown variable "KVPOOL_Tenant"; did you mean "KVPOOL_TENANT"?'),
        ("kvpool_tenant", "x", 'unknown variable "kvpool_tenant"; did you mean "KVPOOL_TENANT"?'),
        ("Kvpool_Tennant", "x", 'unknown variable "Kvpool_Tennant"; did you mean "KVPOOL_TENANT"?'),
        ("KVPOOL_CONFG", "x", 'unknown variable "KVPOOL_CONFG"; did you mean "KVPOOL_CONFIG"?'),
        ("kvpool_config", "x", 'unknown variable "kvpool_config"; did you mean "KVPOOL_CONFIG"?'),
        (
            "KVPOOL_INDEX_TOKN",
            "x",
            'unknown variable "KVPOOL_INDEX_TOKN"; did you mean "KVPOOL_INDEX_TOKEN"?',
        ),
        (
            "KVPOOL_STAGING_NBYTES",
            "1 GB",
            'KVPOOL_STAGING_NBYTES: "1 GB" is not a size: write a whole number',
        ),
        ("KVPOOL_THREAD", "1", 'unknown variable "KVPOOL_THREAD"; did you mean "KVPOOL_THREADS"?'),
        ("KVPOOL_LOOKUP_TIMEOUT_S", "fast", "KVPOOL_LOOKUP_TIMEOUT_S: should be a valid number, got 'fast'"),
        ("KVPOOL_LOOKUP_TIMEOUT_S", "inf", "KVPOOL_LOOKUP_TIMEOUT_S: should be a finite number, got inf"),
        ("KVPOOL_COST_GATE", "maybe", "KVPOOL_COST_GATE: should be a valid boolean, got 'maybe'"),
        ("KVPOOL_THREADS", "2.5", "KVPOOL_THREADS: should be a valid integer, got '2.5'"),
        ("KVPOOL_THREADS", "", "KVPOOL_THREADS: should be a valid integer, got ''"),
        ("KVPOOL_THREADS", "1" * 5000, "KVPOOL_THREADS: should be a valid integer, got '111"),
        ("KVPOOL_STAGING_NBYTES", "lots", 'KVPOOL_STAGING_NBYTES: "lots" is not a size'),
        ("KVPOOL_STAGING_NBYTES", "1", "KVPOOL_STAGING_NBYTES: should be greater than or equal to 1048576"),
    ],
)
def test_refuse_a_variable(variable: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{variable: value})
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", [TierConfig, HiCacheConfig])
def test_who_does_not_see_the_weights_in_memory_is_told_that_they_stay(
    kind: type[TierConfig | HiCacheConfig],
) -> None:
    given = {"pool": URL, "model_id": "m"}
    assert not kind.load(given, {}).weights_never_change
    assert kind.load({**given, "weights_never_change": True}, {}).weights_never_change


def test_a_wrong_value_that_another_source_hides_is_refused(tmp_path: Path) -> None:
    """Else the mistake shows on the day when the other one is removed."""
    file = tmp_path / "kvpool.toml"
    file.write_text("threads = 900\n")
    right = {"pool": URL, "threads": 3, "blocks_per_record": 2}
    with pytest.raises(ConfigError, match="KVPOOL_THREADS: should be a valid integer, got 'many'"):
        load(right, KVPOOL_THREADS="many")
    with pytest.raises(ConfigError, match=f'{file}: setting "threads": should be less than'):
        load(right, KVPOOL_CONFIG=str(file), KVPOOL_THREADS="4")
    with pytest.raises(ConfigError, match="KVPOOL_POOL: write a store URL") as caught:
        load(right, KVPOOL_POOL="user:secret@host")
    assert "secret" not in str(caught.value)
    assert load({**right, "store_policy": "write_through"}, KVPOOL_STORE_POLICY="write_back").threads == 3


@pytest.mark.parametrize("source", ["dict", "environment", "file"])
@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [
        (PoolConfig, "budget_s", "write lookup_timeout_s"),
        (TierConfig, "budget_s", "write lookup_timeout_s"),
        (PoolConfig, "store_after_requests", "write min_requests_to_store"),
        (PoolConfig, "weights_digest", "remove it, or name weights"),
        (PoolConfig, "weights_digest_timeout_s", "set model_id"),
        (PoolConfig, "weights_never_change", "remove it: the weights in memory say"),
        (HiCacheConfig, "fault_miss_ratio", "stop the pool's server"),
        (HiCacheConfig, "fault_delay_s", "stop the pool's server"),
        (HiCacheConfig, "fault_corrupt_ratio", "stop the pool's server"),
    ],
)
def test_a_setting_of_an_earlier_version_is_refused_with_what_to_write(
    tmp_path: Path, kind: type[PoolConfig], name: str, instead: str, source: str
) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text(f"{name} = 1\n")
    variable = f"KVPOOL_{name.upper()}"
    mapping = {"pool": URL, "model_id": "m", **({name: 1} if source == "dict" else {})}
    environ = {"environment": {variable: "1"}, "file": {"KVPOOL_CONFIG": str(file)}}.get(source, {})
    with pytest.raises(ConfigError, match="is no setting any more") as refusal:
        kind.load(mapping, environ)
    assert (variable if source == "environment" else f'setting "{name}"') in str(refusal.value)
    assert instead in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_it_is_frozen() -> None:
    config = load()
    with pytest.raises(ValueError, match="frozen"):
        config.threads = 3


def test_a_password_is_never_shown() -> None:
    url = "valkey://user:hunter/2@@host:6379/0"
    config = load({"pool": url})
    assert config.pool == url
    for text in (repr(config), str(config), f"{config}", repr([config])):
        assert "hunter" not in text
        assert "pool='valkey://user:***@host:6379/0'" in text
    for bad in (
        {"pool": url, "threads": 0},
        {"pool": url, "x": 1},
        {"pool": [url, 1]},
        {"pool": url + "x" * 9000},
    ):
        with pytest.raises(ConfigError) as caught:
            load(bad)
        assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///a@b:c", "file:///a@b:c"),
        ("valkey://host:1/0?client=native", "valkey://host:1/0?client=native"),
        ("valkey://user:pw@host", "valkey://user:***@host"),
        ("valkey://:pw@host", "valkey://:***@host"),
        ("valkey://token@host", "valkey://***@host"),
        ("valkey+cluster://u:p:w@a:1,b:2", "valkey+cluster://u:***@a:1,b:2"),
        ("valkeys://u:a/b@c?d@host", "valkeys://u:***@host"),
        ("valkey://:abc://def@host", "valkey://:***@host"),
        ("file:///a,valkey://:pw@h", "file:///a,valkey://:***@h"),
        ("valkey://h?password=x&db=1", "valkey://h?password=***&db=1"),
        ("valkey://h?db=1&AUTH_TOKEN=x", "valkey://h?db=1&AUTH_TOKEN=***"),
        ("valkey://h?pasword=hunter2", "valkey://h?pasword=***"),
        ("valkey://h?hunter2", "valkey://h?***"),
        ("valkey://h?hunter2=", "valkey://h?***"),
        ("valkey://h?ttl=1d;password=hunter2", "valkey://h?ttl=1d;password=***"),
        ("valkey://h?ttl=1d,password=hunter2", "valkey://h?ttl=***"),
        ("valkey://h?key=hunter2&ca=/ca.pem", "valkey://h?key=***&ca=/ca.pem"),
        ("valkey://h#hunter2", "valkey://h#***"),
        ("valkey://h/0&password=hunter2", "valkey://h/0&password=***"),
        ("valkey://u:hunter2", "valkey://***"),
        ("valkey://u%3Ahunter2%40h", "valkey://***"),
        ("//u:hunter2@h:1", "//u:***@h:1"),
        ("u:hunter2@h:1", "u:***@h:1"),
        ("valkey:/u:hunter2@h", "valkey:***@h"),
        ("file:///x?password=hunter2&capacity=1GiB", "file:///x?password=***&capacity=1GiB"),
        ("file:///x valkey://u:hunter2@h", "file:///x valkey://u:***@h"),
        ("file:///x?pw=hunter2 valkey://u:hunt er2@h", "file:///x?pw=*** valkey://u:***@h"),
        ("https://h/p?api_key=hunter2", "https://h/p?api_key=***"),
        ("valkey://[::1]:6379/0", "valkey://[::1]:6379/0"),
        ("tcp://*:5557", "tcp://*:5557"),
        ("file://u:pw@host/x", "file://u:***@host/x"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("7B", 7), ("10GiB", 10 << 30), ("3kB", 3000), ("5MB", 5_000_000),
     ("2GB", 2 * 10**9), ("1TB", 10**12), ("1TiB", 1 << 40), ("1KiB", 1024), ("1048576", 1 << 20)],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes
    assert parse_nbytes(format_nbytes(nbytes)) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "1.5GiB",
        "-1",
        "1gib",
        "1Gi",
        "1e9",
        "1 2",
        "\u0661",
        "9" * 30,
        "1_000",
        "1 GB",
        " 1GB",
        "1GB\n",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_nbytes(text)


def test_nearest() -> None:
    assert nearest("CAPACTY", ["threads", "capacity"]) == "capacity"
    assert nearest("xyz", ["threads", "capacity"]) is None
    assert nearest("x", []) is None
