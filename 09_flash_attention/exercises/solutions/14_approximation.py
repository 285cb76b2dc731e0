"""A solution of exercises/14_approximation.py."""

import torch


def low_rank(Q, K, V, k):
    K, V = (x.view(k, len(x) // k, -1).mean(1) for x in (K, V))  # [k, d], [k, dv]
    return torch.softmax(Q @ K.T / Q.shape[1] ** 0.5, dim=1) @ V


def linear_attention(f_Q, f_K, V):
    sums = f_K.T @ V  # [r, dv], the same for all queries
    return f_Q @ sums / (f_Q @ f_K.sum(0))[:, None]


def choose_blocks(Q, K, size, count):
    Q_means, K_means = (x.view(len(x) // size, size, -1).mean(1) for x in (Q, K))
    return (Q_means @ K_means.T).topk(count).indices.sort().values  # [N / size, count]
