"""``python -m demo.real``, the program of ``make demo-real``: a real model, a real document, two engines, one pool.

A model that sees is shown a picture, too.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from demo import pictures
from demo.engine_process import all_cores, free_ports
from demo.pictures import Seen
from demo.worker_process import Answer, ask, serving
from demo.workspace import doing, workspace
from kvpool.cli.exits import EXIT_FAILED, run
from kvpool.cli.options import Json
from kvpool.cli.tables import console, show
from kvpool.errors import KVPoolError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DOCUMENT = Path(__file__).parents[1] / "LICENSE"
QUESTION = "In one sentence: what does this licence ask of those who give the work to others?"
BLOCK_TOKENS = 64
OPTIONS = (
    "--dtype", "float32",  # as the answers of both engines are compared: docs/explanation/correctness.md
    "--max-model-len", "4096", "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", "512M", "--enforce-eager",
)  # fmt: skip
ANSWER_TOKENS = 48
NEEDED_SHARE = 0.9  # of the prompt

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def demo(
    model: Annotated[str, typer.Argument(help="A folder, or a name on the Hugging Face hub.")] = MODEL,
    as_json: Json = False,
) -> None:
    """A real model answers a question about a document twice: computed, and by another engine from the pool.

    A model that sees also says what a picture shows: its encoder runs in the first engine alone.
    """
    progress = console(stderr=True)
    answers: list[Answer] = []
    seen: list[Seen] = []
    shows = False

    def wrong() -> list[str]:
        return [*wrong_with(answers), *(pictures.wrong_with(seen) if shows else ())]

    with workspace("kvpool-real-", progress, keep=False, good=lambda: not wrong()) as folder:
        with doing(progress, f"{model} is looked for"):
            found = find_model(model)
        why_not = pictures.why_not(found)
        shows = why_not is None
        if why_not:
            progress.print(why_not, highlight=False, markup=False, soft_wrap=True)
        text = DOCUMENT.read_text()
        content = f"{text}\n\n{QUESTION}"
        for name, port in zip(("first", "second"), free_ports(2), strict=True):
            with serving(
                name, folder, f"file://{folder}/pool?capacity=2GiB", found, port, OPTIONS,
                # The demo shows a hit, however busy the machine is.
                {"KVPOOL_COST_GATE": "0", "KVPOOL_AUDIT_SHARE": "0", "VLLM_CPU_OMP_THREADS_BIND": all_cores()},
                lambda what: doing(progress, what),
            ) as url:  # fmt: skip
                asked(url, "Say hello.")
                with doing(progress, f"{name} engine answers"):
                    answers.append(asked(url, content))
                if shows:
                    with doing(progress, f"{name} engine sees a picture"):
                        seen.append(pictures.show_picture(url, name))
    if as_json:
        told = {"answers": [asdict(one) for one in answers], "pictures": [asdict(one) for one in seen]}
        print(json.dumps({**told, "wrong": wrong()}))
    else:
        show(console(), *report(answers, seen, wrong()))
    if wrong():
        raise typer.Exit(EXIT_FAILED)


def asked(url: str, content: str) -> Answer:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": ANSWER_TOKENS}
    return ask(url, "/v1/chat/completions", body)


def find_model(named: str) -> Path:
    """The folder of the model ``named``, from the hub if need be. Blocks for a download. Errors: ``KVPoolError``."""
    folder = Path(named).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(named, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except Exception as error:  # of the hub's client, of any kind
        raise KVPoolError(
            f"{named} is no folder with a config.json, and the hub does not give it ({type(error).__name__}); download "
            "it where there is a network, then name its folder: make demo-real MODEL=/path/to/model"
        ) from error


def wrong_with(answers: list[Answer]) -> list[str]:
    """The failed claims, in sentences; empty: none failed."""
    if len(answers) < 2:
        return ["an engine did not answer"]
    first, second = answers
    wrong = []
    if first.cached_tokens:
        wrong.append(
            f"the first engine computed all but {first.cached_tokens:,} tokens: it had to compute all"
        )
    if second.cached_tokens < NEEDED_SHARE * second.prompt_tokens:
        wrong.append(f"{second.cached_tokens:,} of {second.prompt_tokens:,} tokens came from the pool")
    if second.text != first.text:
        wrong.append("the second engine answered otherwise")
    return wrong


def report(answers: list[Answer], seen: list[Seen], wrong: list[str]) -> list[str]:
    first, second = answers
    return [
        f"{DOCUMENT.name}, {first.prompt_tokens:,} tokens with the question: {QUESTION}",
        "",
        f"first engine: computed, first token after {first.first_token_s:.2f} s",
        f"  {first.text.strip()}",
        f"second engine: {second.cached_tokens:,} tokens from the pool, first token after {second.first_token_s:.2f} s",
        f"  {second.text.strip()}",
        "",
        *(pictures.report(seen) if seen else ()),
        "\n".join([*wrong, "FAIL"])
        if wrong
        else f"First token {first.first_token_s / second.first_token_s:.1f} times sooner, same answer: PASS",
    ]


if __name__ == "__main__":
    run(app, "python -m demo.real")
