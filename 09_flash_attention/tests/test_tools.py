"""What a reader reads: the rows, tables, JSON, plots and exit status of flash_attention.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import flash_attention
import pytest
import torch
from lab.cases import ARTICLE_CASES, VERIFY_CASES, Case
from flash_attention import benchmark_speed, compare_and_verify, profile_memory, trace
from lab import bench
from lab.visible import DTYPES, Visible

SCRIPT = Path(flash_attention.__file__)


def run(*arguments, cwd=SCRIPT.parent.parent):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


# verify


def test_flash_is_within_1e6_of_standard_on_the_articles_shapes():
    rows = compare_and_verify(ARTICLE_CASES)
    assert [r.shape for r in rows] == ["1x256x64", "1x512x64", "1x1024x64", "4x512x64"]
    assert all(r.passed and 0 < r.max_diff < 1e-6 for r in rows)


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (20, 3)}])
def test_every_case_of_the_list_passes(masks):
    assert {c.dtype for c in VERIFY_CASES} == set(DTYPES)
    rows = compare_and_verify([replace(case, **masks) for case in VERIFY_CASES], 128, 128)
    assert all(r.passed for r in rows), rows


def test_a_wrong_forward_fails_verify_and_its_exit_status_is_1(monkeypatch, capsys):
    right = flash_attention.exp_
    monkeypatch.setattr(flash_attention, "exp_", lambda x: right(x).add_(1e-3))
    assert not all(r.passed for r in compare_and_verify(ARTICLE_CASES))
    monkeypatch.setattr(sys, "argv", ["flash_attention.py", "--seq-len", "64", "--device", "cpu"])
    assert flash_attention.main() == 1
    assert "FAIL" in capsys.readouterr().out


# memory


def test_memory_at_4096_is_the_articles_130_to_1():
    standard, flash, _ = profile_memory([Case(4096)])
    assert standard.peak_bytes == 129 * 2**20  # S and P of 64 MiB each, the result of 1 MiB
    assert standard.peak_bytes >= 115 * flash.peak_bytes
    assert standard.peak_bytes_without_result >= 1000 * flash.peak_bytes_without_result


@pytest.mark.parametrize("case", [
    Case(300), Case(256, heads=4, kv_heads=2), Case(200, dv=32, causal=True),
    Case(256, dtype=torch.float64)])
def test_memory_of_float32_and_float64_is_what_the_formula_counts(case):
    standard, flash, fused = profile_memory([case], 64, 32)
    assert flash.peak_bytes == flash.theory_bytes
    assert standard.peak_bytes == standard.theory_bytes
    result = case.shapes[0][-2] * case.shapes[2][-1] * (case.heads or 1) * case.dtype.itemsize
    assert flash.peak_bytes - flash.peak_bytes_without_result == result
    assert fused.theory_bytes < flash.theory_bytes < standard.theory_bytes


def test_memory_is_the_same_twice_and_beside_a_large_tensor():
    first = profile_memory([Case(256)])
    large = torch.ones(2**24)
    assert profile_memory([Case(256)]) == first
    del large


def test_a_broadcast_mask_is_not_expanded():
    from common.memory import measure_peak
    N = 1024
    Q, K, V = (x.unsqueeze(1) for x in Case(N).inputs("cpu", 0))
    mask = torch.ones(1, 1, 1, N, dtype=torch.bool)
    peak = measure_peak(lambda: flash_attention.flash_attention_forward(Q, K, V, attn_mask=mask),
                        torch.device("cpu"))
    assert peak.without_result < N * N / 4  # a quarter of the smallest N x N mask


def test_a_problem_too_large_for_the_memory_is_shown_and_not_run(monkeypatch):
    monkeypatch.setattr(bench, "free_bytes", lambda device: 2**21)
    standard, flash, fused = profile_memory([Case(512)], 256, 256)
    assert standard.peak_bytes is None and standard.theory_bytes > 2**21
    assert standard.why == "no room" and not standard.failed
    assert flash.peak_bytes and fused.peak_bytes
    standard, flash, fused = benchmark_speed([Case(512)])
    assert standard.seconds is None and flash.seconds > 0 and flash.ratio_to_standard is None


# speed


def test_speed_rows_count_kept_pairs_and_launches():
    rows = {r.name: r for r in benchmark_speed([Case(256, causal=True)])}
    kept = torch.ones(256, 256).tril().sum().item()
    for r in rows.values():
        assert r.tflops == pytest.approx(4 * 64 * kept / r.seconds / 1e12, rel=1e-6)
    assert rows["standard"].ratio_to_standard == 1
    assert rows["fused"].launches == 1 and 100 < rows["flash"].launches < 300
    assert (rows["flash"].Br, rows["flash"].Bc, rows["fused"].Br) == (64, 64, None)


@pytest.mark.parametrize("case", [
    Case(5, Nk=9, causal=True), Case(9, Nk=5, causal=True), Case(9, window=(2, 0)),
    Case(7, Nk=4, window=(None, 1)), Case(6)])
def test_kept_pairs_are_those_of_a_mask(case):
    Q, K, V = case.inputs("cpu", 0)
    scores = flash_attention.standard_attention(Q, torch.zeros_like(K), V, return_lse=True,
                                                **case.masks)[1].exp()  # the sum of ones
    assert Visible(Q, K, V, **case.masks).kept_pairs() == round(scores.sum().item())


def test_a_candidate_that_disagrees_is_not_timed(monkeypatch):
    monkeypatch.setattr(flash_attention, "fused_attention", lambda Q, K, V, **masks: V)
    standard, flash, fused = benchmark_speed([Case(64)])
    assert "differs from standard attention" in fused.why and fused.failed
    assert fused.seconds is None and flash.seconds and not flash.failed


# trace


def test_trace_shows_the_articles_numbers():
    steps, P = trace(torch.ones(1, 1), torch.tensor([[2.0], [1.0], [3.0]]), torch.eye(3), 1, 1,
                     scale=1.0)
    assert [round(s.l, 3) for s in steps] == [1, 1.368, 1.503]
    assert [s.m for s in steps] == [2, 2, 3]
    assert [round(s.correction, 3) for s in steps] == [0, 1, 0.368]
    assert [round(p, 3) for p in P[0].tolist()] == [0.245, 0.090, 0.665]


def test_trace_visits_the_tiles_that_are_drawn():
    shown = run("--mode", "trace", "--causal", "--device", "cpu").stdout
    assert "/ . .\n# / .\n# # /" in shown
    assert "0.245, 0.090, 0.665" in shown


def test_trace_serves_the_options_that_shape_it(monkeypatch, capsys):
    options = ("--mode trace --seq-len 5 8 --head-dim 3 --br 3 --bc auto --window 1 0 "
               "--dtype float64")
    monkeypatch.setattr(sys, "argv", ["flash_attention.py", *options.split()])
    assert flash_attention.main() == 0
    out = capsys.readouterr().out
    assert "5 queries, 5 keys, d = 3, 3x5 tiles" in out and "8 queries, 8 keys" in out
    assert re.search(r"largest difference .*e-1[5-9]", out)


# The command line


def test_all_modes_print_tables_and_leave_json_and_plots(tmp_path):
    done = run("--mode", "all", "--seq-len", "64", "128", "--device", "cpu", "--br", "32",
               "--json", tmp_path / "out" / "rows.json", "--plot", tmp_path / "plots", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # progress stays quiet in a pipe
    for title in ("Trace:", "Verify:", "Memory:", "Speed:"):
        assert title in done.stdout
    found = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert found["device"].startswith("cpu (") and found["versions"]["torch"] == torch.__version__
    fields = {tool: set() for tool in ("trace", "verify", "memory", "speed")}
    for row in found["rows"]:
        fields[row.pop("tool")] |= set(row)
    assert fields["verify"] == {"shape", "dtype", "causal", "max_diff", "error_flash",
                                "error_standard", "passed", "name", "why"}
    assert fields["memory"] == {"name", "shape", "peak_bytes", "peak_bytes_without_result",
                                "theory_bytes", "why", "failed"}
    assert fields["speed"] == {"name", "shape", "Br", "Bc", "seconds", "ratio_to_standard",
                               "ratio_spread", "tflops", "matmul_share", "launches",
                               "gb_per_s", "why", "failed"}
    assert "power of: standard - (" in done.stdout  # two lengths carry no exponent
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["memory.png", "speed.png"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rows.json"]


def test_options_shape_the_cases(monkeypatch, capsys):
    options = ("--seq-len 40 --batch 2 --heads 4 --kv-heads 2 --head-dim 24 --dtype bfloat16 "
               "--window 9 none --causal --device cpu")
    monkeypatch.setattr(sys, "argv", ["flash_attention.py", *options.split()])
    assert flash_attention.main() == 0
    shown = capsys.readouterr().out
    assert re.search(r"2x4x40x24 2x2x40x24 2x2x40x24 \| +bfloat16 .* pass", shown)


def test_a_plot_without_matplotlib_is_refused_before_any_work(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["flash_attention.py", "--mode", "speed", "--plot", "figures"])
    with pytest.raises(SystemExit) as ended:
        flash_attention.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and "pip install matplotlib" in said.err


def test_it_runs_from_its_own_folder():
    done = subprocess.run([sys.executable, "flash_attention.py", "--seq-len", "16"],
                          cwd=SCRIPT.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "pass" in done.stdout


@pytest.mark.parametrize("arguments, words", [
    (["--br", "0"], ["--br", "from 1", "'0'"]),
    (["--seed", "9" * 25], ["--seed", "9" * 25]),
    (["--seq-len", "9" * 20], ["--seq-len"]),
    (["--batch", "2000000000", "--heads", "50"], ["GiB"]),
    (["--seq-len", "300000"], ["300000", "GiB"]),
    (["--json", "/tmp"], ["--json", "/tmp"]),
    (["--bc", "x"], ["--bc", "'x'"]),
    (["--seq-len", "-5"], ["--seq-len", "'-5'"]),
    (["--dtype", "int8"], ["--dtype", "int8", "float32"]),
    (["--mode", "fly"], ["--mode", "fly", "verify"]),
    (["--heads", "4", "--kv-heads", "3"], ["--kv-heads", "3 of 4"]),
    (["--kv-heads", "2"], ["--kv-heads", "2 of None"]),
    (["--window", "1"], ["--window"]),
    (["--window", "1", "-1"], ["--window", "-1"]),
    (["--device", "npu"], ["npu", "torch_npu"]),
    (["--device", "npu:1"], ["npu:1", "torch_npu"]),
    (["--device", "cuda"], ["cuda", "GPU"]),
    (["--device", "tpu"], ["tpu", "npu"]),
    (["--json", "/dev/null/x.json", "--seq-len", "8"], ["/dev/null"]),
    (["--plot", "figures"], ["--plot", "memory and speed", "verify"]),
    (["--mode", "trace", "--heads", "2"], ["--heads", "trace"]),
])
def test_what_cannot_be_served_is_one_line_and_exit_2(arguments, words, monkeypatch, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["flash_attention.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        flash_attention.cli.serve(flash_attention.main)
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(shown.splitlines()) == 1 and all(word in shown for word in words), shown


def test_a_refused_call_ends_the_process_with_2_and_no_traceback():
    done = run("--device", "npu")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize("after", [0.3, 4])
def test_ctrl_c_ends_at_once_without_a_traceback(after):
    child = subprocess.Popen([sys.executable, str(SCRIPT), "--mode", "speed", "--seq-len", "4096"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONUNBUFFERED": "1"})
    time.sleep(after)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    assert child.returncode in (-signal.SIGINT, 130)
    assert stderr == ""
