"""Models of transformers with this phase's attention: what they compute, learn and write."""

import contextlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from flash_attention import standard_attention
from torch._dynamo.testing import CompileCounter

try:
    import hf_attention as hf
    import transformers
    from transformers import DynamicCache, StaticCache

    transformers.logging.set_verbosity_error()
except ImportError:  # transformers is not there: only what says so is tested
    hf = None

needs_transformers = pytest.mark.skipif(not hf, reason="transformers 5.24 or newer is missing")
models = pytest.mark.parametrize("name", hf.MODELS if hf else [])


@pytest.fixture
def calls(monkeypatch):
    """What the models handed to flash_attention: the keyword arguments of each call."""
    seen, attend = [], hf.flash_attention

    def watched(*tensors, **options):
        seen.append(options)
        return attend(*tensors, **options)

    monkeypatch.setattr(hf, "flash_attention", watched)
    return seen


def trained(model, attention, inputs, counted=...):
    """Return logits and gradients of the model with this attention, from seed 0."""
    model.set_attn_implementation(attention)
    torch.manual_seed(0)
    with hf.InFloat64():
        return hf.logits_and_gradients(model, inputs, counted)


def assert_same(found, expected):
    for x, y in zip(found, expected):
        assert hf.furthest(x, y) <= hf.ALLOWED


@models
def test_a_model_computes_learns_and_writes_as_with_eager_attention(name, calls):
    *_, row = hf.compare(name)
    assert row.attention == hf.NAME and row.passed and row.parameters > 10 and calls
    assert max(row.logits, row.gradients, row.written or 0) <= 1e-10
    assert row.same_tokens in (None, "32 of 32")


@needs_transformers
def test_there_are_ten_kinds_of_models_and_more():
    assert len(hf.MODELS) >= 10


# The mask


@needs_transformers
@pytest.mark.parametrize("name, sees", [
    ("llama", [(True, None)] * 2), ("mistral", [(True, (4, 0))] * 2),
    ("qwen2_moe", [(True, (4, 0)), (True, None)]), ("gemma2", [(True, (4, 0)), (True, None)]),
    ("bert", [(False, None)] * 2), ("modernbert", [(False, None), (False, (3, 3))])])
def test_causal_and_window_are_numbers_and_the_padding_is_one_row(name, sees, calls):
    inputs, _ = hf.small_inputs(name)
    model = hf.small_model(name)
    model.set_attn_implementation(hf.NAME)
    model(**inputs)
    assert [(call["causal"], call["window"]) for call in calls] == sees
    assert {tuple(call["attn_mask"].shape) for call in calls} == {(2, 1, 1, 12)}
    calls.clear()
    model(input_ids=inputs["input_ids"])  # nothing is padded: no mask at all
    assert [(call["causal"], call["window"], call["attn_mask"]) for call in calls] == [
        (*pair, None) for pair in sees]


@needs_transformers
def test_chunks_and_packed_sequences_keep_their_masks_whole(calls):
    model, (inputs, _) = hf.small_model("llama4_text"), hf.small_inputs("llama4_text")
    model.set_attn_implementation(hf.NAME)
    model(**inputs)
    packed = {"input_ids": inputs["input_ids"], "position_ids": torch.arange(12)[None] % 7,
              "use_cache": False}
    model = hf.small_model("mistral")
    found = trained(model, hf.NAME, packed)
    assert_same(found, trained(model, "eager", packed))
    assert len(calls) == 4 and all(
        call["attn_mask"].shape[-2:] == (12, 12) and not call["causal"] for call in calls)


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_mask_of_the_callers_own_is_taken_whole(dtype):
    model, (inputs, _) = hf.small_model("mistral"), hf.small_inputs("mistral")
    kept = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.4
    kept |= torch.eye(12, dtype=torch.bool)
    added = torch.zeros(kept.shape, dtype=torch.float64).masked_fill(~kept, -1e300)
    mine = {**inputs, "attention_mask": added if dtype == torch.float64 else kept}
    expected = trained(model, "eager", {**inputs, "attention_mask": added})
    assert_same(trained(model, hf.NAME, mine), expected)


@needs_transformers
def test_a_copy_of_a_one_row_mask_is_refused():
    mask = hf.tiled_mask(1, 4, 4)
    Q = torch.randn(1, 2, 4, 8)
    hf.tiled_attention(None, Q, Q, Q, mask)
    with pytest.raises(ValueError, match=r"attention_mask must be .*, got \(1, 1, 1, 4\)"):
        hf.tiled_attention(None, Q, Q, Q, mask.clone())


@needs_transformers
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_in_two_parts_reads_its_cache(name, static):
    model, (inputs, counted) = hf.small_model(name), hf.small_inputs(name)
    found = {}
    for attention in ("eager", hf.NAME):
        model.set_attn_implementation(attention)
        cache = StaticCache(model.config, max_cache_len=20) if static else DynamicCache(
            config=model.config)
        with hf.InFloat64(), torch.no_grad():
            found[attention] = torch.cat([model(
                input_ids=inputs["input_ids"][:, part],
                attention_mask=inputs["attention_mask"][:, : part.stop],
                cache=cache).logits for part in (slice(0, 7), slice(7, 12))], 1)[counted]
    assert hf.furthest(found[hf.NAME], found["eager"]) <= hf.ALLOWED


