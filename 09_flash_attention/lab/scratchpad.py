"""A memory of two levels, counted: what running code would move to and from a chip of M bytes."""

import math
from collections import Counter, OrderedDict
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.timing import works

LINE = 64  # bytes that move at a time
OVERWRITES = ("copy_", "fill_", "zero_")  # in-place operators that don't read what was there


class Scratchpad(TorchDispatchMode):
    """A chip that holds M bytes; of what it holds, what was used least recently goes out first.

    Under `with Scratchpad(M, Q=Q, K=K, V=V) as chip:` every torch operator on the CPU fetches its
    inputs and writes its outputs line by line, the outputs on the chip. A changed line is written
    to the large memory when it goes out, and at the end. What a deleted tensor held is free.
    read, written: bytes by array, known after the block; other arrays than the named ones are
    called by `name_of(tensor)`.
    """

    def __init__(self, M, name_of, **named):
        super().__init__()
        self.room, self.name_of, self.named = M // LINE, name_of, named
        self.held = OrderedDict()  # (storage, line): whether it was changed
        self.storages = {}  # storage: (weak reference, name)
        self.made = {}  # storage that an operator made and that still stands: its lines
        self.read, self.written = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.free()
        name = func._schema.name.split("::")[1]
        if not works(func) or name == "_unsafe_view":
            return result
        shape_only = name.startswith("new_") or name.endswith("_like")
        inputs = {**dict(enumerate(args)), **(kwargs or {})}
        for number, argument in enumerate(func._schema.arguments):
            overwritten = argument.is_out or number == 0 and name in OVERWRITES
            if not (overwritten or shape_only):
                self.touch(inputs.get(number, inputs.get(argument.name)), False)
        self.touch(result, True)
        return result

    def touch(self, values, change):
        """Use every line of the tensors among `values`."""
        held = self.held
        for x in tree_leaves(values):
            if not isinstance(x, torch.Tensor):
                continue
            storage = self.storage(x)
            used = lines(x.storage_offset(), x.shape, x.stride(), x.dtype.itemsize)
            if storage in self.made:
                self.made[storage].update(used)
            for line in used:
                key = storage, line
                if key in held:
                    held.move_to_end(key)
                elif not change:
                    self.read[storage] += LINE
                if change or key not in held:
                    held[key] = change
                    if len(held) > self.room:
                        self.write(*held.popitem(last=False))

    def storage(self, x):
        """Return the key of x's storage; while its weak reference stands, no other has it."""
        key = x.untyped_storage()._cdata
        if key not in self.storages:
            named = [n for n, y in self.named.items() if y.untyped_storage()._cdata == key]
            name = named[0] if named else self.name_of(x)
            self.storages[key] = StorageWeakRef(x.untyped_storage()), name
            if not named:
                self.made[key] = set()
        return key

    def free(self):
        """Forget the lines of storages that are gone."""
        for storage in [s for s in self.made if self.storages[s][0].expired()]:
            for line in self.made.pop(storage):
                self.held.pop((storage, line), None)

    def write(self, key, changed):
        """Write a line that was changed."""
        if changed:
            self.written[key[0]] += LINE

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self.free()
        while self.held:
            self.write(*self.held.popitem())
        for counts in (self.read, self.written):
            by_name = Counter()
            for key, count in counts.items():
                by_name[self.storages[key][1]] += count
            counts.clear()
            counts.update(by_name)


@cache
def lines(offset, shape, strides, itemsize):
    """Return the lines of a storage that a tensor of these strides lies on, in order."""
    if math.prod(shape) == 1 + sum((n - 1) * s for n, s in zip(shape, strides)):  # without gaps
        last = offset + math.prod(shape) - 1
        return range(offset * itemsize // LINE, last * itemsize // LINE + 1)
    first = torch.tensor([offset])
    for n, step in zip(shape, strides):
        first = (first[:, None] + step * torch.arange(n)).flatten()
    return (first * itemsize // LINE).unique_consecutive().unique().tolist()
