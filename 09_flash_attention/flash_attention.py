"""FlashAttention, forward: attention without the N x N matrix, by tiling and the online softmax.

    python flash_attention.py --mode verify      is it the same as standard attention?
    python flash_attention.py --mode memory      what does it save?
    python flash_attention.py --mode speed       what does it cost, or gain?
    python flash_attention.py --mode trace       the recurrence, step by step

The heart is `online_softmax_step`, five lines; `flash_attention_forward` walks the tiles and calls it.
README.md beside this file is the lesson. Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (2307.08691).
"""

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `common` stands beside this folder

from common import cli  # first: Ctrl-C is quiet from here on
from common.device import choose, describe, free_bytes, torch_npu  # before torch: see there
from common.memory import measure_peak
from common.report import console, mib, plot_curves, print_table, progress, write_json
from common.timing import count_launches, median_ratio, time_in_turn
from cases import VERIFY_CASES, Case, cases_of, dtype_name, parser, verify_cases
from visible import Visible

import torch
import torch.nn.functional as F

# ---- The algorithm


LOG2_E = math.log2(math.e)


def standard_attention(Q, K, V, *, causal=False, q_start=None, window=None, scale=None, attn_mask=None,
                       score_mod=None, return_lse=False):
    """Attention as its formula stands, softmax(Q K^T * scale) V: the baseline, with two Nq x Nk matrices.

    Arguments, result and errors are those of `flash_attention_forward`. For float16 and bfloat16 the scores are
    float32, and P is rounded to V's dtype before it meets V, as model code does. Autograd goes through it.
    """
    visible = Visible(Q, K, V, causal=causal, q_start=q_start, window=window, scale=scale, attn_mask=attn_mask,
                      score_mod=score_mod)
    rows = slice(0, visible.Nq)
    cols = visible.key_range(rows)
    S = visible.query_block(rows) @ visible.key_block(K, cols).transpose(-2, -1) * visible.scale  # [X, G*Nq, Nk]
    S, V_seen = visible.restrict(S, visible.key_block(V, cols), rows, cols)
    if visible.hides:  # the softmax of a row of only -inf is NaN, and so is its gradient
        dead = (S == -math.inf).all(-1, keepdim=True)  # [X, G*Nq, 1]
        S = S.masked_fill(dead, 0)
    P = torch.softmax(S, dim=-1)  # [X, G*Nq, Nk]
    O = P.to(V.dtype) @ V_seen.to(V.dtype)  # [X, G*Nq, dv]
    L = torch.logsumexp(S, dim=-1, keepdim=True) if return_lse else None  # [X, G*Nq, 1]
    if visible.hides:
        O = O.masked_fill(dead, 0)
        L = L.masked_fill(dead, -math.inf) if return_lse else None
    O = O.view(*Q.shape[:-1], V.shape[-1])  # [..., Nq, dv]
    return (O, L.view(Q.shape[:-1])) if return_lse else O


def online_softmax_step(m, l, O_block, S_block, V_block):
    """Take one more tile into the softmax: what was summed under the old maximum is rescaled to the new one.

    m, l [X, Br, 1]: running maximum and running sum of exp. O_block [X, Br, dv]: running output, not yet divided by
    l. S_block [X, Br, Bc], V_block [X, Bc, dv]: the tile's scores and values. Returns the new m, l, O_block; the old
    l and O_block, and S_block, are overwritten. Source: FlashAttention-2, Algorithm 1, lines 8 to 10.
    """
    m_new = torch.maximum(m, S_block.amax(-1, keepdim=True))  # [X, Br, 1]
    correction = torch.exp(m - m_new)  # [X, Br, 1], at most 1
    P_block = exp_(S_block.sub_(m_new))  # [X, Br, Bc]
    l = l.mul_(correction).add_(P_block.sum(-1, keepdim=True))  # [X, Br, 1]
    O_block = O_block.mul_(correction).baddbmm_(P_block, V_block)  # [X, Br, dv] += P_block @ V_block
    return m_new, l, O_block


def exp_(x):
    """exp in place, as exp2(x log2(e)): on a CPU exp2 is so much cheaper that it pays for the product."""
    return x.mul_(LOG2_E).exp2_()


