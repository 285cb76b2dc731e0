"""The simulated cards offer what every torch_npu does, refuse and count as a card does."""

import inspect
import tempfile
from pathlib import Path

import pytest

from simulated_npu.on_cards import SURFACE, Checks, turned

checks = Checks(__file__)


@checks
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
    del offered["torch.npu.device"]  # every wheel has it, the surface does not list it
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


@checks
def an_argument_that_a_wheel_lacks_is_refused():
    x = torch.ones(1, 1, 2, 8, device="npu:0")
    with pytest.raises(RuntimeError, match="softmax_layout"):
        torch_npu.npu_fusion_attention(x, x, x, 1, "BNSD", softmax_layout="TND")


@checks
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


@checks
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
    del y
    assert torch.npu.memory_allocated("npu:1") == before
    stats = torch.npu.memory_stats("npu:1")
    assert stats["allocated_bytes.all.current"] == torch.npu.memory_allocated("npu:1")
    freed = stats["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.freed"]
    assert freed == stats["allocated_bytes.all.current"]


@checks
def freed_memory_is_the_cards_again_when_the_cache_is_emptied():
    x = torch.empty(2**20, device="npu:1")
    del x
    free, total = torch.npu.mem_get_info("npu:1")
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info("npu:1")[0] >= free + 2**22 and total == 2**36


@checks
def what_autograd_keeps_is_counted_and_freed_after_backward():
    before = torch.npu.memory_allocated("npu:1")
    x = torch.ones(100, 100, device="npu:1", requires_grad=True)
    y = x.exp().exp().sum()
    block = (40000 + 32 + 511) // 512 * 512
    assert torch.npu.memory_allocated("npu:1") - before >= 3 * block
    y.backward()
    del x, y
    assert torch.npu.memory_allocated("npu:1") == before


@checks
def what_is_more_than_the_card_has_raises_and_counts_nothing():
    with turned(SIMULATED_NPU_GIB="0.001"):  # 1073741 bytes
        total = torch.npu.mem_get_info("npu:1")[1]
        assert torch.npu.get_device_properties("npu:1").total_memory == total == 1073741
        before = torch.npu.memory_allocated("npu:1")
        x = torch.ones(200000, device="npu:1")
        with pytest.raises(RuntimeError, match="NPU out of memory. Tried to allocate 781.25 KiB"):
            x + 1
        x += 1
        assert torch.npu.memory_allocated("npu:1") - before == 800256
        x = None
        assert torch.ones(200000, device="npu:1").sum().item() == 200000
    assert torch.npu.mem_get_info("npu:1")[1] == 2**36


@checks
def the_workspaces_of_matrix_products_count_where_they_are_asked_for():
    a, b = (torch.ones(4, 8, 8, device="npu:1") for _ in range(2))
    odd = torch.ones(4, 8, 7, device="npu:1")

    def peak(call):
        torch.npu.reset_peak_memory_stats("npu:1")
        before = torch.npu.memory_allocated("npu:1")
        call()
        assert torch.npu.memory_allocated("npu:1") == before
        return torch.npu.max_memory_allocated("npu:1") - before

    mib20 = 20 * 2**20
    assert peak(lambda: a[0] @ b[0]) == 512
    with turned(SIMULATED_NPU_WORKSPACES="1"):
        assert peak(lambda: a[0] @ b[0]) == 512 + mib20 + 512
        assert peak(lambda: a @ b) == 1536 + 512
        assert peak(lambda: a @ b.transpose(1, 2)) == 1536 + 512
        assert peak(lambda: a @ odd) == 1024 + mib20 + 512
        assert peak(lambda: a[:1] @ odd[:1]) == 512 + 512
        assert peak(lambda: a + b) == 1536
        with turned(TASK_QUEUE_ENABLE="2"):
            assert peak(lambda: a @ odd) == 1024


@checks
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


@checks
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


@checks
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


@checks
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


@checks
def a_card_is_the_current_one_within_a_with():
    torch.npu.set_device(0)
    with pytest.raises(ZeroDivisionError), torch.npu.device("npu:1"):
        assert torch.npu.current_device() == 1
        with torch.npu.device(0):
            assert torch.npu.current_device() == 0
        assert torch.npu.current_device() == 1
        raise ZeroDivisionError
    assert torch.npu.current_device() == 0


@checks
def launches_name_the_operators_that_worked_and_their_card():
    x = torch.ones(2, 2).to("npu:1")
    simulation.clear()
    (x.view(4)[1:] * 2).sum().item()
    names = [("aten::mul", 1), ("aten::sum", 1), ("aten::_local_scalar_dense", 1)]
    assert simulation.launches == names


@checks
def a_schedule_says_which_steps_are_profiled():
    written = []
    plan = torch_npu.profiler.schedule(wait=1, active=2, warmup=1, repeat=1)
    with torch_npu.profiler.profile(schedule=plan, on_trace_ready=written.append) as profiler:
        for step in range(6):
            torch.ones(step + 1, device="npu:0").neg()
            written += [step] * bool(written)
            profiler.step()
    assert written == [profiler, 4, 5]


@checks
def without_msprof_a_profile_has_no_tables_and_stdout_a_line_all_the_same():
    for msprof, tables in (("1", list(SURFACE["files"])), ("0", [])):
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, turned(SIMULATED_NPU_MSPROF=msprof):
            ready = torch_npu.profiler.tensorboard_trace_handler(folder)
            with contextlib.redirect_stdout(said), torch_npu.profiler.profile(
                profile_memory=True, on_trace_ready=ready
            ):
                torch.ones(2, device="npu:0").exp()
            (output,) = Path(folder).glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT")
            assert sorted(path.name for path in output.iterdir()) == sorted(tables)
        (line,) = said.getvalue().splitlines()
        assert line.endswith(f"profiler.py: Start parsing profiling data: {output.parent}")


@pytest.mark.parametrize("name", checks)
def test_on_two_cards(name):
    checks.assert_held(name)


if __name__ == "__main__":
    import contextlib
    import io
    import time

    import torch_npu  # before torch: see there

    import torch
    from torch_npu import simulation

    checks.run()
