"""Profile one call: a trace for Chrome or TensorBoard, and its operators by time and by memory."""

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from common.device import synchronize, torch_npu
from common.report import whole_file

from torch.profiler import ProfilerActivity, profile


@dataclass
class Operator:
    """One operator's calls, its own milliseconds on the device, the bytes that it allocated itself.

    What is freed after the operator has returned is not taken off.
    """

    name: str
    calls: int
    self_ms: float
    self_bytes: int


def profile_call(call, device, folder, name):
    """Run `call()` once under the profiler. Return (path of the trace, [Operator, ...] by time).

    CPU and CUDA: folder/name.json, which chrome://tracing and ui.perfetto.dev open. NPU: the folder
    folder/name of torch_npu.profiler, which MindStudio Insight and TensorBoard open.
    """
    profiler = _profile_npu if device.type == "npu" else _profile_torch
    path, operators = profiler(call, device, Path(folder) / name)
    return path, sorted(operators, key=lambda o: o.self_ms, reverse=True)


def _profile_torch(call, device, path):
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *cuda], profile_memory=True) as profiler:
        call()
        synchronize(device)
    path = path.with_suffix(".json")
    with whole_file(path) as part:
        profiler.export_chrome_trace(str(part))
    kinds = ("device", "cuda") if device.type == "cuda" else ("cpu",)  # "cuda" before torch 2.4
    operators = [
        Operator(e.key, e.count, _first(e, kinds, "self_{}_time_total") / 1000,
                 _first(e, kinds, "self_{}_memory_usage"))
        for e in profiler.key_averages() if e.key != "[memory]"
    ]
    return path, operators


def _first(event, kinds, pattern):
    names = [pattern.format(kind) for kind in kinds]
    return next(getattr(event, name) for name in names if hasattr(event, name))


def _profile_npu(call, device, path):
    npu = torch_npu.profiler
    activities = [npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU]
    ready = npu.tensorboard_trace_handler(str(path))
    with npu.profile(activities=activities, profile_memory=True, on_trace_ready=ready):
        call()
        synchronize(device)
    output = max(path.glob("*/ASCEND_PROFILER_OUTPUT"), key=lambda p: p.stat().st_mtime)
    calls, self_us, self_kb = defaultdict(int), defaultdict(float), defaultdict(float)
    for row in _csv_rows(output / "operator_details.csv"):
        calls[row["Name"]] += 1
        self_us[row["Name"]] += float(row["Device Self Duration(us)"])
    for row in _csv_rows(output / "operator_memory.csv"):
        self_kb[row["Name"]] += float(row["Size(KB)"])
    return path, [Operator(n, calls[n], self_us[n] / 1000, int(self_kb[n] * 1024)) for n in calls]


def _csv_rows(path):
    with open(path, newline="") as file:
        yield from csv.DictReader(file)
