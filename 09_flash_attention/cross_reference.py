"""What three earlier phases say about this one, each made runnable.

    python cross_reference.py --phase 1    Hello NPU: how much of attention is its matrix products?
    python cross_reference.py --phase 7    Profiling: which operators take time and memory?
    python cross_reference.py --phase 8    Mini-GPT: its module with standard, flash, fused inside
"""

import sys
from dataclasses import dataclass
from itertools import product
from os.path import dirname, realpath
from typing import Optional

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli, files
from common.profiling import profile_call
from common.report import console, mib, print_table, track
from common.timing import ratio, time_in_turn
from flash_attention import flash_attention_forward, standard_attention
from lab.bench import need_room
from lab.cases import Case
from lab.formulas import forward_bytes
from lab.fused import NO_HALF_PRODUCT
from lab.show import ms, print_reasons
from mini_gpt import CausalSelfAttention

import torch


@dataclass
class ProductRow:
    """A part of standard attention: median seconds, share of the whole, and its rate where it is
    a product. why: why the time is not to be believed.
    """

    name: str
    shape: str
    seconds: float
    share: float
    tflops: Optional[float]
    why: str = ""


def time_products(case, device, seed=0):
    """Phase 1: time Q K^T, softmax and P V in turn with standard attention. Return ProductRows."""
    need_room(f"phase 1 {case.shape}", 2 * forward_bytes("standard", case), device)
    Q, K, V = case.inputs(device, seed)
    S = Q @ K.transpose(-2, -1)  # [..., N, N]
    P = torch.softmax(S, dim=-1)
    calls = {
        "standard attention": lambda: standard_attention(Q, K, V, **case.masks),
        "Q K^T": lambda: Q @ K.transpose(-2, -1),
        "softmax": lambda: torch.softmax(S, dim=-1),
        "P V": lambda: P @ V,
    }
    products = {"Q K^T": 2 * S.numel() * Q.shape[-1], "P V": 2 * S.numel() * V.shape[-1]}
    flop = {**products, "standard attention": sum(products.values())}
    rounds, rows = time_in_turn(calls, device), []
    for name, seconds in rounds.items():
        median, (share, spread) = rounds.median(name), ratio(seconds, rounds["standard attention"])
        tflops = flop[name] / median / 1e12 if name in flop else None
        rows.append(ProductRow(name, case.shape, median, share, tflops,
                               rounds.doubt(name, spread)))
    return rows


@dataclass
class ModuleRow:
    """max_diff: from the module with standard attention inside and the same weights."""

    name: str
    shape: str
    max_diff: float
    seconds: float
    why: str = ""


@torch.no_grad()
def compare_modules(N, device, dtype=torch.float32, n_embd=384, n_head=6, seed=0):
    """Phase 8: one set of weights, one input, each attention in turn. Return ModuleRows."""
    inside = Case(N, heads=n_head, d=n_embd // n_head, dtype=dtype)
    need_room(f"phase 8 1x{N}x{n_embd}", forward_bytes("standard", inside), device)
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        torch.default_generator.manual_seed(seed)
        modules = {name: CausalSelfAttention(n_embd, n_head, name)
                   for name in ("standard", "flash", "fused")}
        x = torch.randn(1, N, n_embd).to(dtype).to(device)
    for module in modules.values():
        module.load_state_dict(modules["standard"].state_dict())
        module.to(device, dtype)
    expected = modules["standard"](x)
    rounds = time_in_turn({name: lambda m=m: m(x) for name, m in modules.items()}, device)
    return [
        ModuleRow(name, f"1x{N}x{n_embd}", (module(x) - expected).abs().max().item(),
                  rounds.median(name), rounds.doubt(name))
        for name, module in modules.items()
    ]


def show_phase_1(cases, args, device):
    rows = [row for case in track("phase 1", cases)
            for row in time_products(case, device, args.seed)]
    print_table("Phase 1, Hello NPU: the matrix products inside standard attention",
                ["part", "Q", "ms", "share", "TFLOP/s"],
                [(r.name, r.shape, ms(r), f"{r.share:.0%}",
                  "-" if r.tflops is None else f"{r.tflops:.3g}") for r in rows])
    print_reasons(rows)
    return rows


def show_phase_7(cases, args, device):
    rows, attention = [], {"standard": standard_attention, "flash": flash_attention_forward}
    for case, name in product(cases, attention):
        inputs = case.inputs(device, args.seed)
        path, operators = profile_call(
            lambda name=name, case=case, inputs=inputs: attention[name](*inputs, **case.masks),
            device, args.traces, f"{name}_{case.shape}")
        rows += operators
        for order, value in (("time", lambda o: o.self_ms), ("memory", lambda o: o.self_bytes)):
            most = sorted(operators, key=value, reverse=True)[:5]
            print_table(f"Phase 7, Profiling: {name} attention {case.shape}, operators by {order}",
                        ["operator", "calls", "self ms", "self MiB"],
                        [(o.name, o.calls, f"{o.self_ms:.3f}", mib(o.self_bytes)) for o in most])
        console.print(f"\ntrace: {path}")
    return rows


def show_phase_8(cases, args, device):
    rows = [row for case in cases
            for row in compare_modules(case.Nq, device, case.dtype, seed=args.seed)]
    print_table("Phase 8, Mini-GPT: CausalSelfAttention, one set of weights",
                ["attention", "input", "largest difference", "ms"],
                [(r.name, r.shape, f"{r.max_diff:.2e}", ms(r)) for r in rows])
    print_reasons(rows)
    return rows


SHOW = {1: show_phase_1, 7: show_phase_7, 8: show_phase_8}


def main():
    options = lesson.parser(__doc__, "device", "dtype", "seq-len", "causal", "seed", "json")
    options.add_argument("--phase", type=int, choices=SHOW, help="(all three)")
    options.add_argument("--traces", metavar="DIR", default="results/traces",
                         help="where phase 7 writes (results/traces)")

    def check(args):
        try:
            if args.phase in (None, 7):
                files.refuse_folder(args.traces)
        except OSError as fault:
            options.error(f"argument --traces: {fault}")

    args, device, cases = lesson.begin(options, (1024,), check)
    half = cases[0].dtype == torch.float16 and device.type == "cpu"
    if half and NO_HALF_PRODUCT and args.phase != 7:
        options.error("argument --dtype: torch before 2.2 multiplies no float16 on a CPU, "
                      "and phases 1 and 8 do: take bfloat16")
    rows = []
    for phase in [args.phase] if args.phase else SHOW:
        rows += [(f"phase {phase}", row) for row in SHOW[phase](cases, args, device)]
    return lesson.finish(args, device, rows)


if __name__ == "__main__":
    cli.serve(main)
