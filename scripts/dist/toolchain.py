"""Compilers for one processor and an old glibc: zig from its wheel on PyPI."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}"


def zig_folder() -> Path:
    found = importlib.util.find_spec("ziglang")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@dataclass(frozen=True)
class Toolchain:
    """Small programs in ``folder`` that call zig as ``cc``, ``c++``, ``ar`` and ``ranlib``."""

    arch: str
    folder: Path
    cache: Path

    @property
    def version(self) -> str:
        return f"zig {importlib.metadata.version('ziglang')} glibc {GLIBC}"

    def environment(self) -> dict[str, str]:
        """Variables for a build with standard tool names. zig caches its output in ``cache``."""
        tools = {"CC": "cc", "CXX": "c++", "AR": "ar", "RANLIB": "ranlib"}
        paths = {name: str(self.folder / tool) for name, tool in tools.items()}
        return {**paths, "ZIG_GLOBAL_CACHE_DIR": str(self.cache), "ZIG_LOCAL_CACHE_DIR": str(self.cache)}

    def write(self) -> Path:
        """Write the programs, and a file for CMake; returns the file's path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        zig = zig_folder() / "zig"
        target = f"{self.arch}-linux-gnu.{GLIBC}"
        for tool in ("cc", "c++", "ar", "ranlib"):
            program = self.folder / tool
            options = f"-target {target} " if tool in ("cc", "c++") else ""
            # As the module's link has it: zig compiles its C++ library for each mode, and CMake's trials name none.
            options += "-O2 -s " if tool == "c++" else ""
            program.write_text(f'#!/bin/sh\nexec "{zig}" {tool} {options}"$@"\n')
            program.chmod(0o755)
        cmake = self.folder / "toolchain.cmake"
        cmake.write_text(
            "set(CMAKE_SYSTEM_NAME Linux)\n"
            f"set(CMAKE_SYSTEM_PROCESSOR {self.arch})\n"
            f'set(CMAKE_CXX_COMPILER "{self.folder / "c++"}")\n'
            f'set(CMAKE_AR "{self.folder / "ar"}")\n'
            f'set(CMAKE_RANLIB "{self.folder / "ranlib"}")\n'
            'set(CMAKE_MODULE_LINKER_FLAGS_INIT "-s")\n'
            f'set(CMAKE_PROJECT_INCLUDE "{self.folder / "project.cmake"}")\n'
        )
        # zig bypasses its cache when asked for header dependencies, and each build starts from nothing.
        (self.folder / "project.cmake").write_text('set(CMAKE_DEPFILE_FLAGS_CXX "")\n')
        return cmake
