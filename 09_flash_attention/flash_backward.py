"""FlashAttention, backward: training in O(N) memory, by computing each tile of P a second time.

    python flash_backward.py --mode verify      are the gradients those of autograd?
    python flash_backward.py --mode memory      what do a forward and a backward hold?
    python flash_backward.py --mode speed       what do they cost?

Autograd through standard attention keeps P, N x N, from the forward to the backward. Here the
forward keeps O and L, and `gradient_step`, five lines, has each tile of P again from L. The
derivation stands in `flash_attention_backward`. Sources: FlashAttention-2 (arXiv 2307.08691),
Algorithm 2; FlashAttention (arXiv 2205.14135), appendix B.2.
"""

import math
from dataclasses import dataclass
from functools import partial

from flash_attention import (  # first: finds `common`
    VerifyRow,
    cli,
    command_line,
    exp_,
    flash_attention_forward,
    kept_flop,
    memory_row,
    run,
    score_blocks,
    speed_rows,
    standard_attention,
    tiles,
)
from cases import VERIFY_CASES, dtype_name
from common.device import free_bytes
from common.report import console, mib, print_table, quotient
from judge import assert_agree, exact, judge
from show import print_speed
from tiles import choose_tile
from visible import Visible

import torch


def gradient_step(
    S_block, Q_block, K_block, V_block, dO_block, L_block, D_block, dQ_block, dK_block, dV_block
):
    """Add what one tile gives to dQ, dK and dV; dQ and dK still without their factor, the scale.

    S_block [X, Br, Bc]: the tile's scores, overwritten. Q_block, dQ_block [X, Br, d]; K_block,
    dK_block [X, Bc, d]; V_block, dV_block [X, Bc, dv]; dO_block [X, Br, dv]; L_block, D_block
    [X, Br, 1]. Source: FlashAttention-2, Algorithm 2, lines 11 to 16.
    """
    P_block = exp_(S_block.sub_(L_block))  # [X, Br, Bc]
    dV_block.baddbmm_(P_block.transpose(1, 2), dO_block)  # [X, Bc, dv], + P^T dO
    dS_block = P_block.mul_((dO_block @ V_block.transpose(1, 2)).sub_(D_block))  # [X, Br, Bc]
    dQ_block.baddbmm_(dS_block, K_block)  # [X, Br, d], + dS K
    dK_block.baddbmm_(dS_block.transpose(1, 2), Q_block)  # [X, Bc, d], + dS^T Q


def flash_attention_backward(dO, Q, K, V, O, L, Br=64, Bc=64, **options):
    """Return dQ, dK, dV: the gradients of a loss whose gradient with respect to O is dO.

    S = Q K^T * scale, P = softmax(S) row by row, O = P V. Backwards:

        dV = P^T dO            O is linear in V
        dP = dO V^T            and in P
        dS = P * (dP - D)      softmax: dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik). That sum, over all
        D = rowsum(dO * O)     keys, is dO_i . sum_k P_ik V_k = dO_i . O_i, one number a row
        dQ = dS K * scale      S is linear in Q
        dK = dS^T Q * scale    and in K

    P = exp(S - L), since L is the log of what the softmax divides by. With L and D known, a tile
    needs no other tile. D has length N; the paper's Algorithm 2 says d, a slip.

    dO [..., Nq, dv], with any strides. O and L are what `flash_attention_forward` returned for Q,
    K, V and the same options: causal, q_start, window, scale, attn_mask. The gradients have the
    shapes and dtypes of Q, K, V. Sums are float32 for float16 and bfloat16, also over the query
    heads that read one key/value head. A row that saw no key passes 0 on. Equal input gives equal
    bits. The tiles are walked as in the forward, the keys inside; in the paper the queries are, so
    that dK and dV can stay on the chip.
    """
    visible = Visible(Q, K, V, **options)
    heads, dv = Q.shape[:-2].numel(), V.shape[-1]
    Br, Bc = choose_tile(Br, Bc, heads, visible.Nq, visible.Nk, dv, Q.dtype, Q.device.type)
    dQ = Q.new_empty(Q.shape)
    dK, dV = (  # [X, Nk, d], [X, Nk, dv]
        x.new_zeros(visible.X, visible.Nk, x.shape[-1], dtype=visible.dtype) for x in (K, V)
    )
    scratch = Q.new_empty(heads * Br * Bc, dtype=visible.dtype)
    for rows in visible.query_blocks(Br):
        Q_block = visible.row_block(Q, rows)  # [X, G*Br, d]
        L_block = visible.row_block(L.unsqueeze(-1), rows)  # [X, G*Br, 1]
        dead = L_block == -math.inf
        L_block = L_block.masked_fill(dead, math.inf)  # P = exp(-inf - inf) = 0, not NaN
        dO_block = visible.row_block(dO, rows).masked_fill(dead, 0)  # [X, G*Br, dv]
        D_block = (dO_block * visible.row_block(O, rows)).sum(-1, keepdim=True)  # [X, G*Br, 1]
        dQ_block = Q_block.new_zeros(Q_block.shape)
        for cols, S_block, V_block in score_blocks(visible, Q, K, V, rows, Bc, scratch):
            K_block = visible.key_block(K, cols)  # [X, Bc, d]
            if visible.attn_mask is not None:  # as `restrict` does with V_block
                unseen = (S_block == -math.inf).all(-2)  # [X, Bc]
                K_block = K_block.masked_fill(unseen.unsqueeze(-1), 0)
            gradient_step(S_block, Q_block, K_block, V_block, dO_block, L_block, D_block,
                          dQ_block, dK[:, cols], dV[:, cols])
        visible.store(dQ, rows, dQ_block.mul_(visible.scale))
    dK.mul_(visible.scale)
    return dQ, dK.to(K.dtype).view(K.shape), dV.to(V.dtype).view(V.shape)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, attn_mask, Br, Bc, options):
        O, L = flash_attention_forward(
            Q, K, V, Br, Bc, attn_mask=attn_mask, return_lse=True, **options
        )
        ctx.save_for_backward(Q, K, V, O, L, attn_mask)
        ctx.tiles, ctx.options = (Br, Bc), options
        return O

    @staticmethod
    def backward(ctx, dO):
        if torch.is_grad_enabled():  # create_graph=True alone runs a backward so
            raise RuntimeError(
                "flash_attention has no second derivative: create_graph=True is not supported, "
                "take standard_attention for it"
            )
        *tensors, attn_mask = ctx.saved_tensors
        gradients = flash_attention_backward(
            dO, *tensors, *ctx.tiles, attn_mask=attn_mask, **ctx.options
        )
        return (*gradients, None, None, None, None)  # one for each argument of forward


