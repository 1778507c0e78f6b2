"""``kvpool lookup --route``, ``--text`` and ``--chat`` as a user meets them: real processes, one line per error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockHasher, IndexClient
from kvpool.index.follow.metrics_page import EngineLoad
from tests.support.command_line import kvpool, refused
from tests.support.deadlines import eventually
from tests.support.feeds import misbehaving
from tests.support.index_process import running
from tests.support.metrics_pages import serving_page
from tests.support.tiny_tokenizer import write_tokenizer
from tests.support.wire import batch, stored

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "the user asks the system " * 20}],
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.mark.usefixtures("grpc_started")
def test_a_ranking_of_a_chat(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    with misbehaving() as publisher, serving_page({0: EngineLoad(3, 1, 0.9)}) as pages:
        workers = [publisher.flag("w-1", address=pages.address), "w-2=tcp://127.0.0.1:1,model=m,block=16"]
        options = [f"--worker={worker}" for worker in workers]
        costs = ["--route-cost=waiting=500", "--route-cost=speed=0"]  # what waits is not less a moment later
        with running(*options, f"--tokenizer=m={folder}", *costs) as index:
            asked = ["lookup", "--index", index.target, "--model", "m", "--timeout", "30"]
            chat = [*asked, "--chat", f"@{tmp_path}/chat.json"]
            rows = json.loads(kvpool(*chat, "--json").stdout)["rows"]
            blocks = rows[0]["prompt_blocks"]
            assert blocks > 3
            with IndexClient(index.target, 60) as client:
                # What it hashes to is what the index itself says a prompt of these tokens would be.
                tokens = _tokens(folder)
                publisher.publish(batch(stored(BlockHasher(16).hashes(tokens)[:3])))
                assert eventually(lambda: client.lookup("m", token_ids=tokens).device_blocks[0] == 3)

                def sources() -> set[str]:
                    return {pick.load_source for pick in client.route("m", token_ids=[1]).picks}

                assert eventually(lambda: sources() == {"none", "scraped"})
            with IndexClient(index.target, 60) as client:
                placements = client.status().index.placements
            picks = json.loads(kvpool(*chat, "--route", "--json").stdout)["picks"]
            assert [pick["worker"] for pick in picks] == ["w-1", "w-2"]
            best: dict[str, Any] = picks[0]
            known = {"device_blocks": 3, "trust": "exact", "running": 3, "waiting": 1}
            assert known.items() <= best.items()
            assert best["queue_cost"] == 500 + 3 * 64 + 512 == picks[1]["queue_cost"]
            assert best["cost"] == best["prefill_cost"] + best["fetch_cost"] + best["queue_cost"]
            assert best["prefill_cost"] == len(tokens) - 48
            # "unreachable" as soon as the index has tried its publisher often enough.
            assert picks[1]["trust"] in ("fallback", "unreachable")
            assert picks[1]["load_source"] == "none"
            table = kvpool(*chat, "--route").stdout
            with IndexClient(index.target, 60) as client:
                assert client.status().index.placements == placements, "who looks places nothing"
            line = rf"w-1 +{best['cost']} +{best['prefill_cost']} +0 +1204 +3/3/3 +3 +1 +exact"
            assert re.search(line, table), table
            assert re.search(r"w-2 .* 0/0/0 +\? +\? +(fallback|unreachable)", table), table

            words = "a tool says 42 " * 12
            (tmp_path / "words").write_text(words)
            for given in (words, "-", "@-", f"@{tmp_path}/words"):
                text = kvpool(*asked, "--text", given, "--json", stdin=words)
                assert json.loads(text.stdout)["rows"][0]["prompt_blocks"] == 3
            assert "shorter than a block" in kvpool(*asked, "--text", "hi").stdout
            row = json.loads(kvpool(*asked, "--chat", json.dumps(CHAT), "--json").stdout)["rows"][0]
            assert row["prompt_blocks"] == blocks
            assert refused(*asked, "--chat", "-", stdin="{") == (
                "kvpool: standard input, line 1, column 2: Expecting property name enclosed in double quotes"
            )
            assert refused(*asked, "--chat", "-", stdin="{}") == (
                'kvpool: standard input: a chat is a list of messages, or an object with "messages"'
            )
            assert "give the prompt as --text WORDS, --token-ids, --hashes or --chat" in refused(*asked)


def _tokens(folder: Path) -> list[int]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kvpool.index import Chat
        from kvpool.index.tokens.tokenizer import Tokenizer

        return Tokenizer.load("m", str(folder)).of_chat(Chat.of_request(CHAT))
