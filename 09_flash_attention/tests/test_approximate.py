"""approximate.py: each approximation sees what it says, at the FLOPs it says."""

import json
import sys

import approximate
import common.timing
import pytest
import torch
from approximate import (
    ALL, BLOCK, METHODS, SHARE, SHARES, CostRow, ErrorRow, Products, block_sparse, conclusions,
    costs, inputs, low_rank, mean_of_values, random_features, window,
)
from lab.cases import Case

N, d = 1024, 16


def attention(Q, K, V, seen=None):
    S = torch.einsum("id,jd->ij", Q.double(), K.double()) / Q.shape[1] ** 0.5
    if seen is not None:
        S = S.masked_fill(~seen, -torch.inf)
    return (torch.softmax(S, dim=1) @ V.double()).float()


@pytest.fixture(scope="module")
def random():
    return inputs(N, d)["random"]


def seen_by(method, random, share):
    """Which key has a weight, [N, N]: with V the unit matrix O is P."""
    Q, K, _ = random
    P = method(Q, K, torch.eye(N), share)
    torch.testing.assert_close(P.sum(dim=1), torch.ones(N))
    return P > 0


@pytest.mark.parametrize("share", SHARES)
def test_a_window_is_exact_attention_to_the_neighbours(random, share):
    reach = (int(share * N) - BLOCK) // 2
    i = torch.arange(N)
    near = (i[:, None] - i).abs() <= reach
    assert torch.equal(seen_by(window, random, share), near)
    torch.testing.assert_close(window(*random, share), attention(*random, near))


