"""Decoding: one query against all the keys so far, from a cache, with the keys split into parts.

    python flash_decoding.py --mode verify      do the cache and the split give what one pass gives?
    python flash_decoding.py --mode memory      what does the split hold beside the cache?
    python flash_decoding.py --mode speed       what does it gain, and where?

One query has one row of tiles a head, walked one after another: at 64K keys a thousand steps, on a
device that could take many at once. The split walks its parts side by side, each to an O and an L
of its own, and `merge` makes one of them. Source: FlashDecoding (Dao, Haziza, Massa and Sizov,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import math
import numbers
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Optional

from flash_attention import (  # first: finds `common`
    MemoryRow,
    SpeedRow,
    VerifyRow,
    cli,
    flash_attention_forward,
    fused_attention,
    standard_attention,
    tiles,
    theory_bytes,
)
from cases import cases_of, dtype_name, parser
from judge import assert_agree, exact, judge
from common.device import choose, describe
from common.memory import measure_peak
from common.report import console, mib, print_table, track, write_json
from common.timing import count_launches, ratio, time_in_turn
from tiles import AUTO
from visible import Visible

import torch


class KVCache:
    """Keys and values of the tokens so far, in buffers that are allocated once.

    K_buffer [B, Hkv, N_max, d], V_buffer [B, Hkv, N_max, dv]: the first `length` rows are filled.
    One new token or many attend to all so far by

        flash_attention_forward(Q_new, *cache.append(K_new, V_new), causal=True)

    since causal's default q_start puts the last query at the last key.
    """

    def __init__(self, batch, kv_heads, N_max, d, dv=None, *, dtype=torch.float32, device="cpu"):
        lead = (batch, kv_heads, N_max)
        self.K_buffer = torch.empty(*lead, d, dtype=dtype, device=device)
        self.V_buffer = torch.empty(*lead, dv or d, dtype=dtype, device=device)
        self.length = 0

    @property
    def K(self):
        """The keys so far, [B, Hkv, length, d]: a view."""
        return self.K_buffer[:, :, : self.length]

    @property
    def V(self):
        """The values so far, [B, Hkv, length, dv]: a view."""
        return self.V_buffer[:, :, : self.length]

    def append(self, K_new, V_new):
        """Write K_new [B, Hkv, n, d] and V_new [B, Hkv, n, dv] behind what is there; return K, V.

        Raises ValueError for other shapes or devices and where N_max is exceeded, TypeError for
        another dtype; the cache is then as it was.
        """
        n = K_new.shape[-2]
        for name, new, buffer in (("K_new", K_new, self.K_buffer), ("V_new", V_new, self.V_buffer)):
            B, Hkv, N_max, width = buffer.shape
            if new.shape != (B, Hkv, n, width):
                wanted = f"[{B}, {Hkv}, n, {width}] with one n for both"
                raise ValueError(f"{name} must be {wanted}, got shape {tuple(new.shape)}")
            if new.dtype != buffer.dtype:
                raise TypeError(f"{name} must have the cache's {buffer.dtype}, got {new.dtype}")
            if new.device != buffer.device:
                raise ValueError(f"{name} must be on {buffer.device}, got {new.device}")
        if self.length + n > N_max:
            raise ValueError(f"K_new must fit into N_max {N_max}, got {self.length} + {n} keys")
        filled = slice(self.length, self.length + n)
        self.K_buffer[:, :, filled], self.V_buffer[:, :, filled] = K_new, V_new
        self.length += n
        return self.K, self.V


def merge(O_parts, L_parts):
    """Return the O and L of all keys, from those of parts of the keys.

    O_parts [P, ..., Nq, dv], L_parts [P, ..., Nq] -> O [..., Nq, dv] in O_parts' dtype, L [..., Nq]
    in L_parts'. Part p has O_p = sum_j exp(s_j) V_j / exp(L_p) over its keys, with
    exp(L_p) = sum_j exp(s_j). So the sums of all keys are sums over the parts of exp(L_p) O_p and
    exp(L_p):

        L = log sum_p exp(L_p)        O = sum_p exp(L_p) O_p / sum_p exp(L_p)

    with the largest L_p taken off every exponent, and the weights divided by their own sum: for
    large scores exp(L_p - L) would not sum to 1, since L is rounded.
    Sums do not care for order or grouping, so neither does the merge. A part that saw no key is
    (0, -inf) and weighs exp(-inf) = 0; of none but such, or of no part at all, comes (0, -inf).
    Raises ValueError for shapes that do not fit, TypeError for dtypes that are not floating point.
    """
    for name, x in (("O_parts", O_parts), ("L_parts", L_parts)):
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if O_parts.dim() < 3 or O_parts.shape[:-1] != L_parts.shape:
        shapes = f"got O_parts {tuple(O_parts.shape)}, L_parts {tuple(L_parts.shape)}"
        raise ValueError(f"O_parts must be [P, ..., Nq, dv] and L_parts [P, ..., Nq], {shapes}")
    L = torch.logsumexp(L_parts, dim=0)  # [..., Nq]
    if not len(L_parts):
        return O_parts.new_zeros(O_parts.shape[1:]), L
    m = L_parts.amax(dim=0)  # [..., Nq]
    weight = torch.exp(L_parts - m.masked_fill(m == -math.inf, 0))  # -inf - -inf would be NaN
    l = weight.sum(dim=0)
    weight = weight / l.masked_fill(l == 0, 1)  # [P, ..., Nq]
    O = (weight.unsqueeze(-1) * O_parts).sum(dim=0)  # [P, ..., Nq, dv] -> [..., Nq, dv]
    return O.to(O_parts.dtype), L


def split_kv_attention(Q, K, V, splits, Br=64, Bc=64, *, causal=False, q_start=None, window=None,
                       scale=None, return_lse=False):
    """Return attention from `splits` parts of the keys, computed side by side and merged by L.

    splits: 1 or more. The other arguments, the result and the errors are those of
    `flash_attention_forward`. For half types the O of a part is rounded before the merge: one
    rounding more, of parts whose weights sum to 1.

    Side by side means in one call: a part becomes a key/value head, [B, Hkv, N, d] -> [B, Hkv,
    splits, N / splits, d], a view, and the queries of a group meet it as a group. One product then
    serves the parts of all heads if they lie evenly in memory; if not (N does not divide, or is
    shorter than the cache), a tile of K and V at a time is copied. Only keys that every query sees
    are split so, for then the parts need no mask. What is left, less than Nq keys at each end and
    less than `splits` that do not divide, is a part by itself at each end.
    """
    if not isinstance(splits, numbers.Integral) or isinstance(splits, bool) or splits < 1:
        raise ValueError(f"splits must be a whole number of at least 1, got {splits!r}")
    visible = Visible(Q, K, V, causal, q_start, window, scale)
    seen = visible.key_range(slice(0, visible.Nq))  # by some query
    first = visible.q_start + visible.Nq - 1 - visible.left  # key that the last query sees
    last = visible.q_start + visible.right  # key that the first query sees
    start = min(max(seen.start, first), seen.stop)
    n = max(0, min(seen.stop, last + 1) - start) // splits  # keys of a part
    stop = start + splits * n

    def alone(cols):
        band = {"causal": causal, "q_start": visible.q_start - cols.start, "window": window}
        K_part, V_part = K[..., cols, :], V[..., cols, :]
        options = {**band, "scale": visible.scale, "return_lse": True}
        O, L = flash_attention_forward(Q, K_part, V_part, Br, Bc, **options)
        return O.unsqueeze(0), L.unsqueeze(0)  # [1, ..., Nq, dv], [1, ..., Nq]

    def side_by_side():
        axis = len(visible.lead)  # where the parts stand: behind the key/value heads
        Q_parts = visible.grouped(Q).unsqueeze(axis)  # [..., 1, G, Nq, d]
        Q_parts = Q_parts.expand(*visible.lead, splits, *Q_parts.shape[axis + 1 :])
        Q_parts = Q_parts.flatten(axis, axis + 1)  # [..., splits*G, Nq, d]
        K_parts, V_parts = (x[..., start:stop, :].unflatten(-2, (splits, n)) for x in (K, V))
        options = {"scale": visible.scale, "return_lse": True}
        parts = flash_attention_forward(Q_parts, K_parts, V_parts, Br, Bc, **options)
        split = (x.unflatten(axis, (splits, visible.G)).movedim(axis, 0) for x in parts)
        return [x.reshape(splits, *Q.shape[:-1], *x.shape[axis + 3 :]) for x in split]

    parts = [side_by_side()] if n else []
    ends = slice(seen.start, start), slice(stop, seen.stop)
    parts += [alone(cols) for cols in ends if cols.start < cols.stop]
    O, L = merge(*(torch.cat(part) for part in zip(*parts or [alone(seen)])))
    return (O, L) if return_lse else O


def decode(Q, K, V, chunk=1, Br=64, Bc=64):
    """Return causal self-attention with `chunk` tokens at a time going through a KVCache.

    Q [B, H, N, d], K [B, Hkv, N, d], V [B, Hkv, N, dv] -> [B, H, N, dv].
    """
    B, Hkv, N, d = K.shape
    cache = KVCache(B, Hkv, N, d, V.shape[-1], dtype=K.dtype, device=K.device)
    answers = []
    for Q_new, K_new, V_new in zip(*(x.split(chunk, dim=-2) for x in (Q, K, V))):
        K_all, V_all = cache.append(K_new, V_new)
        answers.append(flash_attention_forward(Q_new, K_all, V_all, Br, Bc, causal=True))
    return torch.cat(answers, dim=-2)


# The tools: each returns rows and prints nothing.


def verify_cache(case, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare 64 tokens through a cache, 1 and 24 a step, with float64. Returns VerifyRows.

    standard is one full causal pass.
    """
    case = replace(case, Nq=64, Nk=None, causal=True, window=None)
    inputs = case.inputs(device, seed)
    return [
        _row(f"cache, {chunk} a step", case, inputs, decode(*inputs, chunk, Br, Bc))
        for chunk in (1, 24)
    ]


