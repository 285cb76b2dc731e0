"""Measure the peak memory of a call, with one meaning on NPU, CUDA and CPU.

The peak is what the call allocated at its highest moment, above what stood before it. An
accelerator's allocator counts it. The CPU's keeps a log for a profiler, which is read and emptied
as it grows: torch.profiler keeps it to the end, 128 KiB a tile.
"""

from contextlib import contextmanager
from typing import NamedTuple

from common.cli import is_out_of_memory  # noqa: F401  for who measures
from common.device import accelerator, synchronize

from torch._C._autograd import _clear_callbacks, _ProfilerDisableOptions
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd.function import BackwardCFunction
from torch.autograd.profiler_legacy import profile
from torch.overrides import TorchFunctionMode

CALLS_A_READING = 1000
GO_ON = _ProfilerDisableOptions(False, True)  # hand out what is logged, and log on


class Peak(NamedTuple):
    """Bytes at the highest moment of a call: in all, and without what it leaves standing, which is
    what it returned and what was made for it.
    """

    total: int
    without_result: int


def measure_peak(call, device):
    """Run `call()` once, its tensors on `device`, and return its Peak in bytes.

    Run the call once before this if its first run allocates what later runs reuse, as an
    accelerator's workspaces.
    """
    return (_on_cpu if device.type == "cpu" else _on_accelerator)(call, device)


def _on_accelerator(call, device):
    runtime = accelerator(device.type)
    synchronize(device)
    runtime.reset_peak_memory_stats(device)
    before = runtime.memory_allocated(device)
    result = call()  # kept, so that it still stands when what is left is counted
    synchronize(device)
    highest, left = runtime.max_memory_allocated(device), runtime.memory_allocated(device)
    del result
    return Peak(highest - before, highest - left)


def _on_cpu(call, device):
    log = _Log()
    _enable_profiler_legacy(profile(profile_memory=True).config())
    _clear_callbacks()  # no operators in the log; after GO_ON torch would not take its own off
    try:
        with log, _also_inside_backward(log):
            result = call()
        log.read()
        peak = Peak(log.highest, log.highest - log.standing)
        del result  # the allocator must see it go: what takes its address would count as the call's
    finally:
        _disable_profiler_legacy(GO_ON)
        _disable_profiler_legacy()
    return peak


class _Log(TorchFunctionMode):
    """Reads the allocator's log every so many calls of torch. This mode lets operators be; under a
    TorchDispatchMode some take another way and more memory.
    """

    standing = highest = calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        if self.calls % CALLS_A_READING == 0:
            self.read()
        return func(*args, **(kwargs or {}))

    def read(self):
        for thread in _disable_profiler_legacy(GO_ON):
            for event in thread:
                if event.kind() == "memory_alloc":
                    self.standing += event.cpu_memory_usage()  # negative where memory is freed
                    self.highest = max(self.highest, self.standing)


@contextmanager
def _also_inside_backward(mode):
    """Let `mode` see what autograd Functions do in their backward: torch calls it without modes."""
    apply = BackwardCFunction.apply

    def apply_in_mode(*args):
        with mode:
            return apply(*args)

    BackwardCFunction.apply = apply_in_mode
    try:
        yield
    finally:
        BackwardCFunction.apply = apply
