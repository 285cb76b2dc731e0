"""The process in which judge_kernel.py runs a kernel: it loads it, calls it, judges its output."""

import functools
import importlib.util
import inspect
import math
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
from lab.judge import judge, largest
from lab.matrix import Call, Problem, company
from lab.wrong_formulas import wrong_calls, wrong_gradients
from lab.wrong_places import (
    UNNAMED, coarse, letters, multiplied, not_finite, unwritten, where)

PLACE = Path(__file__).resolve().parents[1] / "kernels"
KERNELS = {"fused": "sdpa.py:fused", "math": "sdpa.py:math", "flash": "ours.py:flash",
           "standard": "ours.py:standard", "triton": "ours.py:triton",
           "npu": "npu_fusion.py:attention"}
FIRST = Problem("first call", Case(64, heads=1))
MOST = 2**18  # scores
NO_GRADIENT = "the output has no gradient"


@dataclass
class JudgeRow:
    """One problem. result: pass, FAIL, raised, died, refused, left out or no gradients. error: the
    largest |found - float64|, of the gradient that is furthest off where there are three; allowed:
    what judge.py allows; what, detail: the wrong formula, or why there is no output; smallest: the
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

    @staticmethod
    def of(problem, result="pass", **more):
        case = problem.case
        return JudgeRow(problem.group, problem.text, problem.dtype, case.Nq, case.Nk or case.Nq,
                        result, **more)

    @property
    def wrong(self):
        return self.result in ("FAIL", "raised", "died")

    @property
    def failed(self):
        """What lesson.finish asks: a kernel of which calls are left out isn't known to be right."""
        return self.wrong or self.result == "left out"


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
    if not (path.endswith(".py") and name.isidentifier()):
        raise Refused(f"argument --kernel: {', '.join(KERNELS)} or FILE.py:FUNCTION is taken, "
                      f"got {kernel!r}")
    try:
        place.open("rb").close()
    except OSError as fault:
        raise Refused(f"argument --kernel: {path}: {fault.strerror}") from fault
    sys.path.insert(0, str(place.parent))
    spec = importlib.util.spec_from_file_location(f"kernel_{place.stem}", place)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as fault:  # SystemExit of a script as well
        raise Refused(f"{path} can't be imported: {said(fault)}") from fault
    if not hasattr(module, name):
        raise Refused(f"{path} has no function {name!r}")
    function = getattr(module, name)
    if not callable(function):
        raise Refused(f"{name} of {path} is no function: it is of type {type(function).__name__}")
    try:
        inspect.signature(function).bind(*"qkv", attn_mask=None, is_causal=False, scale=None,
                                         enable_gqa=False)
    except TypeError as fault:
        raise Refused(f"{name} must take (q, k, v, attn_mask=None, is_causal=False, scale=None,"
                      f" enable_gqa=False): {fault}") from fault
    except ValueError:  # a function of C without a signature: the calls will tell
        pass
    return function


def said(fault):
    return reason(fault).removesuffix(":")  # a fault without a text leaves its type


def first_call(function, _, device, seed):
    """Return the Refused of a plain call that gives no tensor of the right shape; else None."""
    q, k, v, _, _ = FIRST.inputs(device, seed)
    try:
        found = function(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False)
    except (Refused, ImportError) as fault:
        return Refused(str(fault))
    except BaseException:  # its row will say so
        return None
    if told(found) == told(q):
        return None
    return Refused(f"the kernel must return a tensor of shape {told(q)} for q, k and v of that "
                   f"shape, got {told(found)}")


def attend(function, problem, q, k, v, dO, mask):
    """Return [O], or [dQ, dK, dV], of which those are None that there are not."""
    options = {"attn_mask": mask, "is_causal": problem.is_causal, "scale": problem.scale,
               "enable_gqa": q.shape[1] != k.shape[1]}
    with torch.set_grad_enabled(problem.gradients):
        if not problem.gradients:
            return [function(q, k, v, **options)]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        O = function(*leaves, **options)
        if not torch.is_tensor(O):
            return [O]
        if not O.requires_grad:
            return [None] * 3
        return list(torch.autograd.grad(O, leaves, dO, allow_unused=True))


