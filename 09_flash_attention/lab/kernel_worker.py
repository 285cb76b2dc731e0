"""The process in which judge_kernel.py runs a kernel: it loads it, calls it, judges its output."""

import functools
import importlib.util
import inspect
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import torch

from common.cli import Refused
from common.device import choose, synchronize
from lab.bench import reason
from lab.cases import Case, dtype_name
from lab.judge import judge
from lab.matrix import Call, Problem
from lab.wrong_formulas import UNNAMED, explain

PLACE = Path(__file__).resolve().parents[1] / "kernels"
KERNELS = {"fused": "sdpa.py:fused", "math": "sdpa.py:math", "flash": "ours.py:flash",
           "standard": "ours.py:standard", "triton": "ours.py:triton",
           "npu": "npu_fusion.py:attention"}


@dataclass
class JudgeRow:
    """One problem. result: pass, FAIL, raised, died or refused. error: the largest
    |found - float64|, of the gradient that is furthest off where there are three; allowed: what
    judge.py allows; what, detail: the wrong formula, or why there is no output; smallest: the
    smallest input that shows it.
    """

    group: str
    problem: str
    dtype: str
    Nq: int
    Nk: int
    result: str
    error: Optional[float] = None
    error_standard: Optional[float] = None
    allowed: Optional[float] = None
    what: str = ""
    detail: str = ""
    smallest: str = ""

    @property
    def failed(self):
        """What lesson.finish asks."""
        return self.result in ("FAIL", "raised", "died")


@dataclass
class RepeatRow:
    """Whether two calls give the same bits where they have the same row to compute."""

    repeat: str
    dtype: str
    result: str  # yes, no, or what was raised
    difference: Optional[float] = None


@functools.cache
def load(kernel):
    """Return the function that FILE.py:FUNCTION names. Raises Refused where there is none."""
    path, _, name = KERNELS.get(kernel, kernel).rpartition(":")
    place = PLACE / path if kernel in KERNELS else Path(path)
    if not (path.endswith(".py") and name.isidentifier() and place.is_file()):
        raise Refused(f"argument --kernel: {', '.join(KERNELS)} or FILE.py:FUNCTION is taken, "
                      f"got {kernel!r}")
    sys.path.insert(0, str(place.parent))
    spec = importlib.util.spec_from_file_location(f"kernel_{place.stem}", place)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as fault:  # SystemExit of a script as well
        raise Refused(f"{path} can't be imported: {reason(fault)}") from fault
    function = getattr(module, name, None)
    if not callable(function):
        raise Refused(f"{path} has no function {name!r}")
    try:
        inspect.signature(function).bind(*"qkv", attn_mask=None, is_causal=False, scale=None,
                                         enable_gqa=False)
    except TypeError as fault:
        raise Refused(f"{name} must take (q, k, v, attn_mask=None, is_causal=False, scale=None,"
                      f" enable_gqa=False): {fault}") from fault
    except ValueError:  # a function of C without a signature: the calls will tell
        pass
    return function


def probe(function, device):
    """Raise Refused where a plain call gives no tensor of the right shape, or is refused."""
    q, k, v, _, _ = Problem("probe", Case(64, heads=1)).inputs(device, 0)
    try:
        found = function(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False)
    except (Refused, ImportError):
        raise
    except Exception:  # its row will say so
        return
    said = tuple(found.shape) if torch.is_tensor(found) else type(found).__name__
    if said != tuple(q.shape):
        raise Refused(f"the kernel must return a tensor of shape {tuple(q.shape)} for q, k and "
                      f"v of that shape, got {said}")


