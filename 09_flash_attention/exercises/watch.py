"""What torch does while a function runs: the calls here go into a Case as its `call`."""

from math import prod

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SOFTMAX = "softmax", "log_softmax", "safe_softmax", "logsumexp", "logcumsumexp", "logaddexp"


class Refusal(Exception):
    """The function does what its docstring rules out; the message says what."""


class Watch(TorchDispatchMode):
    """Call note(operator, its tensors, what it made) for each operator of torch under it.

    An operator's name is that of torch without underscores at its ends: `exp_` is 'exp'.
    """

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.note(function.overloadpacket.__name__.strip("_"),
                  [x for x in args if isinstance(x, Tensor)], made)
        return made


def without(operators, instead):
    """Return a call that refuses these operators, and says what to take instead."""
    def call(function, *inputs):
        def note(operator, tensors, made):
            if operator in operators:
                raise Refusal(f"no {operator} here: {instead}")

        with Watch(note):
            return function(*inputs)
    return call


def largest(function, *inputs):
    """Call it and return the shape of the largest tensor that was made, without sizes of 1."""
    shapes = [[]]

    def note(operator, tensors, made):
        if isinstance(made, Tensor):
            shapes.append([size for size in made.shape if size > 1])

    with Watch(note):
        function(*inputs)
    return max(shapes, key=prod)
