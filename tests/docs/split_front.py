"""Envoy before two groups of workers, as ``docs/how-to/routing.md`` says: those that prefill, and those that decode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from tests import envoy
from tests.docs.recipes import put_in, recipe

PAGE, HEADING = "how-to/routing.md", "## Prefill and decode apart"


def configured(prefill: Sequence[str], decode: Sequence[str], picker: str, listen: int, admin: int) -> str:
    """``deploy/envoy.yaml``, changed as the page says, for workers at these ``IP:PORT``."""
    groups = {
        "10.0.0.1:8000,10.0.0.2:8000": ",".join(prefill),
        "10.0.1.1:8000,10.0.1.2:8000": ",".join(decode),
    }
    said = yaml.safe_load(put_in(recipe(PAGE, HEADING, "yaml"), groups))

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


def chat() -> Callable[..., Any]:
    """The page's function of that name: it sends a chat to both groups."""
    names: dict[str, Any] = {}
    exec(compile(recipe(PAGE, HEADING, "python"), PAGE, "exec"), names)
    return names["chat"]  # type: ignore[no-any-return]
