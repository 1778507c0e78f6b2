from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.key import checkpoint
from kvpool.key.checkpoint import LOADED_PATTERNS, checkpoint_digest
from tests.support.deadlines import eventually


def safetensors(path: Path, tensors: dict[str, bytes], **metadata: str) -> None:
    """A file of one-byte numbers."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def model(folder: Path, *, shards: int = 2, nbytes: int = 50_000, **config: object) -> Path:
    folder.mkdir(parents=True)
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {
            f"layer{shard}.{part}": bytes((i * 7 + shard) % 251 for i in range(97)) * (nbytes // 97)
            for part in ("q", "k")
        }
        safetensors(folder / name, tensors)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    return folder


def change(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a few kilobytes is treated as a large one is."""
    monkeypatch.setattr(checkpoint, "WHOLE_NBYTES", 0)
    monkeypatch.setattr(checkpoint, "SPOTS", 64)
    monkeypatch.setattr(checkpoint, "SPOT_NBYTES", 16)
    monkeypatch.setattr(checkpoint, "TENSOR_SPOT_NBYTES", 16)
    monkeypatch.setattr(checkpoint, "PIECE_SPOTS", 8)
    monkeypatch.setattr(checkpoint, "EDGE_NBYTES", 64)


def test_equal_weights_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    first = model(tmp_path / "a" / "one", _name_or_path="/somewhere", transformers_version="1")
    second = model(tmp_path / "b", _name_or_path="org/name", transformers_version="2")
    (second / "README.md").write_text("of another origin")
    (second / "optimizer.bin").write_bytes(b"not loaded")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in first.iterdir():  # as the cache of a hub has them
        blob = tmp_path / "blobs" / file.name[::-1]
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        (linked / file.name).symlink_to(blob)
    digests = {checkpoint_digest(folder) for folder in (first, second, linked)}
    assert len(digests) == 1
    (digest,) = digests
    assert len(digest.hex) == 32
    assert digest.files == 2
    assert (
        digest.nbytes == digest.read_nbytes == sum(one.stat().st_size for one in first.glob("*.safetensors"))
    )