def attend(function, problem, q, k, v, dO, mask):
    """Return [O], or [dQ, dK, dV]; NotImplementedError where O has no gradient."""
    options = {"attn_mask": mask, "is_causal": problem.is_causal, "scale": problem.scale,
               "enable_gqa": q.shape[1] != k.shape[1]}
    if not problem.gradients:
        with torch.no_grad():
            return [function(q, k, v, **options)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    O = function(*leaves, **options)
    if not O.requires_grad:
        raise NotImplementedError("the output has no gradient")
    return list(torch.autograd.grad(O, leaves, dO))


def judge_problem(function, problem, device, seed, names=None):
    """Return the JudgeRow of one problem. names: the wrong formulas to look at, None for all."""
    row = JudgeRow(problem.group, problem.text, problem.dtype, problem.case.Nq,
                   problem.case.Nk or problem.case.Nq, "pass")
    inputs = q, k, v, dO, mask = problem.inputs(device, seed)
    call = Call.of(problem, *inputs)
    try:
        found = attend(function, problem, *inputs)
        synchronize(device)
    except NotImplementedError as fault:
        return replace(row, result="refused", what=" ".join(str(fault).split()))
    except Exception as fault:
        return replace(row, result="raised", what=type(fault).__name__, detail=reason(fault))
    right = call.gradients() if problem.gradients else [call.output()]
    wanted = [(tuple(x.shape), q.dtype) for x, _ in right]
    given = [(tuple(x.shape), x.dtype) if torch.is_tensor(x) else type(x) for x in found]
    if given != wanted:
        return replace(row, result="FAIL", what="wrong shape or dtype",
                       detail=f"{given[0]} for {wanted[0]}")
    factor, error_standard = 3 if problem.gradients else 2, 0.0
    for x, s, (reference, floor) in zip(found, attend(load("standard"), problem, *inputs), right):
        _, error, e, passed = judge(x, s, reference, floor, factor)
        error_standard = max(error_standard, e)
        allowed = factor * e + floor
        if row.error is None or not error * row.allowed <= row.error * allowed:
            row = replace(row, error=error, error_standard=e, allowed=allowed)
        if not passed:
            row = replace(row, result="FAIL")
    again = Call.of(problem, *inputs)
    if any(a is not None and not a.equal(b) for a, b in zip(call.inputs, again.inputs)):
        return replace(row, result="FAIL", what="the inputs are overwritten")
    if row.failed:
        found, answers = ([x.detach().cpu().double() for x in some]
                          for some in (found, [x for x, _ in right]))
        name, detail = explain(problem, call, found, answers, error_standard, inputs[:4], names)
        row = replace(row, what=name, detail=detail or where(
            found[0], answers[0], row.allowed) * (name in UNNAMED))
    return row


def where(found, right, allowed):
    """Say in which batches, heads and rows the output is wrong."""
    bad = ~((found - right).abs() <= allowed)
    said = []
    for name, dim in (("batch", 0), ("head", 1), ("row", 2), ("column", 3)):
        others = [d for d in range(4) if d != dim]
        at = bad.sum(others).nonzero().flatten().tolist()
        if at and len(at) < bad.shape[dim]:
            said.append(f"{name} {at[0]}" + f" to {at[-1]}" * (len(at) > 1))
    return ", ".join(said) or "everywhere"


def shrink(function, problem, device, seed, name):
    """Return the smallest problem that still gives this name, by steps that halve in each size."""
    for field in ("batch", "heads", "Nq", "Nk", "d") * 2:
        step = getattr(problem.case, field)
        if step is None or field == "heads" and problem.case.kv_heads:
            continue
        while step > 1:
            step = (step + 1) // 2
            size = max(1, getattr(problem.case, field) - step)
            smaller = replace(problem, case=replace(problem.case, **{field: size}))
            if smaller != problem and judge_problem(
                    function, smaller, device, seed).what == name:
                problem = smaller
    return problem


def repeats(function, dtype, device, seed):
    """Return the RepeatRows: the same rows computed twice, alone and in company."""
    q, k, v, _, _ = Problem("", Case(40, 4, 2, Nk=700, dtype=dtype)).inputs(device, seed)
    longer = Problem("", Case(40, 4, 2, Nk=1100, dtype=dtype)).inputs(device, seed + 1)
    k_long, v_long = (torch.cat((a, b[:, :, 700:]), 2) for a, b in zip((k, v), longer[1:3]))
    hidden = (torch.arange(1100) < 700).expand(40, 1100).to(device)
    k_nan, v_nan = (torch.cat((x, torch.full_like(x, torch.nan)), 2) for x in (k, v))
    nan = (torch.arange(1400) < 700).expand(40, 1400).to(device)

    def run(q, k, v, mask=None):
        with torch.no_grad():
            return function(q, k, v, attn_mask=mask, is_causal=False, scale=None, enable_gqa=False)

    pairs = {
        "the same call twice": lambda: (run(q, k, v), run(q, k, v)),
        "a batch entry alone": lambda: (run(q, k, v)[:1], run(q[:1], k[:1], v[:1])),
        "a query row alone": lambda: (run(q, k, v)[:, :, 7:8], run(q[:, :, 7:8], k, v)),
        "a longer cache, its rest masked": lambda: (
            run(q, k, v), run(q, k_long, v_long, hidden)),
        "a longer cache of NaN, masked": lambda: (run(q, k, v), run(q, k_nan, v_nan, nan)),
    }
    return [repeated(name, pair, dtype) for name, pair in pairs.items()]


def repeated(name, pair, dtype):
    row = RepeatRow(name, dtype_name(dtype), "no")
    try:
        a, b = (x.cpu() for x in pair())
    except NotImplementedError:
        return replace(row, result="refused")
    except Exception as fault:
        return replace(row, result=reason(fault))
    difference = (a.double() - b.double()).abs().max().item()
    return replace(row, result="yes" if torch.equal(a, b) else "no", difference=difference)


def work(pipe, kernel, device, seed):
    """Answer the questions that come through the pipe, a (what, ...) each, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this
    os.dup2(2, 1)  # what a kernel prints stays out of --json -
    answers = {"judge": judge_problem, "shrink": shrink, "repeat": repeats}
    try:
        device = choose(device)
        function = load(kernel)
        probe(function, device)
        pipe.send(None)
    except Exception as fault:
        pipe.send(Refused(reason(fault) if not isinstance(fault, Refused) else str(fault)))
        return
    while True:
        try:
            what, subject, *more = pipe.recv()
        except EOFError:
            return
        pipe.send(answers[what](function, subject, device, seed, *more))
