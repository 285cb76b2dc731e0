"""Checks that run in a process with two simulated cards, and what pytest asks of that process.

A file of checks ends with `if __name__ == "__main__": checks.run()`. pytest starts it as a script,
once for all its checks, since simulated cards need a process of their own.
"""

import json
import os
import subprocess
import sys
import traceback
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

TESTS = Path(__file__).resolve().parent.parent
SURFACE = json.loads((TESTS / "torch_npu_surface.json").read_text())
SWITCHES = {"ASCEND_RT_VISIBLE_DEVICES", "INF_NAN_MODE_FORCE_DISABLE", "TASK_QUEUE_ENABLE"}
SWITCHES |= {"TORCH_DEVICE_BACKEND_AUTOLOAD"}


def run(command, **situation):
    """Run Python with the simulated NPU and the switches `situation` alone; return how it ended."""
    kept = {n: v for n, v in os.environ.items() if n not in SWITCHES and "SIMULATED" not in n}
    environment = {"PYTHONPATH": str(TESTS / "simulated_npu"), "OMP_NUM_THREADS": "1", **situation}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, timeout=120
    )


def turned(**switches):
    """Turn switches for a while, in a process that runs already."""
    return mock.patch.dict(os.environ, switches)


def skip_before_torch_2_13():
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 13):
        pytest.skip("the simulation is built on the Python backend of torch 2.13")


class Checks(dict):
    """The checks of one file, by name: `@checks` adds one."""

    def __init__(self, file):
        self.file = file

    def __call__(self, function):
        self[function.__name__] = function
        return function

    @cached_property
    def ended(self):
        """{name of a check: where it failed, or nothing}, from a run of the file as a script."""
        ended = run([self.file], SIMULATED_NPU_CARDS="2")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    def assert_held(self, name):
        skip_before_torch_2_13()
        assert not self.ended[name], self.ended[name]

    def run(self):
        found = dict.fromkeys(self, "")
        for name, function in self.items():
            try:
                function()
            except (Exception, pytest.fail.Exception):
                found[name] = traceback.format_exc()
        print(json.dumps(found))
