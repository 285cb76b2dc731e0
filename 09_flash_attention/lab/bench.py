"""Candidates, and the one way to verify, to profile and to time them.

The first candidate of a list is standard attention. One that raises fails for itself: its row says
why, and the others stand.
"""

import math
from dataclasses import dataclass
from typing import Callable, Optional

import torch

from common.cli import Refused, is_out_of_memory
from common.device import free_bytes
from common.memory import measure_peak
from common.timing import count_launches, ratio, square_matmul, time_in_turn
from lab.cases import dtype_name
from lab.judge import assert_agree, exact, judge

NO_ROOM = "no room"


@dataclass
class Candidate:
    """One way to compute a case. call: of Q, K, V (and dO) -> a result, or a tuple of results.

    theory_bytes: what it has to hold, by formulas.py. tile: (Br, Bc) where it has one.
    """

    name: str
    call: Callable
    theory_bytes: int = 0
    tile: tuple = (None, None)

    def results(self, inputs):
        """Call it; return its results as a list."""
        found = self.call(*inputs)
        return [found] if isinstance(found, torch.Tensor) else list(found)


@dataclass
class VerifyRow:
    """Largest absolute differences: of the candidate `name` from standard attention, and of each
    from float64. why: what the candidate raised.
    """

    shape: str
    dtype: str
    causal: bool
    max_diff: Optional[float]
    error_flash: Optional[float]
    error_standard: Optional[float]
    passed: bool
    name: str = "flash"
    why: str = ""


@dataclass
class MemoryRow:
    """Bytes. why: why nothing was measured; failed: the candidate raised."""

    name: str
    shape: str
    peak_bytes: Optional[int]
    peak_bytes_without_result: Optional[int]
    theory_bytes: int
    why: str = ""
    failed: bool = False


@dataclass
class SpeedRow:
    """ratio_to_standard: times as fast as standard, ratio_spread its quartiles over the rounds.

    launches: operator calls. matmul_share: tflops over those of a large matmul in the same rounds.
    gb_per_s: K and V over the time, where that is what bounds it. why: why there is no figure, or
    why it is not to be believed; failed: the candidate raised, or disagrees with standard.
    """

    name: str
    shape: str
    Br: Optional[int]
    Bc: Optional[int]
    seconds: Optional[float] = None
    ratio_to_standard: Optional[float] = None
    ratio_spread: Optional[tuple] = None
    tflops: Optional[float] = None
    matmul_share: Optional[float] = None
    launches: Optional[int] = None
    gb_per_s: Optional[float] = None
    why: str = ""
    failed: bool = False


def verify(case, candidates, *, device, seed=0, dO=False, oracle=exact, factor=2):
    """Compare each candidate with the first and both with float64: a VerifyRow for each result.

    oracle(case, *inputs) -> [(reference, floor) of each result]; judge.py says when one passes.
    Raises Refused where the oracle's N x N matrices don't fit into memory.
    """
    (*lead, Nq, _), (*_, Nk, _), _ = case.shapes
    need_room(f"verify {case.shape}", 8 * 8 * math.prod(lead) * Nq * Nk, torch.device("cpu"))
    inputs = case.inputs(device, seed, dO)
    references = oracle(case, *inputs)
    first, *others = candidates
    standard = first.results(inputs)
    rows, shown = [], (case.shape, dtype_name(case.dtype), case.causal)
    for candidate in others:
        try:
            found = candidate.results(inputs)
        except Exception as fault:
            rows += [VerifyRow(*shown, None, None, None, False, candidate.name, reason(fault))
                     for _ in references]
            continue
        rows += [VerifyRow(*shown, *judge(a, b, *reference, factor), candidate.name)
                 for a, b, reference in zip(found, standard, references)]
    return rows


def profile(case, candidates, *, device, seed=0, dO=False):
    """Measure the peak memory of each candidate, but for those that have no room: MemoryRows."""
    inputs, rows = case.inputs(device, seed, dO), []
    for candidate in candidates:
        row = MemoryRow(candidate.name, case.shape, None, None, candidate.theory_bytes)
        try:
            check_room(candidate, device)
            if device.type != "cpu":
                candidate.call(*inputs)  # its workspaces are allocated in the first call
            peak = measure_peak(lambda c=candidate: c.call(*inputs), device)
            row.peak_bytes, row.peak_bytes_without_result = peak
        except Exception as fault:
            row.why, row.failed = reason(fault), not is_out_of_memory(fault)
        rows.append(row)
    return rows


def benchmark(case, candidates, *, device, seed=0, dO=False, flop=None, stream=False):
    """Time the candidates in turn: SpeedRows.

    seconds is the median of the rounds, ratio_to_standard the median of the ratios round by round.
    flop: of a call, where a large matmul shall run beside them. stream: K and V are what bounds it.
    Each must first agree with standard attention, by `judge.assert_agree`.
    """
    inputs, rows, calls, expected = case.inputs(device, seed, dO), [], {}, None
    for candidate in candidates:
        row = SpeedRow(candidate.name, case.shape, *candidate.tile)
        try:
            check_room(candidate, device)
            found = candidate.results(inputs)
            expected = found if candidate is candidates[0] else expected
            for result, standard in zip(found, expected or []):
                assert_agree(candidate.name, result, standard)
            calls[candidate.name] = lambda c=candidate: c.call(*inputs)
        except Exception as fault:
            row.why, row.failed = reason(fault), not is_out_of_memory(fault)
        rows.append(row)
    found = expected = None
    add_times(rows, calls, case, device, flop, stream)
    return rows


def add_times(rows, calls, case, device, flop, stream):
    """Time `calls` in turn, beside a large matmul where flop is given, and fill the rows in."""
    matmul, matmul_flop = square_matmul(case.dtype, device)
    rounds = time_in_turn({**calls, **({"matmul": matmul} if flop else {})}, device)
    kv_bytes = sum(map(math.prod, case.shapes[1:])) * case.dtype.itemsize
    for row in rows:
        if row.name not in calls:
            continue
        row.seconds = rounds.median(row.name)
        row.launches = count_launches(calls[row.name])
        if flop:
            row.tflops = flop / row.seconds / 1e12
        if flop and not rounds.doubt("matmul"):
            share = ratio(rounds["matmul"], rounds[row.name])[0]
            row.matmul_share = share * flop / matmul_flop
        if stream:
            row.gb_per_s = kv_bytes / row.seconds / 1e9
        if rows[0].name in calls:
            row.ratio_to_standard, row.ratio_spread = ratio(
                rounds[rows[0].name], rounds[row.name])
        row.why = rounds.doubt(row.name, row.ratio_spread)


def need_room(what, need, device):
    """Raise Refused where fewer bytes are free than `what` needs: its N x N matrices."""
    room = free_bytes(device)
    if need > room:
        raise Refused(f"{what} needs {need / 2**30:.1f} GiB on {device}, {room / 2**30:.1f} GiB "
                      "are free: take a smaller one")


def check_room(candidate, device):
    """Raise MemoryError where less is free than the candidate has to hold."""
    if candidate.theory_bytes > free_bytes(device):
        raise MemoryError


def reason(fault):
    """Return in one line what a candidate raised."""
    if is_out_of_memory(fault):
        return NO_ROOM
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
