"""Measure the peak memory of a call, with one meaning on NPU, CUDA and CPU.

The peak is what the call allocated at its highest moment, above what stood before it. An
accelerator's allocator counts it. The CPU's keeps no count, so there it is read from the
profiler's allocation events.
"""

from typing import NamedTuple

from common.device import accelerator, synchronize

from torch.profiler import ProfilerActivity, profile


class Peak(NamedTuple):
    """Bytes at the highest moment of a call: with the storage of what it returned, and without."""

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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    # The public way to these events, export_chrome_trace, writes and parses a file: minutes for a
    # loop of many tiles.
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    standing = highest = 0
    for event in sorted(events, key=_start):
        standing += event.nbytes()  # negative where memory is freed
        highest = max(highest, standing)
    return Peak(highest, highest - _storage_bytes(result))


def _start(event):
    return event.start_ns() if hasattr(event, "start_ns") else event.start_us()  # torch 2.1


def _storage_bytes(result):
    tensors = result if isinstance(result, (tuple, list)) else [result]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