def flash_attention(
    Q, K, V, Br=64, Bc=64, *, causal=False, q_start=None, window=None, scale=None, attn_mask=None
):
    """Return exact attention to train with: nothing larger than O(N) stands until the backward.

    Arguments, result and errors are those of `flash_attention_forward`, but Q, K and V may want
    gradients. Raises ValueError for an attn_mask that wants one, and RuntimeError in a backward
    with create_graph=True: there is no second derivative.
    """
    if getattr(attn_mask, "requires_grad", False) and torch.is_grad_enabled():
        raise ValueError(
            "attn_mask wants a gradient, got requires_grad=True: flash_attention has none for it, "
            "detach it or take standard_attention"
        )
    options = {"causal": causal, "q_start": q_start, "window": window, "scale": scale}
    return _FlashAttention.apply(Q, K, V, attn_mask, Br, Bc, options)


# The tools: each returns rows and prints nothing.


@dataclass
class GradientRow(VerifyRow):
    """A VerifyRow of one gradient: dQ, dK or dV."""

    gradient: str = ""


def compare_and_verify(cases=VERIFY_CASES, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare flash's gradients with autograd's through standard attention, and both with float64
    on the CPU: three GradientRows a case.

    `judge.py` says when a gradient passes: flash's error is at most three times standard's.
    """
    rows = []
    for case in cases:
        inputs = with_dO(case, device, seed)
        found = (call() for call in candidates(case, inputs, Br, Bc).values())
        wide = (x.double().cpu() for x in inputs)
        reference = gradients(partial(exact, case=case), *wide)
        shown = case.shape, dtype_name(case.dtype), case.causal
        for name, standard, flash, oracle in zip(("dQ", "dK", "dV"), *found, reference):
            rows.append(GradientRow(*shown, *judge(flash, standard, oracle, factor=3),
                                    gradient=name))
    return rows


def profile_memory(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Measure the peak memory of a forward and a backward, by standard and by flash attention: two
    MemoryRows a case. The result is dQ, dK and dV.

    A candidate whose theoretical peak exceeds the free memory is not run.
    """
    device, rows = torch.device(device), []
    for case in cases:
        tile = case.tile(Br, Bc, device)
        for name, call in candidates(case, with_dO(case, device, seed), *tile).items():
            rows.append(memory_row(name, case, call, theory_bytes(name, case, *tile), tile, device))
    return rows


def theory_bytes(name, case, Br, Bc):
    """Return the bytes that a forward and a backward hold at their highest moment, beside Q, K, V
    and dO.

    standard, in the softmax's backward: P, dP, dS, O and dV; for half types also what the forward
    kept in another dtype, Q, K and V, and not what a CPU adds that multiplies them in float32.
    flash, in a step: O, L, dQ, dK, dV; tiles of S, dP, dO, dQ, Q * scale, and of Q where it has to
    be copied; the columns L, D and dead. For half types this is a bound: float32 sums beside dK and
    dV, and float32 tiles of K (twice) and V.
    """
    (*lead, Nq, d), (*kv_lead, Nk, _), (*_, dv) = case.shapes
    heads, kv_heads, width = math.prod(lead), math.prod(kv_lead), case.dtype.itemsize
    wide, half = max(width, 4), width < 4
    O, dQ, dK, dV = heads * Nq * dv, heads * Nq * d, kv_heads * Nk * d, kv_heads * Nk * dv
    if name == "standard":
        kept = wide * (dQ + dK) + width * dV if half else 0
        dead = heads * Nq if case.hides else 0
        return 3 * wide * heads * Nq * Nk + width * (O + dV) + kept + dead
    copied = half or heads > kv_heads and Br < Nq  # the heads of a group become rows of one tile
    tiles = heads * Br * (2 * Bc + dv + 2 * d + 2 + (d if copied else 0))
    sums = dK + dV + kv_heads * Bc * (2 * d + dv) if half else 0
    return width * (O + dQ + dK + dV) + wide * (heads * Nq + tiles + sums) + heads * Br


def benchmark_speed(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Time a forward and a backward, by standard and by flash attention, in turn: two SpeedRows a
    case.

    tflops counts the kept score pairs only, and for both 3.5 times the forward's FLOPs: to its two
    products a backward that has S again adds five. The gradients must first agree, by
    `judge.assert_agree`: RuntimeError where they do not.
    """
    device, rows = torch.device(device), []
    for case in cases:
        inputs, tile = with_dO(case, device, seed), case.tile(Br, Bc, device)
        found = candidates(case, inputs, *tile)
        room = free_bytes(device)
        calls = {name: call for name, call in found.items()
                 if theory_bytes(name, case, *tile) < room}
        if len(calls) == 2:
            for name, *pair in zip(("dQ", "dK", "dV"), calls["flash"](), calls["standard"]()):
                assert_agree(f"{name} of flash", *pair)
        rows += speed_rows(case, found, calls, tile, 3.5 * kept_flop(case), device)
    return rows


def with_dO(case, device, seed):
    """Return Q, K, V of the case and a dO."""
    shape = (*case.shapes[0][:-1], case.shapes[2][-1])
    dO = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
    return (*case.inputs(device, seed), dO.to(device, case.dtype))


def candidates(case, inputs, Br, Bc):
    """Return {name: call}, each call a forward and a backward that returns dQ, dK, dV."""
    standard = partial(standard_attention, **case.masks)
    flash = partial(flash_attention, Br=Br, Bc=Bc, **case.masks)
    return {
        "standard": lambda: gradients(standard, *inputs),
        "flash": lambda: gradients(flash, *inputs),
    }


def gradients(attend, Q, K, V, dO):
    """Return dQ, dK, dV of attend(Q, K, V) from autograd."""
    leaves = [x.detach().requires_grad_() for x in (Q, K, V)]
    return torch.autograd.grad(attend(*leaves), leaves, dO)


# The command line


def show_verify(cases, args, device):
    rows = run("verify", compare_and_verify, cases, args, device)
    print_table(
        f"Verify: largest differences of the gradients, tiles {tiles(args)}",
        ["", "Q (K V)", "dtype", "flash - standard", "flash - float64", "standard - float64",
         "result"],
        [(r.gradient, r.shape, r.dtype, f"{r.max_diff:.2e}", f"{r.error_flash:.2e}",
          f"{r.error_standard:.2e}", "pass" if r.passed else "FAIL") for r in rows],
    )
    return rows


def show_memory(cases, args, device):
    rows = run("memory", profile_memory, cases, args, device)
    standard = {r.shape: r.peak_bytes for r in rows if r.name == "standard"}
    print_table(
        f"Memory: peak of a forward and a backward in MiB, tiles {tiles(args)}",
        ["name", "Q (K V)", "peak", "formula", "peak - formula, bytes", "standard / this"],
        [(r.name, r.shape, mib(r.peak_bytes), mib(r.theory_bytes),
          "-" if r.peak_bytes is None else f"{r.peak_bytes - r.theory_bytes:+d}",
          quotient(standard[r.shape], r.peak_bytes)) for r in rows],
    )
    console.print(
        "\nformula = P, dP, dS, O and dV (standard); O, L, dQ, dK, dV, two tiles of Br x Bc, three "
        "of Br x d and three columns (flash). Beyond it stand the 8 bytes of the scale, what a "
        "window's mask, grouped heads and half types copy, and on a GPU or NPU the allocator's "
        "rounding and the workspaces of the products."
    )
    return rows


def show_speed(cases, args, device):
    rows = run("speed", benchmark_speed, cases, args, device)
    print_speed("Speed: median of a forward and a backward in turn", rows)
    return rows


SHOW = {"verify": show_verify, "memory": show_memory, "speed": show_speed}


def main():
    return command_line(__doc__.splitlines()[0], SHOW, "a forward and a backward", "backward_")


if __name__ == "__main__":
    cli.serve(main)
