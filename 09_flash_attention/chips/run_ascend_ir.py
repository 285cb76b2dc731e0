"""What triton-ascend makes of the kernels, run on a CPU and compared with float64.

    bash scripts/compile.sh 910b        runs it last, where its tools are:
    apt-get install mlir-19-tools clang-19 libmlir-19

triton-ascend turns a kernel into linalg IR, from which the card's own compiler makes the program.
Here MLIR lowers the same IR to a CPU. The launchers believe to be on the card: tile, constants and
arguments are those of a launch there. What would go unseen is made to show:

- NaN stands around each array, between the rows of Q, K and V, in memory that the kernel takes and
  has not written, and in the masked lanes of a load. If a value from there counts, the result is
  NaN.
- A write beside an array, or into an input, is found afterwards and fails.

The steps behind linalg, which give buffers their place in a core's memory, are not run.
"""

import ctypes
import functools
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

chips = Path(__file__).resolve().parent
sys.path[:0] = [str(chips.parent), str(chips)]  # for the lessons and `lab`; `python -I` has neither

from lab.bench import Candidate, VerifyRow, verify
from lab.cases import Case, dtype_name
from lab.show import print_reasons
from lab.triton_tools import DTYPES, INTERPRETED
from common import cli
from common.report import print_table
from ascend import binaries, linalg
from flash_attention import standard_attention
from flash_backward import gradients
from flash_pages import through_pages
from flash_triton import flash_attention_triton
from flash_triton_decoding import paged_attention_triton, split_kv_attention_triton
from launches import KERNELS, PAGED, in_parallel, launching

import torch

INSTALL = "apt-get install mlir-19-tools clang-19 libmlir-19"
TOOLS = "mlir-opt-19", "mlir-translate-19", "clang-19"
PASSES = """
    --empty-tensor-to-alloc-tensor --convert-elementwise-to-linalg --linalg-fuse-elementwise-ops
    --one-shot-bufferize=allow-return-allocs-from-loops=true --buffer-deallocation-pipeline
    --convert-linalg-to-loops --convert-scf-to-cf --expand-strided-metadata --lower-affine
    --convert-math-to-llvm --arith-expand=include-bf16=true --convert-arith-to-llvm
    --convert-index-to-llvm --finalize-memref-to-llvm
    --convert-func-to-llvm=use-bare-ptr-memref-call-conv=0 --convert-cf-to-llvm
    --reconcile-unrealized-casts""".split()
POISON = """
void *malloc(unsigned long), *memset(void *, int, unsigned long);
void *malloc_of_nan(unsigned long n) { return memset(malloc(n), 255, n); }
"""  # all bits set are NaN in each floating type
GUARD = torch.full((2048,), 0x7FFF, dtype=torch.int16).view(torch.uint8)  # NaN too, but another
PROGRAMS = 3  # each takes several blocks
WRITTEN = {"": "", "0": "", "1": "all", "2": "some"}  # by tt.tensor_kind: of an argument's elements

# 333 queries of 200 keys: with causal the first see none. d - 3: columns that are padded to d.
SHAPES = {
    "full": lambda d: Case(300, Nk=333, d=d),
    "causal": lambda d: Case(333, Nk=200, d=d, causal=True),
    "window": lambda d: Case(300, Nk=333, d=max(1, d - 3), window=(200, 30)),
}
DECODING = {
    "full": lambda d: Case(1, Nk=900, d=d),
    "causal": lambda d: Case(5, Nk=700, d=d, causal=True),
    "window": lambda d: Case(5, Nk=900, d=max(1, d - 3), causal=True, window=(300, 0)),
}
PAGE = 128
KERNEL_OF = {"O": "flash_attention_kernel", "dQ": "dQ_kernel", "dK": "dK_dV_kernel",
             "dV": "dK_dV_kernel", "O, decoded": "split_kernel", "O, of pages": PAGED}


