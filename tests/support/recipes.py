"""Recipes of ``docs/`` and ``examples/routers``: their text, the programs they start, and the Envoy in front of prefill
and decode."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from demo.engine_process import child_environment
from tests.support import envoy
from tests.support.deadlines import answers, eventually

DOCS = Path(__file__).parents[2] / "docs"
ROUTERS = DOCS.parent / "examples" / "routers"


def recipe(page: str, heading: str, language: str, number: int = 0) -> str:
    """The code block of that language, counted from 0, in the part of a page below a heading."""
    part = (DOCS / page).read_text().partition(f"\n{heading}\n")[2]
    assert part, f"docs/{page} has no {heading}"
    level = heading.partition(" ")[0]
    part = re.split(rf"^#{{1,{len(level)}}} ", part, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", part, re.DOTALL | re.MULTILINE)[number]  # type: ignore[no-any-return]


def put_in(text: str, places: Mapping[str, str]) -> str:
    """``text`` with other addresses, each of which is there. The new ones are not looked at again."""
    for old in places:
        assert old in text, old
    return re.sub("|".join(re.escape(old) for old in places), lambda found: places[found[0]], text)


@contextmanager
def started(command: Sequence[str], log: Path, ready: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program until the end of the block, from when it answers at the URL ``ready``."""
    with log.open("wb") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **streams, env=child_environment())  # type: ignore[call-overload]
    try:
        assert eventually(lambda: answers(ready, process, log)), log.read_text(errors="replace")[-4000:]
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


SPLIT_PAGE = "how-to/prefill-decode.md"


def split_front(prefill: Sequence[str], decode: Sequence[str], picker: str, listen: int, admin: int) -> str:
    """``deploy/envoy.yaml``, changed as the page says, for workers at these ``IP:PORT``."""
    groups = {
        "10.0.0.1:8000,10.0.0.2:8000": ",".join(prefill),
        "10.0.1.1:8000,10.0.1.2:8000": ",".join(decode),
    }
    said = yaml.safe_load(put_in(recipe(SPLIT_PAGE, "## Behind Envoy", "yaml"), groups))

    def clusters(workers: Sequence[str]) -> Any:
        return yaml.safe_load(envoy.configured(workers, [picker], listen=listen, admin=admin, duplex=False))

    def workers(config: Any) -> Any:
        return next(one for one in config["static_resources"]["clusters"] if one["name"] == "workers")

    config = clusters(decode)
    first = workers(clusters(prefill))
    first["name"] = first["load_assignment"]["cluster_name"] = said["cluster"]
    config["static_resources"]["clusters"].append(first)
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    filters = manager["http_filters"]
    at = next(number for number, one in enumerate(filters) if one["name"] == "envoy.filters.http.ext_proc")
    filters[at]["typed_config"]["metadata_options"]["forwarding_namespaces"] = said["forwarding_namespaces"]
    filters.insert(at, said["filter"])
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    at = next(number for number, one in enumerate(routes) if one["match"] == {"prefix": "/"})
    route = copy.deepcopy(routes[at])
    route["match"], route["route"]["cluster"] = said["match"], said["cluster"]
    routes.insert(at, route)
    return str(yaml.safe_dump(config))


def split_chat() -> Callable[..., Any]:
    """The page's function of that name: it sends a chat to both groups."""
    names: dict[str, Any] = {}
    text = recipe(SPLIT_PAGE, "## Send each request twice", "python")
    exec(compile(text, SPLIT_PAGE, "exec"), names)
    return names["chat"]  # type: ignore[no-any-return]
