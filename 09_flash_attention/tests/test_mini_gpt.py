"""The small GPT: both attentions learn alike, the KV cache is exact."""

import json
import sys
import warnings
from types import SimpleNamespace

import mini_gpt
import pytest
import torch
from common import cli
from cross_reference import compare_modules
from mini_gpt import MiniGPT, Training, compare, generate, measure_steps, train

TEXT = mini_gpt.TEXT.read_text()
SMALL = {"N": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
SMALL_RUN = ["--seq-len", "16", "--layers", "1", "--heads", "2", "--embd", "16", "--batch", "2"]


def model_of(seed=0, **shape):
    torch.manual_seed(seed)
    return MiniGPT(50, **{**SMALL, **shape})


def test_both_attentions_learn_alike_and_the_loss_falls():
    training = Training(TEXT, {**SMALL, "N": 80}, batch=8)  # 80: tiles of 64 and of 16
    train(training, 30)
    standard, flash = compare(training, measure_steps(Training(TEXT, {**SMALL, "N": 80})))
    assert standard.max_diff == 0 and 0 < flash.max_diff < 1e-4 and flash.passed
    assert flash.steps == len(flash.losses) == 30
    assert sum(flash.losses[-5:]) / 5 < flash.losses[0] - 0.5


def test_the_triton_kernels_train_it_as_standard_attention_does(interpreted):
    pytest.importorskip("triton")
    training = Training(TEXT, {**SMALL, "n_layer": 1}, ("standard", "triton"), batch=2)
    train(training, 4)
    standard, kernels = compare(training, {"standard": 1, "triton": 1})
    assert 0 < kernels.max_diff < 1e-5 and kernels.losses[-1] < kernels.losses[0] - 0.05


def test_curves_that_part_do_not_pass():
    training = Training(TEXT, SMALL)
    training.losses = {"standard": [4.0, 3.0, 2.0], "flash": [4.0, 3.002, 2.0]}
    standard, flash = compare(training, {"standard": 1, "flash": 1})
    assert flash.max_diff == pytest.approx(0.002) and not flash.passed and standard.passed


def test_a_loss_that_is_nan_does_not_pass():
    training = Training(TEXT, SMALL)
    training.losses = {"standard": [4.0, 3.0], "flash": [4.0, float("nan")]}
    assert not compare(training, {"standard": 1, "flash": 1})[1].passed


def test_a_step_with_flash_holds_less():
    peaks = measure_steps(Training(TEXT, {**SMALL, "N": 256}, batch=4))
    P_bytes = 4 * SMALL["n_head"] * 256 * 256 * 4  # of one layer
    assert peaks["standard"] - peaks["flash"] > P_bytes


def test_a_model_reads_nothing_that_comes_later():
    model, tokens = model_of(), torch.arange(20).view(1, 20)
    changed = tokens.clone()
    changed[0, 10:] += 7
    same = torch.isclose(model(tokens), model(changed), rtol=0, atol=1e-6).all(-1)[0]
    assert same[:10].all() and not same[10:].any()


def test_batches_are_pieces_of_the_text_and_their_next_letters():
    training = Training(TEXT, SMALL)
    x, y = training.next_batch()
    assert x.shape == y.shape == (8, 32) and torch.equal(x[:, 1:], y[:, :-1])
    assert all(training.decode(torch.cat([a, b[-1:]])) in TEXT for a, b in zip(x, y))


# Writing


@pytest.mark.parametrize("attention", ["standard", "flash"])
@pytest.mark.parametrize("count", [10, 29, 30, 31, 100])  # the context of 32 fills at 30
def test_the_cache_gives_the_same_letters(attention, count):
    model = model_of(attention=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # logits far enough apart that the context tells
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    cached, plain = (generate(model, prompt, count, cached=c) for c in (True, False))
    assert cached.shape == (2, 3 + count) and torch.equal(cached[:, :3], prompt)
    assert torch.equal(cached, plain)


def test_the_cache_gives_the_same_logits():
    model, tokens = model_of(), torch.arange(32).view(1, 32)
    caches = model.new_caches(1)
    pieces = [model(piece, caches) for piece in tokens.split([5, 1, 1, 20, 5], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=0, atol=1e-6)


def test_with_the_cache_one_letter_is_read_a_step():
    model, read = model_of(), []
    model.wte.register_forward_hook(lambda module, args, out: read.append(args[0].shape[1]))
    generate(model, torch.tensor([[1, 2, 3]]), 31)
    assert read == [3] + [1] * 29 + [16]  # full: the later half of the context is read again


# Wrong input, and the command line


@pytest.mark.parametrize(
    "options, words",
    [
        (["--heads", "3"], "n_head must divide n_embd"),
        (["--seq-len", "20000"], "longer than N 20000"),
        (["--text", "no/such/file"], "No such file"),
        (["--embd", "100000", "--heads", "1"], "no room in memory"),
        (["--seq-len", "10000", "--batch", "64"], "a step with standard attention needs"),
        (["--attention", "triton"], "attention triton on cpu: no Triton here"),
    ],
)
def test_what_can_not_be_served_ends_with_one_line_and_2(monkeypatch, capsys, options, words):
    kernels = SimpleNamespace(unserved=lambda device: "no Triton here")
    monkeypatch.setitem(sys.modules, "flash_triton", kernels)
    monkeypatch.setattr(sys, "argv", ["mini_gpt.py", *SMALL_RUN, *options])
    with pytest.raises(SystemExit) as ended:
        cli.serve(mini_gpt.main)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and len(shown.splitlines()) == 1 and words in shown


def test_it_generates_in_bfloat16_with_its_cache():
    model, prompt = model_of().to(torch.bfloat16), torch.tensor([[1, 2, 3]])
    assert generate(model, prompt, 40).shape == (1, 43)


def test_more_tokens_than_the_context_are_refused_by_name():
    model = model_of()
    with pytest.raises(ValueError, match="tokens must be at most N 32, got 33"):
        model(torch.zeros(1, 33, dtype=torch.long))
    caches = model.new_caches(1)
    model(torch.zeros(1, 32, dtype=torch.long), caches)
    with pytest.raises(ValueError, match="at most N 32, got 33"):
        model(torch.zeros(1, 1, dtype=torch.long), caches)


def test_the_callers_random_state_stays_as_it_is():
    before = torch.get_rng_state()
    Training(TEXT, SMALL)
    compare_modules(8, torch.device("cpu"), n_embd=12, n_head=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("text", [" " * 100, "\n \t" * 30, "x" * 100, "no" * 50, "汉字" * 40])
def test_any_text_trains_and_samples(text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib.figure")  # its own warnings as it loads are not ours
    file = tmp_path / "text"
    file.write_text(text, encoding="utf-8")
    options = [*SMALL_RUN, "--steps", "3", "--text", str(file), "--plot", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["mini_gpt.py", *options])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # what a reader would see
        assert mini_gpt.main() == 0
    assert "the same text" in capsys.readouterr().out


def test_a_text_in_gbk_is_refused_and_not_turned_into_other_letters(tmp_path, monkeypatch, capsys):
    file = tmp_path / "text"
    file.write_bytes(("注意力" * 50).encode("gbk"))
    monkeypatch.setattr(sys, "argv", ["mini_gpt.py", *SMALL_RUN, "--text", str(file)])
    with pytest.raises(SystemExit) as ended:
        cli.serve(mini_gpt.main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and "UTF-8 is read" in said


def test_wrong_input_raises_and_names_what_was_given():
    with pytest.raises(ValueError, match="attention must be .* got 'fast'"):
        model_of(attention="fast")
    with pytest.raises(ValueError, match="n_head must divide n_embd, got 3 and 32"):
        model_of(n_head=3)
    with pytest.raises(ValueError, match="text must be longer than N 32, got 5 letters"):
        Training("short", SMALL)


def test_the_command_trains_draws_and_writes(tmp_path, monkeypatch, capsys):
    files = ["--plot", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["mini_gpt.py", *SMALL_RUN, "--steps", "3", *files])
    assert mini_gpt.main() == 0
    shown = capsys.readouterr().out
    assert "Apache" in shown and "the same text" in shown
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["name"], len(row["losses"])) for row in rows] == [("standard", 3), ("flash", 3)]
    assert all(row["peak_bytes"] > 0 and row["passed"] for row in rows)
    assert (tmp_path / "loss.png").stat().st_size