def tools():
    """Return the paths of the tools and of MLIR's library; raises Refused where one is missing."""
    paths = [shutil.which(name) for name in TOOLS]
    missing = [name for name, path in zip(TOOLS, paths) if not path]
    library = list(Path("/usr/lib/llvm-19/lib").glob("libmlir_c_runner_utils.so*"))
    if missing or not library:
        raise cli.Refused(f"it needs {', '.join(missing) or 'libmlir-19'}: {INSTALL}")
    return *paths, library[0]


def without_fills(ir):
    """Return linalg IR whose loads leave masked lanes as they are, as the card may."""
    return re.sub(r"linalg\.fill [^\n]* outs\(%\w+ : memref<[^\n]*", "", ir)


@functools.lru_cache
def on_cpu(ir):
    """Return linalg IR compiled for this CPU: a function of C."""
    opt, translate, clang, library = tools()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, lowered, code = (folder / f"kernel.{end}" for end in ("mlir", "llvm", "ll"))
        source.write_text(without_fills(ir))
        (folder / "poison.c").write_text(POISON)
        call(opt, "--allow-unregistered-dialect", *PASSES, source, "-o", lowered)
        call(translate, "--mlir-to-llvmir", lowered, "-o", code)
        code.write_text(code.read_text().replace("@malloc(", "@malloc_of_nan("))
        call(clang, "-w", "-O2", "-march=native", "-shared", "-fPIC", code, folder / "poison.c",
             library, f"-Wl,-rpath,{library.parent}", "-lm", "-o", folder / "kernel.so")
        loaded = ctypes.CDLL(str(folder / "kernel.so"))
    return loaded[re.search(r"func\.func @(\w+)", ir).group(1)]


def call(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RuntimeError(f"{Path(command[0]).name}: {said[0]}")


class Guarded:
    """The storage of a tensor, copied between two guards."""

    def __init__(self, x, written):
        self.storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        inside = torch.full_like(self.storage, 255) if written == "all" else self.storage
        self.buffer = torch.cat((GUARD, inside, GUARD))
        self.inside, self.written = self.buffer[len(GUARD) : -len(GUARD)], written
        self.at = x.storage_offset() * x.element_size()

    def memref(self):
        """The arguments that MLIR makes of a memref of rank 1."""
        pointer = ctypes.c_void_p(self.inside.data_ptr() + self.at)
        return [pointer, pointer, *map(ctypes.c_int64, (0, len(self.inside), 1))]

    def give_back(self, name):
        """Copy what was written to the tensor; raises RuntimeError where nothing may be."""
        if not all(part.equal(GUARD) for part in (
                self.buffer[: len(GUARD)], self.buffer[-len(GUARD) :])):
            raise RuntimeError(f"{name}: written outside of it")
        if not self.written and not self.inside.equal(self.storage):
            raise RuntimeError(f"{name}: an input was written")
        self.storage.copy_(self.inside)


def run(compiler, tiles, launch):
    """Run a launch on the CPU, from the IR that triton-ascend makes of it; note its tile."""
    ir = linalg(compiler, launch.source())
    function, arrays, arguments = on_cpu(ir), {}, []
    kinds = re.findall(r"%arg\d+: memref<[^>]*>(?: \{tt\.tensor_kind = (\d))?", ir)
    kinds = iter(kinds[2:])  # the first two are no arguments of the kernel
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            arrays[name] = Guarded(value, WRITTEN[next(kinds)])
            arguments += arrays[name].memref()
        elif name not in launch.constants():
            number = ctypes.c_float if isinstance(value, float) else ctypes.c_int32
            arguments.append(number(value))
    nothing = [ctypes.c_void_p(), ctypes.c_void_p(), *map(ctypes.c_int64, (0, 0, 1))]
    grid = (*launch.programs, 1, 1)[:3]
    for ids in itertools.product(*map(range, grid)):
        function(*nothing, *nothing, *arguments, *map(ctypes.c_int32, grid + ids))
    for name, array in arrays.items():
        array.give_back(f"{launch.kernel.__name__}'s {name}")
    tiles[launch.name] = "{}x{}".format(*launch.tile)


def between_nan(x):
    """Return x with NaN behind each row and each head."""
    wide = x.new_full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 8), torch.nan)
    wide[..., : x.shape[-2], : x.shape[-1]] = x
    return wide[..., : x.shape[-2], : x.shape[-1]]


