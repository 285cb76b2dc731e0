"""Decoding: one query against all the keys so far, from a cache, with the keys split into parts.

    python flash_decoding.py --mode verify      do the cache and the split give what one pass gives?
    python flash_decoding.py --mode memory      what does the split hold beside the cache?
    python flash_decoding.py --mode speed       what does it gain, and where?
    python flash_decoding.py --mode repeat      does a row keep its bits in company?

One query has one row of tiles a head, walked one after another: at 64K keys a thousand steps, on a
device that could take many at once. The split walks its parts side by side, each to an O, m and l
of its own, and `merge` makes one of them. Keys in pages: see flash_pages.py. Source: FlashDecoding
(Dao, Haziza, Massa and Sizov, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import numbers
import sys
from dataclasses import dataclass, replace
from functools import partial
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, print_table
from flash_attention import flash_attention_forward, standard_attention
from lab.bench import Candidate, benchmark, profile, verify
from lab.caches import check_new
from lab.cases import Case
from lab.formulas import forward_bytes, split_bytes
from lab.fused import fused_attention
from lab.served import kernels_of, measurable
from lab.show import print_memory, print_speed, print_verify
from lab.tiles import AUTO
from lab.visible import Visible

import torch


class KVCache:
    """Keys and values of the tokens so far, in buffers that are allocated once.

    K_buffer [B, Hkv, N_max, d], V_buffer [B, Hkv, N_max, dv]: the first `length` rows are filled.
    One new token or many attend to all so far by

        flash_attention_forward(Q_new, *cache.append(K_new, V_new), causal=True)

    since causal's default q_start puts the last query at the last key.
    """

    def __init__(self, batch, kv_heads, N_max, d, dv=None, *, dtype=torch.float32, device="cpu"):
        lead, dv = (batch, kv_heads, N_max), d if dv is None else dv
        self.K_buffer = torch.empty(*lead, d, dtype=dtype, device=device)
        self.V_buffer = torch.empty(*lead, dv, dtype=dtype, device=device)
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
        B, Hkv, N_max, _ = self.K_buffer.shape
        check_new((B, Hkv), K_new, V_new, self.K_buffer, self.V_buffer)
        n = K_new.shape[2]
        if self.length + n > N_max:
            raise ValueError(f"K_new must fit into N_max {N_max}, got {self.length} + {n} keys")
        filled = slice(self.length, self.length + n)
        self.K_buffer[:, :, filled], self.V_buffer[:, :, filled] = K_new, V_new
        self.length += n
        return self.K, self.V


def merge(O_parts, m_parts, l_parts):
    """Return the O, m and l of all keys, from those of parts of the keys.

    O_parts [P, ..., Nq, dv], m_parts and l_parts [P, ..., Nq] -> O [..., Nq, dv] in O_parts' dtype,
    m and l [..., Nq]. Part p has l_p = sum_j exp(s_j - m_p) over its keys and
    O_p = sum_j exp(s_j - m_p) V_j / l_p. So the sums of all keys are sums over the parts, once all
    are taken to the largest m:

        m = max_p m_p      l = sum_p exp(m_p - m) l_p      O = sum_p exp(m_p - m) l_p O_p / l

    Sums do not care for order or grouping, so neither does the merge. A part that saw no key is
    (0, any m, 0) and weighs nothing; of none but such, or of no part at all, comes O = 0, l = 0.
    L_p = m_p + log(l_p) would do in place of m_p and l_p, were it not rounded beside a large m_p.
    Raises ValueError for shapes that do not fit, TypeError for dtypes that are not floating point.
    """
    for name, x in (("O_parts", O_parts), ("m_parts", m_parts), ("l_parts", l_parts)):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            given = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating point tensor, got {given}")
    if O_parts.dim() < 3 or not O_parts.shape[:-1] == m_parts.shape == l_parts.shape:
        raise ValueError(
            "O_parts must be [P, ..., Nq, dv], m_parts and l_parts [P, ..., Nq], got "
            f"{tuple(O_parts.shape)}, {tuple(m_parts.shape)} and {tuple(l_parts.shape)}")
    if not len(O_parts):
        return tuple(x.new_zeros(x.shape[1:]) for x in (O_parts, m_parts, l_parts))
    m_parts = m_parts.masked_fill(l_parts == 0, torch.finfo(m_parts.dtype).min)
    m = m_parts.amax(dim=0)  # [..., Nq]
    weight = torch.exp(m_parts - m) * l_parts  # [P, ..., Nq]
    l = weight.sum(dim=0)  # [..., Nq]
    weight = weight / l.masked_fill(l == 0, 1)
    O = (weight.unsqueeze(-1) * O_parts).sum(dim=0)  # [P, ..., Nq, dv] -> [..., Nq, dv]
    return O.to(O_parts.dtype), m, l


def split_kv_attention(Q, K, V, splits, Br=64, Bc=64, *, causal=False, q_start=None, window=None,
                       scale=None, return_lse=False):
    """Return attention from `splits` parts of the keys, computed side by side and merged.

    splits: 1 or more. The other arguments, the result and the errors are those of
    `flash_attention_forward`. For half types the O of a part is rounded before the merge: one
    rounding more, of parts whose weights sum to 1.

    Only keys that every query sees are split side by side, for then the parts need no mask. What is
    left, less than Nq keys at each end and less than `splits` that do not divide, is a part by
    itself at each end.
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
    parts = [side_by_side(visible, Q, K[..., start:stop, :], V[..., start:stop, :], splits, Br, Bc)
             ] if n else []
    ends = [cols for cols in (slice(seen.start, start), slice(stop, seen.stop))
            if cols.start < cols.stop]
    for cols in ends or ([] if n else [seen]):
        parts.append([x.unsqueeze(0) for x in flash_attention_forward(  # [1, ..., Nq(, dv)]
            Q, K[..., cols, :], V[..., cols, :], Br, Bc, causal=causal, window=window,
            q_start=visible.q_start - cols.start, scale=visible.scale, return_m_l=True)])
    O, m, l = merge(*(parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))))
    return (O, m + l.log()) if return_lse else O