def score_blocks(visible, K, V, rows, Bc, scratch):
    """Yield cols, S_block [X, G*Br, Bc], V_block [X, Bc, dv] for each tile that the queries of `rows` visit.

    scratch [X * G * Br * Bc]: where every S_block is written.
    """
    Q_block = visible.query_block(rows) * visible.scale  # [X, G*Br, d]
    for cols in visible.key_blocks(rows, Bc):
        K_block, V_block = visible.key_block(K, cols), visible.key_block(V, cols)  # [X, Bc, d], [X, Bc, dv]
        shape = (*Q_block.shape[:2], K_block.shape[1])
        S_block = torch.bmm(Q_block, K_block.transpose(1, 2), out=scratch[: math.prod(shape)].view(shape))
        yield (cols, *visible.restrict(S_block, V_block, rows, cols))


def flash_attention_forward(Q, K, V, Br=64, Bc=64, *, causal=False, q_start=None, window=None, scale=None,
                            attn_mask=None, score_mod=None, return_lse=False):
    """Exact attention, tile by tile: no matrix larger than Br x Bc a head ever stands in memory.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> O [..., Nq, dv] in Q's dtype. float16, bfloat16, float32 or
    float64; m, l, O and the scores are float32 for the first two. With [B, H, N, d], K and V may have fewer heads:
    query head h reads head h // (Hq / Hkv). Strided views are taken as they are.

    Br, Bc: rows of a query block and of a key/value block, 1 or more.
    causal: query i sees key j where j <= q_start + i.
    q_start: the key position of the first query; None is Nk - Nq, so that the last query sees the last key.
    window: (left, right), query i sees keys from q_start + i - left to q_start + i + right; None is unbounded.
    scale: what Q K^T is multiplied by; None is 1/sqrt(d).
    attn_mask: broadcasts to [..., Nq, Nk]; bool, True keeps; or float, added to the scaled scores.
    score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, FlexAttention's signature, called on whole tiles; its
        arguments broadcast, q_idx counts from 0. It comes after the scale and before the masks.
    return_lse: return (O, L) with L [..., Nq], the natural log of the sum of exp of the scores, in float32 or float64.

    A row that sees no key gives O = 0 and L = -inf. Raises ValueError for shapes, numbers, devices and an input that
    wants a gradient (this is the forward alone), TypeError for dtypes. Loop order: FlashAttention-2, Algorithm 1.
    """
    visible = Visible(Q, K, V, causal=causal, q_start=q_start, window=window, scale=scale, attn_mask=attn_mask,
                      score_mod=score_mod)
    _check_forward(Br, Bc, Q=Q, K=K, V=V)
    O = Q.new_empty(*Q.shape[:-1], V.shape[-1])
    L = Q.new_empty(*Q.shape[:-1], 1, dtype=visible.dtype) if return_lse else None
    scratch = Q.new_empty(Q.shape[:-2].numel() * min(Br, visible.Nq) * min(Bc, visible.Nk), dtype=visible.dtype)
    for rows in visible.query_blocks(Br):
        m, l, O_block = start(visible, rows, V)
        for _, S_block, V_block in score_blocks(visible, K, V, rows, Bc, scratch):
            m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
        visible.store(O, rows, O_block.div_(l.masked_fill(l == 0, 1)))  # l is 0 in a row that saw no key
        if return_lse:
            visible.store(L, rows, m + l.log())
    return (O, L.squeeze(-1)) if return_lse else O


def start(visible, rows, V):
    """Return m, l and O_block as they stand before the first tile.

    m is the lowest finite number and not -inf: a tile with nothing to see then gives correction = exp(0) = 1 and
    P_block = exp(-inf) = 0, where -inf - -inf would be NaN.
    """
    shape = (visible.X, visible.G * (rows.stop - rows.start))
    m = V.new_full((*shape, 1), torch.finfo(visible.dtype).min, dtype=visible.dtype)
    return m, torch.zeros_like(m), m.new_zeros(*shape, V.shape[-1])


