"""small_attention.py and safe_softmax.py: the numbers of the first two chapters."""

import math

import numpy as np
import pytest
import torch
from safe_softmax import limits, safe_softmax, shifts, softmax
from small_attention import attention, by_hand, sizes

CPU = torch.device("cpu")


def test_three_tokens_are_what_the_chapter_computes_by_hand():
    mean, mixed, found = by_hand(CPU)
    assert mean.scores == [0, 0, 0] and mean.output == pytest.approx([2, 2])
    assert mixed.scores == [2, 1, 3]
    assert mixed.weights == pytest.approx([0.2447, 0.0900, 0.6652], abs=1e-4)
    assert found.scores == [0, 8, 0] and found.output == pytest.approx([0, 1], abs=0.01)


def test_attention_is_torchs_own():
    generator = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(s, generator=generator, dtype=torch.float64)
               for s in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)))
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
    torch.testing.assert_close(attention(Q, K, V)[2], expected, rtol=0, atol=1e-14)


def test_sizes_are_counted_and_nothing_is_allocated():
    found = {row.name: row.bytes for row in sizes(2, 8, 2**20, 64)}  # S alone would be 64 TiB
    assert found["Q"] == found["O"] == 2 * 8 * 2**20 * 64 * 4
    assert found["S"] == found["P"] == 2 * 8 * 2**40 * 4


@pytest.mark.parametrize("scores", [[2.0, 1.0, 3.0], [1000.0, 999.0], [-1000.0, -1001.0]])
def test_the_safe_softmax_is_torchs_own(scores):
    x = torch.tensor([scores, scores[::-1]])
    torch.testing.assert_close(safe_softmax(x), torch.softmax(x, -1))


def test_the_formula_as_it_stands_overflows_and_underflows():
    x = torch.tensor([2.0, 1.0, 3.0])
    assert softmax(x + 1000).isnan().all() and softmax(x, 120.0).isnan().all()
    by_m = {row.m: row.weights for row in shifts(CPU)}
    assert by_m[3.0] == pytest.approx(by_m[0.0]) != pytest.approx(by_m[105.0])


@pytest.mark.parametrize("row", limits(CPU), ids=lambda row: row.dtype)
def test_a_limit_is_the_last_number_of_its_dtype(row):
    dtype = getattr(torch, row.dtype)

    def exp(x):
        with np.errstate(over="ignore"):
            return torch.tensor(np.exp(np.float64(x))).to(dtype).item()

    def beyond(x, towards):  # the next number of the dtype, by its spacing
        step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(abs(x)))
        return torch.tensor(x + math.copysign(step, towards), dtype=torch.float64).to(dtype).item()

    assert exp(row.largest_score) < math.inf == exp(beyond(row.largest_score, 1))
    assert exp(row.least_score) > 0 == exp(beyond(row.least_score, -1))
