"""Whether wheels are fit to be published: what they hold, and what their extension needs of a system.

    python scripts/dist/check.py [--system-openssl] WHEEL ...

Prints a line for each fault; the status is 1 if there is one. --system-openssl: made with that option, for tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import openssl
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.elffile import ELFFile
from packaging.utils import parse_wheel_filename
from toolchain import GLIBC, PLATFORM

MAX_NBYTES = 8 << 20
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
# glibc's libraries, present on any Linux of this platform.
LIBRARIES = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.[0-9]+|ld-linux-(x86-64|aarch64)\.so\.[0-9]+")
LICENCES = {"LICENSE", "openssl.txt", "xxhash.txt", "nanobind.txt", "robin-map.txt", "zig-compiler-rt.txt"}
LICENCES |= {"libc++.txt", "libc++abi.txt", "libunwind.txt"}
FOREIGN = re.compile(r"(^|/)(tests?|benchmarks|demo|_native)/|\.(cpp|h|cmake|txt|so\.[0-9.]+)$|__pycache__")


def faults(path: Path, *, system_openssl: bool) -> Iterator[str]:
    _, _, _, tags = parse_wheel_filename(path.name)
    interpreters = {(tag.interpreter, tag.abi) for tag in tags}
    platforms = {tag.platform for tag in tags}
    if not interpreters <= {("cp310", "cp310"), ("cp311", "cp311"), ("cp312", "abi3")}:
        yield f"is for {interpreters}"
    if len(platforms) != 1 or not next(iter(platforms)).startswith(PLATFORM):
        yield f"is for {platforms}, not for {PLATFORM} alone"
    if path.stat().st_size > MAX_NBYTES:
        yield f"has {path.stat().st_size} bytes, more than {MAX_NBYTES}"
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        inside = [name for name in names if not name.startswith(info)]
        for name in inside:
            if FOREIGN.search(name) or not name.startswith("kvpool/"):
                yield f"holds {name}"
        if "kvpool/py.typed" not in inside:
            yield "lacks kvpool/py.typed"
        licences = {name.removeprefix(f"{info}licenses/") for name in names if "/licenses/" in name}
        metadata = Parser().parsestr(wheel.read(f"{info}METADATA").decode())
        if licences != LICENCES or set(metadata.get_all("License-File", [])) != LICENCES:
            yield f"has the licences {sorted(licences)}"
        told = wheel.read(f"{info}sboms/kvpool.cdx.json").decode()
        fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(told)
        if fault is not None:
            yield f"its list of parts is no CycloneDX: {fault}"
        extensions = [name for name in inside if name.endswith(".so")]
        if len(extensions) != 1:
            yield f"has the extensions {extensions}"
            return
        with wheel.open(extensions[0]) as file:
            yield from _faults_of_extension(ELFFile(file), next(iter(platforms)))
            file.seek(0)
            data = file.read()
    if openssl.NOWHERE.encode() not in data and not system_openssl:
        yield "its OpenSSL would read another system's files"
    if any("abi3" in abi for _, abi in interpreters):
        audit = subprocess.run(
            [sys.executable, "-m", "abi3audit", "--strict", path], capture_output=True, text=True
        )
        if audit.returncode:
            yield f"is not of the stable ABI:\n{audit.stdout}{audit.stderr}"


def _faults_of_extension(elf: ELFFile, platform: str) -> Iterator[str]:
    machine = MACHINES.get(elf["e_machine"], elf["e_machine"])
    if not platform.endswith(f"_{machine}"):
        yield f"its extension is for {machine}"
    for tag in elf.get_section_by_name(".dynamic").iter_tags():
        if tag.entry.d_tag == "DT_NEEDED" and not LIBRARIES.fullmatch(tag.needed):
            yield f"needs {tag.needed}"
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield "has a search path"
    exported = [
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name
    ]
    if exported != ["PyInit__native"]:
        yield f"exports {', '.join(exported[:5])} ..."
    newest = tuple(map(int, GLIBC.split(".")))
    for library, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
        for one in versions:
            match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", one.name)
            if match is None or (int(match[1]), int(match[2])) > newest:
                yield f"needs {one.name} of {library.name}"


def main() -> None:
    wheels = [one for one in sys.argv[1:] if one != "--system-openssl"]
    if not wheels:
        sys.exit(__doc__)
    system_openssl = len(wheels) < len(sys.argv) - 1
    found = [
        f"{one}: {fault}" for one in wheels for fault in faults(Path(one), system_openssl=system_openssl)
    ]
    print("\n".join(found) or f"{len(wheels)} wheels: nothing to find fault with")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
