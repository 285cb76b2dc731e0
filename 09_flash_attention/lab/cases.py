"""The attention problems that the tools run, and the command line's options that name them."""

import argparse
import importlib.util
import math
from dataclasses import dataclass, replace
from typing import Optional

from common import cli
from common.device import free_bytes

import torch

from tiles import AUTO, choose_tile
from visible import DTYPES


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

    def tile(self, Br, Bc, device):
        """Return the tile that `flash_attention_forward` takes for this case: Br and Bc."""
        (*lead, Nq, _), _, (*_, Nk, dv) = self.shapes
        return choose_tile(Br, Bc, math.prod(lead), Nq, Nk, dv, self.dtype, device.type)

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


def parser(description, *names):
    """Return a parser with these options, or all; they mean the same in every lesson."""
    number = cli.whole_number(1)
    known = {
        "device": dict(default="auto", help="auto, cpu, cuda[:i] or npu[:i] (auto)"),
        "dtype": dict(choices=[dtype_name(d) for d in DTYPES], help="(float32)"),
        "batch": dict(type=number, metavar="B", help="(1)"),
        "heads": dict(type=number, metavar="H", help="[B, H, N, d] instead of [B, N, d]"),
        "kv-heads": dict(type=number, metavar="H", help="heads of K and V, a divisor of --heads"),
        "seq-len": dict(type=number, nargs="+", metavar="N", help="one or more"),
        "head-dim": dict(type=number, metavar="d", help="(64)"),
        "br": dict(type=_tile, default=64, help="rows of a query block, or auto (64)"),
        "bc": dict(type=_tile, default=64, help="rows of a key/value block, or auto (64)"),
        "causal": dict(action="store_true", help="a query sees no key after it"),
        "window": dict(type=_reach, nargs=2, metavar=("LEFT", "RIGHT"),
                       help="how many keys before and after it a query sees; none: all"),
        "seed": dict(type=cli.whole_number(0), default=0, help="of the random inputs (0)"),
        "json": dict(type=cli.file_to_write, metavar="FILE", help="write the rows there as well"),
        "plot": dict(type=_plot_folder, metavar="DIR",
                     help="draw what was measured into that folder"),
    }
    options = cli.Parser(description=description)
    for name in names or known:
        options.add_argument(f"--{name}", **known[name])
    return options


def _plot_folder(text):
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("it needs matplotlib: pip install matplotlib")
    return cli.folder_to_write(text)


def _tile(text):
    return text if text == AUTO else cli.whole_number(1)(text)


def _reach(text):
    return None if text == "none" else cli.whole_number(0)(text)


def cases_of(args, options, device, lengths=(512, 1024, 2048, 4096)):
    """Return the cases that the options ask for, one a sequence length."""
    shape = _shape(args)
    heads, kv_heads = shape.get("heads"), shape.get("kv_heads")
    if kv_heads and (not heads or heads % kv_heads):
        options.error("argument --kv-heads: a divisor of --heads is taken, "
                      f"got {kv_heads} of {heads}")
    if shape.get("dtype") == torch.float64 and device.type == "npu":
        options.error("argument --dtype: the NPU takes no float64, it has no float64 matmul")
    cases = [Case(N, **shape, **_masks(args)) for N in dict.fromkeys(args.seq_len or lengths)]
    for case in cases:
        need, room = 2 * 4 * sum(map(math.prod, case.shapes)), free_bytes(torch.device("cpu"))
        if need > room:  # they are drawn in float32 and then converted
            options.error(f"Q, K and V of {case.shape} need {need / 2**30:.0f} GiB, "
                          f"{room / 2**30:.0f} GiB are free")
    return cases


def verify_cases(args, options, device):
    """Return the cases that the options ask for, or VERIFY_CASES where they name no shape."""
    if args.seq_len or _shape(args):
        return cases_of(args, options, device)
    refused = torch.float64 if device.type == "npu" else None  # it has no float64 matmul
    return [replace(c, **_masks(args)) for c in VERIFY_CASES if c.dtype != refused]


def _shape(args):
    given = {field: getattr(args, option, None) for field, option in (
        ("batch", "batch"), ("heads", "heads"), ("kv_heads", "kv_heads"), ("d", "head_dim"),
        ("dtype", "dtype"))}
    given["dtype"] = given["dtype"] and getattr(torch, given["dtype"])
    return {field: value for field, value in given.items() if value is not None}


def _masks(args):
    window = getattr(args, "window", None)
    return {"causal": getattr(args, "causal", False), "window": tuple(window) if window else None}
