"""Triton without a GPU: a kernel compiled to Hopper's machine code, and what that takes."""

import re
import subprocess
import tempfile
from pathlib import Path

from common import cli

import triton
from triton.backends.compiler import GPUTarget

SHARED = 227 * 1024  # bytes that a block may take


def check_triton():
    """Raise Refused where Triton can't compile for Hopper."""
    found = tuple(map(int, triton.__version__.split(".")[:2]))
    if "nvidia" not in triton.backends.backends or found < (3, 3):
        raise cli.Refused(f"it needs Triton 3.3 or newer for CUDA, found {triton.__version__}: "
                          "bash scripts/compile.sh hopper installs it")


def compile_hopper(source, tile):
    """Compile to a cubin for sm_90: registers, spilled bytes, shared bytes, wgmma, uses tf32."""
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                            options={"num_warps": tile[2], "num_stages": tile[3]})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([tools / tool, option, cubin], capture_output=True, text=True,
                           check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c")))
    registers, spilled = (int(re.search(rf"{name}:(\d+)", usage).group(1))
                          for name in ("REG", "STACK"))
    tf32 = "tf32" in kernel.asm["ptx"]
    return registers, spilled, kernel.metadata.shared, code.count("HGMMA"), tf32
