"""In real models: what stands around attention, what training keeps, and a mask that stays small.

    python exercises/17_models.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/17_models.md, 中文: lesson/zh/17_models.md.
Solutions: solutions/.
"""

from check import serve

import torch  # noqa: F401  for your functions


def self_attention(x, W, W_out, H, attend):
    """Return the output of causal self-attention with H heads: [B, N, C] -> [B, N, C].

    x [B, N, C]. W [C, 3 C]: `x @ W` holds Q, then K, then V, C columns each, and of these each head
    has C / H side by side. attend(Q, K, V, causal=True) takes [B, H, N, C / H] and returns the
    same. W_out [C, C]: what the heads' outputs, side by side again, are multiplied by.
    """
    raise NotImplementedError


def kept(B, H, N, d, layers):
    """Return how many bytes standard and flash attention keep for the backward: two numbers.

    All layers together, float32, beside Q, K and V, which both keep. Standard attention keeps P.
    Flash attention keeps O, m and l.
    """
    raise NotImplementedError


def padding_mask(lengths, N):
    """Return a bool mask, [B, 1, 1, N], True where a key is a token.

    lengths: how many tokens each of the B sequences has. The others of its N places are padding,
    and stand at its beginning.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
