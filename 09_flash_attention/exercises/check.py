"""What checks an exercise: `serve` runs its CASES on the reader's functions and says one line.

Importing it finds the lessons, `lab` and `common`.
"""

import copy
import sys
import traceback
from dataclasses import dataclass, field
from os.path import basename, dirname, realpath
from typing import Callable, Optional

sys.path.insert(1, dirname(dirname(realpath(__file__))))
import lab  # noqa: F401  it lets torch load where torch_npu can't
from common import cli

import torch

RTOL, ATOL = 1e-4, 1e-6  # float32's rounding is smaller, a mistake is larger


@dataclass
class Case:
    """One call of one function, and what it has to return.

    function: its name. inputs: its arguments. expected: a number, text or tensor, or a tuple of
    them. mistakes: {hint: function}: where the reader's result is that of a function which makes a
    usual mistake, its hint is said. call: call(function, *inputs) gives what is compared, where it
    is not the function's result. said: the inputs in words.
    """

    function: str
    inputs: tuple
    expected: object
    mistakes: dict = field(default_factory=dict)
    call: Optional[Callable] = None
    said: str = ""

    def run(self, function):
        """Call it on copies: what it does to its arguments changes no other case."""
        inputs = copy.deepcopy(self.inputs)
        return self.call(function, *inputs) if self.call else function(*inputs)


def serve(names):
    """Check the functions among a module's globals() and exit: 0, or 1 and one line."""
    cli.serve(lambda: report(names))


def report(names):
    """Print what is right, or one line about the first fault; return the exit status."""
    name, cases = basename(names["__file__"]), names["CASES"]
    fault = next(filter(None, (fault_of(case, names) for case in cases)), None)
    if fault:
        print(f"{name}: {fault}", file=sys.stderr)
        return 1
    for function in dict.fromkeys(case.function for case in cases):
        print(f"{function}: right in {sum(case.function == function for case in cases)} cases")
    print(f"{name}: done")
    return 0


def fault_of(case, names):
    """Return one line that says what does not hold, or None."""
    called = f"{case.function}({case.said or ', '.join(map(show, case.inputs))})"
    try:
        found = case.run(names[case.function])
    except NotImplementedError:
        return f"{case.function} is yours to write. It is called as {called}"
    except Exception as fault:
        lines = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__)
                 if frame.filename == names["__file__"]]
        where = f", line {lines[-1]}" if lines else ""
        return f"{called} raised {type(fault).__name__}{where}: {' '.join(str(fault).split())}"
    if same(found, case.expected):
        return None
    return f"{called}: {difference(found, case.expected)}{hint(case, found)}"


def hint(case, found):
    """Return the hint of the mistake that gives the same result, or ''."""
    for text, mistaken in case.mistakes.items():
        try:
            if same(found, case.run(mistaken)):
                return f". Hint: {text}"
        except Exception:  # this mistake ends in an error with these inputs
            continue
    return ""


def same(found, expected):
    """Whether two results agree: kinds, shapes, and values up to rounding. NaN is like NaN."""
    if isinstance(expected, (tuple, list)):
        return (isinstance(found, (tuple, list)) and len(found) == len(expected)
                and all(map(same, found, expected)))
    found, expected = number(found), number(expected)
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return isinstance(found, type(expected)) and found == expected
    return found.shape == expected.shape and torch.allclose(found, expected, RTOL, ATOL, True)


def number(value):
    """Return a tensor of float64 on the CPU for a tensor or a number, anything else as it is."""
    if isinstance(value, (torch.Tensor, float, int)):
        return torch.as_tensor(value).detach().to("cpu", torch.float64)
    return value


def difference(found, expected):
    """Say in one line how a result differs: in kind, in shape, or where."""
    if found is None:
        return "it returns nothing: is there a `return`?"
    if isinstance(expected, tuple) and isinstance(found, (tuple, list)) and (
            len(found) == len(expected)) and "a tensor" in show(expected):
        at = next(i for i, pair in enumerate(zip(found, expected)) if not same(*pair))
        return f"number {at + 1} of what it returns: {difference(found[at], expected[at])}"
    both = isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    if both and found.shape != expected.shape:
        return f"its shape has to be {list(expected.shape)}, it is {list(found.shape)}"
    if both and found.numel() > 8:
        apart = (number(found) - number(expected)).abs().nan_to_num(torch.inf)
        place = (apart == apart.max()).nonzero()[0].tolist()
        found, expected = found[tuple(place)], expected[tuple(place)]
        return f"at {place} expected {show(expected)}, got {show(found)}"
    return f"expected {show(expected)}, got {show(found)}"


def show(value):
    """Show a value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}" if value.numel() > 8 else show(value.tolist())
    if isinstance(value, (tuple, list)):
        shown = ", ".join(map(show, value))
        return f"({shown})" if isinstance(value, tuple) else f"[{shown}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
