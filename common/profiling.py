"""Profile one call: a trace for Chrome or TensorBoard, and its operators by time and by memory."""

import contextlib
import csv
import os
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from common.cli import Refused
from common.device import synchronize, torch_npu
from common.files import whole_file

from torch.profiler import ProfilerActivity, profile
from torch.profiler._utils import traverse_dfs


@dataclass
class Operator:
    """One operator's calls, its own milliseconds on the device, the bytes that it allocated itself.

    What is freed is not taken off.
    """

    name: str
    calls: int
    self_ms: float
    self_bytes: int


def profile_call(call, device, folder, name):
    """Run `call()` once under the profiler. Return (path of the trace, [Operator, ...] by time).

    CPU and CUDA: folder/name.json, which chrome://tracing and ui.perfetto.dev open. NPU: the folder
    folder/name of torch_npu.profiler, which MindStudio Insight and TensorBoard open. Raises OSError
    and Refused where it can't be written or read, and leaves nothing then.
    """
    profiler = _profile_npu if device.type == "npu" else _profile_torch
    path, operators = profiler(call, device, Path(folder) / name)
    return path, sorted(operators, key=lambda o: o.self_ms, reverse=True)


def _profile_torch(call, device, path):
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *cuda], profile_memory=True) as profiler:
        call()
        synchronize(device)
    path = path.parent / f"{path.name}.json"
    with whole_file(path) as part:
        profiler.export_chrome_trace(str(part))
        with open(part, "ab") as file:  # a full disk, of which the export says nothing, says so
            size = file.tell()
            file.write(b" " * 2**16)
        os.truncate(part, size)
    kinds = ("device", "cuda") if device.type == "cuda" else ("cpu",)  # "cuda" before torch 2.4
    allocated = _allocated(profiler, device)
    operators = [
        Operator(e.key, e.count, _first(e, kinds, "self_{}_time_total") / 1000, allocated[e.key])
        for e in profiler.key_averages() if e.key != "[memory]"
    ]
    return path, operators


def _allocated(profiler, device):
    """Return {operator: the bytes that it handed out on `device`, not through operators inside}."""
    found = defaultdict(int)
    for event in traverse_dfs(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.tag.name == "Allocation" and event.parent is not None:
            memory = event.extra_fields
            if memory.device.type == device.type and memory.alloc_size > 0:
                found[event.parent.name] += memory.alloc_size
    return found


def _first(event, kinds, pattern):
    names = [pattern.format(kind) for kind in kinds]
    return next(getattr(event, name) for name in names if hasattr(event, name))


def _profile_npu(call, device, path):
    npu = torch_npu.profiler
    activities = [npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU]
    ready = npu.tensorboard_trace_handler(str(path))
    before = set(path.glob("*"))
    try:
        with contextlib.redirect_stdout(sys.stderr), npu.profile(
                activities=activities, profile_memory=True, on_trace_ready=ready):
            call()
            synchronize(device)
        written = set(path.glob("*")) - before
        tables = [t for folder in written for t in folder.glob("ASCEND_PROFILER_OUTPUT/*.csv")]
        return path, _read_npu({table.name: table for table in tables})
    except BaseException:
        for left in set(path.glob("*")) - before:
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def _read_npu(tables):
    """Return the operators in the tables of a profile: {name of a file: its path}."""
    missing = {"operator_details.csv", "operator_memory.csv"} - set(tables)
    if missing:
        raise Refused(f"torch_npu's profiler left no {' and no '.join(sorted(missing))}: it needs "
                      "CANN's msprof on PATH (source set_env.sh) and room on the disk")
    calls, self_us, self_kb = defaultdict(int), defaultdict(float), defaultdict(float)
    for row in _csv_rows(tables["operator_details.csv"]):
        calls[row["Name"]] += 1
        self_us[row["Name"]] += float(row["Device Self Duration(us)"])
    for row in _csv_rows(tables["operator_memory.csv"]):
        self_kb[row["Name"]] += max(0, float(row["Size(KB)"]))
    return [Operator(n, calls[n], self_us[n] / 1000, int(self_kb[n] * 1024)) for n in calls]


def _csv_rows(path):
    with open(path, newline="") as file:
        yield from csv.DictReader(file)
