"""FlashAttention, backward: training in O(N) memory, by computing each tile of P a second time.

    python flash_backward.py --mode verify      are the gradients those of autograd?
    python flash_backward.py --mode memory      what do a forward and a backward hold?
    python flash_backward.py --mode speed       what do they cost?
    python flash_backward.py --mode extras      the same with a score_mod, a mask, L and dropout

Autograd through standard attention keeps P, N x N, from the forward to the backward. Here the
forward keeps O, m and l, and `gradient_step`, six lines, computes each tile of P again from m and
l. The derivation stands in `flash_attention_backward`. Sources: FlashAttention-2 (arXiv
2307.08691), Algorithm 2; FlashAttention (arXiv 2205.14135), appendix B.2.

What a call may have besides changes little:

    L                      dL/dS = P, so dS = P * (dP - D + dL): D - dL takes the place of D
    attn_mask              is added to S: its gradient is dS, summed over what it broadcasts to
    score_mod              S = f(raw scores, what f learns): autograd takes dS through f, a tile
                           at a time, and dQ and dK are made of what comes out
    dropout                O = (P * Z) V, Z = 0 or 1/(1-p): dV = (P * Z)^T dO and
                           dP = (dO V^T) * Z; D is the same sum still
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from flash_attention import flash_attention_forward, standard_attention
from lab.autocast import as_autocast, without_autocast
from lab.bench import Candidate, MemoryRow, SpeedRow, VerifyRow, benchmark, profile, verify
from lab.cases import VERIFY_CASES
from lab.checks import check_backward
from lab.extras import Extra, exact_with, extras
from lab.flex import fused_calls
from lab.formulas import backward_bytes
from lab.learned import Learning, learned_by
from lab.served import kernels_of, measurable
from lab.show import print_growth, print_memory, print_speed, print_verify
from lab.tiles import exp_
from lab.visible import Visible, refuse_transforms, same, wants_gradient

import torch


def gradient_step(S_block, Q_block, K_block, V_block, dO_block, m_block, l_block, D_block,
                  dP_block, dQ_block, dK_block, dV_block, drop=same, to_raw=same):
    """Add what one tile gives to dQ, dK and dV; dQ and dK still without their factor, the scale.

    S_block [X, Br, Bc]: the tile's scores, overwritten, and so is dP_block, of the same shape.
    Q_block, dQ_block [X, Br, d]; K_block, dK_block [X, Bc, d]; V_block, dV_block [X, Bc, dv];
    dO_block [X, Br, dv]; m_block, l_block, D_block [X, Br, 1]. drop: what dropout makes of P_block,
    and so of its gradient. to_raw: of the gradient of the scores -> that before mask and score_mod.
    Source: FlashAttention-2, Algorithm 2, lines 11 to 16.
    """
    P_block = exp_(S_block.sub_(m_block)).div_(l_block)  # [X, Br, Bc]
    dV_block.baddbmm_(drop(P_block).transpose(1, 2), dO_block)  # [X, Bc, dv], + P^T dO
    torch.bmm(dO_block, V_block.transpose(1, 2), out=dP_block)  # [X, Br, Bc], dO V^T
    dS_block = to_raw(P_block.mul_(drop(dP_block).sub_(D_block)))  # [X, Br, Bc]
    dQ_block.baddbmm_(dS_block, K_block)  # [X, Br, d], + dS K
    dK_block.baddbmm_(dS_block.transpose(1, 2), Q_block)  # [X, Bc, d], + dS^T Q


@torch.no_grad()
@without_autocast
def flash_attention_backward(dO, Q, K, V, O, m, l, Br=64, Bc=64, *, dL=None, learned=(),
                             mask_gradient=False, attn_mask=None, score_mod=None, **options):
    """Return dQ, dK, dV: the gradients of a loss whose gradient with respect to O is dO.

    S = Q K^T * scale, P = softmax(S) row by row, O = P V. Backwards:

        dV = P^T dO            O is linear in V
        dP = dO V^T            and in P
        dS = P * (dP - D)      softmax: dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik). That sum, over all
        D = rowsum(dO * O)     keys, is dO_i . sum_k P_ik V_k = dO_i . O_i, one number a row
        dQ = dS K * scale      S is linear in Q
        dK = dS^T Q * scale    and in K

    P = exp(S - m) / l, the forward's m and l. FlashAttention-2 has P = exp(S - L),
    L = m + log(l); in float32 that loses log(l) beside a large m. With m, l and D known, a tile
    needs no other tile. D has length N; Algorithm 2 there says d, a slip.

    dO [..., Nq, dv], with any strides; dL [..., Nq] or None. O, m and l are what
    `flash_attention_forward` returned for Q, K, V and the same options: causal, q_start, window,
    scale, attn_mask, score_mod, dropout_p, seed. After dV come attn_mask's gradient, with
    mask_gradient, and those of `learned`, tensors that score_mod reads. The gradients have the
    shapes and dtypes of what they belong to. Raises ValueError for other shapes and where score_mod
    reads a tensor that wants a gradient and is not among `learned`.
    Sums are float32 for float16 and bfloat16, also over the query heads that read one key/value
    head. A row that saw no key passes 0 on. NaN or inf in K or V reaches each query of a tile in
    which some query sees that key. Equal input gives equal bits. The tiles are walked as in the
    forward, the keys inside; in the paper the queries are, so that dK and dV can stay on the chip.
    """
    learning = score_mod and Learning(score_mod, learned)
    visible = Visible(Q, K, V, attn_mask=attn_mask, score_mod=learning, **options)
    check_backward(Q, V, attn_mask, mask_gradient, dO=dO, O=O, m=m, l=l, dL=dL)
    if mask_gradient:
        visible.attn_mask_gradient = torch.zeros_like(visible.options[4], dtype=visible.dtype)
    dQ = Q.new_empty(Q.shape)
    dK, dV = (x.new_zeros(x.shape, dtype=visible.dtype) for x in (K, V))
    queries = (Q, O, m, l, dO, dQ) if dL is None else (Q, O, m, l, dO, dQ, dL)
    for part in visible.parts(Br, Bc, queries, (K, V, dK, dV)):
        gradients_in_tiles(*part, learning)
    gradients = [dQ, dK.mul_(visible.scale).to(K.dtype), dV.to(V.dtype)]
    if mask_gradient:
        gradients.append(visible.attn_mask_gradient.view_as(attn_mask).to(attn_mask.dtype))
    return *gradients, *(learning.results() if learning else ())


def gradients_in_tiles(visible, Br, Bc, queries, keys, learning=None):
    """Fill dQ, and add to dK and dV, and to what is learned besides.

    queries: Q, O, m, l, dO, dQ(, dL); keys: K, V, dK, dV.
    """
    (Q, O, m, l, dO, dQ, *dL), (K, V, dK, dV) = queries, keys
    dK, dV = (x.view(visible.X, visible.Nk, x.shape[-1]) for x in (dK, dV))
    size = visible.X * visible.G * Br * Bc
    scratch, dP = (Q.new_empty(size, dtype=visible.dtype) for _ in range(2))
    for rows in visible.query_blocks(Br):
        Q_block, dO_block, *column_blocks = row_blocks(visible, dO, Q, O, m, l, rows, *dL)
        dQ_block = Q_block.new_zeros(Q_block.shape)
        for cols, S_block, V_block in visible.score_blocks(Q, K, V, rows, Bc, scratch):
            K_block = visible.seen_keys(visible.key_block(K, cols), S_block)  # [X, Bc, d]
            dP_block = dP[: S_block.numel()].view_as(S_block)
            gradient_step(S_block, Q_block, K_block, V_block, dO_block, *column_blocks, dP_block,
                          dQ_block, dK[:, cols], dV[:, cols], **visible.dropping(rows, cols),
                          to_raw=partial(raw_gradient, visible, learning, rows, cols))
        visible.store([dQ], rows, [dQ_block.mul_(visible.scale)])
        del Q_block, dO_block, dQ_block, column_blocks  # before those of the next rows are made


def raw_gradient(visible, learning, rows, cols, dS_block):
    """Return the gradient of Q K^T * scale from dS_block, [X, G*Br, Bc] both, the gradient of the
    scores after score_mod and attn_mask; add to theirs.
    """
    if visible.attn_mask_gradient is not None:
        visible.add_to_mask(dS_block, rows, cols)
    return learning.backward(dS_block) if learning else dS_block


def row_blocks(visible, dO, Q, O, m, l, rows, dL=None):
    """Return what the tiles of `rows` share: Q_block, dO_block, m_block, l_block and D_block.

    D_block is that of D - dL. A row that saw no key, l = 0, gets P = exp(-inf - inf) / 1 = 0 and
    dO = 0.
    """
    Q_block, m_block, l_block, dO_block, O_block = (
        visible.row_block(x, rows) for x in (Q, m.unsqueeze(-1), l.unsqueeze(-1), dO, O))
    D_block = (dO_block * O_block).sum(-1, keepdim=True)  # [X, G*Br, 1]
    if dL is not None:
        D_block -= visible.row_block(dL.unsqueeze(-1), rows)
    if visible.blinds:
        blind = l_block == 0
        Q_block, dO_block, D_block = (
            x.masked_fill(blind, 0) for x in (Q_block, dO_block, D_block))
        m_block, l_block = m_block.masked_fill(blind, torch.inf), l_block.masked_fill(blind, 1)
    return Q_block, dO_block, m_block, l_block, D_block


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, attn_mask, tiles, options, return_lse, fixed, *learned):
        O, m, l = flash_attention_forward(
            Q, K, V, *tiles, attn_mask=attn_mask, return_m_l=True, **options)
        ctx.save_for_backward(Q, K, V, O, m, l, attn_mask, *learned, *fixed)  # to see changes
        ctx.call = tiles, options, learned
        return (O, m + l.log()) if return_lse else O

    @staticmethod
    def backward(ctx, dO, dL=None):
        if torch.is_grad_enabled():  # create_graph=True alone runs a backward so
            raise RuntimeError(
                "flash_attention has no second derivative: create_graph=True is not supported, "
                "take standard_attention for it")
        *tensors, attn_mask = ctx.saved_tensors[:7]
        tiles, options, learned = ctx.call
        asked = ctx.needs_input_grad[3]
        dQ, dK, dV, *more = flash_attention_backward(
            dO, *tensors, *tiles, dL=dL, learned=learned, mask_gradient=asked,
            attn_mask=attn_mask, **options)
        d_mask = more.pop(0) if asked else None
        return dQ, dK, dV, d_mask, *[None] * 4, *more  # one for each argument of forward


def flash_attention(Q, K, V, Br=64, Bc=64, *, causal=False, q_start=None, window=None, scale=None,
                    attn_mask=None, score_mod=None, return_lse=False, dropout_p=0.0, seed=0):
    """Return exact attention to train with: nothing larger than O(N) stands until the backward.

    Arguments, result and errors are those of `flash_attention_forward`, but Q, K, V, attn_mask and
    the tensors that score_mod reads may want gradients; with none that does, this is the forward
    and nothing more. Under torch.autocast Q, K and V are brought to its dtype, as
    F.scaled_dot_product_attention does, and what is computed with them ignores it.
    Raises ValueError for a score_mod that can't be followed (lab/learned.py), and RuntimeError in a
    backward with create_graph=True: there is no second derivative.
    """
    refuse_transforms(Q, K, V, attn_mask)
    Q, K, V = as_autocast(Q, K, V)
    options = {"causal": causal, "q_start": q_start, "window": window, "scale": scale,
               "score_mod": score_mod, "dropout_p": dropout_p, "seed": seed}
    learned = fixed = ()
    if score_mod is not None and torch.is_grad_enabled():
        learned, fixed = learned_by(Visible(Q, K, V, attn_mask=attn_mask, **options))
    if not wants_gradient(Q, K, V, attn_mask, *learned):
        return flash_attention_forward(
            Q, K, V, Br, Bc, attn_mask=attn_mask, return_lse=return_lse, **options)
    return _FlashAttention.apply(
        Q, K, V, attn_mask, (Br, Bc), options, return_lse, fixed, *learned)


# The tools: each returns rows and prints nothing.


@dataclass
class GradientRow(VerifyRow):
    """A VerifyRow of one gradient: dQ, dK or dV."""

    gradient: str = ""


def candidates(case, Br=64, Bc=64, device="cpu", extra=None):
    """Return standard and flash attention, and Triton's kernels where they run: each a forward and
    a backward, dQ, dK, dV.

    extra: a name of lab/extras.py, whose options both have; what it learns has its gradient too.
    """
    tile = case.tile(Br, Bc, torch.device(device))
    more = extras(case, device)[extra] if extra else Extra({})
    calls = {"standard": standard_attention, "flash": partial(flash_attention, Br=Br, Bc=Bc)}
    kernels = None if extra else kernels_of("flash_triton", case, device)[0]
    if kernels:
        calls["triton"] = kernels.flash_attention_triton
    return [Candidate(name, partial(gradients, partial(call, **case.masks, **more.options),
                                    learned=more.learned),
                      backward_bytes(name, case, *tile, extra=extra),
                      tile[:2] if name == "flash" else (None, None))
            for name, call in calls.items()]


def gradients(attend, Q, K, V, dO, learned=()):
    """Return dQ, dK, dV and the gradients of `learned` from autograd through attend(Q, K, V), an O
    or (O, L); dL is then the first column of dO.
    """
    leaves = [x.detach().requires_grad_() for x in (Q, K, V)]
    results = attend(*leaves)
    if isinstance(results, tuple):
        dO = dO, dO[..., 0].to(results[1].dtype)
    return torch.autograd.grad(results, [*leaves, *learned], dO)


def compare_and_verify(cases=VERIFY_CASES, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare flash's gradients with autograd's through standard attention, and both with float64
    on the CPU: three GradientRows a case. flash's error may be three times standard's.
    """
    rows = [row for case in cases for row in verify(
        case, candidates(case, Br, Bc, device), device=device, seed=seed, dO=True, factor=3)]
    return [GradientRow(**vars(row), gradient=name)
            for row, name in zip(rows, cycle(("dQ", "dK", "dV")))]


