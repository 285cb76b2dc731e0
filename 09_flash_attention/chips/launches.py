"""What the launchers would launch on a chip that is not there, and how Triton compiles it.

`launching` puts a stand-in in the place of each kernel. So what is compiled, or run by
`run_ascend_ir.py`, has the arguments, the constants and the tile that the launchers choose.
"""

import contextlib
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the lessons and `lab`

from lab import triton_tools
from common.report import progress

import flash_triton
import flash_triton_backward
import flash_triton_decoding

import torch

import triton
from triton.compiler import ASTSource

MODULES = flash_triton, flash_triton_backward, flash_triton_decoding
PAGED = "split_kernel_paged"  # the same kernel, reading through a block table
KERNELS = ("flash_attention_kernel", "D_kernel", "dQ_kernel", "dK_dV_kernel", "split_kernel", PAGED,
           "merge_kernel")
ONE_TILE = "D_kernel", "merge_kernel"  # the launchers know no other for them
ASCEND = "ascend" in triton.backends.backends  # that Triton is 3.2
TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
         torch.int32: "*i32", torch.int64: "*i64", bool: "i1", float: "fp32", int: "i32"}


@dataclass
class Launch:
    """A kernel, its arguments by name, and how many programs there are of it."""

    kernel: triton.runtime.JITFunction
    arguments: dict
    programs: tuple
    num_warps: int
    num_stages: int

    @property
    def name(self):
        return PAGED if self.arguments.get("PAGED") else self.kernel.__name__

    @property
    def tile(self):
        """(Br, Bc, num_warps, num_stages); merge_kernel takes a row and PARTS parts at a time."""
        sizes = self.arguments.get("Br", 1), self.arguments.get("Bc") or self.arguments["PARTS"]
        return (*sizes, self.num_warps, self.num_stages)

    def constants(self):
        """The arguments that Triton compiles into the kernel; a stride of 1 is one."""
        given = [(p, self.arguments[p.name]) for p in self.kernel.params]
        return {p.name: value for p, value in given if p.is_constexpr or value is None
                or type(value) is int and value == 1 and not p.do_not_specialize}

    def source(self, tile=None):
        """Return what Triton compiles, in the launch's tile or in another."""
        if tile and tile != self.tile:
            self = Launch(self.kernel, {**self.arguments, "Br": tile[0], "Bc": tile[1]},
                          self.programs, *tile[2:])
        names, constants = self.kernel.arg_names, self.constants()
        signature = {name: type_of(value) for name, value in self.arguments.items()
                     if name not in constants}
        if ASCEND:
            return ASTSource(self.kernel, signature, constants)
        aligned = [p.name for p in self.kernel.params
                   if p.name in signature and not p.do_not_specialize
                   and is_aligned(self.arguments[p.name])]
        signature.update(dict.fromkeys(constants, "constexpr"))
        return ASTSource(self.kernel, {name: signature[name] for name in names},
                         {(names.index(name),): value for name, value in constants.items()},
                         {(names.index(name),): [["tt.divisibility", 16]] for name in aligned})


def type_of(value):
    return TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]


def is_aligned(value):
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


class StandIn:
    """Takes a kernel's place: kernel[programs](*arguments, **options) calls run(Launch)."""

    def __init__(self, kernel, run):
        self.kernel, self.run = kernel, run

    def __getitem__(self, programs):
        return partial(self.launch, programs)

    def launch(self, programs, *values, num_warps, num_stages, **named):
        arguments = dict(zip(self.kernel.arg_names, values), **named)
        self.run(Launch(self.kernel, arguments, programs, num_warps, num_stages))


@contextlib.contextmanager
def launching(platform, run, programs=20):
    """Let the launchers take a CPU's tensors for those of `platform`, which has as many programs.

    run(Launch) is called in the place of each launch.
    """
    truth = {"platform_of": lambda device: platform, "programs": lambda device: programs,
             "unserved": lambda device: None, "fitting": {}}
    changes = []
    for module in (triton_tools, *MODULES):
        changes += [(module, name, value) for name, value in truth.items() if hasattr(module, name)]
        changes += [(module, name, StandIn(kernel, run)) for name, kernel in vars(module).items()
                    if name.endswith("_kernel") and isinstance(kernel, triton.runtime.JITFunction)]
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        yield


MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (64, 0)}}


def launches_of(platform, dtype, d, mask):
    """Return {kernel: Launch} of a forward and a backward of head size d on `platform`, and of
    decoding one query, or with a mask 32, so that the tile has all its rows.
    """
    Q, K, V, dO = (torch.ones(2, heads, 256, d, dtype=dtype) for heads in (4, 2, 2, 4))
    few, seen = Q[:, :, : 1 if mask == "full" else 32].clone(), []
    pages = [x.view(4, 128, 2, d) for x in (K, V)]
    table, lengths = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([256, 256])
    with launching(platform, seen.append):
        O = flash_triton.flash_attention_triton(Q.requires_grad_(), K, V, **MASKS[mask])
        O.backward(dO)
        flash_triton_decoding.split_kv_attention_triton(few, K, V, **MASKS[mask])
        flash_triton_decoding.paged_attention_triton(few, *pages, table, lengths.int(),
                                                     window=MASKS[mask].get("window"))
    return {launch.name: launch for launch in seen}


def in_parallel(title, function, problems):
    """Return [row, ...] of function(*problem) -> rows for all problems, on all cores."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), fork) as pool, (
            progress(title, len(problems))) as advance:
        asked = [pool.submit(function, *problem) for problem in problems]
        for each in asked:
            each.add_done_callback(lambda done: advance())
        return [row for each in asked for row in each.result()]
