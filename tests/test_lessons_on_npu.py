"""Every lesson runs on a simulated card, and each mode of it, on card 0 and on card 1.

Not here: what compiles or runs the Triton kernel, which no simulation serves.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LESSONS = {
    "small_attention": "",
    "safe_softmax": "",
    "flash_attention": "--mode all --seq-len 40 64",
    "fast_tiles": "--seq-len 64",
    "articles": "",
    "cross_reference": "--seq-len 32",
    "flash_variants": "--seq-len 32 --br 8 --bc 8",
    "flash_decoding": "--mode all --seq-len 96 --splits 2 3",
    "flash_pages": "--seq-len 96",
    "flash_backward": "--mode all --seq-len 32 --br 16 --bc 8",
    "roofline": "--seq-len 64",
    "generations": "--seq-len 96",
    "lazy_rescale": "",
    "approximate": "--seq-len 1024",
    "judge_kernel": "--kernel flash --quick --dtype float16",
    "mini_gpt": "--steps 3 --seq-len 16 --embd 16 --heads 2 --layers 1 --batch 2",
}
ON_THE_CPU = {"io_model", "overlap", "fp8", "hf_attention", "play", "draw"}
IN_RANKS = {"flash_ring"}  # they meet through HCCL, which no simulation has
# One child a card: it loads torch once. Two rounds are timed instead of five or more, and the
# articles' lengths and what measures the bandwidth are cut.
CHILD = """
import importlib, json, sys
sys.path[:0] = [{lessons!r}, {root!r}]
found = {{}}
for name, options in {options!r}.items():
    lesson = importlib.import_module(name)
    import common.timing, lab.machines
    common.timing.MIN_ROUNDS = common.timing.MAX_ROUNDS = 2
    lab.machines.COPIED["npu"] = 2**22
    lesson.MEMORY_N, lesson.SPEED_N = 128, 64
    sys.argv = [name + ".py", "--device", {card!r}, "--json", name + ".json", *options.split()]
    try:
        found[name] = lesson.main() or 0
    except SystemExit as ended:
        found[name] = ended.code
    except Exception as fault:
        found[name] = repr(fault)
print(json.dumps(found), file=sys.stderr)
"""

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="the simulation needs torch 2.13")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{card: (folder of the JSON files, what each lesson ended with)}; both cards side by side."""
    children, found = {}, {}
    for card in ("npu:0", "npu:1"):
        folder = tmp_path_factory.mktemp("card")
        program = CHILD.format(lessons=str(ROOT / "09_flash_attention"), root=str(ROOT),
                               options=LESSONS, card=card)
        environment = {**os.environ, "SIMULATED_NPU_CARDS": "2", "OMP_NUM_THREADS": "1",
                       "PYTHONPATH": str(ROOT / "tests" / "simulated_npu")}
        children[card] = folder, subprocess.Popen(
            [sys.executable, "-c", program], cwd=folder, env=environment, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for card, (folder, child) in children.items():
        said = child.communicate(timeout=300)[1]
        found[card] = folder, json.loads(said.splitlines()[-1]), said
    return found


@pytest.mark.parametrize("card", ["npu:0", "npu:1"])
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_on_a_card_and_names_it(lesson, card, ended):
    folder, codes, said = ended[card]
    assert codes[lesson] == 0, said
    written = json.loads((folder / f"{lesson}.json").read_text())
    assert written["device"].startswith(f"{card} (Ascend910B3") and written["rows"]
    assert "torch_npu" in written["versions"]


def test_every_lesson_is_run():
    lessons = {path.stem for path in (ROOT / "09_flash_attention").glob("*.py")
               if "cli.serve(main)" in path.read_text()}
    assert lessons == set(LESSONS) | ON_THE_CPU | IN_RANKS


@pytest.mark.parametrize("lesson", sorted(ON_THE_CPU))
def test_a_lesson_that_runs_nothing_on_a_device_takes_none(lesson):
    if lesson == "hf_attention":
        pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, ROOT / "09_flash_attention" / f"{lesson}.py", "--device",
                           "npu"], text=True, capture_output=True)
    assert done.returncode == 2 and "unrecognized arguments: --device" in done.stderr


def on_a_card(*options, **switches):
    """Run flash_attention.py on a simulated card; return how it ended."""
    tests = ROOT / "tests"
    path = f"{tests / 'simulated_npu'}:{switches.pop('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **switches}
    return subprocess.run(
        [sys.executable, ROOT / "09_flash_attention" / "flash_attention.py", "--device", "npu:0",
         *options], env=environment, text=True, capture_output=True, timeout=300)


def test_verify_on_a_card_says_that_the_triton_kernel_needs_triton_ascend():
    pytest.importorskip("triton")
    done = on_a_card("--seq-len", "32")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("triton: ")]
    assert "pip install triton-ascend==3.2.0 pybind11, and a C++ compiler" in line


@pytest.mark.parametrize("mode, names", [("verify", ["flash", "triton"]),
                                         ("memory", ["standard", "flash", "fused", "triton"])])
def test_a_kernel_that_a_card_refuses_fails_for_itself(mode, names, tmp_path):
    """The likely first run on an Ascend image with triton-ascend: its compiler takes no tile."""
    file = tmp_path / "rows.json"
    done = on_a_card("--mode", mode, "--seq-len", "32", "--json", str(file),
                     PYTHONPATH=str(ROOT / "tests" / "simulated_triton_ascend"))
    assert done.returncode == 1 and done.stderr.count("\n") <= 1, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == names
    assert all((row["why"] == "") == (row["name"] != "triton") for row in rows)
    assert "ub overflow, requires" in rows[-1]["why"] and "\n" not in rows[-1]["why"]
    assert "failed: triton 1x32x64: " in done.stdout


def test_a_card_without_memory_is_told_in_one_line_or_in_its_rows():
    done = on_a_card("--mode", "verify", "--seq-len", "64", SIMULATED_NPU_GIB="0.00005")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "no room in memory" in done.stderr
    done = on_a_card("--mode", "memory", "--seq-len", "256", SIMULATED_NPU_GIB="0.0006")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\| standard +\| 1x256x64 +\| no room", done.stdout)
    assert re.search(r"\| flash +\| 1x256x64 +\| 0\.", done.stdout)


def test_an_old_cann_whose_fused_operator_takes_no_float32_fails_that_row_alone():
    done = on_a_card("--mode", "speed", "--seq-len", "64", SIMULATED_NPU_OLD_CANN="1")
    assert done.returncode == 1 and "failed: fused 1x64x64: " in done.stdout


def test_half_types_and_windows_verify_on_a_card():
    for options in ("--dtype bfloat16 --causal", "--window 3 0", "--dtype float16 --heads 2"):
        done = on_a_card("--seq-len", "40", *options.split())
        assert done.returncode == 0 and "FAIL" not in done.stdout, done.stdout + done.stderr