def called(function, problem, inputs, device):
    """Return what `attend` returns, and the fields of the row where that raises."""
    try:
        found = attend(function, problem, *inputs)
        synchronize(device)
        return found, {}
    except NotImplementedError as fault:
        return None, {"result": "refused", "what": " ".join(str(fault).split()) or said(fault)}
    except BaseException as fault:
        return None, {"result": "raised", "what": type(fault).__name__, "detail": said(fault)}


def judge_problem(function, problem, device, seed, names=None):
    """Return the JudgeRow of one problem. names: the wrong formulas to look at, None for all."""
    row, more = measured(function, problem, device, seed)
    if row.result != "FAIL" or row.what:
        return row
    call, inputs, found, right, limits, error_standard = more
    spoil(found)
    found, answers = [wide(x) for x in found], [x for x, _ in right]
    again, fault = called(function, problem, inputs, device)
    changing = "the second raises" if fault else changes(found, again, row)
    if changing:
        what, detail = unwritten(found, answers, limits, chance=True) or (
            "different output at each call", changing)
    else:
        what, detail = explain(
            problem, call, found, answers, limits, error_standard, inputs[:4], names,
            lambda **fields: measured(function, replace(problem, **fields), device, seed)[0])
    detail = detail or where(found, answers, limits) * (what in UNNAMED)
    return replace(row, what=what, detail=detail)


def measured(function, problem, device, seed):
    """Return the JudgeRow of a problem, without the name of a FAIL by numbers; and for that name
    the Call, the inputs, what was found, what is right with its floors, how wrong each may be, and
    the error of standard attention.
    """
    row = JudgeRow.of(problem)
    inputs = problem.inputs(device, seed)
    call = Call.of(problem, *inputs)
    found, fault = called(function, problem, inputs, device)
    if fault:
        return replace(row, **fault), None
    right = call.gradients() if problem.gradients else [call.output()]
    what, detail = malformed(found, right, inputs[0]) or overwritten(call, inputs) or ("", "")
    if what:
        return replace(row, result="FAIL", what=what, detail=detail), None
    factor, limits, error_standard = 3 if problem.gradients else 2, [], 0.0
    for x, s, (reference, floor) in zip(found, attend(load("standard"), problem, *inputs), right):
        _, error, e, passed = judge(x, s, reference, floor, factor)
        error_standard = max(error_standard, e)
        limits.append(factor * e + floor)
        if row.error is None or row.error < math.inf and not (  # NaN stays
                error * row.allowed <= row.error * limits[-1]):
            row = replace(row, error=error, error_standard=e, allowed=limits[-1])
        if not passed:
            row = replace(row, result="FAIL")
    return row, (call, inputs, found, right, limits, error_standard)


def spoil(found):
    """Leave NaN in freed memory of these sizes: what is not written shows it in the next call."""
    for x in found:
        blocks = [torch.full_like(x, torch.nan) for _ in range(8)]
        del blocks


def wide(x):
    """Return a copy: a kernel may give the same memory at each call."""
    return x.detach().cpu().double().clone()


def malformed(found, right, q):
    """Return (name, detail) where what a kernel gives can't be compared with what is right."""
    missing = [name for name, x in zip(letters(right), found) if x is None and right[1:]]
    if missing:
        return NO_GRADIENT if len(missing) == 3 else f"no gradient: {', '.join(missing)}", ""
    for x, (y, _) in zip(found, right):
        pairs = [(told(x), told(y)), *(
            (dtype_name(getattr(x, name)), dtype_name(getattr(q, name)))
            for name in ("dtype", "device", "layout") if torch.is_tensor(x))]
        unlike = ", ".join(f"{a} in place of {b}" for a, b in pairs if a != b)
        if unlike:
            return "wrong shape or dtype", unlike
    return None


def told(x):
    """Return the shape of a tensor, the type of what is none."""
    if torch.is_tensor(x):
        return "x".join(map(str, x.shape)) or "a single number"
    return "None" if x is None else f"a {type(x).__name__}"


def overwritten(call, inputs):
    before = {"q": call.q, "k": call.k, "v": call.v, "dO": call.dO, "attn_mask": call.mask}
    for (name, was), x in zip(before.items(), inputs):
        if x is not None and not torch.equal(was, x.cpu().to(was.dtype)):
            return "the inputs are overwritten", name
    return None


