"""The flags of a chat are read as vLLM reads them, by pydantic."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kvpool.errors import ConfigError
from kvpool.index import Chat

WORDS = ("false", "f", "no", "n", "off", "true", "t", "yes", "y", "on")
VALUES = [
    *WORDS, *(one.upper() for one in WORDS), "0", "1", "", " false", "maybe", "0.0",
    0, 1, 2, 0.0, 1.0, 0.5, True, False, [], {}, 10**30,
]  # fmt: skip


class _Request(BaseModel):
    flag: bool


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_flag_is_read_as_vllm_reads_it(value: Any) -> None:
    def read(name: str) -> Chat:
        return Chat.of_request({"messages": [], name: value})

    try:
        flag = _Request.model_validate({"flag": value}).flag
    except ValidationError:
        for name in ("add_generation_prompt", "continue_final_message"):
            with pytest.raises(ConfigError, match=f"{name} is true or false"):
                read(name)
    else:
        assert read("add_generation_prompt").add_generation_prompt is flag
        assert read("continue_final_message").template_options["continue_final_message"] is flag
