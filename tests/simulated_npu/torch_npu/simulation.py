"""The simulated cards: their tensors, their memory and their queue.

As on the card:
- Tensors of two devices meet in no operator but a copy and an index; a CPU scalar without
  dimensions may join.
- A cast to float64 gives float32, with a warning once; `.cpu().double()` is float64. A tensor that
  is made as float64, on the card or by a copy from the CPU, keeps its dtype.
- Matrix products, convolutions and the backward of softmax take float16, bfloat16 and float32,
  no float64. (CANN's forward softmax takes float64, so it does here.)
- Float32 enters a matrix product whole, or with 11 bits if torch.npu.matmul.allow_hf32 is set.
- Memory is what the live storages hold, each with 32 bytes added and rounded up to 512. What goes
  beyond the card's memory raises.
- Work is queued: an event has no time before it is waited for, and a card's clock moves by the
  work that this card is given, not by another's.

The switches that __init__.py lists are read at each operator, so a test can turn them.

Not simulated: streams, generators, operators that change the shape of an argument. `x.to("npu")`
without an index goes to card 0, whichever is current.
"""

import os
import re
import time
import weakref
from functools import partial

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torch_npu import arithmetic
from torch_npu.arithmetic import BATCHED_OPS, MATMUL_OPS, is_on

CUBE_OPS = {"convolution", "convolution_backward", "_softmax_backward_data"}
CUBE_OPS |= MATMUL_OPS | BATCHED_OPS
CUBE_DTYPES = {torch.float16, torch.bfloat16, torch.float32}
COPIES = {"copy", "_copy_from", "_to_copy"}
MAY_MIX = COPIES | {"index", "index_put", "_index_put_impl"}

launches = []  # (operator, index of the card) of all the work since clear()
watchers = []  # lists to which each operator adds (name, seconds, bytes that it allocated)
kernels = {}  # the functions that run, on CPU tensors, operators that the CPU does not have
_held = {}  # the storages that are alive, by address


def clear():
    """Forget the launches so far."""
    launches.clear()


class Card:
    """What one card has counted: bytes of memory, entries of its queue, seconds of work."""

    def __init__(self):
        self.current = self.peak = self.allocated = self.reserved = 0
        self.queued = self.done = 0
        self.clock = 0.0

    @property
    def total(self):
        return int(float(os.environ.get("SIMULATED_NPU_GIB", "64")) * 2**30)

    def hold(self, storage):
        """Count a storage for as long as it lives: once, however many tensors share it."""
        key = storage._cdata
        if key in _held or not storage.nbytes():
            return
        size = self._take(storage.nbytes())

        def free(_):
            del _held[key]
            self.current -= size

        _held[key] = weakref.ref(storage, free)

    def borrow(self, nbytes):
        """Count a workspace, which is freed as soon as its operator is launched."""
        if nbytes:
            size = self._take(nbytes)
            self.current -= size

    def _take(self, nbytes):
        size = (nbytes + 32 + 511) // 512 * 512
        if self.current + size > self.total:
            used, free = _shown(self.current), _shown(self.total - self.current)
            raise RuntimeError(
                f"NPU out of memory. Tried to allocate {_shown(nbytes)} (NPU {cards.index(self)}; "
                f"{_shown(self.total)} total capacity; {used} already allocated; {used} current "
                f"active; {free} free; {_shown(self.reserved)} reserved in total by PyTorch) If "
                "reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
                "fragmentation."
            )
        self.current += size
        self.allocated += size
        self.peak = max(self.peak, self.current)
        self.reserved = max(self.reserved, self.current)
        return size


def _shown(nbytes):
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


def _seen():
    """How many cards are seen. Of ASCEND_RT_VISIBLE_DEVICES the wheels read the ids before the
    first one that is wrong, and ids that do not rise leave no card.
    """
    count = int(os.environ.get("SIMULATED_NPU_CARDS", "1"))
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is None:
        return count
    ids = []
    for number in re.match(r"[\d,]*", visible).group().split(","):
        if not number or int(number) >= count:
            break
        ids.append(int(number))
    return len(ids) if ids == sorted(set(ids)) else 0


cards = [Card() for _ in range(_seen())]
current = 0


def index_of(device, error=RuntimeError):
    """Return the index of the card that `device` names; None names the current one."""
    if isinstance(device, (str, torch.device)):
        device = torch.device(device)
        if device.type != "npu":
            raise ValueError(f"Expected a npu device, but got: {device}")
        device = device.index
    index = current if device is None else device
    if not 0 <= index < len(cards):
        raise error(f"Invalid device id {index}: {len(cards)} cards are seen")
    return index


