"""Time finished calls: one, or several in turn so that a ratio holds on a noisy machine."""

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.device import accelerator, synchronize

MIN_ROUNDS, MAX_ROUNDS = 5, 50
WIDE = 1.5  # quartiles that far apart say more of the machine than of the call
CROWDED = 0.1  # of the cores, taken by other work while none was idle
LONG = 60  # seconds


def time_call(call, device):
    """Run `call()` once and return its seconds, from a quiet device to a finished result."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    events = [accelerator(device.type).Event(enable_timing=True) for _ in range(2)]
    synchronize(device)
    events[0].record()
    call()
    events[1].record()
    synchronize(device)
    return events[0].elapsed_time(events[1]) / 1000  # elapsed_time is in milliseconds


class Rounds(dict):
    """{name: [seconds of each round]}. others: the share of the cores that other work took."""

    others = 0.0

    def median(self, name):
        return statistics.median(self[name])

    def doubt(self, name, spread=None):
        """Return in a few words why the median of `name` is not to be believed, or ''.

        spread: the quartiles of a ratio that rests on it.
        """
        low, _, high = quartiles(self[name])
        if self.others > CROWDED:
            return f"other work took {self.others:.0%} of the cores"
        if high > WIDE * low:
            return f"quartiles {low * 1e3:.3g} to {high * 1e3:.3g} ms"
        if spread and spread[1] > WIDE * spread[0]:
            return f"quartiles of the ratio {spread[0]:.3g} to {spread[1]:.3g}"
        return ""


def time_in_turn(calls, device, budget=2.0):
    """Time several calls in turn (A B A B ...) and return their Rounds.

    calls: {name: callable}. Each runs once as a warm-up that is not counted. Rounds go on until
    `budget` seconds are spent, at least 5 of them and at most 50. What takes more than a minute is
    announced on stderr.
    """
    least = MIN_ROUNDS * sum(time_call(call, device) for call in calls.values())
    if least > LONG:
        print(f"timing {', '.join(map(str, calls))}: about {least / 60:.0f} minutes",
              file=sys.stderr)
    rounds = Rounds((name, []) for name in calls)
    before, end = _cores(), time.perf_counter() + budget
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, call in calls.items():
            rounds[name].append(time_call(call, device))
    rounds.others = _others(before, _cores())
    return rounds


def _cores():
    """Return seconds of the cores so far: all, idle, this process'; None where none are counted."""
    stat = Path("/proc/stat")
    if not stat.exists():  # macOS
        return None
    ticks = [int(n) for n in stat.read_text().split("\n")[0].split()[1:9]]
    second = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / second, (ticks[3] + ticks[4]) / second, sum(os.times()[:2])


def _others(before, after):
    """Return the share of the cores that other work took, 0 where some were idle all the same."""
    if not before or after[0] <= before[0]:
        return 0.0
    total, idle, own = (b - a for a, b in zip(before, after))
    return max(0.0, (total - idle - own) / total) if idle < CROWDED * total else 0.0


def quartiles(values):
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def ratio(numerators, denominators):
    """Return the median and the quartiles (low, high) of the ratios taken round by round.

    Round by round, what slows a whole round cancels.
    """
    low, median, high = quartiles(n / d for n, d in zip(numerators, denominators))
    return median, (low, high)


def square_matmul(dtype, device):
    """Return (call, FLOPs of a call): the rate that `device` can reach, to compare others with.

    For half types a CPU takes float32: its own products of them can be a hundred times slower.
    """
    n = 8192 if device.type == "cuda" else 2048  # what it takes to fill the chip
    wide = torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype
    A = torch.randn(n, n).to(device, wide)  # a GPU multiplies ones faster than other numbers
    return lambda: A @ A, 2 * n**3


def count_launches(call):
    """Run `call()` once and return how many operators worked: views and empty tensors don't.

    On an accelerator each is a kernel launch or more.
    """
    with _Counter() as counter:
        call()
    return counter.launches


def works(func):
    """Whether an operator of torch works: views and empty tensors don't."""
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not (is_view or "empty" in func._schema.name)


class _Counter(TorchDispatchMode):
    launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches += works(func)
        return func(*args, **(kwargs or {}))