def profile_memory(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Measure the peak memory of a forward and a backward. The result is dQ, dK and dV."""
    return [row for case in cases for row in profile(
        case, measurable(candidates(case, Br, Bc, device), device), device=torch.device(device),
        seed=seed, dO=True)]


def benchmark_speed(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Time a forward and a backward. tflops counts 3.5 times the forward's FLOPs for both: to its
    two products a backward that has S again adds five.
    """
    return [row for case in cases for row in benchmark(
        case, [*measurable(candidates(case, Br, Bc, device), device), *(
            Candidate(name, partial(gradients, call))
            for name, call in fused_calls(case, torch.device(device)).items())],
        device=torch.device(device), seed=seed, dO=True, flop=3.5 * case.flop)]


def try_extras(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Verify, profile and time the first case with each of lab/extras.py, whose name stands behind
    the shape: GradientRows, MemoryRows and SpeedRows.
    """
    rows, case = [], next(iter(cases))
    options = {"device": torch.device(device), "seed": seed, "dO": True}
    for extra in extras(case, device):
        both = candidates(case, Br, Bc, device, extra)
        found = verify(case, both, oracle=partial(exact_with, name=extra), factor=3, **options)
        found = [GradientRow(**vars(row), gradient=name)
                 for row, name in zip(found, ("dQ", "dK", "dV", f"d{extra}"))]
        found += profile(case, both, **options)
        found += benchmark(case, both, flop=3.5 * case.flop, **options)
        rows += [replace(row, shape=f"{row.shape}, {extra}") for row in found]
    return rows


# The command line


def show_verify(rows, args, cases):
    print_verify(f"Verify: largest differences of the gradients, tiles {lesson.tile_text(args)}",
                 rows, ("gradient",))


def show_memory(rows, args, cases):
    print_memory(
        f"Memory: peak of a forward and a backward in MiB, tiles {lesson.tile_text(args)}", rows,
        "formula: P, dP, dS, O and dV (standard); O, m, l, dQ, dK, dV, two tiles of Br x Bc, one "
        "of Br x d and a column (flash); O, m, l, D, dQ, dK, dV (triton). Beyond it stand a few "
        "bytes for the scale, what half types copy, and on a GPU or NPU the allocator's rounding "
        "and the products' workspaces.")


def show_speed(rows, args, cases):
    print_speed("Speed: median of a forward and a backward in turn", rows)
    print_growth(cases, rows)


def show_extras(rows, args, cases):
    verified, profiled, timed = ([row for row in rows if isinstance(row, kind)]
                                 for kind in (GradientRow, MemoryRow, SpeedRow))
    print_verify("Extras: largest differences of the gradients", verified, ("gradient",))
    print_memory("Extras: peak of a forward and a backward in MiB", profiled,
                 "formula: of flash as in --mode memory, and what the extra adds (lab/formulas.py: "
                 "backward_bytes); of standard without the extra.")
    print_speed("Extras: median of a forward and a backward in turn", timed)


MODES = {
    "verify": (compare_and_verify, show_verify),
    "memory": (profile_memory, show_memory),
    "speed": (benchmark_speed, show_speed),
    "extras": (try_extras, show_extras),
}


def main():
    return lesson.run_modes(lesson.parser(__doc__), MODES, "a forward and a backward", "backward_",
                            kernels="flash_triton")


if __name__ == "__main__":
    cli.serve(main)