class NPUTensor(torch.Tensor):
    """A tensor of a card: a shell with its shape and device, and the CPU tensor inside."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, index):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        device = torch.device("npu", index)
        shell = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=device, **layout
        )
        shell.inner = inner
        cards[index].hold(inner.untyped_storage())
        return shell

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, *args, **(kwargs or {}))

    def __repr__(self):
        return f"{self.inner!r} on {self.device}"

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy: use .cpu()")


def run(func, *args, **kwargs):
    """Run an operator on the CPU tensors inside, and put what it returns where it belongs."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    name = func._schema.name.split("::")[1].rstrip("_")
    _refuse(name, tensors)
    worker = target = next((t.device.index for t in tensors if isinstance(t, NPUTensor)), None)
    if worker is not None:
        kwargs = arithmetic.without_float64(name, args, kwargs)
    device = kwargs.get("device")
    if device is not None:
        target = index_of(device) if device.type == "npu" else None
        kwargs = {**kwargs, "device": "cpu"}
    card = cards[target if worker is None else worker]
    allocated = card.allocated
    inputs = arithmetic.as_hf32(name, tree_map(_inside, args))

    start = time.perf_counter()
    result = kernels.get(func, func)(*inputs, **tree_map(_inside, kwargs))
    seconds = (time.perf_counter() - start) * _is_work(func)

    within_card = target is not None and all(isinstance(t, NPUTensor) for t in tensors)
    if _is_work(func) and (within_card or name not in COPIES):
        arithmetic.saturate(result)
    result = tree_map(partial(_outside, func, tensors, target), result)
    if _is_work(func):
        card.borrow(_workspace(name, tensors))
        card.queued += 1
        card.clock += seconds
        launches.append((func._schema.name, cards.index(card)))
    if not any(isinstance(value, NPUTensor) for value in tree_leaves(result)):
        card.done = card.queued  # the host has the result, so the card has finished
    for watcher in watchers:
        watcher.append((func._schema.name, seconds, card.allocated - allocated))
    return result


def _inside(value):
    return value.inner if isinstance(value, NPUTensor) else value


def _outside(func, tensors, target, value):
    for shell in tensors:
        if _inside(shell) is value:  # an operator in place returns its argument
            if shell.shape != value.shape:
                raise NotImplementedError(f"{func} changes a shape, which is not simulated")
            return shell
    on_card = isinstance(value, torch.Tensor) and target is not None
    return NPUTensor(value, target) if on_card else value


def _refuse(name, tensors):
    devices = {str(t.device) for t in tensors if t.dim() or isinstance(t, NPUTensor)}
    if len(devices) > 1 and name not in MAY_MIX:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            + " and ".join(sorted(devices, reverse=True))
        )
    wrong = {t.dtype for t in tensors} - CUBE_DTYPES
    if wrong and name in CUBE_OPS:
        raise RuntimeError(f"{name} is not implemented for {wrong} on the card")


def _workspace(name, tensors):
    """Bytes that an operator works in beside its result. With TASK_QUEUE_ENABLE=2 none is counted.

    An operand is unaligned here if its rows, as they lie in memory, are no multiple of 32 bytes.
    """
    uncounted = os.environ.get("TASK_QUEUE_ENABLE") == "2"
    if uncounted or not is_on("SIMULATED_NPU_WORKSPACES") or name not in MATMUL_OPS | BATCHED_OPS:
        return 0
    if name in MATMUL_OPS:
        return 20 * 2**20
    rows = (t.shape[-1 if t.stride(-1) == 1 else -2] * t.element_size() for t in tensors)
    in_a_batch = tensors[-1].shape[0] > 1
    return 32 + 20 * 2**20 * (in_a_batch and any(row % 32 for row in rows))


def _is_work(func):
    """Whether an operator makes the card work: a view and an empty tensor do not."""
    is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    return not is_view and "empty" not in func._schema.name


aten = torch.ops.aten
kernels[aten._copy_from.default] = lambda source, target, _=False: target.copy_(source)
# torch's own kernels of these resize an empty tensor, which a shell can't follow.
_by_name = [aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default]
_by_name += [aten.eye.default, aten.eye.m, aten.randperm.default, aten._copy_from.default]
_named = torch.library.Library("aten", "IMPL")
for _func in _by_name:
    _named.impl(_func, partial(run, _func), "PrivateUse1")
_others = torch.library.Library("_", "IMPL")
_others.fallback(run, "PrivateUse1")
