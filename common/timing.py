"""Time finished calls: one, or several in turn so that a ratio holds on a noisy machine."""

import statistics
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.device import accelerator, synchronize

MIN_ROUNDS, MAX_ROUNDS = 5, 50


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


def time_in_turn(calls, device, budget=2.0):
    """Time several calls in turn (A B A B ...) and return {name: [seconds of each round]}.

    calls: {name: callable}. Each runs once as a warm-up that is not counted. Rounds go on until
    `budget` seconds are spent, at least 5 of them and at most 50.
    """
    for call in calls.values():
        call()
    seconds = {name: [] for name in calls}
    end = time.perf_counter() + budget
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, call in calls.items():
            seconds[name].append(time_call(call, device))
    return seconds


def ratio(numerators, denominators):
    """Return the median and the quartiles (low, high) of the ratios taken round by round.

    Round by round, what slows a whole round cancels.
    """
    low, median, high = statistics.quantiles(
        (n / d for n, d in zip(numerators, denominators)), n=4, method="inclusive")
    return median, (low, high)


def square_matmul(dtype, device, n=2048):
    """Return (call, FLOPs of a call): the rate that `device` can reach, to compare others with.

    For half types a CPU takes float32: its own products of them can be a hundred times slower.
    """
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


class _Counter(TorchDispatchMode):
    launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        is_empty = "empty" in func._schema.name
        self.launches += not (is_view or is_empty)
        return func(*args, **(kwargs or {}))
