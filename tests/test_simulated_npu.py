"""The simulated NPU offers what every torch_npu does, refuses and counts as a card does, and the
NPU path runs on it.

Simulated cards need a process of their own. Each is started once and serves many tests: the command
line, and this file as a script, which runs the checks on two cards or plays the situations.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PHASE = TESTS.parent / "09_flash_attention"
SURFACE = json.loads((TESTS / "torch_npu_surface.json").read_text())
FLASH = [str(PHASE / "flash_attention.py"), "--seq-len", "128", "--mode"]
RUNS = {
    "checks": ([__file__, "checks"], {"SIMULATED_NPU_CARDS": "2"}),
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
CHECKS = {}


def check(function):
    """Mark what runs in the process with two simulated cards."""
    CHECKS[function.__name__] = function
    return function


# ---- On the side of pytest


@pytest.fixture(scope="module")
def ended():
    """ended(name): how a run of RUNS ended. All of them are under way, two at a time."""
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 13):
        pytest.skip("the simulation is built on the Python backend of torch 2.13")
    settings = {"SIMULATED_NPU_CARDS", "SIMULATED_NPU_BROKEN", "ASCEND_RT_VISIBLE_DEVICES"}
    settings.add("TORCH_DEVICE_BACKEND_AUTOLOAD")
    clean = {name: value for name, value in os.environ.items() if name not in settings}
    clean["PYTHONPATH"] = str(TESTS / "simulated_npu")
    clean["OMP_NUM_THREADS"] = "1"  # two run at a time, and threads that wait would take the cores

    def run(command, situation):
        environment = {**clean, **situation}
        command = [sys.executable, *command]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(2) as pool:
        under_way = {name: pool.submit(run, *parts) for name, parts in RUNS.items()}
        yield lambda name: under_way[name].result()


@pytest.fixture
def told(ended):
    """told(name): what a run of this file as a script printed."""

    def read(name):
        run = ended(name)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    return read


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
    script = [sys.executable, str(TESTS.parent / "scripts" / "torch_npu_surface.py")]
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
def test_auto_falls_back_and_npu_refuses_with_the_cause(situation, cause, told):
    found = told("situations")[situation]
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
def test_a_card_is_chosen_by_its_index(situation, npu, second, told):
    found = told("situations")[situation]
    assert found["auto"] == found["npu"] == npu and found["said"] == ""
    assert found["npu:1"].startswith(second)


# ---- In the process with two simulated cards


@check
def it_offers_the_names_and_parameters_that_every_wheel_has():
    offered = {"torch_npu.__version__": torch_npu.__version__}
    owners = {"torch.npu": torch.npu, "torch_npu.profiler": torch_npu.profiler}
    owners |= {"torch.npu.Event": torch.npu.Event}
    owners |= {"torch_npu.profiler.profile": torch_npu.profiler.profile}
    for owner, thing in owners.items():
        for name, member in vars(thing).items():
            if callable(member) and not name.startswith("_"):
                if member.__module__ in ("torch_npu.npu", "torch_npu.profiler"):
                    offered[f"{owner}.{name}"] = member
    for name in torch_npu.__all__:
        if not inspect.ismodule(getattr(torch_npu, name)):
            offered[f"torch_npu.{name}"] = getattr(torch_npu, name)
    for member in offered.pop("torch_npu.profiler.ProfilerActivity"):
        offered[f"torch_npu.profiler.ProfilerActivity.{member.name}"] = member
    assert set(offered) == set(SURFACE["names"]), set(offered) ^ set(SURFACE["names"])
    for name, member in offered.items():
        positional, keywords = _parameters(member)
        every = SURFACE["names"][name]["parameters"]
        in_order = every[: every.index("*")] if "*" in every else every
        assert positional == in_order[: len(positional)], name
        assert set(keywords) <= set(every), name


def _parameters(member):
    if hasattr(member, "default"):  # an operator
        arguments = member.default._schema.arguments
        found = [(a.name, a.has_default_value(), a.default_value, a.kwarg_only) for a in arguments]
    elif callable(member):
        parameters = inspect.signature(member).parameters.values()
        found = [
            (p.name, p.default is not p.empty, p.default, p.kind is p.KEYWORD_ONLY)
            for p in parameters
            if p.name != "self"
        ]
    else:
        found = []
    shown = [(f"{n}={default!r}" if has else n, keyword) for n, has, default, keyword in found]
    return [p for p, keyword in shown if not keyword], [p for p, keyword in shown if keyword]


@check
def an_argument_that_a_wheel_lacks_is_refused():
    x = torch.ones(1, 1, 2, 8, device="npu:0")
    with pytest.raises(RuntimeError, match="softmax_layout"):
        torch_npu.npu_fusion_attention(x, x, x, 1, "BNSD", softmax_layout="TND")


@check
def memory_counts_live_storages_with_the_allocators_rounding():
    before = torch.npu.memory_allocated("npu:1"), torch.npu.memory_allocated("npu:0")
    x = torch.empty(120, device="npu:1")  # 480 bytes and 32 are one block of 512
    y = torch.empty(121, device="npu:1")  # 484 bytes and 32 are two
    view = y[3:].view(2, 59)
    assert torch.npu.memory_allocated("npu:1") - before[0] == 512 + 1024
    del y
    assert torch.npu.memory_allocated("npu:1") - before[0] == 512 + 1024
    del view
    assert torch.npu.memory_allocated("npu:1") - before[0] == 512
    del x
    assert torch.npu.memory_allocated("npu:1") == before[0]
    assert torch.npu.memory_allocated("npu:0") == before[1]


@check
def the_peak_is_the_highest_moment_since_it_was_reset():
    x = torch.zeros(100000, device="npu:1")
    x = torch.zeros(1000, device="npu:1")  # 4000 bytes: 4096
    before = torch.npu.memory_allocated("npu:1")
    assert torch.npu.max_memory_allocated("npu:1") > before + 400000
    torch.npu.reset_peak_memory_stats("npu:1")
    assert torch.npu.max_memory_allocated("npu:1") == before
    y = (x + 1) * 2
    torch.zeros(1, device="npu:1")
    assert torch.npu.max_memory_allocated("npu:1") - before == 2 * 4096
    assert torch.npu.memory_allocated("npu:1") - before == 4096
    peak = measure_peak(lambda: (x + y) * 2, torch.device("npu:1"))
    assert peak.total == 2 * 4096
    stats = torch.npu.memory_stats("npu:1")
    assert stats["allocated_bytes.all.current"] == torch.npu.memory_allocated("npu:1")
    freed = stats["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.freed"]
    assert freed == stats["allocated_bytes.all.current"]


@check
def freed_memory_is_the_cards_again_when_the_cache_is_emptied():
    x = torch.empty(2**20, device="npu:1")
    del x
    free, total = torch.npu.mem_get_info("npu:1")
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info("npu:1")[0] >= free + 2**22 and total == 2**36


@check
def what_autograd_keeps_is_counted_and_freed_after_backward():
    before = torch.npu.memory_allocated("npu:1")
    x = torch.ones(100, 100, device="npu:1", requires_grad=True)
    y = x.exp().exp().sum()
    block = (40000 + 32 + 511) // 512 * 512
    assert torch.npu.memory_allocated("npu:1") - before >= 3 * block
    y.backward()
    del x, y
    assert torch.npu.memory_allocated("npu:1") == before


@check
def tensors_of_two_devices_do_not_meet():
    a, b, c = torch.ones(2, 2), torch.ones(2, 2, device="npu:0"), torch.ones(2, 2, device="npu:1")
    for x, y in ((a, b), (b, a), (b, c)):
        for operator in (torch.add, torch.matmul):
            with pytest.raises(RuntimeError, match="on the same device"):
                operator(x, y)
    with pytest.raises(RuntimeError, match="on the same device"):
        b.masked_fill(torch.ones(2, 2, dtype=torch.bool), 0)
    assert (b + torch.tensor(1.0)).tolist() == [[2, 2], [2, 2]]
    assert c.copy_(2 * b).device == torch.device("npu:1") and c.tolist() == [[2, 2], [2, 2]]
    with pytest.raises(TypeError, match="can't convert npu:1"):
        c.numpy()


@check
def matrix_products_take_no_float64_and_other_operators_do():
    x = torch.ones(2, 2, dtype=torch.float64, device="npu:0")
    w = x.float().requires_grad_()
    for call in (lambda: x @ x, lambda: x[None] @ x[None], lambda: torch.addmm(x, x, x)):
        with pytest.raises(RuntimeError, match="not implemented for .*float64"):
            call()
    assert (x.exp() + x).dtype == torch.float64
    (w @ w).sum().backward()
    assert w.grad.tolist() == [[4, 4], [4, 4]]


@check
def an_event_has_no_time_before_it_was_waited_for():
    torch.npu.set_device(0)
    x = torch.ones(300, 300, device="npu:0")
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    x @ x
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    torch.npu.synchronize("npu:1")
    assert not end.query()
    torch.npu.synchronize("npu:0")
    assert end.query() and start.elapsed_time(end) > 0
    end.record()
    x.sum().item()  # a number on the host says that all before it is done
    assert end.query()
    plain = torch.npu.Event()
    plain.record()
    plain.synchronize()
    with pytest.raises(RuntimeError, match="enable_timing"):
        start.elapsed_time(plain)


@check
def an_event_times_the_work_of_its_own_card_in_milliseconds():
    x = torch.ones(1000, 1000, device="npu:1")
    spent = {}
    for card in (0, 1):
        torch.npu.set_device(card)
        start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter()
        for _ in range(5):
            x @ x
        wall = (time.perf_counter() - began) * 1000
        end.record()
        end.synchronize()
        spent[card] = start.elapsed_time(end)
    assert spent[0] == 0
    assert 0.1 * wall < spent[1] <= wall


@check
def a_wrong_index_raises():
    for call in (torch.npu.set_device, torch.npu.memory_allocated, torch.npu.synchronize):
        with pytest.raises(RuntimeError, match="Invalid device id 2"):
            call("npu:2")
    with pytest.raises(RuntimeError, match="Invalid device id 2"):
        torch.empty(1, device="npu:2")
    for call in (torch.npu.get_device_name, torch.npu.mem_get_info):
        with pytest.raises(AssertionError):
            call(2)
    with pytest.raises(ValueError, match="Expected a npu device"):
        torch.npu.set_device("cpu")


@check
def results_and_gradients_are_the_cpus_on_both_cards():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    def gradient(device):
        torch.manual_seed(0)
        x = torch.randn(4, 3).to(device).requires_grad_()
        weights = torch.arange(4, device=device) + torch.full((4,), 0.5, device=device)
        (torch.softmax(Square.apply(x) @ x.T, -1) * weights).sum().backward()
        return x.grad

    expected = gradient("cpu")
    for device in ("npu:0", "npu:1"):
        found = gradient(device)
        assert found.device == torch.device(device)
        torch.testing.assert_close(found.cpu(), expected)


@check
def launches_name_the_operators_that_worked_and_their_card():
    x = torch.ones(2, 2).to("npu:1")
    simulation.clear()
    (x.view(4)[1:] * 2).sum().item()
    names = [("aten::mul", 1), ("aten::sum", 1), ("aten::_local_scalar_dense", 1)]
    assert simulation.launches == names


def _attention_inputs(device, shape=(2, 4, 5, 8), kv_heads=4):
    torch.manual_seed(0)
    kv = (shape[0], kv_heads, *shape[2:])
    return [torch.randn(s).to(device) for s in (shape, kv, kv)]


def _fused(*args, **options):
    return torch_npu.npu_fusion_attention(*args, **options)[0].cpu()


@check
def fused_attention_scales_by_1_unless_told():
    inputs = _attention_inputs("cpu")
    cards = _attention_inputs("npu:1")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(_fused(*cards, 4, "BNSD"), sdpa(*inputs, scale=1.0))
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", scale=0.3), sdpa(*inputs, scale=0.3))


@check
def fused_attention_hides_what_is_true_and_ignores_a_mode_without_a_mask():
    inputs, cards = _attention_inputs("cpu"), _attention_inputs("npu:0")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    causal = sdpa(*inputs, is_causal=True, scale=1.0)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = hidden.to("npu:0")
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", atten_mask=mask), causal)
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", atten_mask=mask, sparse_mode=1), causal)
    every = sdpa(*inputs, scale=1.0)
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", sparse_mode=3, next_tockens=0), every)
    with pytest.raises(RuntimeError, match="on the same device"):
        _fused(*cards, 4, "BNSD", atten_mask=hidden)
    with pytest.raises(RuntimeError, match="sparse_mode 3 takes a mask of"):
        _fused(*cards, 4, "BNSD", atten_mask=mask, sparse_mode=3)
    with pytest.raises(RuntimeError, match="upper triangle"):
        _fused(*cards, 4, "BNSD", atten_mask=_compressed("npu:0").T, sparse_mode=2)


def _compressed(device):
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


@check
def fused_attention_aligns_mode_2_to_the_first_key_and_mode_3_to_the_last():
    q, k, v = _attention_inputs("npu:1", (1, 2, 3, 8), kv_heads=2)
    k, v = (torch.cat([x, x + 1], dim=2) for x in (k, v))  # 3 queries, 6 keys
    for mode, last in ((2, 0), (3, 3)):
        found = _fused(q, k, v, 2, "BNSD", atten_mask=_compressed("npu:1"), sparse_mode=mode)
        hidden = torch.ones(3, 6, dtype=torch.bool).triu(last + 1).to("npu:1")
        torch.testing.assert_close(found, _fused(q, k, v, 2, "BNSD", atten_mask=hidden))


@check
def fused_attention_gives_0_for_a_row_without_keys_only_if_told():
    cards = _attention_inputs("npu:0")
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    options = {"atten_mask": mask.to("npu:0"), "sparse_mode": 1}
    assert _fused(*cards, 4, "BNSD", **options)[:, :, 2].isnan().all()
    told = _fused(*cards, 4, "BNSD", inner_precise=2, **options)
    assert (told[:, :, 2] == 0).all() and told.isfinite().all()


@check
def fused_attention_takes_every_layout_and_grouped_heads():
    q, k, v = _attention_inputs("npu:1", kv_heads=2)
    expected = _fused(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), 4, "BNSD")
    torch.testing.assert_close(_fused(q, k, v, 4, "BNSD"), expected)
    back = {
        "BSND": lambda x: x.transpose(1, 2),
        "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
    }
    for layout, turn in back.items():
        found = _fused(turn(q), turn(k), turn(v), 4, layout)
        torch.testing.assert_close(found, turn(expected))


@check
def fused_attention_returns_the_statistics_of_its_softmax_and_a_gradient():
    q, k, v = (x.requires_grad_() for x in _attention_inputs("npu:1"))
    out, largest, total, _, *numbers = torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD")
    assert largest.shape == total.shape == (2, 4, 5, 8) and largest.dtype == torch.float32
    assert numbers == [0, 0, 0]
    L = torch.logsumexp(q @ k.transpose(-2, -1), -1)
    torch.testing.assert_close((largest + total.log())[..., 0], L)
    out.sum().backward()
    found, q.grad = q.grad, None
    (torch.softmax(q @ k.transpose(-2, -1), -1) @ v).sum().backward()
    assert found.device == torch.device("npu:1")
    torch.testing.assert_close(found, q.grad)


@check
def fused_attention_refuses_float64_and_a_wrong_number_of_heads():
    cards = _attention_inputs("npu:0")
    many = torch.ones(1, 257, 2, 8, device="npu:0")
    with pytest.raises(RuntimeError, match="at most 256 heads"):
        _fused(many, many, many, 257, "BNSD")
    with pytest.raises(RuntimeError, match="float64"):
        _fused(*(x.double() for x in cards), 4, "BNSD")
    with pytest.raises(RuntimeError, match="do not fit"):
        _fused(*cards, 2, "BNSD")
    with pytest.raises(NotImplementedError):
        _fused(*_attention_inputs("cpu"), 4, "BNSD")


@check
def a_profile_has_the_tables_of_every_wheel():
    with tempfile.TemporaryDirectory() as folder:
        x = torch.ones(100, 100, device="npu:1")
        path, operators = profile_call(lambda: (x @ x).exp_(), x.device, folder, "product")
        (output,) = path.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT")
        for table, columns in SURFACE["files"].items():
            assert (output / table).read_text().splitlines()[0].split(",") == columns
    found = {o.name: (o.calls, o.self_ms > 0, o.self_bytes) for o in operators}
    assert found == {"aten::mm": (1, True, 40448), "aten::exp_": (1, True, 0)}


@check
def a_schedule_says_which_steps_are_profiled():
    written = []
    plan = torch_npu.profiler.schedule(wait=1, active=2, warmup=1, repeat=1)
    with torch_npu.profiler.profile(schedule=plan, on_trace_ready=written.append) as profiler:
        for step in range(6):
            torch.ones(step + 1, device="npu:0").neg()
            written += [step] * bool(written)
            profiler.step()
    assert written == [profiler, 4, 5]


@check
def the_peak_of_every_candidate_is_what_the_card_counted():
    card, counted, measure = simulation.cards[1], [], flash_attention.measure_peak

    def measured(call, device):
        before = card.current
        peak = measure(call, device)
        counted.append(card.peak - before)
        return peak

    flash_attention.measure_peak = measured
    case = flash_attention.Case(128, causal=True)
    rows = flash_attention.profile_memory([case], device=choose("npu:1"))
    flash_attention.measure_peak = measure
    assert [row.name for row in rows] == ["standard", "flash", "fused"]
    assert [row.peak_bytes for row in rows] == counted
    assert all(row.peak_bytes > row.peak_bytes_without_result > 0 for row in rows)


@check
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
    assert timed == [*(row.launches for row in rows), matmul] * 2
    assert all(row.seconds > 0 for row in rows)


# ---- What the script does


def run_checks():
    """Return {name of a check: where it failed, or nothing}."""
    found = {}
    for name, function in CHECKS.items():
        try:
            function()
            found[name] = ""
        except (Exception, pytest.fail.Exception):
            found[name] = traceback.format_exc()
    return found


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


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_cards(name, told):
    failure = told("checks")[name]
    assert not failure, failure


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(PHASE)]
    import contextlib
    import io
    import time

    if sys.argv[1] == "situations":
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch  # once for all the forks

        print(json.dumps(run_situations()))
    else:
        from common.device import choose, torch_npu  # before torch: see there

        import flash_attention
        import torch
        from common import timing
        from common.memory import measure_peak
        from common.profiling import profile_call
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves
        from torch_npu import simulation

        print(json.dumps(run_checks()))
