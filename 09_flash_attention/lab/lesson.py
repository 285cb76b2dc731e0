"""A lesson's command line: options that mean the same in every lesson, the cases that they name,
the modes one after the other, the files at the end.
"""

import importlib
import math
from dataclasses import replace

import torch

from common import cli
from common.device import choose, describe, free_bytes
from common.report import console, track, write_json
from lab.cases import VERIFY_CASES, Case, dtype_name
from lab.served import say_why_not
from lab.show import plot
from lab.tiles import AUTO
from lab.visible import DTYPES

LENGTHS = (512, 1024, 2048, 4096)
DRAWN = ("memory", "speed")
RESULTS = "results"  # the folder where pictures go that no folder is named for; git ignores it


def parser(doc, *names):
    """Return a parser with these options, or all. doc: the lesson's docstring."""
    number = cli.whole_number(1)
    known = {
        "device": dict(default="auto", help="auto, cpu, cuda[:i] or npu[:i] (auto)"),
        "dtype": dict(choices=[dtype_name(d) for d in DTYPES], help="(float32)"),
        "batch": dict(type=number, metavar="B", help="(1)"),
        "heads": dict(type=number, metavar="H", help="[B, H, N, d] instead of [B, N, d]"),
        "kv-heads": dict(type=number, metavar="H", help="heads of K and V, a divisor of --heads"),
        "seq-len": dict(type=number, nargs="+", metavar="N", help="one or more"),
        "head-dim": dict(type=number, metavar="d", help="(64)"),
        "br": dict(type=_tile, help="rows of a query block, or auto (64)"),
        "bc": dict(type=_tile, help="rows of a key/value block, or auto (64)"),
        "causal": dict(action="store_true", help="a query sees no key after it"),
        "window": dict(type=_reach, nargs=2, metavar=("LEFT", "RIGHT"),
                       help="how many keys before and after it a query sees; none: all"),
        "seed": dict(type=cli.whole_number(0), default=0, help="of the random inputs (0)"),
        "json": dict(type=cli.file_to_write, metavar="FILE", help="write the rows there as well"),
        "plot": dict(type=cli.folder_to_write, nargs="?", const=RESULTS, metavar="DIR",
                     help=f"draw what was found, into that folder ({RESULTS})"),
    }
    options = cli.Parser(description=doc)
    for name in names or known:
        options.add_argument(f"--{name}", **known[name])
    return options


def begin(options, lengths=None, check=lambda args: None):
    """Parse, check, choose the device, say which. Return args, device, cases of these lengths."""
    args = options.parse_args()
    check(args)
    if getattr(args, "plot", None) is not None:
        try:
            importlib.import_module("matplotlib.figure")
        except ImportError as missing:
            options.error(f"argument --plot: it needs matplotlib ({missing}): pip install "
                          "matplotlib")
    args.device = device = choose(args.device)
    cases = cases_of(args, options, device, lengths) if lengths else []
    console.print(f"device: {describe(device)}")
    return args, device, cases


def run_modes(options, modes, what="", prefix="", lengths=LENGTHS, adapt=None, unserved=None,
              kernels=None, **more):
    """Run what --mode asks for, each table as soon as it is there; return the exit status.

    modes: {mode: (tool, show)}: tool(cases, Br=, Bc=, device=, seed=, **more) -> rows, and
    show(rows, args, cases) prints them. Or {mode: show(args, device) -> rows}. adapt: of a case of
    the options -> the lesson's case. more: {argument: option} of the tools. what, prefix: of plots.
    unserved: {mode: options that it can't serve}. kernels: the lesson in Triton that has rows too.
    """
    options.add_argument("--mode", choices=[*modes, "all"], default="verify", help="(verify)")
    def check(args):
        for name in (unserved or {}).get(args.mode, ()):
            if getattr(args, name):
                options.error(f"argument --{name.replace('_', '-')}: --mode {args.mode} takes none")
        if getattr(args, "plot", None) is not None and args.mode not in (*DRAWN, "all"):
            options.error(f"argument --plot: {' and '.join(DRAWN)} are drawn, "
                          f"got --mode {args.mode}")

    args, device, cases = begin(options, lengths, check)
    asked = modes if args.mode == "all" else [args.mode]
    suite = [adapt(c) for c in cases] if adapt else verify_cases(args, options, device)
    cases = suite if adapt else cases
    more, found = {name: getattr(args, option) for name, option in more.items()}, []
    for mode in asked:
        if callable(modes[mode]):
            rows = modes[mode](args, device)
        else:
            tool, show = modes[mode]
            given = suite if mode == "verify" else cases
            Br, Bc = tile(args)
            rows = tool(track(mode, given), Br=Br, Bc=Bc, device=device, seed=args.seed, **more)
            show(rows, args, given)
            if kernels:
                say_why_not(kernels, given, device)
        found += [(mode, row) for row in rows]
    status = finish(args, device, found)
    if getattr(args, "plot", None) is not None:
        plot(found, args.plot, f"{device}, tiles {tile_text(args)}", what, prefix)
    return status


def finish(args, device, rows):
    """Write --json; return 0, or 1 where a comparison or a candidate failed. rows: (tool, row)."""
    if args.json is not None:
        write_json(args.json, device, rows)
    held = (getattr(row, "passed", True) and not getattr(row, "failed", False) for _, row in rows)
    return 0 if all(held) else 1


def tile(args):
    """Return Br and Bc as they were asked for."""
    return args.br or 64, args.bc or 64


def tile_text(args):
    """Show the tile that was asked for."""
    Br, Bc = tile(args)
    return AUTO if Br == Bc == AUTO else f"{Br}x{Bc}"


def cases_of(args, options, device, lengths=LENGTHS):
    """Return the cases that the options ask for, one a sequence length."""
    shape = _shape(args)
    heads, kv_heads = shape.get("heads"), shape.get("kv_heads")
    if kv_heads and (not heads or heads % kv_heads):
        options.error("argument --kv-heads: a divisor of --heads is taken, "
                      f"got {kv_heads} of {heads}")
    if shape.get("dtype") == torch.float64 and device.type == "npu":
        options.error("argument --dtype: the NPU takes no float64, it has no float64 matmul")
    asked = getattr(args, "seq_len", None) or lengths
    cases = [Case(N, **shape, **masks(args)) for N in dict.fromkeys(asked)]
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
    return [replace(c, **masks(args)) for c in VERIFY_CASES if c.dtype != refused]


def _shape(args):
    given = {field: getattr(args, option, None) for field, option in (
        ("batch", "batch"), ("heads", "heads"), ("kv_heads", "kv_heads"), ("d", "head_dim"),
        ("dtype", "dtype"))}
    given["dtype"] = given["dtype"] and getattr(torch, given["dtype"])
    return {field: value for field, value in given.items() if value is not None}


def masks(args):
    window = getattr(args, "window", None)
    return {"causal": getattr(args, "causal", False), "window": tuple(window) if window else None}


def _tile(text):
    return text if text == AUTO else cli.whole_number(1)(text)


def _reach(text):
    return None if text == "none" else cli.whole_number(0)(text)
