"""Masks and score functions: what models change about attention, a few lines each, in one loop.

    python flash_variants.py                check each with FlexAttention, count the tiles it skips
    python flash_variants.py --plot DIR     draw what each query sees

A score_mod changes scores and skips nothing: it is called on tiles that are computed already.
causal, window and attn_mask say what is hidden before that, and a tile that they empty is never
visited. So here what hides keys is said with them, and a score_mod changes scores alone.
"""

import math
import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, plotted, track
from flash_attention import flash_attention_forward, standard_attention
from lab.bench import Candidate, VerifyRow, verify
from lab.judge import floor
from lab.show import print_verify
from lab.visible import Visible

import torch
import torch.nn.functional as F

try:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError:  # torch before 2.5
    flex_attention = None

# Each function returns keyword arguments of flash_attention_forward for N queries and N keys.


def alibi(N, heads, device):
    """Nearer keys score higher, more so in the first heads: ALiBi (arXiv 2108.12409), section 3."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - torch.exp2(-8.0 * (h + 1) / heads) * (q_idx - kv_idx)

    return {"causal": True, "score_mod": score_mod}


def softcap(N, heads, device, cap=50.0):
    """Scores stay between -cap and cap: Gemma 2 (arXiv 2408.00118), section 2, where cap is 50."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return {"causal": True, "score_mod": score_mod}