@dataclass
class Row(VerifyRow):
    """A VerifyRow of one result, with what hides keys and the tile."""

    d: int = 0
    mask: str = ""
    tile: str = ""


def ways(case, decoding):
    """Return [(names of the results, standard attention's call, the kernels'), ...]."""
    standard = partial(standard_attention, **case.masks)
    if decoding:
        return [(["O, decoded"], standard, partial(split_kv_attention_triton, **case.masks)),
                (["O, of pages"], standard, partial(through_pages, partial(
                    behind_nan, partial(paged_attention_triton, window=case.window)), page=PAGE))]
    ours = partial(flash_attention_triton, **case.masks)
    return [(["O"], standard, ours),
            (["dQ", "dK", "dV"], partial(gradients, standard), partial(gradients, ours))]


def behind_nan(attend, Q, K_pages, V_pages, table, lengths):
    """Call attend with NaN behind the last token of each sequence."""
    for pages in (K_pages, V_pages):
        pages[table[:, -1].long(), int(lengths[0] - 1) % PAGE + 1 :] = torch.nan
    return attend(Q, K_pages, V_pages, table, lengths)


def check(compiler, kernels, decoding, dtype, d, mask):
    """Run the kernels on a case and compare with float64: a Row for each result of `kernels`."""
    torch.set_num_threads(1)
    case = replace((DECODING if decoding else SHAPES)[mask](d), heads=2, kv_heads=1, dtype=dtype)
    rows, tiles = [], {}

    def compiled(attend, *inputs):
        with launching("npu", partial(run, compiler, tiles), PROGRAMS):
            return attend(*map(between_nan, inputs))

    for names, standard, ours in ways(case, decoding):
        if {KERNEL_OF[name] for name in names} <= set(kernels):
            dO = len(names) > 1
            found = verify(case, [Candidate("standard", standard),
                                  Candidate("compiled", partial(compiled, ours))],
                           device=torch.device("cpu"), dO=dO, factor=3 if dO else 2)
            rows += [Row(**{**vars(row), "name": name}, d=case.d, mask=mask,
                         tile=tiles.get(KERNEL_OF[name], "-")) for row, name in zip(found, names)]
    return rows


def show(compiler, kernels, dtypes, sizes):
    """Run and compare the kernels, print a table, return its Rows; """
    rows = in_parallel("run", partial(check, compiler, kernels),
                       list(itertools.product((False, True), dtypes, sizes, SHAPES)))

    def error(value):
        return "-" if value is None else f"{value:.2e}"

    print_table(
        "Run on this CPU, from triton-ascend's linalg IR: the largest error against float64",
        ["result", "Q (K V)", "dtype", "mask", "Br x Bc", "error", "standard's", "result"],
        [(r.name, r.shape, r.dtype, r.mask, r.tile, error(r.error_flash), error(r.error_standard),
          "pass" if r.passed else "FAIL") for r in rows])
    print_reasons(rows)
    return rows


def main():
    options = cli.Parser(description=__doc__)
    options.add_argument("--compiler", metavar="DIR", default="ascendnpu-ir",
                         help="the folder that holds the package ascendnpuir")
    options.add_argument("--kernel", nargs="+", default=KERNELS, choices=KERNELS,
                         help="one or more (all)")
    options.add_argument("--dtype", nargs="+", default=[*map(dtype_name, DTYPES)],
                         choices=[*map(dtype_name, DTYPES)], help="one or more (all)")
    options.add_argument("--head-dim", nargs="+", type=cli.whole_number(1, 256), metavar="d",
                         default=[64, 128, 256], help="one or more (64 128 256)")
    args = options.parse_args()
    if INTERPRETED:
        raise cli.Refused("TRITON_INTERPRET is set, and the interpreter does not compile: unset it")
    tools()
    binaries(args.compiler)
    rows = show(args.compiler, args.kernel, [getattr(torch, name) for name in args.dtype],
                args.head_dim)
    return 0 if rows and all(row.passed for row in rows) else 1


if __name__ == "__main__":
    cli.serve(main)
