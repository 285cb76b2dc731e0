"""Are the Triton kernels right on this GPU, and how fast beside every backend of torch's own SDPA?

    bash scripts/gpu_check.sh

First their error against float64 on the CPU, over dtypes, head sizes, lengths, groups, strides and
windows. Then, in bfloat16 and in turn with SDPA's backends, and with FlexAttention compiled: the
forward, a forward and a backward, windows, decoding. Then the launchers' tiles in turn with others.
It ends within six minutes and writes verify.json, speed.csv and a plot for each kind of work.
"""

import csv
import dataclasses
import itertools
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Optional

chips = Path(__file__).resolve().parent
sys.path[:0] = [str(chips.parent), str(chips)]  # for the lessons and `lab`; `python -I` has neither

from lab.bench import Candidate, benchmark, profile, verify as verify_candidates
from common import cli
from common.device import choose, describe
from common.report import (
    console, logarithmic, mib, plotted, print_table, track, whole_file, write_json)
from compile_kernel import HOPPER_TILES
from flash_attention import standard_attention
from flash_backward import gradients
from flash_pages import through_pages
from flash_triton import flash_attention_triton, tile_of
from flash_triton_decoding import paged_attention_triton, split_kv_attention_triton
from lab.cases import Case
from lab import flex
from lab.judge import seen
from lab.show import ms, print_reasons, print_verify
from lab.triton_tools import DTYPES, platform_of

import torch
import torch.nn.functional as F

SECONDS = 330  # after that nothing new is begun
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
FLEX = "FlexAttention"
TOKENS, WIDTH = 16384, 2048  # of a batch, and of all heads: FlashAttention's own benchmark
IN_A_ROW = 4  # calls that are timed as one, so that the time to launch them does not count

LENGTHS = (dict(Nq=300, Nk=333, window=(100, 30)), dict(Nq=113, Nk=203), dict(Nq=300, Nk=200),
           dict(Nq=1, Nk=1239, heads=8, kv_heads=2), dict(Nq=1023, Nk=1024),
           dict(Nq=512, heads=8, kv_heads=2, batch=2))
VERIFY_CASES = [Case(d=d, dtype=dtype, causal=causal, **lengths)
                for lengths, dtype, d, causal in itertools.product(
                    LENGTHS, DTYPES, (64, 128, 31, 72, 256), (False, True))]
WITH_GRADIENTS = 113, 300  # the Nq for which they are verified too
PAGE = 16  # keys a page, as serving systems have them


def speed_case(N, d, causal, window=None):
    return Case(N, batch=TOKENS // N, heads=WIDTH // d, d=d, dtype=torch.bfloat16, causal=causal,
                window=window)


# By the kind of work. Decoding: one query a head, groups of 4, as a model with 32 heads has them.
SPEED_CASES = {
    "decode": [Case(1, Nk=Nk, batch=4, heads=32, kv_heads=8, d=128, dtype=torch.bfloat16)
               for Nk in (4096, 16384, 65536)],
    "window": [speed_case(N, 128, True, (1023, 0)) for N in (4096, 16384)],
    "backward": [speed_case(N, d, causal) for d, causal, N in itertools.product(
        (128, 64), (True, False), (2048, 8192))],
    "forward": [speed_case(N, d, causal) for d, causal, N in itertools.product(
        (128, 64), (True, False), (1024, 2048, 4096, 8192, 16384))],
}


def verify(case, device):
    """Verify the kernels on a case, and with d=64 on other strides too: VerifyRows."""
    standard, attend = (partial(call, **case.masks)
                        for call in (standard_attention, flash_attention_triton))
    candidates = [Candidate("standard", standard), Candidate("triton", attend)]
    if case.d == 64:
        candidates.append(Candidate("triton, strided", partial(on_transposed, attend)))
    if case.Nq == 1:
        candidates += [Candidate("triton, split", split_kv_attention_triton),
                       Candidate("triton, pages", partial(
                           through_pages, paged_attention_triton, page=PAGE))]
    rows = verify_candidates(case, candidates, device=device)
    if case.Nq in WITH_GRADIENTS:
        rows += verify_candidates(
            case, [Candidate("standard", partial(gradients, standard)),
                   Candidate("triton backward", partial(gradients, attend))],
            device=device, dO=True, factor=3)
    return rows


def on_transposed(attend, *inputs):
    """Call attend on inputs whose rows are columns in memory."""
    return attend(*(x.mT.contiguous().mT for x in inputs))


@dataclass
class BackendRow:
    """Medians of one call; ratio_to_triton: times as fast as the kernels, with its quartiles.

    gb_per_s: of K and V, in decoding. why: why it was not run (None), or is not to be believed.
    """

    work: str
    name: str
    d: int
    causal: bool
    N: int
    batch: int
    heads: int
    seconds: Optional[float] = None
    tflops: Optional[float] = None
    matmul_share: Optional[float] = None
    gb_per_s: Optional[float] = None
    peak_bytes: Optional[int] = None
    ratio_to_triton: Optional[float] = None
    ratio_low: Optional[float] = None
    ratio_high: Optional[float] = None
    why: str = ""


