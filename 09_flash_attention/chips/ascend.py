"""triton-ascend without a card: a kernel's linalg IR, and the memory plan of its last compiler.

triton-ascend takes a kernel from Triton's IR to linalg; bishengir-compile, of the package
ascendnpu-ir, takes that on and plans each buffer of a core. Its last step, hivmc, belongs to CANN.
"""

import math
import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from common import cli

import triton
from triton.backends.compiler import GPUTarget

CHIP = "Ascend910B3"
BYTES = {"ub": 192 * 1024, "cbuf": 512 * 1024, "cc": 128 * 1024}  # UB, L1, L0C of a core
BITS = {"f16": 16, "bf16": 16, "f32": 32, "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
PATH = os.environ["PATH"]
OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits")


class Seen(Exception):
    """Ends a compile that has shown what was wanted."""


def linalg(folder, source):
    """Return the linalg IR that triton-ascend makes of a source: what bishengir-compile reads."""
    seen = {}

    def run(command, **options):
        if Path(command[0]).name != "bishengir-compile":
            return run_again(seen, command, **options)
        seen["ir"] = Path(command[1]).read_text()
        raise Seen

    stopped = compile_with(run, binaries(folder), source)
    if "ir" not in seen:
        raise RuntimeError(refusal(seen.get("said") or str(stopped)))
    return seen["ir"]


def compiler(folder):
    """Return compile(source) -> {memory: bytes}, or the compiler's refusal as a string.

    Before 1.2.0 a compiler keeps its plan to itself: {}. With "single": it fits only since the
    compiler has given up a second buffer for each load, and with it loading while it computes.
    """
    program = binaries(folder) / "bishengir-compile"
    said = subprocess.run([program, "--help-hidden"], capture_output=True)
    return partial(plan, program.parent, b"save-temps" in said.stdout)


def plan(path, keeps, source):
    seen = {"said": ""}
    with tempfile.TemporaryDirectory() as folder:
        def run(command, **options):
            if keeps and Path(command[0]).name == "bishengir-compile":
                command = [*command, f"--save-temps={folder}"]
            return run_again(seen, command, **options)

        stopped, said = compile_with(run, path, source), seen["said"]
        given_up = "compilation then succeeded" in said
        if "Cannot find hivmc" not in said or OVERFLOW.search(said) and not given_up:
            return refusal(said or str(stopped))
        found = planned_bytes(Path(folder, "module.hivm.opt.mlir").read_text()) if keeps else {}
        return {**found, "single": True} if given_up else found


def binaries(folder):
    """Return where the programs of the package ascendnpuir in `folder` are.

    Raises Refused where triton-ascend or it is missing.
    """
    path = Path(folder).resolve() / "ascendnpuir" / "bin"
    if "ascend" not in triton.backends.backends or not path.is_dir():
        raise cli.Refused(f"it needs triton-ascend and ascendnpu-ir in {folder}: "
                          "bash scripts/compile.sh 910b installs them")
    return path


def compile_with(run, path, source):
    """Compile a source for the card, as triton-ascend does, with `run` in place of its
    subprocess.run. What stands in for a card is the answer to its name. Return what stopped it.
    """
    os.environ.update(TRITON_ASCEND_ARCH=CHIP, TRITON_ALWAYS_COMPILE="1", PATH=f"{path}:{PATH}")
    # The backend's own globals: Triton loads a second copy of the module beside the imported one.
    backend = triton.backends.backends["ascend"].compiler.add_stages.__globals__
    backend["NPUUtils"] = lambda: SimpleNamespace(get_arch=lambda: CHIP)
    backend["subprocess"] = SimpleNamespace(run=run)
    try:
        triton.compile(source, target=GPUTarget("npu", CHIP, 0))
    except Exception as stopped:
        return stopped


def run_again(seen, command, **options):
    """Run a compiler as subprocess.run does; what it says goes to seen["said"]."""
    for _ in range(3):  # both compilers crash now and then, on inputs that they take next time
        done = subprocess.run(command, **{**options, "check": False})
        seen["said"] = done.stderr.decode()
        if done.returncode >= 0:
            break
        seen["said"] = f"{Path(command[0]).name} ended by signal {-done.returncode}"
    done.check_returncode()
    return done


def refusal(said):
    """Return what the compiler refuses, 'ub overflow: 395328 bytes, 201%', or its last line."""
    overflow = OVERFLOW.search(said)
    if overflow:
        memory, need, room = overflow.group(1), int(overflow.group(2)), int(overflow.group(3))
        return f"{memory} overflow: {need // 8} bytes, {need / room:.0%}"
    lines = said.strip().splitlines()
    return next((line for line in lines if "error:" in line), lines[-1])


def planned_bytes(module):
    """Return {memory: bytes} of the compiler's plan: the highest end of a buffer in each memory."""
    found = {}
    buffer = r"pointer_cast\(([^)]*)\).*?memref<((?:\d+x)*)(\w+)[^#\n]*#hivm\.address_space<(\w+)>"
    for addresses, dimensions, dtype, memory in re.findall(buffer, module):
        size = math.prod(int(n) for n in dimensions.split("x") if n) * BITS[dtype] // 8
        for address in re.findall(r"%c(\d+)_i64", addresses):
            found[memory] = max(found.get(memory, 0), int(address) + size)
    return found
