"""What exercises/17_models.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import torch

from flash_attention import flash_attention_forward, standard_attention


def heads(X, H):
    return X.unflatten(-1, (H, -1)).transpose(1, 2)


def mixed(split=heads, order=(0, 1, 2), joined=lambda O: O.transpose(1, 2).flatten(-2),
          causal=True, project=True):
    """Return a `self_attention` that does one thing in another way."""
    def self_attention(x, W, W_out, H, attend):
        parts = (x @ W).chunk(3, dim=-1)
        O = joined(attend(*(split(parts[i], H) for i in order), causal=causal)).reshape(x.shape)
        return O @ W_out if project else O
    return self_attention


def interleaved(x, W, W_out, H, attend):
    Q, K, V = ((x @ W).unflatten(-1, (H, 3, -1))[..., i, :].transpose(1, 2) for i in range(3))
    return attend(Q, K, V, causal=True).transpose(1, 2).flatten(-2) @ W_out


def cut(X, H):
    return X.reshape(X.shape[0], H, X.shape[1], X.shape[2] // H)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attended(mask):
    """Attention of some queries with this mask."""
    Q, K, V = (numbers(len(mask), 2, mask.shape[-1], 8, seed=seed) for seed in range(3))
    return flash_attention_forward(Q, K, V, attn_mask=mask)


X, W, W_OUT = numbers(2, 6, 12), numbers(12, 36, seed=1), numbers(12, 12, seed=2)
MODULE_MISTAKES = {
    "the heads' columns have to stand side by side again for each token: transpose, then flatten":
        mixed(joined=lambda O: O),
    "cutting [B, N, C] into [B, H, N, C / H] mixes tokens: split the columns, then transpose":
        mixed(split=cut),
    "the parts come in the order Q, K, V": mixed(order=(1, 0, 2)),
    "in `x @ W` all of Q comes first, not the Q of each head": interleaved,
    "a query must not see later tokens: causal=True": mixed(causal=False),
    "W_out is still missing": mixed(project=False),
}
P_BYTES, COLUMNS = 2 * 8 * 4 * 256**2 * 4, 2 * 8 * 4 * 256 * 4
KEPT_MISTAKES = {
    "each layer keeps its own": lambda B, H, N, d, layers: (
        B * H * N * N * 4, B * H * N * (d + 2) * 4),
    "each head has a P of its own": lambda B, H, N, d, layers: (
        layers * B * N * N * 4, layers * B * N * (H * d + 2 * H) * 4),
    "m and l are one number a row each": lambda B, H, N, d, layers: (
        layers * B * H * N * N * 4, layers * B * H * N * 3 * d * 4),
    "m and l are kept as well as O": lambda B, H, N, d, layers: (
        layers * B * H * N * N * 4, layers * B * H * N * d * 4),
    "in bytes: float32 has 4": lambda B, H, N, d, layers: (
        layers * B * H * N * N, layers * B * H * N * (d + 2)),
    "S is not kept, P is enough": lambda B, H, N, d, layers: (
        2 * layers * B * H * N * N * 4, layers * B * H * N * (d + 2) * 4),
}
LENGTHS = [6, 4, 1]
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
MASK_MISTAKES = {
    "the padding stands at the beginning, so the last places are tokens":
        lambda lengths, N: RIGHT.flip(-1)[:, None, None],
    "True is for tokens, not for padding": lambda lengths, N: ~RIGHT[:, None, None],
    "two dimensions of 1, for the heads and the queries, belong in the middle":
        lambda lengths, N: RIGHT,
    "one row serves all queries: [B, 1, 1, N], not [B, 1, N, N]":
        lambda lengths, N: RIGHT[:, None, None].expand(-1, 1, N, N),
    "a bool mask is asked for, not one that is added":
        lambda lengths, N: torch.zeros(3, 1, 1, N).masked_fill(~RIGHT[:, None, None], -torch.inf),
}

CASES = [
    Case("self_attention", (X, W, W_OUT, 1, standard_attention),
         mixed()(X, W, W_OUT, 1, standard_attention), MODULE_MISTAKES, said="x [2, 6, 12], H=1"),
    Case("self_attention", (X, W, W_OUT, 3, standard_attention),
         mixed()(X, W, W_OUT, 3, standard_attention), MODULE_MISTAKES, said="x [2, 6, 12], H=3"),
    Case("self_attention", (X, W, W_OUT, 3, flash_attention_forward),
         mixed()(X, W, W_OUT, 3, standard_attention), MODULE_MISTAKES,
         said="the same with flash attention inside"),
    Case("kept", (8, 4, 256, 24, 2), (P_BYTES, COLUMNS * 24 + 2 * COLUMNS), KEPT_MISTAKES),
    Case("kept", (1, 32, 4096, 128, 32), (32 * 32 * 4096**2 * 4, 32 * 32 * 4096 * 130 * 4),
         KEPT_MISTAKES),
    Case("padding_mask", (LENGTHS, 6), RIGHT[:, None, None], MASK_MISTAKES),
    Case("padding_mask", (LENGTHS, 6), attended(RIGHT[:, None, None]), call=lambda mask, *inputs:
         attended(mask(*inputs)), said=f"{LENGTHS}, 6, then flash attention with it"),
]