def compare_backends(work, case, device):
    """Time the kernels in turn with all that does the same work: a BackendRow each.

    tflops counts the kept score pairs only; matmul_share is of a large matmul in the same rounds.
    """
    calls = {"triton": split_kv_attention_triton, "triton, pages": pages_call(case, device)
             } if work == "decode" else {"triton": partial(flash_attention_triton, **case.masks)}
    calls.update(sdpa_calls(case, device))
    if flex.flex_attention is not None and device.type == "cuda":
        calls[FLEX] = flex_call(case, device)
    if work == "backward":
        calls = {name: partial(gradients, call) for name, call in calls.items()}
    scores = 4 * 4 * case.batch * case.heads * case.Nq * (case.Nk or case.Nq)  # what MATH holds
    once = [Candidate(name, call, scores * (name == "MATH")) for name, call in calls.items()]
    often = [replace(c, call=partial(in_a_row, c.call)) for c in once]
    flop = None if work == "decode" else case.flop * (3.5 if work == "backward" else 1)
    options = {"device": device, "dO": work == "backward"}
    rows = benchmark(case, often, flop=flop and IN_A_ROW * flop, stream=flop is None, **options)
    return [BackendRow(
        work, r.name, case.d, case.causal, case.Nk or case.Nq, case.batch, case.heads,
        r.seconds and r.seconds / IN_A_ROW, r.tflops, r.matmul_share,
        r.gb_per_s and r.gb_per_s * IN_A_ROW, memory.peak_bytes,
        r.ratio_to_standard, *(r.ratio_spread or (None, None)), r.why)
        for r, memory in zip(rows, profile(case, once, **options))]


def pages_call(case, device):
    """Return decoding from pages, as a call of Q, K, V; the pages are made beforehand, from the
    K and V that every call is given, and lie in any order.
    """
    pages = [x.transpose(1, 2).reshape(-1, PAGE, *x.shape[1::2])  # [P, page, Hkv, d]
             for x in case.inputs(device, 0)[1:]]
    order = torch.randperm(len(pages[0]), generator=torch.Generator().manual_seed(0))
    table = order.argsort().view(case.batch, -1).to(device, torch.int32)
    lengths = torch.full((case.batch,), case.Nk, dtype=torch.int32, device=device)
    pages = [x[order.to(device)] for x in pages]
    return lambda Q, K, V: paged_attention_triton(Q, *pages, table, lengths)


def sdpa_calls(case, device):
    """Return {backend: call} of SDPA; a window needs an N x N mask there, made beforehand."""
    options = {"is_causal": case.causal} if case.window is None else {
        "attn_mask": seen(case, case.Nq, case.Nk or case.Nq).to(device)}
    if case.kv_heads:
        options["enable_gqa"] = True
    return {name: partial(sdpa, name, options) for name in BACKENDS}


def sdpa(name, options, *inputs):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        return F.scaled_dot_product_attention(*inputs, **options)


def flex_call(case, device):
    """Return FlexAttention, compiled, as a call of Q, K, V; its mask is made beforehand."""
    torch.compiler.reset()  # or after eight shapes it would not compile any more
    left, _ = case.window or (case.Nq, None)

    def sees(b, h, i, j):
        return (j <= i) & (j >= i - left)

    mask = flex.create_block_mask(sees, None, None, case.Nq, case.Nq, device=device.type
                                  ) if case.causal else None
    return partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask,
                   enable_gqa=bool(case.kv_heads))


def in_a_row(call, *inputs):
    for _ in range(IN_A_ROW):
        found = call(*inputs)
    return found


def print_speed(rows):
    cells = []
    for r in rows:
        shape = r.work, r.name, r.d, r.causal, f"{r.batch}x{r.heads}x{r.N}"
        if r.seconds is None:
            cells.append((*shape, "not run", *"------"))
            continue
        share = "-" if r.matmul_share is None else f"{r.matmul_share:.0%}"
        rates = (f"{x:.4g}" if x else "-" for x in (r.tflops, r.gb_per_s))
        ratio = "--" if r.ratio_to_triton is None else (
            f"{r.ratio_to_triton:.3g}", f"{r.ratio_low:.3g} to {r.ratio_high:.3g}")
        cells.append((*shape, ms(r), *rates, share, mib(r.peak_bytes), *ratio))
    print_table("Speed: bfloat16, median of calls in turn",
                ["work", "name", "d", "causal", "B x H x N", "ms", "TFLOP/s", "K, V in GB/s",
                 "of matmul", "peak MiB", "times as fast as triton", "quartiles"], cells, left=2)
    for name, why in dict.fromkeys((r.name, r.why) for r in rows if r.why):
        console.print(f"{name}: {why}")


