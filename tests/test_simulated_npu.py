"""The NPU path runs on simulated cards, and says what is wrong where there is none.

Simulated cards need a process of their own. Each is started once and serves many tests: the command
line, and this file as a script, which runs the checks on two cards or plays the situations.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from simulated_npu.on_cards import SURFACE, TESTS, Checks, run, skip_before_torch_2_13

checks = Checks(__file__)
PHASE = TESTS.parent / "09_flash_attention"
FLASH = [str(PHASE / "flash_attention.py"), "--seq-len", "128", "--mode"]
RUNS = {
    "situations": ([__file__, "situations"], {}),
    "npu:0": ([*FLASH, "all", "--device", "npu:0"], {"SIMULATED_NPU_CARDS": "2"}),
    "npu:1": ([*FLASH, "all", "--device", "npu:1"], {"SIMULATED_NPU_CARDS": "2"}),
    "no CANN, auto": ([*FLASH, "trace"], {"SIMULATED_NPU_BROKEN": "nocann"}),
    "no CANN, npu": ([*FLASH, "trace", "--device", "npu"], {"SIMULATED_NPU_BROKEN": "nocann"}),
    "no CANN, torch": (["-c", "import torch"], {"SIMULATED_NPU_BROKEN": "nocann"}),
}
SITUATIONS = {
    "no CANN": {"SIMULATED_NPU_BROKEN": "nocann"},
    "ImportError": {"SIMULATED_NPU_BROKEN": "importerror"},
    "OSError": {"SIMULATED_NPU_BROKEN": "oserror"},
    "RuntimeError": {"SIMULATED_NPU_BROKEN": "runtimeerror"},
    "no card": {"SIMULATED_NPU_CARDS": "0"},
    "one card": {"SIMULATED_NPU_CARDS": "1"},
    "two cards": {"SIMULATED_NPU_CARDS": "2"},
    "second of two": {"SIMULATED_NPU_CARDS": "2", "ASCEND_RT_VISIBLE_DEVICES": "1"},
    "no such card": {"SIMULATED_NPU_CARDS": "2", "ASCEND_RT_VISIBLE_DEVICES": "7"},
    "falling ids": {"SIMULATED_NPU_CARDS": "2", "ASCEND_RT_VISIBLE_DEVICES": "1,0"},
    "not an id": {"SIMULATED_NPU_CARDS": "2", "ASCEND_RT_VISIBLE_DEVICES": "none"},
}


@pytest.fixture(scope="module")
def ended():
    """ended(name): how a run of RUNS ended. All of them are under way, two at a time."""
    skip_before_torch_2_13()
    with ThreadPoolExecutor(2) as pool:
        under_way = {
            name: pool.submit(run, command, **situation)
            for name, (command, situation) in RUNS.items()
        }
        yield lambda name: under_way[name].result()


@pytest.fixture
def situations(ended):
    """{situation: what common.device.choose gave and said}."""
    run = ended("situations")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_wheel_has_every_name_that_is_called():
    assert len(SURFACE["wheels"]) == 3
    assert [name for name, entry in SURFACE["names"].items() if "missing_in" in entry] == []


def test_the_surface_is_what_all_wheels_have(tmp_path):
    view = "torch_npu/profiler/analysis/prof_view"
    old = {
        "torch_npu/__init__.py": "from torch_npu.version import __version__ as __version__",
        "torch_npu/version.py": "__version__ = '2.1.0'",
        "torch_npu/npu/__init__.py": "from .utils import synchronize\nfrom .memory import *\n"
        "def device_count(): pass",
        "torch_npu/npu/utils.py": "def synchronize(device=None): pass",
        "torch_npu/npu/memory.py": "def empty_cache(): pass\ndef memory_stats(device=None): pass",
        "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml": "  func: npu_fusion_attention("
        "Tensor query, float scale=1., *, int sync=0, str layout='') -> Tensor",
        f"{view}/_operator_view_parser.py": "class OperatorViewParser:\n OPERATOR_HEADERS = ['A']",
        f"{view}/_memory_view_parser.py": "class MemoryViewParser:\n HEADERS_OPERATOR = ['B', 'C']",
    }
    new = {
        **old,
        "torch_npu/version.py": "__version__ = '2.9.0'",
        "torch_npu/npu/__init__.py": "from .memory import *\ndef synchronize(device=None): pass",
        "torch_npu/npu/memory.py": "def empty_cache(pool=None): pass\n"
        "def memory_stats(pool=None, device=None): pass",
        "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml": "  func: npu_fusion_attention("
        "Tensor query, float scale=1., *, int sync=0, int seed=1) -> Tensor",
        f"{view}/_memory_view_parser.py": "class MemoryViewParser:\n HEADERS_OPERATOR = ['C']",
    }
    for name, files in (("old", old), ("new", new)):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)
    script = [sys.executable, str(TESTS / "torch_npu_surface.py")]
    wheels = [str(tmp_path / "old"), str(tmp_path / "new"), "--out", str(tmp_path / "out.json")]
    subprocess.run(script + wheels, check=True)
    found = json.loads((tmp_path / "out.json").read_text())
    names = found["names"]
    assert found["wheels"] == ["2.1.0", "2.9.0"]
    assert found["files"] == {"operator_details.csv": ["A"], "operator_memory.csv": ["C"]}
    assert names["torch.npu.synchronize"] == {
        "parameters": ["device=None"],
        "read_from": {"2.1.0": "torch_npu/npu/utils.py", "2.9.0": "torch_npu/npu/__init__.py"},
    }
    assert names["torch.npu.device_count"]["missing_in"] == ["2.9.0"]
    assert names["torch.npu.empty_cache"]["only_in"] == {"2.9.0": ["pool=None"]}
    assert names["torch.npu.memory_stats"]["parameters"] == ["*", "device=None"]
    fused = names["torch_npu.npu_fusion_attention"]
    assert fused["parameters"] == ["query", "scale=1.0", "*", "sync=0"]
    assert fused["only_in"] == {"2.1.0": ["layout=''"], "2.9.0": ["seed=1"]}


@pytest.mark.parametrize("device", ["npu:0", "npu:1"])
def test_every_mode_runs_on_a_card(device, ended):
    run = ended(device)
    assert run.returncode == 0, run.stdout + run.stderr
    first_line = run.stdout.splitlines()[0]
    assert device in first_line and "Ascend910B3, 64.0 GiB" in first_line
    for title in ("Trace", "Verify", "Memory", "Speed"):
        assert f"\n{title}" in run.stdout


def test_auto_goes_on_without_cann_and_says_why(ended):
    run = ended("no CANN, auto")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("device: cpu")
    assert "libhccl.so" in run.stderr and run.stderr.count("\n") == 1


def test_an_npu_that_is_asked_for_without_cann_ends_with_2_and_one_line(ended):
    run = ended("no CANN, npu")
    assert run.returncode == 2 and run.stdout == ""
    assert "libhccl.so" in run.stderr and run.stderr.count("\n") == 1


def test_without_cann_torch_itself_does_not_load(ended):
    run = ended("no CANN, torch")
    assert run.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in run.stderr


@pytest.mark.parametrize(
    ("situation", "cause"),
    [
        ("no CANN", "ImportError: libhccl.so"),
        ("ImportError", "ImportError: libtorch_npu.so: undefined symbol"),
        ("OSError", "OSError: libtorch_npu.so: undefined symbol"),
        ("RuntimeError", "RuntimeError: Two accelerators cannot be used"),
        ("no card", "is_available() is False"),
        ("no such card", "ASCEND_RT_VISIBLE_DEVICES='7'"),
        ("falling ids", "ASCEND_RT_VISIBLE_DEVICES='1,0'"),
        ("not an id", "ASCEND_RT_VISIBLE_DEVICES='none'"),
    ],
)
def test_auto_falls_back_and_npu_refuses_with_the_cause(situation, cause, situations):
    found = situations[situation]
    assert found["auto"] == "cpu"
    for message in (found["said"], found["npu"]):
        assert cause in message
        assert "torch 2." in message and "torch_npu 2.13.0" in message and "set_env.sh" in message
        assert "\n" not in message.strip()


@pytest.mark.parametrize(
    ("situation", "npu", "second"),
    [
        ("one card", "npu:0", "no device 'npu:1'"),
        ("two cards", "npu:0", "npu:1"),
        ("second of two", "npu:0", "no device 'npu:1'"),
    ],
)
def test_a_card_is_chosen_by_its_index(situation, npu, second, situations):
    found = situations[situation]
    assert found["auto"] == found["npu"] == npu and found["said"] == ""
    assert found["npu:1"].startswith(second)


# ---- In the process with two simulated cards


@checks
def a_measured_peak_is_what_the_card_counts():
    x, y = (torch.zeros(1000, device="npu:1") for _ in range(2))  # 4000 bytes: 4096
    peak = measure_peak(lambda: (x + y) * 2, torch.device("npu:1"))
    assert peak.total == 2 * 4096


@checks
def a_profile_has_the_tables_of_every_wheel():
    with tempfile.TemporaryDirectory() as folder:
        x = torch.ones(100, 100, device="npu:1")
        path, operators = profile_call(lambda: (x @ x).exp_(), x.device, folder, "product")
        (output,) = path.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT")
        for table, columns in SURFACE["files"].items():
            assert (output / table).read_text().splitlines()[0].split(",") == columns
    found = {o.name: (o.calls, o.self_ms > 0, o.self_bytes) for o in operators}
    assert found == {"aten::mm": (1, True, 40448), "aten::exp_": (1, True, 0)}


@checks
def the_peak_of_every_candidate_is_what_the_card_counted():
    card, counted, measure = simulation.cards[1], [], bench.measure_peak

    def measured(call, device):
        before = card.current
        peak = measure(call, device)
        counted.append(card.peak - before)
        return peak

    bench.measure_peak = measured
    case = flash_attention.Case(128, causal=True)
    rows = flash_attention.profile_memory([case], device=choose("npu:1"))
    bench.measure_peak = measure
    assert [row.name for row in rows] == ["standard", "flash", "fused"]
    assert [row.peak_bytes for row in rows] == counted
    assert all(row.peak_bytes > row.peak_bytes_without_result > 0 for row in rows)


@checks
def the_timed_region_works_on_the_card_alone():
    class Elsewhere(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            if not any(x.device == torch.device("npu:1") for x in tensors):
                elsewhere.append(func)
            return result

    elsewhere, timed, time_call = [], [], timing.time_call

    def watched(call, device):
        simulation.clear()
        with Elsewhere():
            seconds = time_call(call, device)
        timed.append(len(simulation.launches))
        assert {index for _, index in simulation.launches} == {1}
        return seconds

    timing.time_call, timing.MIN_ROUNDS, timing.MAX_ROUNDS = watched, 2, 2
    case = flash_attention.Case(128, causal=True)
    rows = flash_attention.benchmark_speed([case], device=choose("npu:1"))
    timing.time_call = time_call
    assert elsewhere == []
    matmul = 1  # timed in the same rounds
    assert timed == [*(row.launches for row in rows), matmul] * 3  # a warm-up and two rounds
    assert all(row.seconds > 0 for row in rows)


@checks
def the_dear_exp2_is_not_taken_on_a_card():
    case = flash_attention.Case(64, causal=True)
    simulation.clear()
    inputs = case.inputs("npu:0", 0, dO=True)
    flash_backward.candidates(case, 16, 16, "npu:0")[1].call(*inputs)
    names = {name for name, _ in simulation.launches}
    assert "aten::exp_" in names and not any("exp2" in name or "pow" in name for name in names)


@checks
def fused_attention_is_left_out_where_older_operators_are_wrong():
    def named(case):
        return [c.name for c in flash_attention.candidates(case, device="npu:0")]

    assert named(flash_attention.Case(8)) == ["standard", "flash", "fused"]
    assert named(flash_attention.Case(8, dv=32)) == ["standard", "flash"]
    with pytest.raises(ValueError, match="V must have Q's last dimension .* got 32 and 64"):
        bench_case = flash_attention.Case(8, dv=32)
        flash_attention.fused_attention(*bench_case.inputs("npu:0", 0))


@checks
def the_oracle_is_float64_and_the_card_is_asked_for_none():
    case = flash_attention.Case(32, causal=True)
    Q, K, V = case.inputs("npu:0", 0)
    [(O, _)] = exact(case, Q, K, V)
    assert O.dtype == torch.float64 and O.device.type == "cpu"
    rounded = O.float().double()
    assert (O - rounded).abs().max() > 0  # or the digits beyond float32 would be zeros


# ---- What the script does


def run_situations():
    """Return {situation: what common.device.choose gave and said}, each in a fork of its own."""
    found = {}
    for name, situation in SITUATIONS.items():
        with tempfile.TemporaryFile("w+") as answer:
            child = os.fork()
            if child == 0:
                os.environ.update(situation)
                answer.write(json.dumps(run_situation()))
                answer.flush()
                os._exit(0)
            os.waitpid(child, 0)
            answer.seek(0)
            found[name] = json.load(answer)
    return found


def run_situation():
    from common.device import DeviceError, choose

    found = {}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for name in ("auto", "npu", "npu:1"):
            try:
                found[name] = str(choose(name))
            except DeviceError as refusal:
                found[name] = str(refusal)
    return {**found, "said": said.getvalue()}


@pytest.mark.parametrize("name", checks)
def test_on_two_cards(name):
    checks.assert_held(name)


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(PHASE)]
    import contextlib
    import io

    if "situations" in sys.argv:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch  # once for all the forks

        print(json.dumps(run_situations()))
    else:
        from common.device import choose  # before torch: see there

        import flash_attention
        import flash_backward
        import torch
        from lab import bench
        from lab.judge import exact
        from common import timing
        from common.memory import measure_peak
        from common.profiling import profile_call
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves
        from torch_npu import simulation

        checks.run()