@pytest.mark.parametrize("share", SHARES)
def test_block_sparse_is_exact_attention_to_its_own_block_and_others(random, share):
    seen = seen_by(block_sparse, random, share)
    blocks = seen.view(N // BLOCK, BLOCK, N // BLOCK, BLOCK)
    whole = blocks.all(3).all(1)
    assert torch.equal(whole, blocks.any(3).any(1))  # all of a block for each query, or none
    assert whole.diagonal().all() and (whole.sum(1) == share * N / BLOCK).all()
    torch.testing.assert_close(block_sparse(*random, share), attention(*random, seen))


def test_low_rank_is_exact_where_neighbours_are_equal(random):
    Q, K, V = random
    K, V = (x[: N // 8].repeat_interleave(8, dim=0) for x in (K, V))
    torch.testing.assert_close(low_rank(Q, K, V, 1 / 8), attention(Q, K, V))
    assert (low_rank(*random, 1 / 8) - attention(*random)).abs().max() > 0.01


@pytest.mark.parametrize("share", [1, 8])
def test_random_features_have_the_error_of_their_number(random, share):
    """The weight by one feature has the relative variance e^(|q + k|^2 / sqrt(d)) - 1."""
    Q, K, _ = (x / x.norm(dim=1, keepdim=True) for x in random)
    K = K * torch.linspace(0.5, 2, N)[:, None]
    P = attention(Q, K, torch.eye(N))
    error = (random_features(Q, K, torch.eye(N), share) - P).norm()
    features = share * 4 * N * d / (8 * d + 2)
    variance = torch.exp((Q[:, None] + K).square().sum(-1) / d**0.5) - 1  # [N, N]
    assert 0.7 < error / ((P**2 * variance).sum() / features).sqrt() < 1.3


@pytest.mark.parametrize("share", SHARES)
def test_the_counted_flops_are_the_share_that_was_asked_for(random, share):
    exact, found = 4 * N * N * d, {}
    for name, attend in ALL.items():
        with Products() as products:
            attend(*random, share)
        found[name] = products.flop
    assert found["standard"] == found["flash"] == exact and found["mean of V"] == 0
    assert torch.equal(mean_of_values(*random, share)[5], random[2].mean(dim=0))
    assert found["block-sparse"] == found["low rank"] == share * exact
    assert abs(found["random features"] - share * exact) <= 8 * N * d + 2 * N  # a feature
    reach = (int(share * N) - BLOCK) // 2
    keys = sum(min(N, i + BLOCK + reach) - max(0, i - reach) for i in range(0, N, BLOCK))
    assert found["window"] == 4 * d * BLOCK * keys
    assert (1 - share) * share * exact < found["window"] <= share * exact


def test_the_inputs_are_what_they_are_called():
    found = inputs(2048, 64)
    assert list(found) == ["random", "one key", "one key near", "smooth"]
    assert attention(*found["random"][:2], torch.eye(2048)).max() < 0.2
    i = torch.arange(2048)
    for kind, farthest in (("one key", 2047), ("one key near", 8)):
        Q, K, _ = found[kind]
        weight, key = attention(Q, K, torch.eye(2048)).max(dim=1)
        assert weight.median() > 0.9
        distance = (key - i)[weight > 0.9].abs()
        assert distance.max() <= farthest and (farthest == 8 or distance.median() > 300)
    for x in found["smooth"]:
        assert x.diff(dim=0).norm() < 0.05 * x.norm()


# What is said


def rows_of(errors, spreads):
    """errors: {kind: {name: error}}, of all others 1; spreads: {name: the lower quartile}."""
    found = [ErrorRow(name, "1x8x4", share, kind, some.get(name, 1.0))
             for kind, some in errors.items() for name in ALL for share in SHARES]
    return found, [CostRow(name, "1x8x4", 1, 1, 1.0, 1.0, (spreads.get(name, 0.9), 2.0))
                   for name in ALL]


def test_the_conclusion_is_read_off_the_rows():
    always = {"flash": 0.0, "window": 0.1}
    lines = conclusions(*rows_of({"a": {**always, "low rank": 0.05, "mean of V": 0.7},
                                  "b": {**always, "low rank": 0.5}},
                                 {"window": 1.1, "flash": 1.5}))
    assert lines == [
        "a: error at most 10%: window, low rank; no better than the mean of V: block-sparse, "
        "random features",
        "b: error at most 10%: window; no better than the mean of V: block-sparse, random features",
        "error at most 10% on every input: flash, window",
        "faster than flash in three of four rounds, on this device: window"]
    lines = conclusions(*rows_of({"a": {"mean of V": 2}}, {}))
    assert [line.rsplit(": ")[-1] for line in lines] == ["none"] * 3
    assert "at most 10%: none" in lines[0]


def test_costs_are_of_each_method_and_the_exact_ones_hold_the_most_flops(monkeypatch):
    monkeypatch.setattr(common.timing, "MIN_ROUNDS", 2)
    monkeypatch.setattr(common.timing, "MAX_ROUNDS", 2)
    rows = {r.name: r for r in costs(Case(N, d=d), torch.device("cpu"), 0)}
    assert list(rows) == list(ALL)
    assert all(rows[name].flop < rows["flash"].flop / 7 for name in METHODS)
    assert rows["standard"].peak_bytes == 2 * 4 * N * N + 4 * N * d
    assert all(r.peak_bytes < rows["standard"].peak_bytes and r.seconds > 0
               for r in rows.values() if r.name != "standard")
    assert rows["flash"].ratio_to_flash == 1


def run(monkeypatch, *arguments):
    monkeypatch.setattr(common.timing, "MIN_ROUNDS", 2)
    monkeypatch.setattr(common.timing, "MAX_ROUNDS", 2)
    monkeypatch.setattr(sys, "argv", ["approximate.py", "--device", "cpu", *map(str, arguments)])
    return approximate.main()


def test_the_command_prints_draws_and_writes_what_it_found(monkeypatch, capsys, tmp_path):
    written = tmp_path / "rows.json"
    assert run(monkeypatch, "--seq-len", N, "--json", written, "--plot", tmp_path) == 0
    printed = capsys.readouterr().out
    rows = json.loads(written.read_text())["rows"]
    error = {(r["kind"], r["name"], r["share"]): r["error"] for r in rows if r["tool"] == "errors"}
    assert len(error) == 4 * (4 * 4 + 3)
    assert all(error[kind, "flash", SHARE] < 1e-5 for kind, _, _ in error)
    [line] = [line for line in printed.splitlines() if line.startswith("| window ")]
    cells = [cell.strip() for cell in line.split("|")]
    kinds = ("random", "one key", "one key near", "smooth")
    assert cells[4:8] == [f"{error[kind, 'window', SHARE]:.2g}" for kind in kinds]
    assert "error at most 10% on every input: standard, flash\n" in printed
    assert "\none key near: error at most 10%: window; " in printed
    assert "\nsmooth: error at most 10%: low rank; " in printed
    assert (tmp_path / "approximate.png").stat().st_size > 5000


def test_a_length_that_blocks_do_not_divide_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--seq-len", 1000)
    assert ended.value.code == 2 and "multiples of 1024 are taken" in capsys.readouterr().err