def print_held(rows):
    """Say where the kernels are slower than the lesson asks on Hopper."""
    for r in rows:
        if r.name.startswith("triton") or r.name == FLEX or r.ratio_to_triton is None or r.N < 2048:
            continue
        if r.ratio_to_triton > 1 / 0.9:
            console.print(f"{r.work}: below 0.9 of {r.name} at d={r.d}, causal {r.causal}, N={r.N}")


def write_speed(folder, rows, where):
    """Write speed.csv, and for each kind of work its plot."""
    with whole_file(folder / "speed.csv") as part, open(part, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(BackendRow)])
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, rows))
    for work in dict.fromkeys(r.work for r in rows):
        plot(folder / f"{work}.png", [r for r in rows if r.work == work], where)


def plot(path, rows, where):
    rate, label = ("gb_per_s", "K and V in GB/s") if rows[0].work == "decode" else (
        "tflops", "TFLOP/s")
    panels = sorted({(r.d, r.causal) for r in rows})
    with plotted(path, 1, len(panels), figsize=(4 * len(panels), 4), sharey=True,
                 squeeze=False) as axes:
        for (d, causal), panel in zip(panels, axes[0]):
            for name in dict.fromkeys(r.name for r in rows):
                points = [(r.N, getattr(r, rate)) for r in rows
                          if (r.name, r.d, r.causal) == (name, d, causal) and r.seconds]
                if points:
                    panel.plot(*zip(*points), marker="o", label=name)
            logarithmic(panel, {r.N for r in rows})
            panel.set(title=f"{rows[0].work}, d={d}{', causal' if causal else ''}",
                      xlabel="sequence length N")
        axes[0][0].set(ylabel=f"{label} on {where}")
        axes[0][0].legend()


def compare_tiles(case, device):
    """Time the forward's tiles in turn: [(tile, times as fast as the launcher's), ...]."""
    chosen = tile_of(platform_of(device), case.dtype, case.d, case.d, case.causal)
    rows = benchmark(case, [
        Candidate(tile, partial(in_a_row, partial(flash_attention_triton, causal=case.causal,
                                                  tile=tile)))
        for tile in dict.fromkeys([chosen, *HOPPER_TILES["flash_attention_kernel"]])],
        device=device)
    print_reasons(rows)  # Triton's OutOfResources: this chip has less
    return [(row.name, row.ratio_to_standard) for row in rows if row.seconds]


def check(device, end):
    """Verify the cases that can be begun before `end`; print what fails and the largest errors."""
    rows = []
    for case in track("verify", VERIFY_CASES):
        if time.perf_counter() < end:
            rows += verify(case, device)
    failed = [row for row in rows if not row.passed]
    largest = [max((r for r in rows if r.dtype == dtype), key=lambda r: r.error_flash or 0)
               for dtype in dict.fromkeys(row.dtype for row in rows)]
    print_verify(f"Verify: {len(failed)} of {len(rows)} fail; the largest errors",
                 failed + largest)
    if len({row.shape for row in rows}) < len({case.shape for case in VERIFY_CASES}):
        console.print("not all cases were begun")
    return rows


def main():
    options = cli.Parser(description=__doc__)
    options.add_argument("--device", default="auto", help="auto or cuda[:i] (auto)")
    options.add_argument("--folder", type=cli.folder_to_write, default="results/gpu_check",
                         help="where the files go (results/gpu_check)")
    args = options.parse_args()
    device, folder = choose(args.device), Path(args.folder)
    if device.type != "cuda":
        raise cli.Refused(f"it needs a CUDA GPU, found {device}")
    console.print(f"device: {describe(device)}")
    end = time.perf_counter() + SECONDS

    checked = check(device, end - 2 * SECONDS / 3)
    failed = [row for row in checked if not row.passed]
    write_json(folder / "verify.json", device, [("verify", row) for row in checked])

    rows, tiles, speed = [], [], [(work, case) for work, cases in SPEED_CASES.items()
                                  for case in cases]
    for work, case in track("speed", speed):
        if time.perf_counter() < end:
            rows += compare_backends(work, case, device)
    print_speed(rows)
    print_held(rows)
    write_speed(folder, rows, torch.cuda.get_device_name(device))

    for case in track("tiles", [c for c in SPEED_CASES["forward"] if c.Nq == 8192]):
        if time.perf_counter() < end:
            tiles += [(case.d, case.causal, "{}x{}, {} warps, {} stages".format(*tile),
                       f"{times:.3g}") for tile, times in compare_tiles(case, device)]
    print_table("Tiles at N=8192", ["d", "causal", "Br x Bc", "times as fast as the launcher's"],
                tiles, left=3)
    if time.perf_counter() > end:
        console.print(f"\nwhat is missing was not begun: {SECONDS} s were over")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.serve(main)
