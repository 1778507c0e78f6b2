"""Make the kit's vLLM 0.32 run on CUDA without its compiled extension: without_extension.py SITE

The fallback for a driver that does not take a blanked library. SITE is the kit's folder of packages. Then only
check.py --python-only runs. It is not undone: unpack the kit again.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The engine's start-up operations, in Python.
EXTENSION = """
import torch

_library = torch.library.Library("_C", "FRAGMENT")
_library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")


def _silu_and_mul(out, x):
    half = x.shape[-1] // 2
    out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])


_library.impl("silu_and_mul", _silu_and_mul, "CompositeExplicitAutograd")
for _name in ("fp8", "block_fp8", "fp4"):  # asked while modules are imported
    _library.define(f"cutlass_scaled_mm_supports_{_name}(int capability) -> bool")
    _library.impl(f"cutlass_scaled_mm_supports_{_name}", lambda capability: False, "CompositeExplicitAutograd")
_library.define("cutlass_group_gemm_supported(int capability) -> bool")
_library.impl("cutlass_group_gemm_supported", lambda capability: False, "CompositeExplicitAutograd")
"""
PLUGIN = '''
def register():
    """The V2 model runner reads host memory through a compiled view; its other buffers copy instead."""
    import vllm.v1.worker.gpu.buffer_utils as buffers

    buffers.is_uva_available = lambda: False
'''


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    site = Path(sys.argv[1])
    for library in (site / "vllm").rglob("*.so"):
        if "third_party" not in library.parts:
            library.unlink()
    (site / "vllm" / "_C_stable_libtorch.py").write_text(EXTENSION)
    (site / "vllm" / "vllm_flash_attn" / "_vllm_fa2_C.py").write_text('"""Imported, never called."""\n')
    (site / "no_uva.py").write_text(PLUGIN)
    about = site / "no_uva-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: no-uva\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nno_uva = no_uva:register\n")


if __name__ == "__main__":
    main()