def changes(found, again, row):
    """Say how far two calls on the same input are apart, '' where that is no more than is allowed,
    and small beside the error: the order of a sum may change by chance, and is not what is wrong.
    """
    again = [wide(x) for x in again]
    if not all(x.isfinite().equal(y.isfinite()) for x, y in zip(found, again)):
        return "NaN or inf in other places"
    apart = max(largest((x - y).nan_to_num(0, 0, 0)) for x, y in zip(found, again))
    finite = row.error < math.inf  # not where it is NaN
    return f"by {apart:.1e}" * (apart > (min(row.error / 4, row.allowed) if finite else 0))


def explain(problem, call, found, right, limits, error_standard, raw, names, twin):
    """Return (name, detail) of the wrong formula that `found` agrees with; of UNNAMED where none.

    found, right: [O] or the three gradients, in float64; limits: how wrong each may be. raw: q, k,
    v and dO as the kernel got them. names: the formulas to look at, all of them where it is None.
    twin: of fields of the problem, the JudgeRow of the call in which they are changed.
    The first formula that fits gives the fault its name, so the more general ones stand first.
    An output agrees as judge.py says of a right one; to be told from the right one, the formula
    has to lie at least 4 times as far from it.
    """
    if not all(x.isfinite().all() for x in found):
        return not_finite(problem, call, found, right, limits, twin)
    large = names is None and call.q[..., 0].numel() * call.k.shape[-2] > MOST
    formulas = wrong_gradients if problem.gradients else wrong_calls
    for name, detail, wrong in () if large else formulas(call, raw):
        if names is not None and name not in names:
            continue
        answers, floors = wrong if problem.gradients else ([part] for part in wrong.output())
        fits = all(x.shape == y.shape and largest(x - y) <= 2 * (error_standard + limit)
                   for x, y, limit in zip(found, answers, floors))
        if fits and any(largest(y - z) > 4 * largest(x - y) and largest(y - z) > 0
                        for x, y, z in zip(found, answers, right)):
            return name, detail
    beyond = not problem.gradients and largest(found[0]) > largest(call.v)  # no average of V is
    named = unwritten(found, right, limits, beyond) or multiplied(found, right, limits)
    if named or large:
        return named or (UNNAMED[1], "")
    small = not problem.gradients and largest(found[0] - right[0]) <= 0.1 * largest(right[0])
    plain = {"mask": None, "is_causal": False, "scale": None}  # a mask alone is not less precise
    return small and twin(**plain).result == "FAIL" and coarse(
        call, found[0], right[0]) or (UNNAMED[0], "")


def repeats(function, dtype, device, seed):
    """Return the RepeatRows: the same rows computed twice, alone and in company."""
    return [repeated(function, name, dtype, *pair)
            for name, pair in company(dtype, device, seed).items()]


def repeated(function, name, dtype, inputs, others, shared):
    def run(q, k, v, mask=None):
        with torch.no_grad():
            return wide(function(q, k, v, attn_mask=mask, is_causal=False, scale=None,
                                 enable_gqa=False))

    row = RepeatRow(name, dtype_name(dtype), "no")
    try:
        a, b = run(*inputs)[shared], run(*others)
    except NotImplementedError:
        return replace(row, result="refused")
    except BaseException as fault:
        return replace(row, result=said(fault))
    return replace(row, result="yes" if torch.equal(a, b) else "no", difference=largest(a - b))


def work(pipe, kernel, device, seed):
    """Load the kernel and send None, or why it can't be; then answer the questions that come
    through the pipe, a (what, subject, ...) each, until it closes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this
    os.dup2(2, 1)  # what a kernel prints stays out of --json -
    answers = {"first": first_call, "judge": judge_problem, "repeat": repeats}
    own = os.getpid()
    try:
        device = choose(device)
        function = load(kernel)
        pipe.send(None)
    except Exception as fault:
        pipe.send(Refused(said(fault) if not isinstance(fault, Refused) else str(fault)))
        return
    while True:
        try:
            what, subject, *more = pipe.recv()
        except EOFError:
            return
        answer = answers[what](function, subject, device, seed, *more)
        if os.getpid() != own:  # a kernel that forks may let its child come back
            os._exit(0)
        pipe.send(answer)
