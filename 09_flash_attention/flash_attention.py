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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `common` stands beside this folder

from common import cli  # first: Ctrl-C is quiet from here on
from common.device import choose, describe, free_bytes, torch_npu  # before torch: see there
from common.memory import measure_peak
from common.report import console, mib, plot_curves, print_table, progress, write_json
from common.timing import count_launches, median_ratio, time_in_turn
from visible import DTYPES, Visible

import torch
import torch.nn.functional as F

# ---- The algorithm


def standard_attention(Q, K, V, *, causal=False, q_start=None, window=None, scale=None, attn_mask=None,
                       score_mod=None, return_lse=False):
    """Attention as its formula stands, softmax(Q K^T * scale) V: the baseline, with two Nq x Nk matrices.

    Arguments, result and errors are those of `flash_attention_forward`. For float16 and bfloat16 the scores are
    float32, and P is rounded to V's dtype before it meets V, as model code does. Autograd goes through it.
    """
    visible = Visible(Q, K, V, causal=causal, q_start=q_start, window=window, scale=scale, attn_mask=attn_mask,
                      score_mod=score_mod)
    rows, cols = slice(0, visible.Nq), slice(0, visible.Nk)
    S = visible.query_block(rows) @ K.to(visible.dtype).transpose(-2, -1) * visible.scale  # [..., G*Nq, Nk]
    S, V = visible.restrict(S, V, rows, cols)
    dead = (S == -math.inf).all(-1, keepdim=True) if visible.hides else None  # [..., G*Nq, 1]
    if dead is not None:
        S = S.masked_fill(dead, 0)  # the softmax of a row of -inf is NaN, and so is its gradient
    P = torch.softmax(S, dim=-1)  # [..., G*Nq, Nk]
    O = P.to(V.dtype) @ V  # [..., G*Nq, dv]
    L = torch.logsumexp(S, dim=-1) if return_lse else None  # [..., G*Nq]
    if dead is not None:
        O = O.masked_fill(dead, 0)
        L = L.masked_fill(dead.squeeze(-1), -math.inf) if return_lse else None
    O = O.reshape(*Q.shape[:-1], V.shape[-1])  # [..., Nq, dv]
    return (O, L.reshape(Q.shape[:-1])) if return_lse else O


def online_softmax_step(m, l, O_block, S_block, V_block):
    """Take one more tile into the softmax: what was summed under the old maximum is rescaled to the new one.

    m, l [..., Br, 1]: running maximum and running sum of exp. O_block [..., Br, dv]: running output, not yet
    divided by l. S_block [..., Br, Bc]: the tile's scores. V_block [..., Bc, dv]. Returns the new m, l, O_block;
    O_block and S_block are overwritten. Source: FlashAttention-2, Algorithm 1, lines 8 to 10.
    """
    m_new = torch.maximum(m, S_block.amax(-1, keepdim=True))  # [..., Br, 1]
    correction = torch.exp(m - m_new)  # [..., Br, 1], at most 1
    P_block = S_block.sub_(m_new).exp_()  # [..., Br, Bc]
    l = correction * l + P_block.sum(-1, keepdim=True)  # [..., Br, 1]
    O_block = O_block.mul_(correction).add_(P_block @ V_block)  # [..., Br, dv]
    return m_new, l, O_block


def score_blocks(visible, K, V, rows, Bc):
    """Yield cols, S_block [..., G*Br, Bc], V_block [..., Bc, dv] for each tile that the queries of `rows` visit."""
    Q_block = visible.query_block(rows) * visible.scale  # [..., G*Br, d]
    for cols in visible.key_blocks(rows, Bc):
        K_block, V_block = (x[..., cols, :].to(visible.dtype) for x in (K, V))  # [..., Bc, d], [..., Bc, dv]
        S_block = Q_block @ K_block.transpose(-2, -1)
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
    L = Q.new_empty(Q.shape[:-1], dtype=visible.dtype)
    for rows in visible.query_blocks(Br):
        m, l, O_block = visible.start(rows, V.shape[-1])
        for _, S_block, V_block in score_blocks(visible, K, V, rows, Bc):
            m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
        visible.store(O, rows, O_block / l.masked_fill(l == 0, 1))  # l is 0 in a row that saw no key
        visible.store(L.unsqueeze(-1), rows, m + l.log())
    return (O, L) if return_lse else O


