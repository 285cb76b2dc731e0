"""The attention problems that the tools run: shapes, dtype, what may be seen, and the options that name them."""

from dataclasses import dataclass, replace
from typing import Optional

from common import cli

import torch

from visible import DTYPES


@dataclass(frozen=True)
class Case:
    """One attention problem: shapes, dtype and what may be seen. Nk, dv and kv_heads are Nq, d and heads if None."""

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
        """The shapes in a table's cell: 1x256x64, or 'Q x K x V' where they differ."""
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

    def inputs(self, device, seed):
        """Q, K, V from a standard normal distribution: the same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(s, generator=generator).to(device, self.dtype) for s in self.shapes]


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


def parser(description):
    """Return the options that every lesson takes where they make sense."""
    positive, options = cli.whole_number(1), cli.Parser(description=description)
    options.add_argument("--device", default="auto", help="auto, cpu, cuda[:i] or npu[:i] (auto)")
    options.add_argument("--dtype", choices=[dtype_name(d) for d in DTYPES], help="(float32)")
    options.add_argument("--batch", type=positive, metavar="B", help="(1)")
    options.add_argument("--heads", type=positive, metavar="H", help="[B, H, N, d] instead of [B, N, d]")
    options.add_argument("--kv-heads", type=positive, metavar="H", help="heads of K and V, a divisor of --heads")
    options.add_argument("--seq-len", type=positive, nargs="+", metavar="N", help="(512 1024 2048 4096)")
    options.add_argument("--head-dim", type=positive, metavar="d", help="(64)")
    options.add_argument("--br", type=positive, default=64, help="rows of a query block (64)")
    options.add_argument("--bc", type=positive, default=64, help="rows of a key/value block (64)")
    options.add_argument("--causal", action="store_true", help="a query sees no key after it")
    options.add_argument("--window", type=_reach, nargs=2, metavar=("LEFT", "RIGHT"),
                         help="how many keys before and after it a query sees, or none for all")
    options.add_argument("--seed", type=cli.whole_number(0), default=0, help="of the random inputs (0)")
    options.add_argument("--json", metavar="FILE", help="write the rows there as well")
    options.add_argument("--plot", metavar="DIR", help="draw memory and time against N into that folder")
    return options


def _reach(text):
    return None if text == "none" else cli.whole_number(0)(text)


def cases_of(args, options, device, lengths=(512, 1024, 2048, 4096)):
    """Return the cases that the options ask for, one a sequence length."""
    if args.kv_heads and (not args.heads or args.heads % args.kv_heads):
        options.error(f"argument --kv-heads: a divisor of --heads is taken, got {args.kv_heads} of {args.heads}")
    if args.dtype == "float64" and device.type == "npu":
        options.error("argument --dtype: Ascend has no float64 matmul, so the NPU takes no float64")
    given = _shape_options(args)
    if "dtype" in given:
        given["dtype"] = getattr(torch, args.dtype)
    return [Case(N, **given, **_masks(args)) for N in args.seq_len or lengths]


def verify_cases(args, options, device):
    """Return the cases that the options ask for, or VERIFY_CASES where they name no shape."""
    if args.seq_len or _shape_options(args):
        return cases_of(args, options, device)
    suited = [c for c in VERIFY_CASES if c.dtype != torch.float64 or device.type != "npu"]  # no float64 matmul there
    return [replace(case, **_masks(args)) for case in suited]


def _shape_options(args):
    given = {"batch": args.batch, "heads": args.heads, "kv_heads": args.kv_heads, "d": args.head_dim,
             "dtype": args.dtype}
    return {name: value for name, value in given.items() if value is not None}


def _masks(args):
    return {"causal": args.causal, "window": tuple(args.window) if args.window else None}
