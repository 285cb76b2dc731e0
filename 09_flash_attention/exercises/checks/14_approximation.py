"""What exercises/14_approximation.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

from math import prod

import torch
from watch import largest


def attend(Q, K, V, scale=True):
    return torch.softmax(Q @ K.T / (Q.shape[1] ** 0.5 if scale else 1), 1) @ V


def means(x, k):
    return x.view(k, -1, x.shape[1]).mean(1)


def apart(x, k):
    """Takes the means of rows that lie k apart."""
    return x.view(-1, k, x.shape[1]).mean(0)


def first_of_each(x, k):
    return x[:: len(x) // k]


def weighed(f_Q, f_K, V):
    P = f_Q @ f_K.T
    return P @ V / P.sum(1, keepdim=True)


def held(attend, *inputs):
    """Say whether a tensor larger than the inputs was made."""
    most = max(x.numel() for x in inputs)
    found = prod(largest(attend, *inputs))
    return "no tensor larger than V" if found <= most else "a larger tensor than V"


def chosen(Q, K, size, count, block=means, sort=True, largest=True):
    S = block(Q, len(Q) // size) @ block(K, len(K) // size).T
    found = S.topk(count, largest=largest).indices
    return found.sort().values if sort else found


def one_for_all(Q, K, size, count):
    best = (means(Q, len(Q) // size) @ means(K, len(K) // size).T).sum(0).topk(count).indices
    return best.sort().values.expand(len(Q) // size, -1)


generator = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(12, n, generator=generator) for n in (4, 4, 3))
EQUAL = [torch.repeat_interleave(x[:4], 3, dim=0) for x in (Q, K, V)]  # low rank loses nothing
F_Q, F_K = torch.exp(Q), torch.exp(K)
LONG = [torch.ones(256, n) for n in (2, 2, 4)]
LOW_RANK = {
    "a mean is of neighbours: x.view(k, N // k, -1).mean(1)":
        lambda Q, K, V, k: attend(Q, apart(K, k), apart(V, k)),
    "take means, not one key of each group":
        lambda Q, K, V, k: attend(Q, first_of_each(K, k), first_of_each(V, k)),
    "divide the scores by sqrt(d)":
        lambda Q, K, V, k: attend(Q, means(K, k), means(V, k), scale=False),
    "sum(1) is not the mean: divide by N // k": lambda Q, K, V, k: attend(
        Q, means(K, k) * (len(K) // k), means(V, k) * (len(K) // k)),
    "k is how many means there are, not how many keys are in one": lambda Q, K, V, k: attend(
        Q, means(K, len(K) // k), means(V, len(K) // k)),
}
LINEAR = {
    "divide by the sum of the weights": lambda f_Q, f_K, V: f_Q @ (f_K.T @ V),
    "there is no exp here, f_Q and f_K have it already":
        lambda f_Q, f_K, V: torch.softmax(f_Q @ f_K.T, 1) @ V,
    "each query has a sum of its own: f_Q @ f_K.sum(0)":
        lambda f_Q, f_K, V: f_Q @ (f_K.T @ V) / (f_Q @ f_K.sum(0)).sum(),
}
WHOLE = {"f_K.T @ V first, [r, dv]: then nothing is N x N": weighed}
CHOICE = {
    "in rising order: .sort()": lambda *inputs: chosen(*inputs, sort=False),
    "the highest products, not the lowest": lambda *inputs: chosen(*inputs, largest=False),
    "means of the rows of a block: x.view(blocks, size, -1).mean(1)":
        lambda *inputs: chosen(*inputs, block=apart),
    "each block of queries chooses for itself": one_for_all,
}

CASES = [
    Case("low_rank", (*EQUAL, 4), attend(*EQUAL), LOW_RANK, said="12 keys, each 3 times, k=4"),
    Case("low_rank", (Q, K, V, 3), attend(Q, means(K, 3), means(V, 3)), LOW_RANK,
         said="12 keys, k=3"),
    Case("low_rank", (Q, K, V, 12), attend(Q, K, V), LOW_RANK, said="12 keys, k=12"),
    Case("linear_attention", (F_Q, F_K, V), weighed(F_Q, F_K, V), LINEAR, said="12 queries, r=4"),
    Case("linear_attention", LONG, "no tensor larger than V", WHOLE, call=held,
         said="N=256, r=2"),
    *(Case("choose_blocks", (Q, K, size, count), chosen(Q, K, size, count), CHOICE,
           said=f"12 keys, size={size}, count={count}")
      for size, count in ((2, 3), (3, 2), (3, 4))),
]