def fused_attention(Q, K, V, *, causal=False, window=None, scale=None):
    """The platform's own kernel: npu_fusion_attention on an NPU, scaled_dot_product_attention elsewhere.

    Shapes, `causal`, `window` and `scale` as in `flash_attention_forward`, without `return_lse`.
    """
    visible = Visible(Q, K, V, causal=causal, window=window, scale=scale)
    heads = [x if x.dim() == 4 else x.reshape(1, -1, *x.shape[-2:]) for x in (Q, K, V)]  # [B, H, N, d]
    hidden = None
    if visible.hides:
        offset = torch.arange(visible.Nk, device=Q.device) - torch.arange(visible.Nq, device=Q.device)[:, None]
        hidden = (offset > visible.q_start + visible.right) | (offset < visible.q_start - visible.left)  # [Nq, Nk]
    if Q.device.type == "npu":
        # Here True hides, and the scale is 1 unless given. inner_precise=2 makes a row that sees no key 0.
        mask = {} if hidden is None else {"atten_mask": hidden, "sparse_mode": 1, "inner_precise": 2}
        O = torch_npu.npu_fusion_attention(*heads, heads[0].shape[1], "BNSD", scale=visible.scale, **mask)[0]
    else:
        square = causal and window is None and visible.Nq == visible.Nk
        mask = {"is_causal": True} if square else {} if hidden is None else {"attn_mask": ~hidden}
        grouped = {"enable_gqa": True} if visible.G > 1 else {}  # torch 2.5 and later
        O = F.scaled_dot_product_attention(*heads, scale=visible.scale, **mask, **grouped)
    return O.reshape(*Q.shape[:-1], V.shape[-1])


def _check_forward(Br, Bc, **inputs):
    for name, size in (("Br", Br), ("Bc", Bc)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
    for name, tensor in inputs.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} wants a gradient, and this is the forward alone: call it under torch.no_grad()")


# ---- The tools: each returns rows and prints nothing


@dataclass
class VerifyRow:
    """Largest absolute differences: flash - standard, and each from the float64 oracle."""

    shape: str
    dtype: str
    causal: bool
    max_diff: float
    error_flash: float
    error_standard: float
    passed: bool


def compare_and_verify(cases=VERIFY_CASES, Br=64, Bc=64, *, device=torch.device("cpu"), seed=0):
    """Compare flash with standard attention, and both with float64 on the CPU: one VerifyRow a case.

    A case passes where flash's error is at most twice standard's, FlashAttention's own rule. float32 and float64 are
    allowed 2 eps of the largest output more, for on a small case standard's error may be next to nothing.
    """
    rows = []
    for case in cases:
        Q, K, V = case.inputs(device, seed)
        flash = flash_attention_forward(Q, K, V, Br, Bc, **case.masks).double().cpu()
        standard = standard_attention(Q, K, V, **case.masks).double().cpu()
        oracle = _oracle(Q, K, V, case)
        max_diff, error_flash, error_standard = (
            (a - b).abs().max().item() for a, b in ((flash, standard), (flash, oracle), (standard, oracle)))
        slack = 2 * torch.finfo(case.dtype).eps * oracle.abs().max().item() if case.dtype.itemsize >= 4 else 0
        passed = error_flash <= 2 * error_standard + slack
        rows.append(VerifyRow(case.shape, dtype_name(case.dtype), case.causal, max_diff, error_flash, error_standard, passed))
    return rows


