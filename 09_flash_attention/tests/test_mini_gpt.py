"""The small GPT: both attentions learn alike, a run can stop and go on, the KV cache is exact."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mini_gpt
import pytest
import torch
from common import cli
from mini_gpt import MiniGPT, Training, compare, generate, measure_steps, train

TEXT = mini_gpt.TEXT.read_text()
SMALL = {"N": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
PROGRAM = Path(mini_gpt.__file__)
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


def test_curves_that_part_do_not_pass():
    training = Training(TEXT, SMALL)
    training.losses = {"standard": [4.0, 3.0, 2.0], "flash": [4.0, 3.002, 2.0]}
    standard, flash = compare(training, {"standard": 1, "flash": 1})
    assert flash.max_diff == pytest.approx(0.002) and not flash.passed and standard.passed


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


# Stopping and going on


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path):
    whole = Training(TEXT, SMALL)
    assert train(whole, 8)
    train(Training(TEXT, SMALL), 5, tmp_path / "five.pt")
    resumed = Training(TEXT, SMALL)
    resumed.load(tmp_path / "five.pt")
    assert resumed.steps == 5 and train(resumed, 8)
    assert resumed.losses == whole.losses
    for name, model in whole.models.items():
        again = resumed.models[name].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in model.state_dict().items())


def test_a_checkpoint_is_saved_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(mini_gpt, "SAVE_EVERY", 2)
    saved = []
    monkeypatch.setattr(Training, "save", lambda self, path: saved.append(self.steps))
    train(Training(TEXT, SMALL), 5, tmp_path / "x.pt")
    assert saved == [2, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": {**SMALL, "n_layer": 1}},
        {"text": TEXT + "."},
        {"attention": ["flash"]},
        {"batch": 3},
        {"seed": 1},
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change):
    Training(TEXT, SMALL).save(tmp_path / "run.pt")
    other = Training(**{"text": TEXT, "shape": SMALL, **change})
    (name,) = set(change) - {"shape"} or {"n_layer"}
    with pytest.raises(ValueError, match=f"of a run with {name} "):
        other.load(tmp_path / "run.pt")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\3\4", "other"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "run.pt"
    if content == "other":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="is no checkpoint"):
        Training(TEXT, SMALL).load(path)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--heads", "3"], "n_head must divide n_embd"),
        (["--seq-len", "20000"], "longer than N 20000"),
        (["--text", "no/such/file"], "No such file"),
        (["--checkpoint", __file__], "is no checkpoint"),
    ],
)
def test_what_can_not_be_served_ends_with_one_line_and_2(monkeypatch, capsys, options, words):
    monkeypatch.setattr(sys, "argv", ["mini_gpt.py", *SMALL_RUN, *options])
    with pytest.raises(SystemExit) as ended:
        cli.serve(mini_gpt.main)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and len(shown.splitlines()) == 1 and words in shown


def test_ctrl_c_leaves_a_checkpoint_and_the_table_so_far(tmp_path):
    path = tmp_path / "run.pt"
    run = [sys.executable, PROGRAM, *SMALL_RUN, "--steps", "1000000", "--checkpoint", path]
    child = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("training"):
            break
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err == ""
    assert "| flash " in out
    found = torch.load(path, weights_only=True)
    assert 0 < len(found["losses"]["flash"]) == len(found["losses"]["standard"]) < 1000000
    assert os.listdir(tmp_path) == ["run.pt"]


# Wrong input, and the command line


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


def test_a_run_begun_on_a_simulated_npu_goes_on_on_the_cpu(tmp_path):
    pytest.importorskip("torch", "2.13")  # what the simulation is built on
    script = (
        "import sys; from mini_gpt import TEXT, Training, choose, train;"
        "run = Training(TEXT.read_text(), eval(sys.argv[1]), batch=2, device=choose('npu'));"
        "train(run, 3, sys.argv[2])"
    )
    paths = [str(PROGRAM.parent), str(PROGRAM.parent.parent / "tests" / "simulated_npu")]
    on_npu = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    path = tmp_path / "run.pt"
    subprocess.run([sys.executable, "-c", script, str(SMALL), path], env=on_npu, check=True)
    resumed, whole = (Training(TEXT, SMALL, batch=2) for _ in range(2))
    resumed.load(path)
    assert resumed.steps == 3 and train(resumed, 5) and train(whole, 5)
    assert resumed.losses["flash"] == pytest.approx(whole.losses["flash"], abs=1e-5)
