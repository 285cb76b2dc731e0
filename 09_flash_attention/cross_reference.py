"""What three earlier phases say about this one, each made runnable.

    python cross_reference.py --phase 1    Hello NPU: how much of attention is its matrix products?
    python cross_reference.py --phase 7    Profiling: which operators take time and memory?
    python cross_reference.py --phase 8    Mini-GPT: its module with standard, flash, fused inside
"""

import math
import statistics
from dataclasses import dataclass
from itertools import product

from flash_attention import cli, standard_attention  # first: finds `common`
from flash_backward import flash_attention
from fused import fused_attention
from cases import cases_of, parser
from common.device import choose, describe
from common.profiling import profile_call
from common.report import console, mib, print_table, track, write_json
from common.timing import ratio, time_in_turn

import torch
from torch import nn

ATTENTION = {"standard": standard_attention, "flash": flash_attention, "fused": fused_attention}


@dataclass
class ProductRow:
    """A part of standard attention: its median seconds, its share of the whole, its rate."""

    name: str
    shape: str
    seconds: float
    share: float
    tflops: float


def time_products(case, device, seed=0):
    """Phase 1: time Q K^T, softmax and P V in turn with standard attention. Return ProductRows."""
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
    flop = {**products, "standard attention": sum(products.values()), "softmax": math.nan}
    seconds = time_in_turn(calls, device)
    whole = seconds["standard attention"]
    rows = []
    for name, part in seconds.items():
        median = statistics.median(part)
        rows.append(ProductRow(name, case.shape, median, ratio(part, whole)[0],
                               flop[name] / median / 1e12))
    return rows


class CausalSelfAttention(nn.Module):
    """Phase 8's module in nanoGPT's shape, [B, N, C] -> [B, N, C], its attention chosen by name.

    attention: 'standard', 'flash' or 'fused'. Q, K and V are strided views of one projection.
    """

    def __init__(self, n_embd, n_head, attention="standard"):
        super().__init__()
        if attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {attention!r}")
        if n_embd % n_head:
            raise ValueError(f"n_head must divide n_embd, got {n_head} and {n_embd}")
        self.n_head, self.attend = n_head, ATTENTION[attention]
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, cache=None):
        """cache: takes the new K and V and returns all so far, as flash_decoding.KVCache does."""
        Q, K, V = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # [B, N, C] -> [B, H, N, C/H]
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        if cache is not None:
            K, V = cache.append(K, V)  # [B, H, length, C/H]
        O = self.attend(Q, K, V, causal=True)  # [B, H, N, C/H]
        return self.c_proj(O.transpose(1, 2).flatten(-2))  # [B, N, C]


@dataclass
class ModuleRow:
    """max_diff: from the module with standard attention inside and the same weights."""

    name: str
    shape: str
    max_diff: float
    seconds: float


@torch.no_grad()
def compare_modules(N, device, dtype=torch.float32, n_embd=384, n_head=6, seed=0):
    """Phase 8: one set of weights, one input, each attention in turn. Return ModuleRows."""
    torch.manual_seed(seed)
    modules = {name: CausalSelfAttention(n_embd, n_head, name) for name in ATTENTION}
    x = torch.randn(1, N, n_embd).to(device, dtype)
    for module in modules.values():
        module.load_state_dict(modules["standard"].state_dict())
        module.to(device, dtype)
    expected = modules["standard"](x)
    seconds = time_in_turn({name: lambda m=m: m(x) for name, m in modules.items()}, device)
    return [
        ModuleRow(name, f"1x{N}x{n_embd}", (module(x) - expected).abs().max().item(),
                  statistics.median(seconds[name]))
        for name, module in modules.items()
    ]


def show_phase_1(cases, args, device):
    rows = [row for case in track("phase 1", cases)
            for row in time_products(case, device, args.seed)]
    print_table("Phase 1, Hello NPU: the matrix products inside standard attention",
                ["part", "Q", "ms", "share", "TFLOP/s"],
                [(r.name, r.shape, f"{r.seconds * 1e3:.4g}", f"{r.share:.0%}",
                  "-" if math.isnan(r.tflops) else f"{r.tflops:.3g}") for r in rows])
    return rows


def show_phase_7(cases, args, device):
    rows = []
    for case, name in product(cases, ("standard", "flash")):
        inputs = case.inputs(device, args.seed)
        path, operators = profile_call(
            lambda name=name, case=case, inputs=inputs: ATTENTION[name](*inputs, **case.masks),
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
                [(r.name, r.shape, f"{r.max_diff:.2e}", f"{r.seconds * 1e3:.4g}") for r in rows])
    return rows


SHOW = {1: show_phase_1, 7: show_phase_7, 8: show_phase_8}


def main():
    options = parser(__doc__.splitlines()[0],
                     "device", "dtype", "seq-len", "causal", "seed", "json")
    options.add_argument("--phase", type=int, choices=SHOW, help="(all three)")
    options.add_argument("--traces", metavar="DIR", default="results/traces",
                         help="where phase 7 writes (results/traces)")
    args = options.parse_args()
    device = choose(args.device)
    cases = cases_of(args, options, device, lengths=(1024,))
    console.print(f"device: {describe(device)}")
    rows = []
    for phase in [args.phase] if args.phase else SHOW:
        rows += [(f"phase {phase}", row) for row in SHOW[phase](cases, args, device)]
    if args.json:
        write_json(args.json, device, rows)


if __name__ == "__main__":
    cli.serve(main)
