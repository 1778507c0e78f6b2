"""Wheels of kvpool for manylinux_2_28, and its sdist.

    python scripts/dist SCRATCH OUT [--for-tests] [--system-openssl] [TARGET ...]

TARGET: cp310-x86_64, cp311-x86_64, cp312-x86_64 (stable ABI: 3.12 and newer), or with aarch64; all six unless some are
named. SCRATCH keeps sources, OpenSSL and compiled objects for the next time. Runs in an environment with the tools of
scripts/dist/tools.txt, on Linux, x86-64, with make and perl. Python 3.10, 3.11 and 3.12 are looked for on the PATH and
among pyenv's; a wheel for another processor takes the headers of this machine's Python.
--for-tests: an older OpenSSL will do where the pinned one cannot be fetched. --system-openssl: this Debian's static
one, if it has one, in place of minutes of compiling; such wheels are for tests only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import finish
import openssl
import sources
from toolchain import Toolchain

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"cp310": ["3.10"], "cp311": ["3.11"], "cp312": ["3.12", "3.13", "3.14"]}
ARCHES = ("x86_64", "aarch64")
TARGETS = [f"{python}-{arch}" for arch in ARCHES for python in VERSIONS]
TOOLS = Path(__file__).with_name("tools.txt")
BUILDERS = ("cmake", "nanobind", "ninja", "scikit-build-core")  # of TOOLS, to build a wheel


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/dist", description=__doc__.partition("\n")[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all unless named"
    )
    parser.add_argument("--for-tests", action="store_true")
    parser.add_argument("--system-openssl", action="store_true")
    asked = parser.parse_args()
    unknown = sorted(set(asked.targets) - set(TARGETS))
    if unknown:
        parser.error(f"unknown target {unknown[0]}: known are {', '.join(TARGETS)}")
    targets = asked.targets or TARGETS
    pythons = {name: find_python(name) for name in dict.fromkeys(one.partition("-")[0] for one in targets)}
    scratch, out = asked.scratch.resolve(), asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    system = openssl.of_system() if asked.system_openssl else None
    try:
        xxhash, crypto = sources.XXHASH, sources.OPENSSL
        trees = {xxhash: sources.unpacked(xxhash, scratch / "sources")}
        try:
            crypto, trees[crypto] = system or (crypto, sources.unpacked(crypto, scratch / "sources"))
        except sources.Unavailable as failure:
            if not asked.for_tests:
                raise
            crypto = sources.OPENSSL_FOR_TESTS
            trees[crypto] = sources.unpacked(crypto, scratch / "sources")
            print(
                f"{failure}\nOpenSSL {crypto.version} is in these wheels: they are for tests only",
                file=sys.stderr,
            )
    except sources.Unavailable as failure:
        raise SystemExit(str(failure)) from None
    say("packing the source")
    source = build_sdist(scratch, out)
    for number, target in enumerate(targets, 1):
        name, _, arch = target.partition("-")
        began = time.monotonic()
        toolchain = Toolchain(arch, scratch / f"tools-{arch}", scratch / "zig")
        cmake = toolchain.write()
        if system is None:
            prefix = openssl.build(crypto, trees[crypto], toolchain, scratch)
        else:
            prefix = openssl.linked(arch, scratch)
        say(f"{target}, {number} of {len(targets)}: build tools")
        python = environment(pythons[name], name, scratch)
        say(f"{target}: compiling; its output: {scratch / f'{name}-{arch}.log'}")
        raw = build_wheel(python, source, toolchain, cmake, prefix, trees[xxhash], name, scratch)
        parts = [finish.of_source(one, tree) for one, tree in trees.items()]
        parts += finish.of_tools(site_packages(python))
        wheel = finish.finish(raw, parts, arch, scratch, out)
        size = wheel.stat().st_size / 2**20
        print(f"{wheel.name}: {size:.1f} MiB, {time.monotonic() - began:.0f} s", flush=True)


def say(step: str) -> None:
    """A line for each step that may take minutes."""
    print(step, flush=True)


def find_python(name: str) -> str:
    """An interpreter for the wheel ``name``, such as cp310."""
    for version in VERSIONS[name]:
        beside = sorted(map(str, Path(_pyenv_root()).glob(f"versions/{version}.*/bin/python{version}")))
        for candidate in [shutil.which(f"python{version}"), *reversed(beside)]:
            if candidate is not None and _works(candidate, version):
                return candidate
    wanted = " or ".join(f"python{version}" for version in VERSIONS[name])
    raise SystemExit(
        f"the wheel {name} needs {wanted} with its headers and venv: install it, or name other targets"
    )


def _pyenv_root() -> str:
    return os.environ.get("PYENV_ROOT") or str(Path.home() / ".pyenv")


def _works(python: str, version: str) -> bool:
    code = (
        "import ensurepip, os, sys, sysconfig, venv;"
        "has = os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'));"
        "print('%d.%d' % sys.version_info[:2], has)"
    )
    try:
        told = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return told.stdout.split() == [version, "True"]


def environment(python: str, name: str, scratch: Path) -> Path:
    """The interpreter of a virtual environment with the build tools."""
    folder = scratch / f"python-{name}"
    lines = TOOLS.read_text().splitlines()
    wanted = [line for line in lines if line.partition("==")[0] in BUILDERS]
    stamp, text = folder / ".stamp", "\n".join([python, *wanted])
    if not stamp.exists() or stamp.read_text() != text:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-qq", *wanted], check=True)
        stamp.write_text(text)
    return folder / "bin/python"


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


def build_sdist(scratch: Path, out: Path) -> Path:
    """Write the sdist to ``out``; returns the folder of its files, from which wheels are built."""
    for old in out.glob("kvpool-*.tar.gz"):
        old.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the sdist could not be built:\n{done.stdout}{done.stderr}")
    (archive,) = out.glob("kvpool-*.tar.gz")
    folder = scratch / "source"  # always the same, for zig's cache
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    print(f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)
    (tree,) = folder.iterdir()
    return tree


def build_wheel(
    python: Path,
    source: Path,
    toolchain: Toolchain,
    cmake: Path,
    prefix: Path,
    xxhash: Path,
    name: str,
    scratch: Path,
) -> Path:
    arch = toolchain.arch
    folder = scratch / "raw"
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "build-dir": str(scratch / "build" / "wheel"),
        "install.strip": "false",  # the linker strips, for any processor
        "cmake.define.CMAKE_TOOLCHAIN_FILE": str(cmake),
        "cmake.define.OPENSSL_ROOT_DIR": str(prefix),
        "cmake.define.OPENSSL_USE_STATIC_LIBS": "ON",
        "cmake.define.XXHASH_INCLUDE_DIR": str(xxhash),
        "cmake.define.KVPOOL_WERROR": "ON",
    }
    shutil.rmtree(settings["build-dir"], ignore_errors=True)
    command = [str(python), "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command += [f"--wheel-dir={folder}", str(source)]
    command += [f"--config-settings={setting}={value}" for setting, value in settings.items()]
    variables = {
        **os.environ,
        **toolchain.environment(),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{name.removeprefix('cp')}-{arch}-linux-gnu.so",
    }
    log = scratch / f"{name}-{arch}.log"
    with log.open("wb") as told:
        done = subprocess.run(command, env=variables, stdout=told, stderr=told)
    if done.returncode:
        raise SystemExit(f"the wheel {name}-{arch} could not be built; all that was said: {log}")
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    main()
