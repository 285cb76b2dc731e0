"""Faults of a kernel that are known without its formula: by where NaN or the wrong rows are, by a
factor, or by the size of the error.
"""

import math

import torch

from lab.judge import largest
from lab.matrix import LARGE, NAN_BESIDE, SEEING

UNNAMED = "none of the formulas", "more scores than are looked at"
EDGE = 16  # rows of the smallest tile


def not_finite(problem, call, found, right, limits, twin):
    """Name an output, or gradients, with NaN or inf in it.

    twin: of fields of the problem, the JudgeRow of the call in which they are changed. A cause is
    named only where the call without it is finite.
    """
    named = unwritten(found, right, limits)
    if named:
        return named
    masked = call.bias == -torch.inf
    blind = masked.all(-1)  # [..., Nq]
    bad = (~found[0].isfinite()).any(-1)
    alone = len(found) == 1 and bad.equal(blind.expand(bad.shape))
    kind, *dims = problem.mask or ("",)
    for known, without, name, detail in (
            (blind.any() and kind in SEEING, {"mask": (SEEING.get(kind), *dims)},
             f"NaN {'in' if alone else 'from'} rows that see no key",
             "" if alone else "beyond these rows"),
            (call.scale <= 0 and masked.any(), {"scale": None},
             "mask multiplied by the scale", "-inf times a scale of 0 or less"),
            (problem.layout in NAN_BESIDE, {"layout": ""},
             "memory beside the tensors is read", problem.layout),
            (problem.values in LARGE, {"values": ""},
             "scores overflow", "no maximum is subtracted, or they are half")):
        error = twin(**without).error if known else None
        if error is not None and math.isfinite(error):
            return name, detail
    shares = {name: (~x.isfinite()).double().mean().item() for name, x in zip(
        letters(found), found)}
    return "NaN or inf", ", ".join(f"{share:.0%} of {name}" for name, share in shares.items()
                                   if share)


def unwritten(found, right, limits, chance=False):
    """Name the output, or the gradient, that is right up to a tile's edge and holds from there on
    0, NaN or another number alone, or what can only be chance; None where there is none. Other
    numbers may come from the keys that these rows see.
    """
    for letter, x, y, limit in zip(letters(found), found, right, limits):
        wrong = (~((x - y).abs() <= limit)).any(-1)  # [B, H, N]
        unlike = ~(wrong | (y == 0).all(-1))  # a 0 that is right may be unwritten
        at = unlike.flatten(0, 1).any(0).nonzero()
        n = (int(at[-1]) + EDGE) // EDGE * EDGE if len(at) else 0
        if wrong[..., :n].any() or not wrong[..., n:].any():
            continue
        tail = x[..., n:, :]
        first = tail[0, 0, 0, 0].item() + 0.0  # -0 is 0
        one = (tail == first).all() or tail.isnan().all()
        held = f"{first:g}".replace("nan", "NaN") if one else "other numbers"
        if n and (one or chance):
            return f"last rows of {letter} not written", f"from row {n} on they hold {held}"
        if held == "0":
            return f"{letter} is 0", ""
    return None


def multiplied(found, right, limits):
    """Name an output, or gradients, that are right but for a factor; None where there is none."""
    off, fits, apart = {}, True, False
    for letter, x, y, limit in zip(letters(found), found, right, limits):
        factor = ((x * y).sum() / (y * y).sum()).nan_to_num(1).item()  # y may be 0
        error, left = largest(x - y), largest(x - factor * y)
        if error > limit:
            off[letter] = f"{factor:.6g}"
        fits = fits and left <= 2 * limit * max(1, abs(factor))
        apart = apart or error > 2 * left
    if not (fits and apart):
        return None
    return f"{', '.join(off)} off by a factor", ", ".join(off.values())


def letters(found):
    return ("O",) if len(found) == 1 else ("dQ", "dK", "dV")


def where(found, right, limits):
    """Say in which batches, heads and rows the output, or which gradient, is wrong."""
    said = []
    for letter, x, y, limit in zip(letters(found), found, right, limits):
        bad, places = ~((x - y).abs() <= limit), []
        for name, dim in (("batch", 0), ("head", 1), ("row", 2), ("column", 3)):
            at = bad.sum([d for d in range(4) if d != dim]).nonzero().flatten().tolist()
            if at and len(at) < bad.shape[dim]:
                places.append(f"{name} {at[0]}" + f" to {at[-1]}" * (len(at) > 1))
        if bad.any():
            said.append(f"{letter}: " * (len(found) > 1) + (", ".join(places) or "everywhere"))
    return "; ".join(said)


def coarse(call, found, right):
    """Name an error that has the size of another precision's, within a factor of 8; None where it
    has not. Sizes alone: in which order a kernel sums can't be known.
    """
    error = largest(found - right)
    if call.dtype.itemsize >= 4:
        half, name = torch.float16, "float32 multiplied as tf32 or half"
        wrong = call.change(q=rounded(call.q, half), k=rounded(call.k, half),
                            v=rounded(call.v, half)).output()[0]
    else:
        name, wrong = "sums in half precision", half_sums(call)
    size = largest(wrong - right)
    return (name, "by the size of its error") if size / 8 < error < 8 * size else None


def half_sums(call, Bc=16):
    """Return O where each tile of Bc keys is added to an O of the half type."""
    S = (call.q @ call.k[:, call.kv_head].mT * call.scale + call.bias)
    P, O = call.softmax(S), 0
    for P_tile, V_tile in zip(P.split(Bc, -1), call.v[:, call.kv_head].split(Bc, -2)):
        O = rounded(O + P_tile @ V_tile, call.dtype)
    return O


def rounded(x, dtype):
    return x.to(dtype).double()
