"""What checks an exercise: `serve` runs its cases on the reader's functions and says one line.

The cases of exercises/NN_name.py are CASES of exercises/checks/NN_name.py. Importing this module
finds the lessons, `lab` and `common`.
"""

import copy
import importlib.util
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from os.path import basename, dirname, join, realpath
from typing import Callable, Optional

sys.path.insert(1, dirname(dirname(realpath(__file__))))
import lab  # noqa: F401  it lets torch load where torch_npu can't
from common import cli

import torch
from watch import Refusal

HERE = dirname(realpath(__file__))
RTOL, ATOL = 1e-4, 1e-6  # float32's rounding is smaller, a mistake is larger


@dataclass
class Case:
    """One call of one function, and what it has to return.

    function: its name. inputs: its arguments. expected: a number, text or tensor, or a tuple of
    them; where it is a tensor of bool, the dtype counts. mistakes: {hint: function}: where the
    reader's result or error is that of a function which makes a usual mistake, its hint is said.
    call: call(function, *inputs) gives what is compared, where it is not the function's result.
    said: the inputs in words.
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the one line says it
            return self.call(function, *inputs) if self.call else function(*inputs)

    def outcome(self, function):
        """Return what it gives, or the error that it ends in."""
        try:
            return self.run(function)
        except Exception as error:
            return error


def load(path):
    """Import a file, whose name need not be one of a module; return its globals."""
    spec = importlib.util.spec_from_file_location(f"_{basename(path)[:-3]}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def cases_of(name):
    """Return the cases of the exercise NN_name.py."""
    return load(join(HERE, "checks", name))["CASES"]


def serve(names):
    """Check the functions among a module's globals() and exit: 0, or 1 and one line."""
    cli.serve(lambda: report(names))


def report(names):
    """Print what is right, or one line about the first fault; return the exit status."""
    name = basename(names["__file__"])
    cases = cases_of(name)
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
    found = case.outcome(names[case.function])
    if same(found, case.expected):
        return None
    if not isinstance(found, Exception):
        return f"{called}: {difference(found, case.expected)}{hint(case, found)}"
    if isinstance(found, NotImplementedError):
        return f"{case.function} is yours to write. It is called as {called}"
    lines = [frame.lineno for frame in traceback.extract_tb(found.__traceback__)
             if frame.filename == names["__file__"]]
    where, said = f", line {lines[-1]}" if lines else "", " ".join(str(found).split())
    if isinstance(found, Refusal):
        return f"{called}{where}: {said}"
    return f"{called} raised {type(found).__name__}{where}: {said}{hint(case, found)}"


def hint(case, found):
    """Return the hint of the mistake that gives the same result or error, or ''."""
    return next((f". Hint: {text}" for text, mistaken in case.mistakes.items()
                 if same(found, case.outcome(mistaken))), "")


def same(found, expected):
    """Whether two results agree: kinds, shapes, and values up to rounding. NaN is like NaN.

    Two errors agree where their words do, in any order: torch names sizes in that of the operands.
    """
    if isinstance(expected, Exception):
        return type(found) is type(expected) and sorted(str(found).split()) == sorted(
            str(expected).split())
    if isinstance(expected, (tuple, list)):
        return (isinstance(found, (tuple, list)) and len(found) == len(expected)
                and all(map(same, found, expected)))
    if lacks_bool(found, expected):
        return False
    found, expected = number(found), number(expected)
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return isinstance(found, type(expected)) and found == expected
    return found.shape == expected.shape and torch.allclose(found, expected, RTOL, ATOL, True)


def lacks_bool(found, expected):
    """Whether a tensor of bool is expected and one of numbers came."""
    return (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
            and expected.dtype == torch.bool != found.dtype)


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
    if lacks_bool(found, expected):
        return f"its dtype has to be torch.bool, it is {found.dtype}"
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
