"""torch_npu.profiler: the tables that the real one writes, with what is simulated in them.

As the real one it says on stdout that it works, and without msprof it goes on and leaves no tables.
"""

import csv
import json
import os
import time
from enum import Enum
from pathlib import Path

from torch_npu import simulation

_SURFACE = Path(__file__).resolve().parents[2] / "torch_npu_surface.json"


class ProfilerActivity(Enum):
    CPU = 0
    NPU = 1


class schedule:
    """Which step is recorded. Note the order: active stands before warmup, unlike in torch."""

    def __init__(self, wait, active, warmup=0, repeat=0, skip_first=0):
        self.wait, self.active, self.warmup = wait, active, warmup
        self.repeat, self.skip_first = repeat, skip_first

    def __call__(self, step):
        length = self.wait + self.warmup + self.active
        cycle, place = divmod(step - self.skip_first, length)
        if step < self.skip_first or 0 < self.repeat <= cycle or place < length - self.active:
            return "skip"
        return "save" if place == length - 1 else "record"


def tensorboard_trace_handler(dir_name=None, worker_name=None, analyse_flag=True, async_mode=False):
    """Return what writes a profile under dir_name, as tables if analyse_flag."""

    def write(profiler):
        worker = f"{worker_name or 'simulated'}_{os.getpid()}_{time.time_ns()}_ascend_pt"
        folder = Path(dir_name or ".") / worker / "ASCEND_PROFILER_OUTPUT"
        folder.mkdir(parents=True)
        if not analyse_flag:
            return
        stamp = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] [INFO] [{os.getpid()}]"
        print(f"{stamp} profiler.py: Start parsing profiling data: {folder.parent}")
        if os.environ.get("SIMULATED_NPU_MSPROF") == "0":
            return
        work = [
            {"Name": name, "Device Self Duration(us)": seconds * 1e6}
            for name, seconds, _ in profiler.operators
        ]
        _write(folder / "operator_details.csv", work)
        if profiler.profile_memory:
            held = [
                {"Name": n, "Size(KB)": size / 1024} for n, _, size in profiler.operators if size
            ]
            _write(folder / "operator_memory.csv", held)

    return write


def _write(path, rows):
    columns = json.loads(_SURFACE.read_text())["files"][path.name]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)


class profile:
    """Record the operators of the steps that the schedule names: all of them without one."""

    def __init__(
        self,
        *,
        activities=None,
        schedule=None,
        on_trace_ready=None,
        record_shapes=False,
        profile_memory=False,
        with_stack=False,
        with_flops=False,
        with_modules=False,
        experimental_config=None,
    ):
        self.schedule = schedule or (lambda step: "record")
        self.on_trace_ready = on_trace_ready
        self.profile_memory = profile_memory
        self.number = 0
        self.operators = None

    def start(self):
        if self.operators is None and self.schedule(self.number) != "skip":
            self.operators = []
            simulation.watchers.append(self.operators)

    def stop(self):
        if self.operators is not None:
            simulation.watchers[:] = [w for w in simulation.watchers if w is not self.operators]
            if self.on_trace_ready:
                self.on_trace_ready(self)
            self.operators = None

    def step(self):
        if self.schedule(self.number) == "save":
            self.stop()
        self.number += 1
        self.start()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()
