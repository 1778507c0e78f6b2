"""What a metrics page says: those that vLLM's own code makes, and those that nobody should have made."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.index.follow import metrics_page
from kvpool.index.follow.metrics_page import BadPage, EngineLoad, read_page
from tests.support.metrics_pages import page

CAPACITY = 15984  # tokens, of the pages of vLLM


def test_the_pages_of_vllm(vllm_server: dict[str, Any]) -> None:
    pages = {name: read_page(text.encode()) for name, text in vllm_server["pages"].items()}
    assert pages["new"] == {0: EngineLoad(), 1: EngineLoad()}
    busy = {
        0: EngineLoad(3, 5, 0.25, capacity_tokens=CAPACITY), 1: EngineLoad(4, 6, 0.75, capacity_tokens=CAPACITY),
    }  # fmt: skip
    assert pages["busy"] == pages["awake"] == busy
    for level in (0, 1, 2):
        asleep = {number: engine._replace(asleep=True) for number, engine in busy.items()}
        assert pages[f"asleep {level}"] == asleep, "the lightest sleep has no gauge of its own"


def test_the_pages_of_the_tests_are_like_those_of_vllm(vllm_server: dict[str, Any]) -> None:
    ours = page({0: EngineLoad(3, 5, 0.25, capacity_tokens=CAPACITY), 1: EngineLoad(4, 6, 0.75)})
    theirs = vllm_server["pages"]["busy"].splitlines()
    lines = [line for line in ours.decode().splitlines() if not line.startswith("#")]
    assert len(lines) == 13
    for line in lines:
        name, labels = line.partition("{")[0], set(line[line.index("{") + 1 : line.index("}")].split(","))
        wanted = {label for label in labels if not label.startswith("model_name")}
        assert any(
            other.startswith(f"{name}{{") and all(label in other for label in wanted) for other in theirs
        ), line


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ('num_gpu_blocks="100",block_size="16"', 1600),
        ('num_gpu_blocks="100",block_size="16",kv_cache_size_tokens="None"', 1600),
        ('num_gpu_blocks="100",block_size="16",kv_cache_size_tokens="400"', 400),
        ('num_gpu_blocks="None",block_size="16"', None),
        ('num_gpu_blocks="-5",block_size="16"', None),
        ('num_gpu_blocks="1e9",block_size="16"', None),
        ("", None),
        (f'kv_cache_size_tokens="{10**17}"', (1 << 53) - 1),
        (f'num_gpu_blocks="{10**17}",block_size="{10**17}"', (1 << 53) - 1),
        (f'kv_cache_size_tokens="{10**400}"', None),
    ],
)
def test_the_size_of_a_cache(labels: str, tokens: int | None) -> None:
    line = f'vllm:cache_config_info{{engine="0",{labels}}} 1.0\n'.encode()
    assert read_page(page({0: EngineLoad(3)}) + line) == {0: EngineLoad(3, capacity_tokens=tokens)}


def test_processes_of_a_server_may_each_tell_of_its_cache() -> None:
    known, unknown = (
        f'vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'.encode()
        for blocks in (100, None)
    )
    other = known.replace(b"engine=", b'other="1",engine=')
    for lines in (known + unknown, unknown + known, known + other):
        assert read_page(page({0: EngineLoad(3)}) + lines) == {0: EngineLoad(3, capacity_tokens=1600)}


def test_what_is_beside_it_is_not_read() -> None:
    noise = b'# HELP x y\nvllm:num_requests_running_other{engine="x"} nan\nvllm:e2e_bucket{le="1"} broken\n\xff\xfe\n'
    assert read_page(noise + page({2: EngineLoad(1)}) + noise) == {2: EngineLoad(1)}


def test_a_name_of_a_model_may_hold_anything() -> None:
    made = page({0: EngineLoad(7)}, model='a"}\\ {b=",\n')
    assert read_page(made) == {0: EngineLoad(7)}


def test_values_are_cut_to_what_they_can_be() -> None:
    found = read_page(page({0: EngineLoad(1 << 40, 3, 1.5)}))
    assert found == {0: EngineLoad((1 << 31) - 1, 3, 1.0)}


RUNNING = metrics_page.RUNNING.encode()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "there is no vllm:num_requests_running"),
        (b"<html>not here</html>", "there is no"),
        (RUNNING + b"{} 1\n", "names no engine"),
        (RUNNING + b'{model_name="m"} 1\n', "names no engine by its number"),
        (RUNNING + b'{engine="zero"} 1\n', "names no engine by its number"),
        (RUNNING + b'{engine="-1"} 1\n', "names no engine"),
        (RUNNING + b'{engine="999999"} 1\n', "names no engine"),
        (RUNNING + b'{engine="0"} nan\n', "cannot be nan"),
        (RUNNING + b'{engine="0"} -1\n', "cannot be -1"),
        (RUNNING + b'{engine="0"} +Inf\n', "cannot be inf"),
        (RUNNING + b'{engine="0"} many\n', "cannot be parsed"),
        (RUNNING + b'{engine="0"\n', "cannot be parsed"),
        (RUNNING + b'{engine="0",model_name="\xff"} 1\n', "cannot be parsed"),
        (page({0: EngineLoad()}) * 2, "is there twice for engine 0"),
        (page({0: EngineLoad()}) + page({0: EngineLoad()}, model="other"), "is there twice"),
        (page({0: EngineLoad()}).replace(RUNNING, b"x"), "there is no vllm:num_requests_running"),
        (b"".join(page({number: EngineLoad()}) for number in range(2800)), "more than 16384 lines"),
    ],
)
def test_what_is_no_page(body: bytes, says: str) -> None:
    with pytest.raises(BadPage, match=says) as caught:
        read_page(body)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_any_bytes_are_a_page_or_are_refused(data: Any) -> None:
    made = bytearray(page({0: EngineLoad(3, 5, 0.25), 7: EngineLoad(1, asleep=True)}))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(made)))
        made[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=6))
    engines: dict[int, EngineLoad] = {}
    with contextlib.suppress(BadPage):
        engines = read_page(bytes(made))
    for engine in engines.values():
        assert engine.running >= 0
        assert engine.waiting >= 0
        assert 0 <= engine.kv_usage <= 1
