"""common/: the peak memory of a call, and what a profile says of its operators."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import memory, profiling
from common.cli import Refused

ROOT = Path(memory.__file__).resolve().parent.parent
CPU = torch.device("cpu")


def test_peak_counts_what_stands_at_once_above_what_stood_before():
    before = torch.ones(2**20)

    def call():
        a = torch.empty(2**18)  # 1 MiB
        b = torch.neg(a)  # and 1 MiB beside it
        del a
        return torch.neg(b[:0]) + torch.neg(before[:0])

    for _ in range(2):
        assert memory.measure_peak(call, CPU).total == 2 * 2**20


def test_peak_without_the_result_counts_shared_storage_once():
    def call():
        x = torch.ones(2**18)
        return x, x[1:]

    assert memory.measure_peak(call, CPU) == (2**20, 0)


def test_a_call_that_allocates_nothing_has_no_peak():
    before = torch.ones(2**18)
    assert memory.measure_peak(lambda: before, CPU) == (0, 0)
    assert memory.measure_peak(lambda: (before[1:], [before]), CPU) == (0, 0)


def test_what_the_call_leaves_standing_is_no_part_of_the_peak_without_it():
    kept = []

    def call():
        kept.append(torch.ones(2**18))  # 1 MiB that stays
        return torch.ones(2**18).neg().neg()  # beside one more

    assert memory.measure_peak(call, CPU) == (3 * 2**20, 2**20)


class Tiles(torch.autograd.Function):
    """Its backward is a loop, as that of a tiled attention."""

    @staticmethod
    def forward(ctx, x, steps):
        ctx.steps = steps
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        total = torch.zeros_like(grad)
        for _ in range(ctx.steps):
            total = (total + grad) * 0.5
        return total, None


def one_session(call):
    """The peak of a call from torch.profiler's events, which are kept to its end."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        result = call()
    standing = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            standing += event.nbytes()
            highest = max(highest, standing)
    del result
    return highest, highest - standing


def train():
    x = torch.linspace(0, 1, 4096).view(64, 64).requires_grad_()
    index = torch.arange(128) % 64
    loss = torch.softmax(x @ x.T, -1)[index].sum() + Tiles.apply(x, 3000).sum()
    return torch.autograd.grad(loss + x.gather(0, index.view(2, 64)).sum(), x)


def loop():
    x = torch.zeros(64)
    for _ in range(3000):
        x = torch.add(x, x)
    return x


@pytest.mark.parametrize("call", [
    train, loop, lambda: torch.nn.functional.scaled_dot_product_attention(
        *torch.ones(3, 1, 2, 256, 64), is_causal=True)])
def test_the_log_read_in_pieces_gives_the_peak_of_one_session(call):
    expected = call()
    found = []
    peak = memory.measure_peak(lambda: found.append(call()), CPU)
    assert peak.total == one_session(call)[0]
    assert memory.measure_peak(call, CPU) == one_session(call)
    assert torch.equal(found[0][0], expected[0])


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
@pytest.mark.parametrize("call", ["loop", "backward"])
def test_measuring_holds_no_more_for_more_operators(call):
    program = f"""
import resource, torch
from common.memory import measure_peak
from test_measuring import Tiles
x = torch.ones(8, requires_grad=True)
def loop(steps):
    y = torch.zeros(8)
    for _ in range(steps):
        y = torch.add(y, y)
def backward(steps):
    Tiles.apply(x, steps // 2).sum().backward()
used = []
for steps in (5_000, 200_000):
    measure_peak(lambda: {call}(steps), torch.device("cpu"))
    used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(used[1] - used[0])"""
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"})
    assert int(done.stdout) < 8 * 1024, done.stderr  # KiB


def test_a_measured_call_that_raises_leaves_nothing_behind():
    apply = torch.autograd.function.BackwardCFunction.apply

    def call():
        loop()
        raise KeyError("a fault")

    for _ in range(2):
        with pytest.raises(KeyError, match="a fault"):
            memory.measure_peak(call, CPU)
    assert torch.autograd.function.BackwardCFunction.apply is apply
    assert torch.overrides._get_current_function_mode() is None
    assert memory.measure_peak(loop, CPU) == one_session(loop)


def test_an_operator_is_shown_what_it_allocated_and_never_less_than_nothing(tmp_path):
    def call():
        x = torch.ones(2, 64, 64)
        return torch.autograd.grad(Tiles.apply(x.requires_grad_(), 10).sum(), x)

    _, operators = profiling.profile_call(call, CPU, tmp_path, "tiles")
    held = {o.name: o.self_bytes for o in operators}
    assert held["aten::mul"] >= 11 * 2**15 and min(held.values()) == 0


def npu_profiler(tables):
    """A torch_npu whose profiler says where it writes, and writes those tables."""
    class Profile:
        def __init__(self, on_trace_ready, **options):
            self.path = on_trace_ready

        def __enter__(self):
            print("[INFO] profiler.py: Start parsing profiling data")

        def __exit__(self, *error):
            output = self.path / "worker_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
            output.mkdir(parents=True)
            for name, text in tables.items():
                (output / name).write_text(text)

    return SimpleNamespace(profiler=SimpleNamespace(
        ProfilerActivity=SimpleNamespace(CPU=0, NPU=1), profile=Profile,
        tensorboard_trace_handler=Path))


TABLES = {"operator_details.csv": "Name,Device Self Duration(us)\nmm,2000\nmm,1000\n",
          "operator_memory.csv": "Name,Size(KB)\nmm,4\n"}


@pytest.mark.parametrize("missing", [None, *TABLES])
def test_a_profile_without_msprof_is_refused_and_leaves_nothing(
        missing, tmp_path, monkeypatch, capsys):
    tables = {name: text for name, text in TABLES.items() if name != missing}
    monkeypatch.setattr(profiling, "torch_npu", npu_profiler(tables))
    monkeypatch.setattr(profiling, "synchronize", lambda device: None)
    npu = SimpleNamespace(type="npu")
    if missing:
        with pytest.raises(Refused, match=f"no {missing}.*msprof"):
            profiling.profile_call(lambda: None, npu, tmp_path, "x")
        assert not list(tmp_path.iterdir())
    else:
        path, operators = profiling.profile_call(lambda: None, npu, tmp_path, "x")
        assert path == tmp_path / "x"
        assert operators == [profiling.Operator("mm", 2, 3.0, 4096)]
    assert capsys.readouterr().out == ""
