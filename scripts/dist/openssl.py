"""A static OpenSSL for one processor with the core's needs: TLS clients, certificates, SHA-256."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from sources import OPENSSL_FOR_TESTS, Source
from toolchain import Toolchain

# A path without files, so that no other OpenSSL's settings are read, and the core finds authorities itself.
NOWHERE = "/usr/lib/kvpool/no-openssl"
TARGETS = {"x86_64": "linux-x86_64", "aarch64": "linux-aarch64"}
# No code loaded at run time, only TLS over TCP, and only ciphers of TLS 1.2, TLS 1.3 and today's
# certificates.
_CODE = ("shared", "tests", "dso", "module", "engine", "legacy", "ui-console")
_PROTOCOLS = ("dtls", "quic", "comp", "cms", "ts", "ct", "srp", "cmp", "ssl3")
_CIPHERS = (
    "idea",
    "seed",
    "camellia",
    "aria",
    "bf",
    "cast",
    "rc2",
    "rc4",
    "md4",
    "mdc2",
    "whirlpool",
    "rmd160",
)
WITHOUT = (*_CODE, *_PROTOCOLS, *_CIPHERS, "sm2", "sm3", "sm4")


_LICENCE = Path("/usr/share/doc/libssl-dev/copyright")


def of_system() -> tuple[Source, Path] | None:
    """This Debian's static OpenSSL, and the folder of its licence. None: it has none."""
    header = Path("/usr/include/openssl/opensslv.h")
    if not all(one.exists() for one in (header, _LICENCE, *_libraries(platform.machine()))):
        return None
    version = re.search(r'OPENSSL_VERSION_STR "(3[0-9.]+)"', header.read_text())
    if version is None:
        return None
    return replace(
        OPENSSL_FOR_TESTS, version=version[1], sha256="", licence_file=_LICENCE.name
    ), _LICENCE.parent


def _libraries(arch: str) -> list[Path]:
    return [Path(f"/usr/lib/{arch}-linux-gnu", name) for name in ("libssl.a", "libcrypto.a")]


def linked(arch: str, scratch: Path) -> Path:
    """Folder with ``include`` and ``lib`` of ``of_system``."""
    if arch != platform.machine():
        raise SystemExit(f"--system-openssl: this machine's OpenSSL is not for {arch}")
    prefix = scratch / "openssl-of-system"
    shutil.rmtree(prefix, ignore_errors=True)
    headers = [
        *Path("/usr/include/openssl").glob("*.h"),
        *Path(f"/usr/include/{arch}-linux-gnu/openssl").glob("*.h"),
    ]
    for folder, files in (("include/openssl", headers), ("lib", _libraries(arch))):
        (prefix / folder).mkdir(parents=True)
        for one in files:
            (prefix / folder / one.name).symlink_to(one)
    return prefix


def build(source: Source, tree: Path, toolchain: Toolchain, scratch: Path) -> Path:
    """Folder with ``include`` and ``lib``; built unless present."""
    prefix = scratch / f"{source.folder}-{toolchain.arch}"
    stamp = prefix / ".built"
    unknown = {"quic"} if source.version.startswith("3.0.") else set()
    options = [f"no-{name}" for name in WITHOUT if name not in unknown]
    wanted = " ".join([toolchain.version, *options])
    if stamp.exists() and stamp.read_text() == wanted:
        return prefix
    print(f"building OpenSSL {source.version} for {toolchain.arch}", flush=True)
    folder = scratch / "build" / f"{source.folder}-{toolchain.arch}"
    for old in (prefix, folder):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    environment = {**os.environ, **toolchain.environment()}
    configure = [tree / "Configure", TARGETS[toolchain.arch], f"--prefix={NOWHERE}", "--libdir=lib"]
    configure += [f"--openssldir={NOWHERE}", *options, "-fPIC", "-fvisibility=hidden"]
    log = scratch / f"{folder.name}.log"
    with log.open("wb") as out:
        for command in (
            configure,
            ["make", f"--jobs={os.cpu_count()}", "build_libs"],
            ["make", "install_dev", f"DESTDIR={prefix}"],
        ):
            try:
                subprocess.run(command, check=True, cwd=folder, env=environment, stdout=out, stderr=out)
            except subprocess.CalledProcessError:
                raise SystemExit(f"OpenSSL could not be built; all that was said: {log}") from None
    for part in ("include", "lib"):
        (prefix / NOWHERE.lstrip("/") / part).rename(prefix / part)
    shutil.rmtree(folder)
    stamp.write_text(wanted)
    return prefix