def fused_attention(Q, K, V, *, causal=False, window=None, scale=None):
    """The platform's own kernel: npu_fusion_attention on an NPU, scaled_dot_product_attention elsewhere.

    Shapes, `causal`, `window` and `scale` as in `flash_attention_forward`, without `return_lse`.
    """
    visible = Visible(Q, K, V, causal=causal, window=window, scale=scale)
    heads = [x if x.dim() == 4 else x.reshape(1, -1, *x.shape[-2:]) for x in (Q, K, V)]  # [B, H, N, d]
    hidden = visible.hidden(slice(0, visible.Nq), slice(0, visible.Nk), Q.device) if visible.hides else None
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


@dataclass(frozen=True)
class Case:
    """One attention problem: shapes, dtype and what may be seen. Nk, dv and kv_heads are Nq, d and heads if None."""

    Nq: int
    batch: int = 1
    heads: Optional[int] = None  # None: the article's [B, N, d]
    kv_heads: Optional[int] = None
    d: int = 64
    Nk: Optional[int] = None
    dv: Optional[int] = None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window: Optional[tuple] = None

    @property
    def shapes(self):
        """The shapes of Q, K and V."""
        Nk, dv, kv_heads = self.Nk or self.Nq, self.dv or self.d, self.kv_heads or self.heads
        lead = (self.batch,) if self.heads is None else (self.batch, self.heads)
        kv_lead = (self.batch,) if self.heads is None else (self.batch, kv_heads)
        return (*lead, self.Nq, self.d), (*kv_lead, Nk, self.d), (*kv_lead, Nk, dv)

    @property
    def shape(self):
        """The shapes in a table's cell: 1x256x64, or 'Q x K x V' where they differ."""
        names = ["x".join(map(str, shape)) for shape in self.shapes]
        return names[0] if len(set(names)) == 1 else " ".join(names)

    @property
    def masks(self):
        """The keyword arguments that say what may be seen."""
        return {"causal": self.causal, "window": self.window}

    def inputs(self, device, seed):
        """Q, K, V from a standard normal distribution: the same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(s, generator=generator).to(device, self.dtype) for s in self.shapes]


ARTICLE_CASES = (Case(256), Case(512), Case(1024), Case(512, batch=4))
VERIFY_CASES = ARTICLE_CASES + (
    Case(1023),
    Case(113, Nk=203, batch=2),
    Case(512, d=64, dv=96),
    Case(512, heads=8, kv_heads=2),
    Case(512, dtype=torch.float64),
    Case(1024, dtype=torch.float16),
    Case(1024, dtype=torch.bfloat16),
)


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

    float16 and bfloat16 pass where flash's error is at most twice standard's (FlashAttention's own rule). float32
    and float64 pass where the two differ by at most 8 eps of the largest output: both round the same dozen or so
    steps in another order.
    """
    rows = []
    for case in cases:
        Q, K, V = case.inputs(device, seed)
        flash = flash_attention_forward(Q, K, V, Br, Bc, **case.masks).double().cpu()
        standard = standard_attention(Q, K, V, **case.masks).double().cpu()
        oracle = _oracle(Q, K, V, case)
        max_diff, error_flash, error_standard = (
            (a - b).abs().max().item() for a, b in ((flash, standard), (flash, oracle), (standard, oracle)))
        if case.dtype.itemsize < 4:
            passed = error_flash <= 2 * error_standard
        else:
            passed = max_diff <= 8 * torch.finfo(case.dtype).eps * max(1.0, oracle.abs().max().item())
        rows.append(VerifyRow(case.shape, _name(case.dtype), case.causal, max_diff, error_flash, error_standard, passed))
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

    standard: S and P. flash: P_block in the place of S_block, O_block and P_block @ V_block, m, m_new, correction,
    l and the row sum. fused: L.
    """
    (*lead, Nq, d), (*kv_lead, Nk, _), (*_, dv) = case.shapes
    heads, width = math.prod(lead), case.dtype.itemsize
    wide = max(width, 4)
    Br, Bc = min(Br, Nq), min(Bc, Nk)
    beside = {
        "standard": heads * Nq * Nk * (2 * wide + (width if width < 4 else 0)),
        "flash": heads * wide * (Br * Bc + 2 * Br * dv + 5 * Br) + heads * Nq * wide,
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


def _name(dtype):
    return str(dtype).replace("torch.", "")


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
    steps = []
    for rows in visible.query_blocks(Br):
        m, l, O_block = visible.start(rows, V.shape[-1])
        for cols, S_block, V_block in score_blocks(visible, K, V, rows, Bc):
            m_old, scores = m, S_block.clone()
            m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
            correction = torch.exp(m_old - m)
            for i, query in enumerate(range(rows.start, rows.stop)):
                steps.append(TraceRow(query, f"{cols.start}-{cols.stop - 1}", scores[i].tolist(), m[i].item(),
                                      correction[i].item(), l[i].item()))
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
    cells = []
    for r, standard in _beside_standard(rows):
        ratio = f"{standard.peak_bytes / r.peak_bytes:.4g}" if r.peak_bytes and standard.peak_bytes else "-"
        cells.append((r.name, r.shape, _or_no_room(r, r.peak_bytes), _or_no_room(r, r.peak_bytes_without_result),
                      mib(r.theory_bytes), ratio))
    print_table(f"Memory: peak MiB of one call, tiles {args.br}x{args.bc}",
                ["name", "Q (K V)", "peak", "without result", "formula", "times less"], cells)
    return rows


def _or_no_room(row, count):
    return mib(count) if count is not None else "no room"


def _beside_standard(rows):
    """Pair each row with the standard row of its shape."""
    standard = {r.shape: r for r in rows if r.name == "standard"}
    return [(r, standard[r.shape]) for r in rows]


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
    difference = (O - standard_attention(Q, K, V, causal=args.causal)).abs().max().item()
    console.print(f"\nlargest difference of O from standard attention: {difference:.1e}")
    return steps + more


def _trace_cells(r):
    return (r.query, r.keys, " ".join(f"{s:6.3f}" for s in r.scores), f"{r.m:.3f}", f"{r.correction:.3f}", f"{r.l:.3f}")


SHOW = {"trace": show_trace, "verify": show_verify, "memory": show_memory, "speed": show_speed}


def parser(description):
    """Return the options that every lesson takes where they make sense."""
    positive, options = cli.whole_number(1), cli.Parser(description=description)
    options.add_argument("--device", default="auto", help="auto, cpu, cuda[:i] or npu[:i]")
    options.add_argument("--dtype", choices=[_name(d) for d in DTYPES])
    options.add_argument("--batch", type=positive)
    options.add_argument("--heads", type=positive, help="query heads: [B, H, N, d] instead of [B, N, d]")
    options.add_argument("--kv-heads", type=positive, help="key and value heads, a divisor of --heads")
    options.add_argument("--seq-len", type=positive, nargs="+", metavar="N")
    options.add_argument("--head-dim", type=positive, metavar="d")
    options.add_argument("--br", type=positive, default=64, help="rows of a query block (64)")
    options.add_argument("--bc", type=positive, default=64, help="rows of a key/value block (64)")
    options.add_argument("--causal", action="store_true")
    options.add_argument("--seed", type=cli.whole_number(0), default=0)
    options.add_argument("--json", metavar="FILE", help="write the rows there as well")
    options.add_argument("--plot", metavar="DIR", help="draw memory and time against N into that folder")
    return options


def main():
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--mode", choices=[*SHOW, "all"], default="verify")
    args = options.parse_args()
    device = choose(args.device)
    console.print(f"device: {describe(device)}")
    rows = []
    for mode in SHOW if args.mode == "all" else [args.mode]:
        rows += [(mode, row) for row in SHOW[mode](cases(mode, args, options), args, device)]
    if args.json:
        write_json(args.json, device, rows)
    return 0 if all(row.passed for mode, row in rows if mode == "verify") else 1


def cases(mode, args, options):
    """Return the cases that the options ask for: with no shape given, verify takes its own list."""
    shape = {"batch": args.batch, "heads": args.heads, "kv_heads": args.kv_heads, "d": args.head_dim,
             "dtype": args.dtype and getattr(torch, args.dtype)}
    shape = {name: value for name, value in shape.items() if value is not None}
    if mode == "verify" and not shape and not args.seq_len:
        return [replace(case, causal=args.causal) for case in VERIFY_CASES]
    return [Case(N, causal=args.causal, **shape) for N in args.seq_len or (512, 1024, 2048, 4096)]


if __name__ == "__main__":
    cli.serve(main)
