"""Sources of wheels outside of this repository: pinned by version and SHA-256, fetched once into a folder."""

from __future__ import annotations

import hashlib
import http.client
import subprocess
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 120.0
MAX_NBYTES = 100 << 20


class Unavailable(Exception):
    """No place served a source; a line for each."""


@dataclass(frozen=True)
class Source:
    """``urls``: of the makers. ``debian``: path of the same file in any Debian mirror's pool."""

    name: str
    version: str
    sha256: str
    folder: str  # inside the archive
    url: str
    debian: str
    licence: str  # SPDX
    licence_file: str
    cpe: str


OPENSSL = Source(
    "OpenSSL",
    "3.5.7",
    "a8c0d28a529ca480f9f36cf5792e2cd21984552a3c8e4aa11a24aa31aeac98e8",
    "openssl-3.5.7",
    "https://github.com/openssl/openssl/releases/download/openssl-3.5.7/openssl-3.5.7.tar.gz",
    "o/openssl/openssl_3.5.7.orig.tar.gz",
    "Apache-2.0",
    "LICENSE.txt",
    "cpe:2.3:a:openssl:openssl:3.5.7:*:*:*:*:*:*:*",
)
# For tests without access to the pinned version: Debian 12 keeps it, its makers no longer fix it.
OPENSSL_FOR_TESTS = Source(
    "OpenSSL",
    "3.0.20",
    "c80a01dfc70ece4dc21168932c37739042d404d46ccc81a5986dd75314ecda6f",
    "openssl-3.0.20",
    "https://github.com/openssl/openssl/releases/download/openssl-3.0.20/openssl-3.0.20.tar.gz",
    "o/openssl/openssl_3.0.20.orig.tar.gz",
    "Apache-2.0",
    "LICENSE.txt",
    "cpe:2.3:a:openssl:openssl:3.0.20:*:*:*:*:*:*:*",
)
XXHASH = Source(
    "xxHash",
    "0.8.3",
    "aae608dfe8213dfd05d909a57718ef82f30722c392344583d3f39050c7f29a80",
    "xxHash-0.8.3",
    "https://github.com/Cyan4973/xxHash/archive/refs/tags/v0.8.3.tar.gz",
    "x/xxhash/xxhash_0.8.3.orig.tar.gz",
    "BSD-2-Clause",
    "LICENSE",
    "cpe:2.3:a:cyan4973:xxhash:0.8.3:*:*:*:*:*:*:*",
)


def unpacked(source: Source, folder: Path) -> Path:
    """The source's files, in a folder below ``folder``; fetched unless present. Errors: ``Unavailable``."""
    tree = folder / source.folder
    if (tree / ".unpacked").exists():
        return tree
    archive = folder / f"{source.folder}.tar.gz"
    if not archive.exists() or _sha256(archive.read_bytes()) != source.sha256:
        _fetch(source, archive)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (tree / ".unpacked").touch()
    return tree


def _fetch(source: Source, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    print(f"fetching {source.name} {source.version}", flush=True)
    for url in [source.url, *(f"{site}/pool/main/{source.debian}" for site in _debian_mirrors())]:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:  # noqa: S310
                data = reply.read(MAX_NBYTES)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            failures.append(f"{url}: {error}")
            continue
        if _sha256(data) != source.sha256:
            failures.append(f"{url}: another file, its SHA-256 is {_sha256(data)}")
            continue
        archive.write_bytes(data)
        return
    raise Unavailable(
        "\n".join(
            [
                f"{source.name} {source.version} could not be fetched:",
                *failures,
                f"Store it as {archive}, or pin a newer one in {Path(__file__).name}.",
            ]
        )
    )


def _debian_mirrors() -> list[str]:
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    try:
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return list(dict.fromkeys(told.split()))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
