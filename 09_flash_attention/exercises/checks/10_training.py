"""What exercises/10_training.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

from math import prod

import torch
from watch import largest


def formula(Q, K, V, Z, dO, scaled=True, D="rows", Z_at="dV dP", product="P", dP="dO V"):
    """The five equations; the parameters are what the mistakes get wrong."""
    scale = Q.shape[1] ** -0.5
    P = torch.softmax(Q @ K.T * scale, 1)
    O, scale = (P * Z) @ V, scale if scaled else 1
    dV = (P * Z if "dV" in Z_at else P).T @ (dO if dP == "dO V" else O)
    dP = dO @ V.T * (Z if "dP" in Z_at else 1)
    D = {"rows": (dO * O).sum(1, keepdim=True), "none": 0, "all": (dO * O).sum(),
         "dP": dP.sum(1, keepdim=True)}[D]
    dS = (P * Z if product == "P Z" else P) * (dP - D)
    return dS @ K * scale, dS.T @ Q * scale, dV


def whole(**wrong):
    return lambda Q, K, V, dO: formula(Q, K, V, torch.ones(len(Q), len(K)), dO, **wrong)


def dropped(**wrong):
    return lambda Q, K, V, Z, dO: formula(Q, K, V, Z, dO, **wrong)


def tiles(tail=True, kept="m l", overwrite="", scaled=True, subtract=True):
    """Return a backward in tiles that forgets something."""
    def gradients(Q, K, V, O, m, l, dO, Br, Bc):
        dQ, dK, dV = map(torch.zeros_like, (Q, K, V))
        scale, D = Q.shape[1] ** -0.5, (dO * O).sum(1, keepdim=True) * subtract
        ends = [n if tail else n // size * size for n, size in ((len(Q), Br), (len(K), Bc))]
        for i in range(0, ends[0], Br):
            for j in range(0, ends[1], Bc):
                rows, cols = slice(i, i + Br), slice(j, j + Bc)
                S = Q[rows] @ K[cols].T * scale
                P = torch.exp(S - m[rows]) / l[rows]
                if kept == "none":
                    P = torch.softmax(S, 1)
                elif kept == "m":
                    P = P * l[rows]
                dS = P * (dO[rows] @ V[cols].T - D[rows]) * (scale if scaled else 1)
                dQ[rows] = dS @ K[cols] + (0 if "dQ" in overwrite else dQ[rows])
                dK[cols] = dS.T @ Q[rows] + (0 if "dK" in overwrite else dK[cols])
                dV[cols] = P.T @ dO[rows] + (0 if "dK" in overwrite else dV[cols])
        return dQ, dK, dV
    return gradients


def held(gradients, Q, *inputs):
    """Say whether a tensor with more numbers than Q was made."""
    most = prod(largest(gradients, Q, *inputs))
    return "no tensor larger than Q" if most <= Q.numel() else "a larger tensor than Q"


def autograd(Q, K, V, Z, dO):
    Q, K, V = (x.clone().requires_grad_() for x in (Q, K, V))
    O = torch.softmax(Q @ K.T / Q.shape[1] ** 0.5, 1) * Z @ V
    return torch.autograd.grad(O, (Q, K, V), dO)


def kept(Q, K, V):
    """Return O, m and l of the forward."""
    S = Q @ K.T / Q.shape[1] ** 0.5
    m = S.amax(1, keepdim=True)
    P = torch.exp(S - m)
    l = P.sum(1, keepdim=True)
    return P @ V / l, m, l


NO_D = "dS = P * (dP - D), with D = rowsum(dO * O)"
SCALE = "S = Q K^T * scale: dQ and dK have the factor scale too"
BACKWARD = {
    NO_D: whole(D="none"),
    "D has one number for each row: sum(1, keepdim=True)": whole(D="all"),
    "D = rowsum(dO * O), not rowsum(dP)": whole(D="dP"),
    SCALE: whole(scaled=False),
    "dV = P^T dO, not P^T O": whole(dP="dO O"),
}
IN_TILES = {
    "the last block may be shorter, and counts too": tiles(tail=False),
    "divide by l: P = exp(S - m) / l": tiles(kept="m"),
    "a tile has only a part of the row: take m and l of the forward, no softmax":
        tiles(kept="none"),
    "each tile adds to dQ of its rows: += and not =": tiles(overwrite="dQ"),
    "each tile adds to dK and dV of its keys: += and not =": tiles(overwrite="dK"),
    NO_D: tiles(subtract=False),
    SCALE: tiles(scaled=False),
}
WHOLE = {"compute the scores of one tile at a time":
         lambda Q, K, V, O, m, l, dO, Br, Bc: whole_matrices((Q, K, V, dO))}
DROPOUT = {
    "dP = (dO V^T) * Z: Z is missing there": dropped(Z_at="dV"),
    "dV = (P * Z)^T dO: Z is missing there": dropped(Z_at="dP"),
    "dS = P * (dP - D) has the P from before the dropout": dropped(product="P Z"),
    NO_D: dropped(D="none"),
    SCALE: dropped(scaled=False),
}

generator = torch.Generator().manual_seed(0)


def inputs(Nq, Nk, d, dv):
    """Return Q, K, V, dO."""
    return [torch.randn(s, generator=generator) for s in ((Nq, d), (Nk, d), (Nk, dv), (Nq, dv))]


EVEN, ODD, LONG = inputs(8, 8, 4, 4), inputs(7, 10, 4, 3), inputs(128, 128, 4, 4)
Z = (torch.rand(7, 10, generator=generator) > 0.3) / 0.7


def in_tiles(inputs, Br, Bc):
    Q, K, V, dO = inputs
    return Q, K, V, *kept(Q, K, V), dO, Br, Bc


def three(function, inputs, expected, mistakes, said):
    """Return a case for each gradient, so that what differs is named."""
    def one(n):
        return lambda function, *inputs: three_tensors(function(*inputs))[n]

    return [Case(function, tuple(inputs), expected[n], mistakes, one(n), f"{said}; {name}")
            for n, name in ((2, "dV"), (0, "dQ"), (1, "dK"))]


def three_tensors(found):
    return found if isinstance(found, (tuple, list)) and len(found) == 3 else [None] * 3


def whole_matrices(inputs):
    Q, K, V, dO = inputs
    return autograd(Q, K, V, torch.ones(len(Q), len(K)), dO)


CASES = [
    *three("backward", EVEN, whole_matrices(EVEN), BACKWARD, "8 queries, 8 keys"),
    *three("backward", ODD, whole_matrices(ODD), BACKWARD, "7 queries, 10 keys"),
    *three("backward_in_tiles", in_tiles(EVEN, 4, 2), whole_matrices(EVEN), IN_TILES,
           "8 queries, 8 keys, 4x2 tiles"),
    *three("backward_in_tiles", in_tiles(ODD, 3, 4), whole_matrices(ODD), IN_TILES,
           "7 queries, 10 keys, 3x4 tiles"),
    Case("backward_in_tiles", in_tiles(LONG, 16, 16), "no tensor larger than Q", WHOLE,
         call=held, said="N = 128, d = 4, 16x16 tiles"),
    *three("backward_with_dropout", (*ODD[:3], Z, ODD[3]), autograd(*ODD[:3], Z, ODD[3]), DROPOUT,
           "7 queries, 10 keys, p = 0.3"),
]