def test_any_byte_of_a_small_checkpoint_counts(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", nbytes=970)
    shard = folder / "model-00002-of-00002.safetensors"
    before = checkpoint_digest(folder)
    size = shard.stat().st_size
    for offset in (8, size // 2, size - 1):
        change(shard, offset)
        if offset > 8:  # a header that is broken is refused where it is looked at
            assert checkpoint_digest(folder).hex != before.hex
        change(shard, offset)
    assert checkpoint_digest(folder) == before


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "config.json").write_text(json.dumps({"hidden_size": 16})),
        lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
        lambda folder: (folder / "model-00001-of-00002.safetensors").rename(folder / "other.safetensors"),
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        lambda folder: safetensors(folder / "more.safetensors", {"x": b"x"}),
    ],
    ids=["config", "quantization", "name", "one less", "one more"],
)
def test_what_lies_beside_the_bytes_counts(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    folder = model(tmp_path / "m")
    before = checkpoint_digest(folder).hex
    harm(folder)
    assert checkpoint_digest(folder).hex != before


@pytest.mark.parametrize("name", ["alpha_pattern", "rank_pattern", "dynamic", "config_groups"])
def test_the_order_of_patterns_counts_where_the_first_that_matches_decides(tmp_path: Path, name: str) -> None:
    patterns = {"q_proj": 64, "layers.0.self_attn.q_proj": 2}
    others = dict(reversed(patterns.items()))
    digests = [
        checkpoint_digest(
            model(tmp_path / str(number), quantization_config={"bits": 4, name: given}, a=1)
        ).hex
        for number, given in enumerate((patterns, others, patterns))
    ]
    assert digests[0] == digests[2] != digests[1]
    config = {"quantization_config": {name: patterns, "bits": 4}, "a": 1, "hidden_size": 8}
    (tmp_path / "0" / "config.json").write_text(json.dumps(config))
    assert checkpoint_digest(tmp_path / "0").hex == digests[0], "no other order does"


def test_code_counts_where_the_configuration_names_it(tmp_path: Path) -> None:
    with_code, without = model(tmp_path / "c", auto_map={"AutoModel": "m.Model"}), model(tmp_path / "w")
    before = [checkpoint_digest(folder).hex for folder in (with_code, without)]
    for folder in (with_code, without):
        (folder / "m.py").write_text("print()")
    after = [checkpoint_digest(folder).hex for folder in (with_code, without)]
    assert before[0] != after[0]
    assert before[1] == after[1]


@pytest.mark.usefixtures("sampled")
def test_of_a_large_checkpoint_every_tensor_and_every_region_is_sampled(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", nbytes=97_000)
    shard = folder / "model-00001-of-00002.safetensors"
    before = checkpoint_digest(folder)
    assert before.read_nbytes < before.nbytes // 10
    header = 8 + struct.unpack("<Q", shard.read_bytes()[:8])[0]
    for tensor in (header, header + 97_000):
        change(shard, tensor)
        assert checkpoint_digest(folder).hex != before.hex
        change(shard, tensor)
    region = shard.read_bytes()
    other = bytearray(region)
    other[header + 30_000 : header + 50_000] = bytes(20_000)  # a part of one tensor, its start left as it is
    shard.write_bytes(other)
    assert checkpoint_digest(folder).hex != before.hex
    shard.write_bytes(region)
    assert checkpoint_digest(folder) == before


@pytest.mark.usefixtures("sampled")
def test_files_of_torch_are_told_apart_by_the_sums_at_their_end(tmp_path: Path) -> None:
    digests = set()
    for last in (0, 1):
        folder = tmp_path / str(last)
        folder.mkdir()
        with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as file:
            for i in range(40):
                file.writestr(f"archive/data/{i}", bytes(9_999) + bytes([last if i == 39 else 0]))
        digests.add(checkpoint_digest(folder).hex)
    assert len(digests) == 2


def test_the_files_that_an_engine_loads_are_taken(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"also there")
    for name in (".hidden.pt", "._model.bin", ".model.safetensors"):  # of another system, or half copied
        (folder / name).write_bytes(b"no weights")
    loaded = LOADED_PATTERNS["auto"]
    assert checkpoint_digest(folder, patterns=loaded).files == 2
    other = checkpoint_digest(folder, patterns=("*.pt", "*.bin"))
    assert (other.files, other.nbytes) == (1, 10)
    single = checkpoint_digest(folder / "model-00001-of-00002.safetensors")
    assert single.files == 1


def test_for_a_loader_that_is_not_known_files_of_every_kind_count(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    of_one_kind = checkpoint_digest(folder)
    assert of_one_kind == checkpoint_digest(folder, patterns=LOADED_PATTERNS["auto"])
    (folder / "pytorch_model.bin").write_bytes(b"also there")
    with_bin = checkpoint_digest(folder)
    assert with_bin.files == 3
    (folder / "pytorch_model.bin").write_bytes(b"ALSO THERE")
    assert checkpoint_digest(folder).hex not in (with_bin.hex, of_one_kind.hex)


def index(folder: Path, *names: str, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"weight_map": {f"of {one}": one for one in names}}))


def test_an_index_counts_where_it_leaves_files_out(tmp_path: Path) -> None:
    """Two sets of weights in one folder: loaders take those that it names."""
    folder = model(tmp_path / "m")
    first, second = sorted(one.name for one in folder.glob("*.safetensors"))
    without = checkpoint_digest(folder)
    index(folder, first, second)
    assert checkpoint_digest(folder) == without, "it names all that are there"
    index(folder, "consolidated.safetensors", name="consolidated.safetensors.index.json")
    assert checkpoint_digest(folder) == without, "it is of other files"
    digests = {without.hex}
    for chosen in (first, second):
        index(folder, chosen)
        digests.add(checkpoint_digest(folder).hex)
    assert len(digests) == 3


AGAIN = "; fetch the checkpoint again"
SHARD = "model-00001-of-00002.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (
            lambda folder: (shutil.rmtree(folder), folder.mkdir()),
            r"no weights in .*: no file is \*\.safetensors, \*\.bin",
        ),
        (shutil.rmtree, "there are no weights in .*: it is not there"),
        (lambda folder: os.mkfifo(folder / "extra.safetensors"), "is not a file of weights"),
        (lambda folder: os.truncate(folder / SHARD, 9_000), f"is shorter than its header says{AGAIN}"),
        (lambda folder: (folder / SHARD).write_text(POINTER), f"is not a whole safetensors file{AGAIN}"),
        (lambda folder: (folder / "config.json").write_text("{"), f"config.json is not JSON{AGAIN}"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}'),
            f"index.json is no index of safetensors{AGAIN}",
        ),
        (
            lambda folder: (folder / "extra.safetensors").symlink_to(folder / "gone"),
            "cannot be read .*; name a folder that this user can read",
        ),
    ],
)
def test_what_cannot_be_vouched_for_is_refused_in_one_line(
    tmp_path: Path, harm: Callable[[Path], object], sentence: str
) -> None:
    folder = model(tmp_path / "m")
    harm(folder)
    with pytest.raises(ConfigError, match=sentence) as caught:
        checkpoint_digest(folder)
    assert "\n" not in str(caught.value)


def test_a_disk_that_hangs_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "m")
    goes_on = threading.Event()
    read = os.pread

    def hanging(descriptor: int, nbytes: int, offset: int) -> bytes:
        goes_on.wait(60)
        return read(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", hanging)
    with pytest.raises(ConfigError, match=r"was not made within 0\.2 s"):
        checkpoint_digest(folder, timeout_s=0.2)
    goes_on.set()
    assert eventually(lambda: not any(one.name == "kvpool-checkpoint" for one in threading.enumerate()))