def sliding_window(N, heads, device):
    """A query sees itself and N/8 keys before it: Mistral 7B (arXiv 2310.06825), section 2."""
    return {"causal": True, "window": (N // 8, 0)}


def prefix_lm(N, heads, device):
    """All see a prefix of N/4 keys, the rest is causal: T5 (arXiv 1910.10683), section 3.2.1."""
    mask = torch.ones(N, N, dtype=torch.bool, device=device).tril()
    mask[:, : N // 4] = True
    return {"attn_mask": mask}


def documents(N, heads, device):
    """Documents packed in one row are apart: Llama 3 (arXiv 2407.21783), section 3.2."""
    starts = torch.tensor([N // 2, N * 3 // 4], device=device)
    document = (torch.arange(N, device=device)[:, None] >= starts).sum(-1)  # [N]: 0.. 1.. 2..
    return {"causal": True, "attn_mask": document[:, None] == document}


def sink_keys(N, heads, device, sinks=4):
    """A sliding window and the first keys: StreamingLLM (arXiv 2309.17453), section 3."""
    mask = torch.ones(N, N, dtype=torch.bool, device=device).triu(-(N // 8))
    mask[:, :sinks] = True
    return {"causal": True, "attn_mask": mask}


def learned_sink(N, heads, device):
    """A sliding window whose L `with_sink` needs: gpt-oss (arXiv 2508.10925), section 2."""
    return {**sliding_window(N, heads, device), "return_lse": True}


def with_sink(O, L, sink):
    """Return O as if each row had one more score, `sink`, whose value is 0.

    O [B, H, N, dv], L [B, H, N], sink [H], learned in gpt-oss. The sum of exp grows from exp(L) to
    exp(L) + exp(sink), so O shrinks by exp(L) / (exp(L) + exp(sink)) = sigmoid(L - sink): the sink
    needs no tile and no column of its own. A row that sees no key stays 0.
    """
    L = L.masked_fill(L == -math.inf, torch.finfo(L.dtype).min)  # -inf - -inf would be NaN
    return (O * torch.sigmoid(L - sink[:, None]).unsqueeze(-1)).to(O.dtype)


VARIANTS = {
    "ALiBi": alibi,
    "softcap": softcap,
    "sliding window": sliding_window,
    "prefix-LM": prefix_lm,
    "documents": documents,
    "sink keys": sink_keys,
    "learned sink": learned_sink,
}

# The same rules said again, for the reference: whether query q sees key k. A mask that both sides
# shared could be wrong on both.
RULES = {
    "ALiBi": lambda N, q, k: k <= q,
    "softcap": lambda N, q, k: k <= q,
    "sliding window": lambda N, q, k: (k <= q) & (q - k <= N // 8),
    "prefix-LM": lambda N, q, k: (k <= q) | (k < N // 4),
    "documents": lambda N, q, k: (
        (k <= q) & ((q < N // 2) == (k < N // 2)) & ((q < N * 3 // 4) == (k < N * 3 // 4))
    ),
    "sink keys": lambda N, q, k: (k <= q) & ((q - k <= N // 8) | (k < 4)),
    "learned sink": lambda N, q, k: (k <= q) & (q - k <= N // 8),
}


def sink_logits(heads, device):
    """Return a sink for each head, [heads], in place of learned ones: from -1 to 3."""
    return torch.linspace(-1, 3, heads, device=device)


def reference(name, Q, K, V, score_mod=None):
    """Return variant `name` by flex_attention, uncompiled, in float64 on the CPU.

    Q [B, H, N, d], K [B, Hkv, N, d], V [B, Hkv, N, dv]. Raises Refused where torch has no
    flex_attention, or one that does not take these shapes.
    """
    if flex_attention is None:
        raise cli.Refused(f"flex_attention needs torch 2.5 or later, this is {torch.__version__}")
    heads, N = Q.shape[1:3]
    Q, K, V = (x.cpu().double() for x in (Q, K, V))  # a card has no float64
    K, V = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (K, V))  # [B, H, N, d or dv]

    def sees(b, h, q_idx, kv_idx):
        return RULES[name](N, q_idx, kv_idx) | (kv_idx == N)  # key N: the sink, where there is one

    if name == "learned sink":
        sinks = sink_logits(heads, "cpu")
        K, V = (F.pad(x, (0, 0, 0, 1)) for x in (K, V))  # [B, H, N + 1, d or dv], zeros at the end

        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(kv_idx == N, sinks[h], score)

    block_mask = create_block_mask(sees, None, None, N, K.shape[-2], device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled: here it is the formula
        try:
            return flex_attention(Q, K, V, score_mod=score_mod, block_mask=block_mask)
        except ValueError as fault:  # torch 2.5 takes no d but powers of two
            raise cli.Refused(f"flex_attention of torch {torch.__version__}: {fault}") from fault


@dataclass
class VariantRow(VerifyRow):
    """A VerifyRow of a variant: what expresses it, and the share of the tiles never visited."""

    expressed: str = ""
    skipped: float = 0.0


def check_variant(name, case, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare variant `name` with `reference` on a [B, H, N, d] case. Returns a VariantRow."""
    device = torch.device(device)
    Br, Bc, _ = case.tile(Br, Bc, device)
    heads = case.heads
    options = VARIANTS[name](case.Nq, heads, device)

    def call(attend, *inputs):
        found = attend(*inputs, **options)
        return with_sink(*found, sink_logits(heads, device)) if name == "learned sink" else found

    def oracle(case, Q, K, V):
        score_mod = VARIANTS[name](case.Nq, heads, "cpu").get("score_mod")
        O, terms = (reference(name, Q, K, x, score_mod) for x in (V, V.abs()))
        # The terms of a score are at most the norms of its query and its key: see `floor`.
        t = case.d**-0.5 * math.prod(x.cpu().double().norm(dim=-1).max().item() for x in (Q, K))
        return [(O, floor(case.dtype, (1 + 2 * t) * terms, terms + O.abs()))]

    flash = partial(flash_attention_forward, Br=Br, Bc=Bc)
    [row] = verify(case, [Candidate("standard", partial(call, standard_attention)),
                          Candidate(name, partial(call, flash))],
                   device=device, seed=seed, oracle=oracle)
    expressed = " + ".join("L" if key == "return_lse" else key for key in options)
    skipped = skipped_share(*case.inputs(device, seed), Br, Bc, options)
    return VariantRow(**vars(row), expressed=expressed, skipped=skipped)


def visible_of(Q, K, V, options):
    """Return the Visible of a call of flash_attention_forward with these options."""
    return Visible(Q, K, V, **{key: x for key, x in options.items() if key != "return_lse"})


def skipped_share(Q, K, V, Br, Bc, options):
    """Return the share of the Br x Bc tiles that flash_attention_forward never visits."""
    visible = visible_of(Q, K, V, options)
    visited = sum(1 for rows in visible.query_blocks(Br) for _ in visible.key_blocks(rows, Bc))
    return 1 - visited / (math.ceil(visible.Nq / Br) * math.ceil(visible.Nk / Bc))


def weights(name, N, heads):
    """Return what each query sees, [heads, N, N] from 0 to 1: its weights where all keys are alike.

    With Q = 0 every score is what the variant makes of 0, and with V = I the output is P itself.
    """
    zeros, eye = torch.zeros(1, heads, N, 1), torch.eye(N).expand(1, heads, N, N)
    options = {**VARIANTS[name](N, heads, "cpu"), "return_lse": False}
    P = flash_attention_forward(zeros, zeros, eye, **options)[0]
    return P / P.amax(-1, keepdim=True)


def drawings(N=32, tile=4):
    """Return a drawing of the tiles that each variant visits at N queries and keys, as lines."""
    Q = torch.zeros(1, 4, N, 1)
    blocks = [
        [name, *visible_of(Q, Q, Q, build(N, 4, "cpu")).drawing(tile, tile).splitlines()]
        for name, build in VARIANTS.items()
    ]
    width = 2 * N // tile + 2
    lines = []
    for start in range(0, len(blocks), 4):  # four beside each other fit 80 columns
        for line in zip(*blocks[start : start + 4]):
            lines.append("".join(cell.ljust(width) for cell in line).rstrip())
        lines.append("")
    return lines


def plot(path, N=64, heads=4):
    """Draw `weights` of head 0, a panel for each variant, into the file `path`."""
    with plotted(path, 2, 4, figsize=(9, 5)) as axes:
        for panel in axes.flat:
            panel.set_axis_off()
        for name, panel in zip(VARIANTS, axes.flat):
            panel.imshow(weights(name, N, heads)[0].numpy(), cmap="Blues", vmin=0, vmax=1)
            panel.set(title=name, xticks=[], yticks=[])
            panel.set_axis_on()
        axes[0, 0].figure.suptitle(f"What each of {N} queries sees: rows are queries, columns keys")


def main():
    names = "device dtype batch heads kv-heads seq-len head-dim br bc seed json plot"
    options = lesson.parser(__doc__, *names.split())  # what is seen, each variant says
    options.set_defaults(heads=4)
    args, device, cases = lesson.begin(options, lengths=(512,))
    Br, Bc = lesson.tile(args)
    rows = [check_variant(name, case, Br, Bc, device=device, seed=args.seed)
            for case, name in track("variants", list(product(cases, VARIANTS)))]
    shown = [replace(row, skipped=f"{row.skipped:.0%}") for row in rows]
    print_verify(
        f"Variants: largest differences, float64 by flex_attention, tiles {lesson.tile_text(args)}",
        shown, ("name", "expressed", "skipped"))
    console.print("\ntiles visited, 32 queries in 4x4 tiles: # whole, / in part, . never visited\n")
    console.print("\n".join(drawings()))
    if args.plot:
        plot(Path(args.plot) / "masks.png")
    return lesson.finish(args, device, [("variants", row) for row in rows])


if __name__ == "__main__":
    cli.serve(main)
