"""Dropout: how much, which, the same everywhere, and its gradients."""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import flash_backward
import pytest
import torch
from flash_attention import flash_attention_forward, standard_attention
from flash_backward import flash_attention
from lab.dropout import Dropout, mix
from test_forward import inputs
from test_training import trained

PHASE = Path(flash_backward.__file__).parent


def whole_mask(p, seed, N=64, lead=(2, 3)):
    """Return what dropout drops, read off attention itself: with Q = 0 and V = I, O is P."""
    zeros = torch.zeros(*lead, N, 1)
    eye = torch.eye(N).expand(*lead, N, N)
    return flash_attention(zeros, zeros, eye, 16, 16, dropout_p=p, seed=seed) == 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_in_each_row_column_and_seed(p):
    masks = torch.stack([whole_mask(p, seed) for seed in range(20)]).double()  # [20, 2, 3, N, N]
    for dims in ((), (0,), (1,), (2,), (3,), (4,)):  # the mean over all other dimensions
        share = masks.mean([d for d in range(5) if d not in dims])
        deviation = math.sqrt(p * (1 - p) * share.numel() / masks.numel())
        assert (share - p).abs().max() < 4.5 * deviation  # of 64 at most: one run in 2000


def test_neighbours_heads_and_seeds_are_dropped_independently():
    masks = torch.stack([whole_mask(0.5, seed) for seed in (0, 1, 2**32, 2**64 - 1)]).double() - 0.5
    for dim in range(5):
        a, b = (masks.narrow(dim, start, masks.shape[dim] - 1) for start in (0, 1))
        correlation = (a * b).mean() * 4
        assert correlation.abs() < 4.5 / math.sqrt(a.numel())


def test_no_diagonal_and_no_mirror_image_is_dropped_alike():
    N, p = 256, 0.1
    excess = whole_mask(p, 0, N).double() - p  # of the seed whose first state is 0
    for mirrored in (excess, excess.flip(-1)):
        for offset in range(-200, 201):
            shares = mirrored.diagonal(offset, -2, -1)  # [2, 3, N - |offset|]
            deviation = math.sqrt(p * (1 - p) / shares.shape[-1])
            assert shares.mean(-1).abs().max() < 6 * deviation
    for shift in (-1, 0, 1):  # its own mirror image has a diagonal that is alike
        alike = (excess.roll(shift, -1) * excess.mT).mean()
        assert alike.abs() < p / N + 5 * p * math.sqrt(2 / excess.numel())


def test_a_hash_is_what_its_definition_gives():
    """With Python's own whole numbers, entry by entry."""
    def scrambled(n):
        n = (n ^ n >> 16) * 0x21F0AAAD % 2**32
        n = (n ^ n >> 15) * 0x735A2D97 % 2**32
        return n ^ n >> 15

    def number(seed, head, i, j):
        state = scrambled(seed % 2**32)
        state = scrambled((state + (seed >> 32)) % 2**32)
        state = scrambled((state + head) % 2**32)
        return scrambled(scrambled(state ^ i) ^ scrambled(scrambled(j + 1)))

    seed, Q = 2**40 + 5, torch.empty(2, 3, 9, 4)
    found = Dropout(0.3, seed, Q).dropped(slice(4, 7), slice(2, 9))
    expected = [[[[number(seed, 3 * b + h, i, j) / 2**32 < 0.3 for j in range(2, 9)]
                  for i in range(4, 7)] for h in range(3)] for b in range(2)]
    assert found.tolist() == expected
    numbers = torch.arange(10**5) * 42949  # to 2^32
    assert mix(numbers.clone()).tolist() == [scrambled(n) for n in numbers.tolist()]
    assert len(mix(numbers).unique()) == 10**5  # one to one, as each step of it is


def test_tiles_of_any_size_and_standard_attention_drop_the_same():
    tensors = inputs(40, 30, lead=(2, 2))
    expected = trained(partial(standard_attention, dropout_p=0.3, seed=9), tensors)
    for tile in ((7, 5), (64, 64), ("auto", "auto"), (1, 30)):
        attend = partial(flash_attention, Br=tile[0], Bc=tile[1], dropout_p=0.3, seed=9)
        for a, b in zip(trained(attend, tensors), expected):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    other = standard_attention(*tensors, dropout_p=0.3, seed=10)
    assert (other - expected[0]).abs().max() > 0.1


def test_without_dropout_no_bit_changes_and_l_is_never_dropped():
    tensors = inputs(20, dtype=torch.float32)
    run = [trained(partial(flash_attention, Br=8, Bc=8, **options), tensors)
           for options in ({}, {"dropout_p": 0.0, "seed": 5})]
    assert all(torch.equal(a, b) for a, b in zip(*run))
    L = [flash_attention(*tensors, return_lse=True, dropout_p=p)[1] for p in (0, 0.5)]
    assert torch.equal(*L)


def test_the_expected_result_is_kept():
    tensors = inputs(30, lead=(1,))
    mean = sum(flash_attention(*tensors, dropout_p=0.2, seed=seed) for seed in range(400)) / 400
    exact = flash_attention(*tensors)
    P = torch.softmax(tensors[0] @ tensors[1].mT * 8**-0.5, -1)
    deviation = (P.square() @ tensors[2].square() * 0.25 / 400).sqrt()  # p / (1 - p) = 0.25
    assert ((mean - exact).abs() / deviation).max() < 4.5


ON_A_CARD = """
import json, sys
sys.path.insert(0, ".")
from common.device import choose
import torch
from lab.dropout import Dropout
Q = torch.empty(2, 3, 70, 4, device=choose("npu:0"))
print(json.dumps(Dropout(0.3, 2**40 + 5, Q).dropped(slice(0, 70), slice(5, 40)).cpu().tolist()))
"""


def test_a_simulated_card_drops_the_same():
    pytest.importorskip("torch", "2.13")  # what the simulation is built on
    path = f"{PHASE.parent / 'tests' / 'simulated_npu'}:{PHASE.parent}"
    seen = subprocess.run([sys.executable, "-c", ON_A_CARD], cwd=PHASE, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert seen.returncode == 0, seen.stderr
    here = Dropout(0.3, 2**40 + 5, torch.empty(2, 3, 70, 4)).dropped(slice(0, 70), slice(5, 40))
    assert json.loads(seen.stdout) == here.tolist()


@pytest.mark.parametrize("options, words", [
    ({"dropout_p": 1.0}, "dropout_p must be a number from 0 to below 1, got 1.0"),
    ({"dropout_p": "0"}, "dropout_p must be"), ({"dropout_p": math.nan}, "dropout_p must be"),
    ({"seed": -1}, "seed must be an int from 0"), ({"seed": 0.5}, "seed must be"),
    ({"seed": 2**64}, "seed must be")])
def test_other_shares_and_seeds_are_refused(options, words):
    for attend in (flash_attention, standard_attention, flash_attention_forward):
        with pytest.raises(ValueError, match=words):
            attend(*inputs(), **options)


def test_dropout_has_the_gradients_of_finite_differences():
    QKV = [x.requires_grad_() for x in inputs(5, 6, d=3, lead=(1, 2))]
    attend = partial(flash_attention, Br=2, Bc=3, dropout_p=0.4, seed=7)
    assert torch.autograd.gradcheck(attend, QKV)