@needs_transformers
def test_beams_are_those_of_eager():
    model, (inputs, _) = hf.small_model("mistral"), hf.small_inputs("mistral")
    found = []
    for attention in ("eager", hf.NAME):
        model.set_attn_implementation(attention)
        with hf.InFloat64():
            found.append(model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False))
    assert torch.equal(*found)


@needs_transformers
def test_steps_with_a_static_cache_compile_into_one_graph():
    model, (inputs, _) = hf.small_model("llama").float(), hf.small_inputs("llama")
    read = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    step, found, graphs = torch.empty(2, 1, 32), {}, CompileCounter()
    compiled = torch.compile(model.forward, backend=graphs, fullgraph=True)
    for attention, write in (("eager", model), (hf.NAME, compiled)):
        model.set_attn_implementation(attention)
        cache, found[attention] = StaticCache(model.config, max_cache_len=20), []
        with torch.no_grad():
            model(**inputs, cache=cache)
            for token in inputs["input_ids"].split(1, dim=1)[:3]:
                mask = hf.masks.create_causal_mask(model.config, step, read, cache)
                found[attention].append(write(token, attention_mask=mask, cache=cache).logits)
    assert graphs.frame_count == 1
    torch.testing.assert_close(found[hf.NAME], found["eager"], rtol=0, atol=1e-4)


# Training

# autograd computes a checkpoint again outside of every mode.
IN_FLOAT64 = {"use_reentrant": False,
              "context_fn": lambda: (contextlib.nullcontext(), hf.InFloat64())}
NO_DROPOUT = dict.fromkeys((
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "dropout_rate", "dropout",
    "attention_probs_dropout_prob"), 0.0)


@models
def test_gradient_checkpointing_computes_the_tiles_again_and_gives_the_same_gradients(name, calls):
    model, (inputs, counted) = hf.small_model(name, **NO_DROPOUT).train(), hf.small_inputs(name)
    expected = trained(model, "eager", inputs, counted)
    trained(model, hf.NAME, inputs, counted)
    once = len(calls)
    model.activation_checkpointing_enable(IN_FLOAT64)
    assert_same(trained(model, hf.NAME, inputs, counted), expected)
    assert len(calls) == 3 * once


@models
def test_under_autocast_the_gradients_are_as_near_to_float64_as_those_of_eager(name):
    model, (inputs, counted) = hf.small_model(name), hf.small_inputs(name)
    _, exact = trained(model, "eager", inputs, counted)
    model, errors = model.float(), []
    for attention in ("eager", hf.NAME):
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16):
            _, gradients = hf.logits_and_gradients(model, inputs, counted)
        assert gradients.keys() == exact.keys()
        errors.append(sum((gradients[k] - exact[k]).square().sum() for k in exact).sqrt())
    assert errors[1] <= 3 * errors[0]


@needs_transformers
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_dropout_is_the_same_when_it_is_computed_again(checkpointing, calls, monkeypatch):
    model, (inputs, counted) = hf.small_model("gpt2").train(), hf.small_inputs("gpt2")
    if checkpointing:
        model.activation_checkpointing_enable(IN_FLOAT64)
    found = trained(model, hf.NAME, inputs, counted)
    assert {call["dropout_p"] for call in calls} == {0.1}
    assert len({call["seed"] for call in calls}) == 2  # one a layer, the same when computed again
    monkeypatch.setattr(hf, "flash_attention", standard_attention)
    assert_same(found, trained(model, hf.NAME, inputs, counted))
    assert hf.furthest(found[0], trained(model.eval(), hf.NAME, inputs, counted)[0]) > 0.1


@needs_transformers
def test_the_peak_of_a_padded_layer_grows_with_N_and_not_with_its_square():
    short, long = ({row.attention: row for row in hf.measure_layer(N)} for N in (512, 1024))
    assert long[hf.NAME].mask == "2x1x1x1024" and long["sdpa"].mask == "2x1x1024x1024"
    growth = {name: long[name].peak_bytes / short[name].peak_bytes for name in short}
    assert growth[hf.NAME] < 2.1 and growth["sdpa"] > 3 and growth["eager"] > 3


# The command


@needs_transformers
@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_prints_and_writes_the_rows_and_fails_with_one(
        wrong, monkeypatch, capsys, tmp_path):
    if wrong:  # what loses the window is seen
        attend = hf.flash_attention
        monkeypatch.setattr(hf, "flash_attention", lambda *tensors, window, **options: attend(
            *tensors, window=None, **options))
    monkeypatch.setattr(hf, "MODELS", {"mistral": hf.MODELS["mistral"]})
    monkeypatch.setattr(hf, "measure_layer", partial(hf.measure_layer, 64))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["hf_attention.py", "--json", str(tmp_path / "rows.json")])
    assert hf.main() == wrong
    shown = capsys.readouterr().out
    assert ("FAIL" in shown) == wrong and "| tiled_lesson |" in shown
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["passed"] for row in rows if row["tool"] == "models"] == [True, not wrong]
    layers = [row["attention"] for row in rows if row["tool"] == "layer"]
    assert layers == ["eager", "sdpa", hf.NAME]


def test_without_transformers_one_line_says_what_is_missing(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('none here')")
    lesson = Path(__file__).parent.parent / "hf_attention.py"
    done = subprocess.run([sys.executable, lesson], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert "needs transformers 5.24 or newer (none here): pip install transformers" in done.stderr
