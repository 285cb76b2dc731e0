"""A solution of exercises/15_judge.py."""

import torch


def passes(found, standard, exact, floor):
    error, allowed = ((x - exact).abs().max().item() for x in (found, standard))
    return error <= 2 * allowed + floor


def input_A():
    """The last tile is shorter, and dropped: 65 keys, of which the last has a large value."""
    v = torch.zeros(1, 1, 65, 1)
    v[..., -1, 0] = 65
    return torch.ones(1, 1, 1, 1), torch.ones(1, 1, 65, 1), v


def input_B():
    """Query heads 0 and 1 belong to key/value head 0, not to 0 and 1: values 0 and 1 show it."""
    return torch.ones(1, 4, 1, 1), torch.ones(1, 2, 1, 1), torch.tensor([0.0, 1]).view(1, 2, 1, 1)


def input_C():
    """The scale is applied to a float mask too: with d = 4 it is 1/2, and all scores are 0."""
    q = k = torch.zeros(1, 1, 2, 4)
    return q[..., :1, :], k, torch.tensor([0.0, 1]).view(1, 1, 2, 1), torch.tensor([[0.0, 3.0]])