def side_by_side(visible, Q, K, V, splits, Br, Bc):
    """Return O, m, l of `splits` even parts of K and V, [splits, ..., Nq(, dv)], from one call.

    A part becomes a key/value head, [B, Hkv, N, d] -> [B, Hkv, splits, N / splits, d], a view, and
    the queries of a group meet it as a group. One product then serves the parts of all heads if
    they lie evenly in memory; if not (N does not divide, or is shorter than the cache), a tile of K
    and V at a time is copied.
    """
    axis = len(visible.lead)  # where the parts stand: behind the key/value heads
    Q_parts = visible.grouped(Q).unsqueeze(axis)  # [..., 1, G, Nq, d]
    Q_parts = Q_parts.expand(*visible.lead, splits, *Q_parts.shape[axis + 1 :])
    Q_parts = Q_parts.flatten(axis, axis + 1)  # [..., splits*G, Nq, d]
    K_parts, V_parts = (x.unflatten(-2, (splits, -1)) for x in (K, V))
    parts = flash_attention_forward(
        Q_parts, K_parts, V_parts, Br, Bc, scale=visible.scale, return_m_l=True)
    split = (x.unflatten(axis, (splits, visible.G)).movedim(axis, 0) for x in parts)
    return [x.reshape(splits, *Q.shape[:-1], *x.shape[axis + 3 :]) for x in split]


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


def cached(case, Br=64, Bc=64):
    """Return a case of 64 tokens that see each other causally, and its candidates: one full pass,
    and the same through a cache, 1 and 24 tokens a step.
    """
    case = replace(case, Nq=64, Nk=None, causal=True, window=None)
    return case, [Candidate("standard", partial(standard_attention, causal=True)), *(
        Candidate(f"cache, {n} a step", partial(decode, chunk=n, Br=Br, Bc=Bc)) for n in (1, 24))]


def candidates(case, splits, Br=64, Bc=64, device="cpu"):
    """Return standard and fused attention, flash with the tile asked for and with auto, splits, and
    the split by Triton's kernels where they can be had.
    """
    device, masks = torch.device(device), case.masks
    found = [Candidate(name, partial(attend, **masks), forward_bytes(name, case))
             for name, attend in (("standard", standard_attention), ("fused", fused_attention))]
    for name, asked in (("flash", (Br, Bc)), ("flash, auto", (AUTO, AUTO))):
        tile = case.tile(*asked, device)
        attend = partial(flash_attention_forward, Br=asked[0], Bc=asked[1], **masks)
        found.append(Candidate(name, attend, forward_bytes("flash", case, *tile), tile[:2]))
    Br, Bc, _ = case.tile(Br, Bc, device)
    for P in splits:
        attend = partial(split_kv_attention, splits=P, Br=Br, Bc=Bc, **masks)
        found.append(Candidate(f"split {P}", attend, split_bytes(case, P, Br, Bc), (Br, Bc)))
    kernels, _ = kernels_of("flash_triton_decoding", case, device)
    if kernels:
        attend = partial(kernels.split_kv_attention_triton, **masks)
        found.append(Candidate("triton split", attend, kernels.held_bytes(case)))
    return found