def _oracle(Q, K, V, case):
    """torch's own attention in float64 on the CPU, with a mask built from index lists."""
    Q, K, V = (x.double().cpu() for x in (Q, K, V))
    if Q.dim() == 4:
        K, V = (x.repeat_interleave(Q.shape[1] // x.shape[1], dim=1) for x in (K, V))
    Nq, Nk = Q.shape[-2], K.shape[-2]
    left, right = case.window or (None, None)
    keep = torch.ones(Nq, Nk, dtype=torch.bool)
    if case.causal or right is not None:
        keep = keep.tril(Nk - Nq + (0 if case.causal else right))
    if left is not None:
        keep = keep.triu(Nk - Nq - left)
    return F.scaled_dot_product_attention(Q, K, V, attn_mask=keep).nan_to_num(0)  # NaN: a row that sees no key


@dataclass
class MemoryRow:
    """Bytes. theory_bytes counts the result and the largest buffers beside it; None: not run, memory too small."""

    name: str
    shape: str
    peak_bytes: Optional[int]
    peak_bytes_without_result: Optional[int]
    theory_bytes: int


def profile_memory(cases, Br=64, Bc=64, *, device=torch.device("cpu"), seed=0):
    """Measure the peak memory of standard, flash and fused attention: three MemoryRows a case.

    A candidate whose theoretical peak exceeds the free memory is not run.
    """
    rows = []
    for case in cases:
        inputs = case.inputs(device, seed)
        for name, call in _candidates(case, inputs, Br, Bc).items():
            theory = theory_bytes(name, case, Br, Bc)
            peak = (None, None)
            if theory < free_bytes(device):
                if device.type != "cpu":
                    call()  # an accelerator's workspaces are allocated in the first call
                peak = measure_peak(call, device)
            rows.append(MemoryRow(name, case.shape, *peak, theory))
    return rows


def theory_bytes(name, case, Br, Bc):
    """The bytes that attention has to hold at its highest moment, the result included.

    standard: S and P. flash: a tile each of S_block, O_block and the scaled Q_block, five columns (m, m_new,
    correction, l, row sums), and where they apply the tile's mask and the float32 copies of half-precision K_block
    and V_block. fused: L.
    """
    (*lead, Nq, d), (*_, Nk, _), (*kv_lead, _, dv) = case.shapes
    heads, kv_heads, width = math.prod(lead), math.prod(kv_lead), case.dtype.itemsize
    wide = max(width, 4)
    Br, Bc = min(Br, Nq), min(Bc, Nk)
    tile = heads * (Br * Bc + Br * d + Br * dv + 5 * Br) + (Br * Bc if case.hides else 0)
    beside = {
        "standard": heads * Nq * Nk * (2 * wide + (width if width < wide else 0)),
        "flash": wide * (tile + (kv_heads * Bc * (d + dv) if width < wide else 0)),
        "fused": heads * Nq * 4,
    }
    return heads * Nq * dv * width + beside[name]


@dataclass
class SpeedRow:
    """ratio_to_standard: how many times as fast as standard attention. launches: operator calls. None: not run."""

    name: str
    shape: str
    Br: Optional[int]
    Bc: Optional[int]
    seconds: Optional[float]
    ratio_to_standard: Optional[float]
    tflops: Optional[float]
    launches: Optional[int]


def benchmark_speed(cases, Br=64, Bc=64, *, device=torch.device("cpu"), seed=0):
    """Time standard, flash and fused attention in turn: three SpeedRows a case.

    seconds is the median of the rounds, ratio_to_standard the median of the ratios round by round, and tflops counts
    the kept score pairs only. Before it is timed, each must agree with standard attention to 1e-3 of the largest
    output (8 eps for half types), which shows another formula, not a rounding: RuntimeError where it does not.
    """
    rows = []
    for case in cases:
        inputs = case.inputs(device, seed)
        pairs = Visible(*inputs, **case.masks).kept_pairs() * math.prod(case.shapes[0][:-2])
        flop = 2 * pairs * (case.shapes[0][-1] + case.shapes[2][-1])
        calls = {name: call for name, call in _candidates(case, inputs, Br, Bc).items()
                 if theory_bytes(name, case, Br, Bc) < free_bytes(device)}
        if "standard" in calls:
            expected = calls["standard"]()
            for name, call in calls.items():
                _assert_agree(name, call(), expected)
            del expected
        seconds = time_in_turn(calls, device)
        for name in ("standard", "flash", "fused"):
            tile = (Br, Bc) if name == "flash" else (None, None)
            if name not in calls:
                rows.append(SpeedRow(name, case.shape, *tile, None, None, None, None))
                continue
            median = statistics.median(seconds[name])
            ratio = median_ratio(seconds["standard"], seconds[name]) if "standard" in calls else None
            rows.append(SpeedRow(name, case.shape, *tile, median, ratio, flop / median / 1e12,
                                 count_launches(calls[name])))
    return rows


def _candidates(case, inputs, Br, Bc):
    return {
        "standard": lambda: standard_attention(*inputs, **case.masks),
        "flash": lambda: flash_attention_forward(*inputs, Br, Bc, **case.masks),
        "fused": lambda: fused_attention(*inputs, **case.masks),
    }


def _assert_agree(name, O, expected):
    allowed = max(1e-3, 8 * torch.finfo(O.dtype).eps) * max(1.0, expected.abs().max().item())
    difference = (O.float() - expected.float()).abs().max().item()
    if not difference <= allowed:
        raise RuntimeError(f"{name} differs from standard attention by {difference:.3g}, more than {allowed:.3g}")


@dataclass
class TraceRow:
    """One step of the recurrence: the state of one query row after a tile. l is the article's d."""

    query: int
    keys: str
    scores: list
    m: float
    correction: float
    l: float


def trace(Q, K, V, Br=2, Bc=2, *, causal=False, scale=None):
    """Walk the tiles of a small [N, d] attention on the CPU: a TraceRow for each query row and tile, then O."""
    visible = Visible(Q, K, V, causal=causal, scale=scale)
    steps, scratch = [], torch.empty(Br * Bc)
    for rows in visible.query_blocks(Br):
        m, l, O_block = start(visible, rows, V)
        for cols, S_block, V_block in score_blocks(visible, K, V, rows, Bc, scratch):
            m_old, scores = m, S_block.clone()
            m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
            correction = torch.exp(m_old - m)
            for i, query in enumerate(range(rows.start, rows.stop)):
                steps.append(TraceRow(query, f"{cols.start}-{cols.stop - 1}", scores[0, i].tolist(),
                                      m[0, i].item(), correction[0, i].item(), l[0, i].item()))
    steps.sort(key=lambda step: step.query)  # a query row is easier to follow through its tiles
    return steps, flash_attention_forward(Q, K, V, Br, Bc, causal=causal, scale=scale)


# ---- The command line


def show_verify(cases, args, device):
    rows = []
    with progress("verify", len(cases)) as advance:
        for case in cases:
            rows += compare_and_verify([case], args.br, args.bc, device=device, seed=args.seed)
            advance(case.shape)
    print_table(f"Verify: largest differences, tiles {args.br}x{args.bc}",
                ["Q (K V)", "dtype", "flash - standard", "flash - float64", "standard - float64", "result"],
                [(r.shape, r.dtype, f"{r.max_diff:.2e}", f"{r.error_flash:.2e}", f"{r.error_standard:.2e}",
                  "pass" if r.passed else "FAIL") for r in rows])
    return rows


def show_memory(cases, args, device):
    rows = []
    with progress("memory", len(cases)) as advance:
        for case in cases:
            rows += profile_memory([case], args.br, args.bc, device=device, seed=args.seed)
            advance(case.shape)
    standard = {r.shape: r for r in rows if r.name == "standard"}
    print_table(f"Memory: peak of one call in MiB, tiles {args.br}x{args.bc}",
                ["name", "Q (K V)", "peak", "formula", "standard / this", "without result", "standard / this"],
                [(r.name, r.shape, _mib(r.peak_bytes), mib(r.theory_bytes),
                  _ratio(standard[r.shape].peak_bytes, r.peak_bytes), _mib(r.peak_bytes_without_result),
                  _ratio(standard[r.shape].peak_bytes_without_result, r.peak_bytes_without_result)) for r in rows])
    console.print("\nformula = result + what must stand beside it: S and P (standard); a tile of S_block, O_block and "
                  "Q_block and five columns (flash); L (fused).")
    beyond = [f"{r.name} {(r.peak_bytes - r.theory_bytes) / 2**20:+.4f}" for r in rows[-3:] if r.peak_bytes is not None]
    console.print(f"peak - formula at {rows[-1].shape}, in MiB: {', '.join(beyond)}; what is left is the fused "
                  "kernel's working buffers, and on a GPU or NPU the allocator's rounding to 512 bytes.")
    return rows


def _mib(count):
    return "no room" if count is None else mib(count)


def _ratio(standard, this):
    return f"{standard / this:.4g}" if standard and this else "-"


def show_speed(cases, args, device):
    rows = []
    with progress("speed", len(cases)) as advance:
        for case in cases:
            rows += benchmark_speed([case], args.br, args.bc, device=device, seed=args.seed)
            advance(case.shape)
    print_table(f"Speed: median of calls in turn, tiles {args.br}x{args.bc}",
                ["name", "Q (K V)", "ms", "times as fast as standard", "TFLOP/s", "launches"],
                [(r.name, r.shape, *(("no room",) * 4 if r.seconds is None else
                  (f"{r.seconds * 1e3:.4g}", "-" if r.ratio_to_standard is None else f"{r.ratio_to_standard:.3g}",
                   f"{r.tflops:.3g}", r.launches))) for r in rows])
    return rows


def show_trace(cases, args, device):
    """The article's [2, 1, 3], one score a tile, then a small attention, tile by tile."""
    scores = torch.tensor([[2.0], [1.0], [3.0]])
    steps, P = trace(torch.ones(1, 1), scores, torch.eye(3), 1, 1, scale=1.0)
    columns = ["query", "keys", "scores", "m", "correction", "l"]
    print_table("Trace: the softmax of [2, 1, 3], one score at a time", columns, map(_trace_cells, steps))
    console.print("\nexp(score - m) / l with the last m and l: " + ", ".join(f"{p:.3f}" for p in P[0].tolist()))
    Q, K, V = Case(6, d=4, causal=args.causal).inputs("cpu", args.seed)
    Q, K, V = Q[0], K[0], V[0]
    more, O = trace(Q, K, V, causal=args.causal)
    print_table("Trace: 6 queries, 6 keys, d = 4, 2x2 tiles", columns, map(_trace_cells, more))
    if args.causal:
        console.print("\ntiles visited, a query block a line: # whole, / on the edge, . never visited\n")
        console.print(Visible(Q, K, V, causal=True).drawing(2, 2), markup=False)
    difference = (O - standard_attention(Q, K, V, causal=args.causal)).abs().max().item()
    console.print(f"\nlargest difference of O from standard attention: {difference:.1e}")
    return steps + more


def _trace_cells(r):
    return (r.query, r.keys, " ".join(f"{s:6.3f}" for s in r.scores), f"{r.m:.3f}", f"{r.correction:.3f}", f"{r.l:.3f}")


SHOW = {"trace": show_trace, "verify": show_verify, "memory": show_memory, "speed": show_speed}


def plot(rows, folder, where):
    """Draw what was measured over N: memory.png, time.png. Guides pass through the last measured point."""
    drawings = {"memory": ("peak memory (MiB)", "peak_bytes", 2**20), "speed": ("time (ms)", "seconds", 1e-3)}
    for mode, (label, field, unit) in drawings.items():
        curves = {}
        for row in (row for tool, row in rows if tool == mode and getattr(row, field) is not None):
            N = int(row.shape.split()[0].split("x")[-2])
            curves.setdefault(row.name, []).append((N, getattr(row, field) / unit))
        if curves:
            guides = {"O(N^2)": (2, "standard"), "O(N)": (1, "flash" if mode == "memory" else "standard")}
            title = f"{mode.capitalize()} of one attention call ({where})"
            plot_curves(folder / f"{mode}.png", title, label, curves, guides)


def main():
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--mode", choices=[*SHOW, "all"], default="verify")
    args = options.parse_args()
    device = choose(args.device)
    cases, suite = cases_of(args, options, device), verify_cases(args, options, device)
    console.print(f"device: {describe(device)}")
    rows = []
    for mode in SHOW if args.mode == "all" else [args.mode]:
        rows += [(mode, row) for row in SHOW[mode](suite if mode == "verify" else cases, args, device)]
    if args.json:
        write_json(args.json, device, rows)
    if args.plot:
        plot(rows, Path(args.plot), f"{device}, tiles {args.br}x{args.bc}")
    return 0 if all(row.passed for mode, row in rows if mode == "verify") else 1


if __name__ == "__main__":
    cli.serve(main)
