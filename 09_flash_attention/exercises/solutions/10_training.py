"""A solution of exercises/10_training.py."""

import torch


def backward(Q, K, V, dO):
    return backward_with_dropout(Q, K, V, 1.0, dO)


def backward_in_tiles(Q, K, V, O, m, l, dO, Br, Bc):
    dQ, dK, dV = map(torch.zeros_like, (Q, K, V))
    scale = Q.shape[1] ** -0.5
    D = (dO * O).sum(1, keepdim=True)  # [Nq, 1]
    for i in range(0, len(Q), Br):
        for j in range(0, len(K), Bc):
            rows, cols = slice(i, i + Br), slice(j, j + Bc)
            P_block = torch.exp(Q[rows] @ K[cols].T * scale - m[rows]) / l[rows]  # [Br, Bc]
            dV[cols] += P_block.T @ dO[rows]
            dP_block = dO[rows] @ V[cols].T  # [Br, Bc]
            dS_block = P_block * (dP_block - D[rows])
            dQ[rows] += dS_block @ K[cols] * scale
            dK[cols] += dS_block.T @ Q[rows] * scale
    return dQ, dK, dV


def backward_with_dropout(Q, K, V, Z, dO):
    scale = Q.shape[1] ** -0.5
    P = torch.softmax(Q @ K.T * scale, 1)  # [Nq, Nk]
    O = P * Z @ V
    dV = (P * Z).T @ dO
    dP = dO @ V.T * Z
    D = (dO * O).sum(1, keepdim=True)  # [Nq, 1]
    dS = P * (dP - D)
    return dS @ K * scale, dS.T @ Q * scale, dV
