"""What exercises/15_judge.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case, load

from os.path import dirname, join, realpath

import torch

KERNELS = load(join(dirname(dirname(realpath(__file__))), "15_judge.py"))


def right(q, k, v, mask=None):
    """Attention in float64, each step in plain sight."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    S = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        S = S.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else S + mask
    return torch.softmax(S, dim=-1).nan_to_num(0) @ v


SHOWN = "an input that shows the fault"


def verdict(kernel, fewest):
    """Return call(function): what is said of the input that the reader's function gives."""
    def call(function):
        q, k, v, *mask = function()
        try:
            off = (KERNELS[kernel](q, k, v, *mask) - right(q, k, v, *mask)).abs().max().item()
        except NotImplementedError as refusal:
            return f"one that the kernel refuses: {refusal}"
        if not off >= 0.01:
            return f"one on which the kernel is right, q {list(q.shape)} and k {list(k.shape)}"
        scores = q.shape[:-1].numel() * k.shape[-2]
        return SHOWN if scores <= fewest else f"one with {scores} scores: {fewest} will do"
    return call


def ones(*shapes):
    """Return tensors of different numbers, none of them 0."""
    return tuple(torch.arange(1.0, 1 + torch.Size(s).numel()).view(s) / 8 for s in shapes)


EXACT = torch.tensor([1.0, 2.0, 3.0, 4.0])
TOO_FAR, NEAR = EXACT + torch.tensor([0.0, 0.5, 0, 0]), EXACT + torch.tensor([0.25, 0, 0, 0])
NAN = EXACT * torch.tensor([1.0, torch.nan, 1, 1])
PASSES = {
    "NaN is not greater than anything: ask whether the error is <= what is allowed":
        lambda f, s, e, floor: not (f - e).abs().max() > 2 * (s - e).abs().max() + floor,
    "standard attention may be right by chance: add the floor":
        lambda f, s, e, floor: (f - e).abs().max() <= 2 * (s - e).abs().max(),
    "it may be twice as far off as standard attention":
        lambda f, s, e, floor: (f - e).abs().max() <= (s - e).abs().max() + floor,
    "compare with the exact result, not with standard attention":
        lambda f, s, e, floor: (f - s).abs().max() <= floor,
    "the largest error counts, not the mean":
        lambda f, s, e, floor: (f - e).abs().mean() <= 2 * (s - e).abs().mean() + floor,
    "errors have a sign: .abs() before .max()":
        lambda f, s, e, floor: (f - e).max() <= 2 * (s - e).max() + floor,
}
A = {"64 keys are one whole tile. What becomes of a 65th?":
     lambda: ones((1, 1, 1, 1), (1, 1, 64, 1), (1, 1, 64, 1)),
     "one query, one head and one batch show it as well":
     lambda: ones((1, 1, 65, 1), (1, 1, 65, 1), (1, 1, 65, 1))}
B = {"with one key/value head, or one for each query head, every order is the same":
     lambda: ones((1, 2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
     "one query and one key show it as well, if the values of the heads differ":
     lambda: ones((1, 4, 2, 1), (1, 2, 2, 1), (1, 2, 2, 1))}
C = {"the scale meets the mask. Is the scale 1 at this d, the mask bool, or is there one key?":
     lambda: ones((1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 2, 1), (1, 2)),
     "one query and two keys show it as well":
     lambda: ones((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4), (2, 2))}

CASES = [
    Case("passes", (EXACT, EXACT, EXACT, 1e-6), True, PASSES, said="the exact result itself"),
    Case("passes", (EXACT, TOO_FAR, EXACT, 0.1), True, PASSES,
         said="the exact result, standard off by 0.5, floor=0.1"),
    Case("passes", (NEAR, EXACT, EXACT, 0.1), False, PASSES, said="off by 0.25, floor=0.1"),
    Case("passes", (NEAR, EXACT, EXACT, 0.3), True, PASSES, said="off by 0.25, floor=0.3"),
    Case("passes", (TOO_FAR, NEAR, EXACT, 0.1), True, PASSES,
         said="off by 0.5, standard by 0.25, floor=0.1"),
    Case("passes", (2 * EXACT - TOO_FAR, EXACT, EXACT, 0.1), False, PASSES,
         said="off by -0.5, floor=0.1"),
    Case("passes", (TOO_FAR, EXACT, EXACT, 0.2), False, PASSES, said="one entry off, floor=0.2"),
    Case("passes", (NAN, EXACT, EXACT, 0.1), False, PASSES, said="one entry NaN"),
    Case("input_A", (), SHOWN, A, call=verdict("kernel_A", 65)),
    Case("input_B", (), SHOWN, B, call=verdict("kernel_B", 4)),
    Case("input_C", (), SHOWN, C, call=verdict("kernel_C", 2)),
]
