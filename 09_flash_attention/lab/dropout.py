"""Which weights dropout drops: a function of (seed, b, h, i, j), so that no mask has to be kept.

A generator's numbers depend on the order in which they are drawn, and so on the tiles. Here each
entry has a number of its own, a hash of where it stands. The backward computes it again, tiles of
any size drop the same entries, and so does standard attention.
"""

from copy import copy

import torch

LOW_32 = 2**32 - 1


def mix(x):
    """Scramble int64 numbers from 0 to 2^32 - 1 in place: each bit of x depends on all of them.

    The factors are below 2^31, so a product stays below 2^63: nothing overflows, and every device
    computes the same bits. Source: the factors and shifts are those of splitmix32.
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x ^= x >> shift
        x *= factor
        torch.bitwise_and(x, LOW_32, out=x)  # torch 2.1 can't count the launches of &=
    x ^= x >> 15
    return x


class Dropout:
    """The weights that a call with Q [..., Nq, d] drops, each with the chance p."""

    def __init__(self, p, seed, Q):
        lead = Q.shape[:-2]  # [B, Hq], or whatever stands before N
        number = torch.arange(lead.numel(), device=Q.device).view(lead)
        self.p, self.state = p, torch.zeros_like(number)
        for part in (seed % 2**32, seed // 2**32, number):
            self.state = mix((self.state + part) % 2**32)  # [...], of each head

    def of_heads(self, q):
        """Return the same for the heads of `q`, slices of the leading dimensions."""
        part = copy(self)
        part.state = self.state[q]
        return part

    def dropped(self, rows, cols):
        """Return what is dropped of the tile `rows` x `cols`, bool [..., Br, Bc]."""
        i, j = (torch.arange(s.start, s.stop, device=self.state.device) for s in (rows, cols))
        row = mix(self.state.unsqueeze(-1) ^ i)  # [..., Br]
        # Scrambled once more than the rows: else some row and column would share their numbers,
        # and where both are equal the hash is 0.
        x = row.unsqueeze(-1) ^ mix(mix(j + 1))  # [..., Br, Bc]
        return mix(x) < round(self.p * 2**32)
