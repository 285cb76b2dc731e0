"""The simulated triton-ascend loads as the real one does and fails at a launch as it does."""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "simulated_triton_ascend"
CHILD = """
import json, os, sys
sys.path.insert(0, {package!r})
import triton, triton.language as tl
from triton.compiler.errors import MLIRCompilationError

@triton.jit(do_not_specialize=["N"])
def kernel(X, N, Br: tl.constexpr, Bc: tl.constexpr):
    raise AssertionError("no kernel runs")

os.environ["SIMULATED_TRITON_TILE"] = "4096"
said = []
for Br, Bc in ((128, 64), (64, 64)):
    try:
        kernel[(20,)](None, 8, Br, Bc, num_warps=4, num_stages=1)
    except (MLIRCompilationError, RuntimeError) as refusal:
        said.append([type(refusal).__name__, str(refusal)])
cores = triton.runtime.driver.active.utils.get_device_properties(0)["num_aicore"]
print(json.dumps({{
    "said": said, "cores": cores, "version": triton.__version__,
    "launches": triton.runtime.launches, "backends": list(triton.backends.backends),
    "is a JITFunction": isinstance(kernel, triton.runtime.JITFunction)}}))
"""


def test_it_looks_installed_and_a_launch_raises_as_the_tile_fits_or_not():
    program = CHILD.format(package=str(PACKAGE))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    overflow, fits = found.pop("said")
    assert overflow[0] == "MLIRCompilationError" and overflow[1].count("\n") > 1
    assert "ub overflow, requires 3145728 bits while 1572864 bits available!" in overflow[1]
    assert fits == ["RuntimeError", "simulated: nothing runs"]
    assert found == {
        "cores": 20, "version": "3.2.0", "launches": [["kernel", 128, 64], ["kernel", 64, 64]],
        "backends": ["ascend"], "is a JITFunction": True}
    (package,) = distributions(path=[str(PACKAGE)])
    assert (package.metadata["Name"], package.version) == ("triton-ascend", "3.2.0")