def compare_and_verify(cases, splits, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare the splits with standard attention, and both with float64. Returns VerifyRows."""
    rows = []
    for case in cases:
        inputs = case.inputs(device, seed)
        for P in splits:
            O = split_kv_attention(*inputs, P, Br, Bc, **case.masks)
            rows.append(_row(f"split {P}", case, inputs, O))
    return rows


def _row(name, case, inputs, O):
    standard = standard_attention(*inputs, **case.masks)
    shown = case.shape, dtype_name(case.dtype), case.causal
    return VerifyRow(*shown, *judge(O, standard, exact(*inputs, case)), name)


def profile_memory(cases, splits, Br=64, Bc=64, *, device="cpu", seed=0):
    """Measure the peak memory of standard, flash, split and fused attention. Returns MemoryRows."""
    device, rows = torch.device(device), []
    for case in cases:
        for name, (call, _, theory) in _candidates(case, splits, Br, Bc, device, seed).items():
            if device.type != "cpu":
                call()  # an accelerator's workspaces are allocated in the first call
            rows.append(MemoryRow(name, case.shape, *measure_peak(call, device), theory))
    return rows


@dataclass
class StreamRow(SpeedRow):
    """A SpeedRow, and the rate at which K and V are read: what bounds one query. tflops is None."""

    gb_per_s: Optional[float] = None


def benchmark_speed(cases, splits, Br=64, Bc=64, *, device="cpu", seed=0):
    """Time standard, flash, split and fused attention in turn. Returns StreamRows.

    Each must first agree with standard attention, as in flash_attention.py's benchmark_speed.
    """
    device, rows = torch.device(device), []
    for case in cases:
        candidates = _candidates(case, splits, Br, Bc, device, seed)
        calls = {name: call for name, (call, _, _) in candidates.items()}
        expected = calls["standard"]()
        for name, call in calls.items():
            assert_agree(name, call(), expected)
        seconds = time_in_turn(calls, device)
        kv_bytes = sum(map(math.prod, case.shapes[1:])) * case.dtype.itemsize
        for name, (call, tile, _) in candidates.items():
            row = StreamRow(name, case.shape, *tile, statistics.median(seconds[name]))
            row.ratio_to_standard, row.ratio_spread = ratio(seconds["standard"], seconds[name])
            row.launches = count_launches(call)
            row.gb_per_s = kv_bytes / row.seconds / 1e9
            rows.append(row)
    return rows


def _candidates(case, splits, Br, Bc, device, seed):
    """{name: (call, (Br, Bc), theoretical bytes)}; the tile of 'flash, auto' is tiles.py's."""
    inputs, masks, found = case.inputs(device, seed), case.masks, {}
    tiles = {"flash": case.tile(Br, Bc, device), "flash, auto": case.tile(AUTO, AUTO, device)}
    for name, attend in (("standard", standard_attention), ("fused", fused_attention)):
        call = partial(attend, *inputs, **masks)
        found[name] = call, (None, None), theory_bytes(name, case, 1, 1)
    for name, tile in tiles.items():
        call = partial(flash_attention_forward, *inputs, *tile, **masks)
        found[name] = call, tile, theory_bytes("flash", case, *tile)
    for P in splits:
        call = partial(split_kv_attention, *inputs, P, *tiles["flash"], **masks)
        found[f"split {P}"] = call, tiles["flash"], split_theory_bytes(case, P, *tiles["flash"])
    return found


def split_theory_bytes(case, splits, Br, Bc):
    """Return the bytes of a split: flash's with a head a part, their L, and a group's Q copied.

    Beside them stand copies of a tile of K and V where `split_kv_attention` makes them.
    """
    kv_heads = case.kv_heads or case.heads
    more = {"heads": case.heads * splits, "kv_heads": kv_heads * splits}
    parts = replace(case, Nk=max(1, case.Nk // splits), **more)
    Q_shape = parts.shapes[0]
    L = math.prod(Q_shape[:-1]) * max(case.dtype.itemsize, 4)
    Q = math.prod(Q_shape) * case.dtype.itemsize if case.heads > kv_heads else 0
    return theory_bytes("flash", parts, Br, min(Bc, parts.Nk)) + L + Q


# The command line


def show_verify(rows, args, device):
    print_table(
        f"Verify: largest differences, tiles {tiles(args)}",
        ["name", "Q K V", "dtype", "it - standard", "it - float64", "standard - float64", "result"],
        [
            (r.name, r.shape, r.dtype)
            + tuple(f"{x:.2e}" for x in (r.max_diff, r.error_flash, r.error_standard))
            + ("pass" if r.passed else "FAIL",)
            for r in rows
        ],
    )


def show_memory(rows, args, device):
    print_table(
        f"Memory: peak of one call in MiB, tiles {tiles(args)}",
        ["name", "Q K V", "peak", "formula"],
        [(r.name, r.shape, mib(r.peak_bytes), mib(r.theory_bytes)) for r in rows],
    )
    console.print(
        "\nOne query has no N x N matrix, so nothing here weighs much beside the cache itself. A "
        "split holds an O, an L and a tile for each part."
    )


def show_speed(rows, args, device):
    print_table(
        "Speed: median of calls in turn",
        ["name", "Q K V", "ms", "times as fast as standard", "K, V in GB/s", "launches"],
        [
            (f"{r.name} {r.Br}x{r.Bc}" if r.Br else r.name, r.shape, f"{r.seconds * 1e3:.4g}")
            + (f"{r.ratio_to_standard:.3g}", f"{r.gb_per_s:.3g}", r.launches)
            for r in rows
        ],
    )
    console.print(
        "\nOne query does little with each key, so whoever reads K and V fastest wins. A split has "
        "fewer launches, and so has the wider tile of auto."
    )
    if device.type == "cpu":
        console.print(
            "On a CPU that is all a split gains. On a GPU or NPU its parts also fill cores that "
            "one row of tiles leaves idle: not measured here."
        )


TOOLS = {
    "verify": (compare_and_verify, show_verify),
    "memory": (profile_memory, show_memory),
    "speed": (benchmark_speed, show_speed),
}


def main():
    names = "device dtype batch heads kv-heads seq-len head-dim br bc window seed json"  # one query
    options = parser(__doc__.splitlines()[0], *names.split())
    options.add_argument("--mode", choices=[*TOOLS, "all"], default="verify", help="(verify)")
    options.add_argument("--splits", type=cli.whole_number(1), nargs="+", metavar="P",
                         default=[4, 16, 64], help="(4 16 64)")
    args = options.parse_args()
    device = choose(args.device)
    lengths = cases_of(args, options, device, lengths=(4096, 16384, 65536))
    cases = [replace(case, heads=case.heads or 8, Nq=1, Nk=case.Nq) for case in lengths]
    console.print(f"device: {describe(device)}")
    rows = []
    for mode in TOOLS if args.mode == "all" else [args.mode]:
        tool, show = TOOLS[mode]
        tile, where = (args.br, args.bc), {"device": device, "seed": args.seed}
        found = verify_cache(cases[0], *tile, **where) if mode == "verify" else []
        for case in track(mode, cases):
            found += tool([case], args.splits, *tile, **where)
        show(found, args, device)
        rows += [(mode, row) for row in found]
    if args.json:
        write_json(args.json, device, rows)
    return 0 if all(row.passed for mode, row in rows if mode == "verify") else 1


if __name__ == "__main__":
    cli.serve(main)
