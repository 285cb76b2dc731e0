"""The attention problems that the tools run."""

import math
from dataclasses import dataclass
from typing import Optional

import torch

from lab.tiles import choose_tile
from lab.visible import Visible


@dataclass(frozen=True)
class Case:
    """One attention problem. Nk, dv and kv_heads are as Nq, d and heads where they are None."""

    Nq: int
    batch: int = 1
    heads: Optional[int] = None  # None: the article's [B, N, d]
    kv_heads: Optional[int] = None
    d: int = 64
    Nk: Optional[int] = None
    dv: Optional[int] = None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window: Optional[tuple] = None

    @property
    def shapes(self):
        """The shapes of Q, K and V."""
        Nk, dv, kv_heads = self.Nk or self.Nq, self.dv or self.d, self.kv_heads or self.heads
        lead = (self.batch,) if self.heads is None else (self.batch, self.heads)
        kv_lead = (self.batch,) if self.heads is None else (self.batch, kv_heads)
        return (*lead, self.Nq, self.d), (*kv_lead, Nk, self.d), (*kv_lead, Nk, dv)

    @property
    def shape(self):
        """The shapes in a table's cell: 1x256x64, or 1x4x64 1x8x64 1x8x96 where they differ."""
        names = ["x".join(map(str, shape)) for shape in self.shapes]
        return names[0] if len(set(names)) == 1 else " ".join(names)

    @property
    def hides(self):
        """Whether a query may be kept from a key."""
        return self.causal or self.window is not None

    @property
    def masks(self):
        """The keyword arguments that say what may be seen."""
        return {"causal": self.causal, "window": self.window}

    def tile(self, Br, Bc, device):
        """Return Br, Bc and the number of key/value heads that are taken at a time."""
        Q, K, V = (torch.empty(shape, dtype=self.dtype, device="meta") for shape in self.shapes)
        return choose_tile(Br, Bc, Q, K, V.shape[-1], device.type)

    @property
    def flop(self):
        """FLOPs of Q K^T and P V over the score pairs that causal and window keep."""
        Q, K, V = (torch.empty(shape, device="meta") for shape in self.shapes)
        pairs = Visible(Q, K, V, **self.masks).kept_pairs()
        return 2 * pairs * math.prod(Q.shape[:-2]) * (Q.shape[-1] + V.shape[-1])

    def inputs(self, device, seed, dO=False):
        """Q, K, V (and dO) from a standard normal distribution: the same on every device."""
        shapes = self.shapes + ((*self.shapes[0][:-1], self.shapes[2][-1]),) * dO
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(s, generator=generator).to(self.dtype).to(device) for s in shapes]


ARTICLE_CASES = (Case(256), Case(512), Case(1024), Case(512, batch=4))
VERIFY_CASES = ARTICLE_CASES + (
    Case(1023),
    Case(113, Nk=203, batch=2),
    Case(512, d=64, dv=96),
    Case(512, heads=8, kv_heads=2),
    Case(512, dtype=torch.float64),
    Case(1024, dtype=torch.float16),
    Case(1024, dtype=torch.bfloat16),
)


def dtype_name(dtype):
    """'float32' for torch.float32."""
    return str(dtype).replace("torch.", "")
