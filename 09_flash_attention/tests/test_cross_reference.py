"""cross_reference.py and articles.py: figures that hold, files that open, claims settled."""

import json
import subprocess
import sys
from pathlib import Path

import articles
import cross_reference
import pytest
import torch
from common import cli
from lab import bench
from lab.cases import Case
from cross_reference import compare_modules, time_products
from common.profiling import profile_call
from mini_gpt import ATTENTION, CausalSelfAttention

CPU = torch.device("cpu")


def test_phase_1_times_the_products_beside_the_whole():
    rows = {r.name: r for r in time_products(Case(128), CPU)}
    assert list(rows) == ["standard attention", "Q K^T", "softmax", "P V"]
    assert rows["standard attention"].share == 1 and rows["softmax"].tflops is None
    product = rows["Q K^T"]
    assert product.tflops == pytest.approx(2 * 128 * 128 * 64 / product.seconds / 1e12)


def test_phase_7_leaves_a_trace_and_counts_operators_and_bytes(tmp_path):
    x = torch.empty(64, 64)

    def call():
        for _ in range(3):
            torch.mm(x, x)

    path, operators = profile_call(call, CPU, tmp_path, "product")
    assert path == tmp_path / "product.json" and list(tmp_path.iterdir()) == [path]
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(e.get("name") == "aten::mm" for e in events) == 3
    (product,) = (o for o in operators if o.name == "aten::mm")
    assert (product.calls, product.self_bytes) == (3, 3 * 64 * 64 * 4)
    assert [o.self_ms for o in operators] == sorted((o.self_ms for o in operators), reverse=True)


def test_phase_8_gives_the_same_output_by_each_name():
    rows = compare_modules(96, CPU, n_embd=48, n_head=3)
    assert [r.name for r in rows] == ["standard", "flash", "fused"]
    assert rows[0].max_diff == 0
    assert all(0 <= r.max_diff < 1e-6 for r in rows)


@pytest.mark.parametrize("name", list(ATTENTION))
def test_phase_8_is_causal(name, interpreted):
    if name == "triton":
        pytest.importorskip("flash_triton")
    torch.manual_seed(0)
    module = CausalSelfAttention(12, 3, name)
    x = torch.randn(2, 7, 12)
    changed = x.clone()
    changed[:, 5:] += 1
    with torch.no_grad():
        same = (module(x) - module(changed)).abs().amax((0, 2)) < 1e-6
    assert same.tolist() == [True] * 5 + [False] * 2


def test_phase_8_refuses_an_unknown_attention_and_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="standard, flash, fused, triton, got 'fast'"):
        CausalSelfAttention(12, 3, "fast")
    with pytest.raises(ValueError, match="n_head must divide n_embd, got 5 and 12"):
        CausalSelfAttention(12, 5)


def test_all_phases_run_from_the_command_line(tmp_path):
    done = subprocess.run(
        [sys.executable, cross_reference.__file__, "--device", "cpu", "--seq-len", "64",
         "--traces", "t", "--json", "rows.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"Phase {n}" in done.stdout for n in (1, 7, 8))
    tools = {row["tool"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert tools == {"phase 1", "phase 7", "phase 8"}
    names = sorted(p.name for p in (tmp_path / "t").iterdir())
    assert names == ["flash_1x64x64.json", "standard_1x64x64.json"]


@pytest.mark.parametrize("phase", [1, 8])
def test_a_length_without_room_is_one_line_and_exit_2(phase, monkeypatch, capsys):
    monkeypatch.setattr(bench, "free_bytes", lambda device: 2**20)
    monkeypatch.setattr(sys, "argv", ["cross_reference.py", "--phase", str(phase), "--device",
                                      "cpu", "--seq-len", "512"])
    with pytest.raises(SystemExit) as ended:
        cli.serve(cross_reference.main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and f"phase {phase}" in said


def test_traces_that_can_not_be_written_are_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cross_reference.py", "--traces", "/proc/traces"])
    with pytest.raises(SystemExit) as ended:
        cli.serve(cross_reference.main)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and "argument --traces: " in said.err


def test_float16_where_torch_has_no_product_of_it_is_one_line_and_exit_2(monkeypatch, capsys):
    monkeypatch.setattr(cross_reference, "NO_HALF_PRODUCT", True)
    monkeypatch.setattr(sys, "argv", ["cross_reference.py", "--device", "cpu", "--seq-len", "8",
                                      "--dtype", "float16"])
    with pytest.raises(SystemExit) as ended:
        cli.serve(cross_reference.main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and "take bfloat16" in said


def test_json_of_every_phase_is_strict(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["cross_reference.py", "--phase", "1", "--seq-len", "64",
                                      "--device", "cpu", "--json", str(file)])
    assert cross_reference.main() == 0
    rows = json.loads(file.read_text(), parse_constant=pytest.fail)["rows"]
    assert [row["tflops"] is None for row in rows] == [False, False, True, False]


def test_the_claims_that_arithmetic_settles():
    found = articles.computed() + articles.traffic() + articles.generations()
    here = {claim.claim: claim.here for claim in found}
    assert here["traffic, n=1024"] == "26.0 MB"  # 25 without n d, and in the article
    assert here["traffic, n=64K"] == "103 GB = 96 GiB"
    assert here["time to move it at 2 TB/s"] == "51.6 ms"
    assert here["arithmetic at 312 TFLOP/s"] == "3.5 ms"
    assert here["the saving tends to N^2/(Br Bc)"] == "129 at N=4096, d=64"
    assert here["Q, K, V read once, O written once"] == "Q, O 1, 1; K, V 8 times"
    assert here["S and P are not written back"] == "0 bytes"
    assert here["m, l and O of a block"] == "16.9 KB"  # 64 x 64 + 2 x 64 numbers
    assert here["FA3 on an H100, float16"] == "75%"
    assert here["a larger N brings it nearer"] == "from 3.1% of it to 0.8%"
    assert here["P written over S, at N=4096"] == "64 MiB"
    assert here["standard on a 910B3, N=2048"] == "above 0.043 ms"
    assert here["d = 64 is all heads together"] == "202 MB with 8 heads"
    assert here["arithmetic, flash against standard"].startswith("1.00 x and 1.2")
    assert here["warps meet in shared memory"] == "133 KB a tile, FA2 0"


def test_softmax_j_must_be_the_numerator():
    literal, numerator = articles.softmax_j_errors()
    assert literal > 0.1 and numerator < 1e-15


def test_scores_without_their_scale_are_wrong_unless_d_is_1():
    assert articles.unscaled_error(64) > 0.5 and articles.unscaled_error(1) == 0


def test_the_articles_have_a_command():
    assert Path(articles.__file__).name == "articles.py"
    done = subprocess.run([sys.executable, articles.__file__, "--br", "8"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 2 and "--br" in done.stderr  # it takes no option that it ignores
