"""The shapes of FlashAttention's own tests, by its rule: at most twice the error of standard.

Every pair of settings occurs in some case, not every combination.
"""

import itertools

import pytest
import torch
from flash_attention import flash_attention_forward, standard_attention

LENGTHS = (1, 239), (3, 799), (127, 512), (113, 203), (512, 113), (1023, 1024)
HEAD_SIZES = 32, 40, 59, 64, 80, 96, 111, 128, 256
KV_HEADS = 4, 2, 1  # of 4 query heads: MHA, GQA, MQA
MASKS = "none", "causal", "window", "softcap"
DTYPES = torch.float32, torch.float16, torch.bfloat16
CAP, LEFT, RIGHT = 1.5, 64, 5

CASES = [
    (length, d, KV_HEADS[(i + j) % 3], MASKS[(i + 3 * j + j // 4) % 4], DTYPES[(i + j // 3) % 3])
    for (i, length), (j, d) in itertools.product(enumerate(LENGTHS), enumerate(HEAD_SIZES))
]


def softcap(score, b, h, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (LEFT, RIGHT)},
    "softcap": {"causal": True, "score_mod": softcap},
}


def exact_attention(Q, K, V, mask):
    """Attention in float64, from scores that are whole, with its mask from distances."""
    Q, K, V = (x.double() for x in (Q, K, V))
    K, V = (x.repeat_interleave(Q.shape[1] // x.shape[1], dim=1) for x in (K, V))
    S = Q @ K.transpose(-2, -1) * Q.shape[-1] ** -0.5  # [B, H, Nq, Nk]
    S = CAP * torch.tanh(S / CAP) if mask == "softcap" else S
    Nq, Nk = S.shape[-2:]
    ahead = torch.arange(Nk) - (torch.arange(Nq)[:, None] + Nk - Nq)  # of the query's own key
    if mask != "none":
        far = (ahead > RIGHT) | (ahead < -LEFT) if mask == "window" else ahead > 0
        S = S.masked_fill(far, -torch.inf)
    P = torch.softmax(S, dim=-1)
    return P.nan_to_num(0) @ V  # NaN: a row that sees no key


@pytest.mark.parametrize("length, d, kv_heads, mask, dtype", CASES)
def test_flash_errs_at_most_twice_as_much_as_standard(length, d, kv_heads, mask, dtype):
    generator = torch.Generator().manual_seed(d)
    Nq, Nk = length
    shapes = (1, 4, Nq, d), (1, kv_heads, Nk, d), (1, kv_heads, Nk, d)
    Q, K, V = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    exact = exact_attention(Q, K, V, mask)
    flash, standard = (
        (O.double() - exact).abs().max()
        for O in (
            flash_attention_forward(Q, K, V, 128, 128, **OPTIONS[mask]),
            standard_attention(Q, K, V, **OPTIONS[mask]),
        )
    )
    eps, largest = torch.finfo(dtype).eps, exact.abs().max().item()
    assert flash <= 2 * standard + (2 * eps * largest if dtype == torch.float32 else 0)
    assert standard <= 8 * eps * max(1, largest)  # of another formula, flash could err as much


def test_every_pair_of_settings_occurs():
    columns = LENGTHS, HEAD_SIZES, KV_HEADS, MASKS, DTYPES
    for a, b in itertools.combinations(range(5), 2):
        pairs = {(case[a], case[b]) for case in CASES}
        assert pairs == set(itertools.product(columns[a], columns[b]))