def compare_and_verify(cases, splits, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare 64 tokens through a cache and then the splits with standard attention and float64."""
    where, rows = {"device": device, "seed": seed}, []
    for case in cases:
        rows = rows or verify(*cached(case, Br, Bc), **where)
        standard, *others = candidates(case, splits, Br, Bc, device)
        rows += verify(case, [standard, *(c for c in others if "split" in c.name)], **where)
    return rows


def profile_memory(cases, splits, Br=64, Bc=64, *, device="cpu", seed=0):
    """Measure the peak memory of the `candidates`: MemoryRows."""
    return [row for case in cases for row in profile(
        case, measurable(candidates(case, splits, Br, Bc, device), device),
        device=torch.device(device), seed=seed)]


def benchmark_speed(cases, splits, Br=64, Bc=64, *, device="cpu", seed=0):
    """Time the `candidates` in turn; one query is bound by the rate at which K and V are read."""
    return [row for case in cases for row in benchmark(
        case, measurable(candidates(case, splits, Br, Bc, device), device),
        device=torch.device(device), seed=seed, stream=True)]


SPLIT_KEYS, PARTS = 256, 64  # keys of a part; parts of all heads together that fill a card


@dataclass
class RepeatRow:
    """Whether batch entry 0 has the bits that it has alone, before and after the merge, and how
    many of its parts stay as the cache grows. rule: what is fixed, the keys of a part or the number
    of parts.
    """

    rule: str
    batch: int
    splits: int
    parts_same_bits: bool
    same_bits: bool
    difference: float
    parts_kept: int


def repeat(args, device, N=4096, heads=4):
    """Show what becomes of a row's bits as its batch and its cache grow: RepeatRows.

    A fixed number of parts over all heads fills the card, so a batch entry in company gets fewer.
    """
    case = Case(1, batch=8, heads=heads, Nk=N + SPLIT_KEYS)
    inputs = case.inputs(device, args.seed)

    def splits(rule, batch, N):
        return N // SPLIT_KEYS if rule == "keys of a part" else PARTS // (batch * heads)

    def parts(rule, batch, N):
        Q, K, V = inputs[0][:batch], *(x[:batch, :, :N] for x in inputs[1:])
        return side_by_side(Visible(Q, K, V), Q, K, V, splits(rule, batch, N), 64, 64)

    rows = []
    for rule in ("number of parts", "keys of a part"):
        alone = parts(rule, 1, N)
        for batch in (1, 2, 8):
            found, longer = (parts(rule, batch, n) for n in (N, N + SPLIT_KEYS))
            O, O_alone = merge(*found)[0][:1], merge(*alone)[0]
            rows.append(RepeatRow(
                rule, batch, len(found[0]),
                all(torch.equal(x[:, :1], y) for x, y in zip(found, alone)),
                torch.equal(O, O_alone), (O - O_alone).abs().max().item(),
                sum(map(torch.equal, found[0], longer[0]))))
    print_table(f"Repeat: one query row of {heads} heads, {N} keys, alone and in a batch",
                ["fixed", "batch", "parts", "same parts", "same row", "difference",
                 f"parts kept as the cache grows by {SPLIT_KEYS}"],
                [(r.rule, r.batch, r.splits, *("yes" if x else "no" for x in (
                    r.parts_same_bits, r.same_bits)), f"{r.difference:.1e}",
                  f"{r.parts_kept} of {r.splits}") for r in rows])
    console.print(
        "\nSame: bit by bit. The merge is a sum over the parts, in whichever order the library "
        "adds for this shape.")
    return rows


# The command line


def show_verify(rows, args, cases):
    print_verify(f"Verify: largest differences, tiles {lesson.tile_text(args)}", rows)


def show_memory(rows, args, cases):
    print_memory(
        f"Memory: peak of one call in MiB, tiles {lesson.tile_text(args)}", rows,
        "formula: as in flash_attention.py; a split holds an O, m, l and a tile for each part. One "
        "query has no N x N matrix, so nothing here weighs much beside the cache itself.")


def show_speed(rows, args, cases):
    print_speed("Speed: median of calls in turn", rows)
    console.print(
        "\nOne query does little with each key, so the time is set by how fast K and V are read. A "
        "split has fewer launches, and so has the wider tile of auto.")
    if args.device.type == "cpu":
        console.print(
            "On a CPU that is all a split gains. On a GPU or NPU its parts also fill cores that "
            "one row of tiles leaves idle: not measured here.")


MODES = {
    "verify": (compare_and_verify, show_verify),
    "memory": (profile_memory, show_memory),
    "speed": (benchmark_speed, show_speed),
    "repeat": repeat,
}


def one_query(case):
    """Return the case with one query against all keys."""
    return replace(case, Nq=1, Nk=case.Nq)


def main():
    names = "device dtype batch heads kv-heads seq-len head-dim br bc window seed json"  # one query
    options = lesson.parser(__doc__, *names.split())
    options.set_defaults(heads=8)
    options.add_argument("--splits", type=cli.whole_number(1), nargs="+", metavar="P",
                         default=[4, 16, 64], help="(4 16 64)")
    return lesson.run_modes(options, MODES, lengths=(4096, 16384, 65536), adapt=one_query,
                            kernels="flash_triton_decoding", splits="splits")


if __name__ == "__main__":
    cli.serve(main)
