"""What a score_mod learns: tensors that it reads from a closure, a module or anywhere else and that
want a gradient, and that gradient, tile by tile.

No list of names can tell which tensors these are, so a score_mod is watched as it runs: for each of
them its operators get a stand-in, a leaf of the graph of one tile.
"""

import sys
from functools import wraps

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lab.visible import refuse_transforms

BLIND = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5)  # what watches sees no x[index]


class _Watch(TorchFunctionMode):
    """Hands operators a stand-in for each tensor that wants a gradient and was made before."""

    def __init__(self, score, *position):
        super().__init__()
        self.made = WeakTensorKeyDictionary({score: True})
        self.plain = WeakTensorKeyDictionary({x: True for x in position})  # made, without gradient
        self.read = {}  # id: (tensor, stand-in)
        self.fixed = {}  # id: a tensor that wants no gradient
        self.given = []  # both, and those of torch.func

    def stand_in(self, x):
        if not isinstance(x, torch.Tensor) or x in self.made:
            return x
        if not x.requires_grad and x in self.plain:
            return x
        self.given.append(x)
        if not x.requires_grad:
            self.fixed[id(x)] = x
            return x
        return self.read.setdefault(id(x), (x, x.detach().requires_grad_()))[1]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(self.stand_in, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for x in tree_flatten(result)[0]:
            if isinstance(x, torch.Tensor):
                (self.made if x.requires_grad else self.plain)[x] = True
        return result


def never_compiled(function):
    """Keep torch.compile out of a function, without loading it: that takes seconds."""
    @wraps(function)
    def call(*args):
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args)
        return function(*args)

    return call


@never_compiled
def watch(score_mod, score, *position):
    """Return score_mod(score, *position) with its graph, [(tensor, stand-in)], what it learns, and
    the other tensors that it reads.
    """
    with torch.enable_grad(), _Watch(score, *position) as watched:
        try:
            changed = score_mod(score, *position)
        finally:  # an operator would make another error of this one
            refuse_transforms(*watched.given)
        return (watched.stand_in(changed), list(watched.read.values()),
                list(watched.fixed.values()))


def writes_nothing(score_mod):
    """Return score_mod, held to leave the scores that it gets as they are."""

    def call(score, *position):
        version = None if score.is_inference() else score._version  # those count no writes
        changed = score_mod(score, *position)
        if version is not None and version != score._version:
            raise ValueError("score_mod must return new scores, got one that writes in place to "
                             "those that it was given: only the forward alone takes it")
        return changed

    return call


def learned_by(visible):
    """Return the tensors that the score_mod of a call learns, by two looks at its first score, and
    those that it reads besides: where one of them changes, the backward would see another function.

    Raises ValueError where it writes to the scores, and where it learns from a tensor that is
    another one each time: no operator of torch made it, but something like an autograd.Function.
    """
    first = slice(0, min(1, visible.Nq)), slice(0, min(1, visible.Nk))
    position = visible.positions(*first)
    shape = *visible.lead, visible.G, *(x.stop for x in first)
    with torch.enable_grad():  # times 1: to a leaf torch itself refuses to write, in other words
        score = 1 * torch.zeros(shape, dtype=visible.dtype, device=visible.b.device,
                                requires_grad=True)
    looks = [watch(writes_nothing(visible.score_mod), score, *position) for _ in range(2)]
    learned, again = ([x for x, _ in look[1]] for look in looks)
    if list(map(id, learned)) != list(map(id, again)):
        raise ValueError("score_mod must learn by torch's own operators, got a tensor that "
                         "something else makes, like an autograd.Function: call that before it"
                         + ", and take(index) instead of [index]" * BLIND)
    return learned, looks[0][2]


class Learning:
    """A score_mod whose derivative can be taken at the tile that it was called with last.

    sums: over the tiles so far, the gradients of the tensors `learned`, in float32 for half types.
    """

    def __init__(self, score_mod, learned):
        self.score_mod, self.learned = writes_nothing(score_mod), learned
        self.sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                     for x in learned]

    def __call__(self, score, *position):
        self.tile = score, position
        return self.score_mod(score, *position)

    def backward(self, dS_block):
        """Return the gradient of the raw scores, from that of the changed ones; add to the sums.

        A hidden score, whose dS is 0, may come from the NaN of an unused key: it counts as 0 here.
        """
        if torch.is_inference_mode_enabled():  # in which there is no graph
            with torch.inference_mode(False):
                return self.backward(dS_block)
        score, position = self.tile
        dS = dS_block.view_as(score)
        score = score.masked_fill((dS == 0) & ~score.isfinite(), 0).requires_grad_()
        changed, read, _ = watch(self.score_mod, score, *position)
        if not changed.requires_grad:
            return dS_block.zero_()
        dS = dS.sum_to_size(changed.shape).to(changed.dtype)
        inputs, places = [score], {id(x): n for n, x in enumerate(self.learned)}
        inputs += [stand_in for _, stand_in in read]
        d_score, *found = torch.autograd.grad(changed, inputs, dS, allow_unused=True)
        for (x, _), gradient in zip(read, found):
            if id(x) not in places:
                raise ValueError("score_mod must learn the same tensors in every tile, got one of "
                                 f"shape {tuple(x.shape)} that is not among `learned`")
            if gradient is not None:
                self.sums[places[id(x)]] += gradient
        return dS_block.zero_() if d_score is None else d_score.view_as(dS_block)

    def results(self):
        """Return the gradients of `learned` in their dtypes."""
        return [total.to(x.dtype) for x, total in zip(self.learned, self.sums)]
