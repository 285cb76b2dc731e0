"""Lessons in Triton, for those without: which is there, whom it serves, and why not."""

import importlib
import os

import torch

from common.report import console


def kernels_of(lesson, case, device):
    """Return the module `lesson`, whose kernels are in Triton, and None; or None and why they can't
    run the case.

    On a CPU they have to be asked for, by TRITON_INTERPRET=1 in the environment; without that both
    are None.
    """
    device = torch.device(device)
    if device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return None, None
    try:
        module = importlib.import_module(lesson)
    except ImportError as missing:  # Triton is not everywhere
        return None, str(missing)
    tools = importlib.import_module("lab.triton_tools")
    why_not = tools.unserved(device)
    if case.dtype not in tools.DTYPES or max(case.d, case.dv or 0) > tools.MOST_COLUMNS:
        why_not = why_not or "the kernels take no float64 and no head size above 256"
    return (None, why_not) if why_not else (module, None)


def measurable(candidates, device):
    """Return the candidates whose memory and time mean something: no interpreted kernel."""
    return [c for c in candidates
            if not (c.name.startswith("triton") and torch.device(device).type == "cpu")]


def say_why_not(lesson, cases, device):
    """Say why there are no rows of the kernels, where there are none."""
    for why_not in dict.fromkeys(kernels_of(lesson, case, device)[1] for case in cases):
        if why_not:
            console.print(f"\ntriton: {why_not}")
