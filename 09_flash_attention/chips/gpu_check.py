"""Is the Triton kernel right on this GPU, and how fast beside every backend of torch's own SDPA?

    bash scripts/gpu_check.sh

First its error against float64 on the CPU, over dtypes, head sizes, lengths, groups and strides;
then its bfloat16 forward in turn with SDPA's backends; then the launcher's tile in turn with
others. It ends within six minutes and writes verify.json, speed.csv and speed.png.
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
from flash_triton import DTYPES, flash_attention_triton, platform_of, tile_of
from lab.cases import Case
from lab.show import ms, print_reasons, print_verify

import torch
import torch.nn.functional as F

SECONDS = 330  # after that nothing new is begun
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
TOKENS, WIDTH = 16384, 2048  # of a batch, and of all heads: FlashAttention's own benchmark
IN_A_ROW = 4  # calls that are timed as one, so that the time to launch them does not count

LENGTHS = (dict(Nq=1, Nk=239), dict(Nq=113, Nk=203), dict(Nq=1023, Nk=1024),
           dict(Nq=300, Nk=200), dict(Nq=512, heads=8, kv_heads=2, batch=2))
VERIFY_CASES = [Case(d=d, dtype=dtype, causal=causal, **lengths)
                for dtype, d, causal, lengths in itertools.product(
                    DTYPES, (31, 64, 72, 128, 256), (False, True), LENGTHS)]
SPEED_CASES = [Case(N, batch=TOKENS // N, heads=WIDTH // d, d=d, dtype=torch.bfloat16,
                    causal=causal)
               for d, causal, N in itertools.product(
                   (64, 128), (False, True), (1024, 2048, 4096, 8192, 16384))]


def verify(case, device):
    """Verify the kernel on a case, and with d=64 on other strides too: VerifyRows."""
    attend = partial(flash_attention_triton, causal=case.causal)
    candidates = [Candidate("standard", partial(standard_attention, causal=case.causal)),
                  Candidate("triton", attend)]
    if case.d == 64:
        candidates.append(Candidate("triton, strided", partial(on_transposed, attend)))
    return verify_candidates(case, candidates, device=device)


def on_transposed(attend, *inputs):
    """Call attend on inputs whose rows are columns in memory."""
    return attend(*(x.mT.contiguous().mT for x in inputs))


@dataclass
class BackendRow:
    """Medians of one call; ratio_to_triton: times as fast as the kernel, with its quartiles.

    why: why it was not run (None), or is not to be believed.
    """

    name: str
    d: int
    causal: bool
    N: int
    batch: int
    heads: int
    seconds: Optional[float] = None
    tflops: Optional[float] = None
    matmul_share: Optional[float] = None
    peak_bytes: Optional[int] = None
    ratio_to_triton: Optional[float] = None
    ratio_low: Optional[float] = None
    ratio_high: Optional[float] = None
    why: str = ""


def compare_backends(case, device):
    """Time the kernel in turn with each backend of SDPA that takes the case: a BackendRow each.

    tflops counts the kept score pairs only; matmul_share is of a large matmul in the same rounds.
    """
    scores = 4 * 4 * case.batch * case.heads * case.Nq**2  # what MATH holds
    once = [Candidate("triton", partial(flash_attention_triton, causal=case.causal))] + [
        Candidate(name, partial(sdpa, name, case.causal), scores * (name == "MATH"))
        for name in BACKENDS]
    often = [replace(c, call=partial(in_a_row, c.call)) for c in once]
    rows = benchmark(case, often, device=device, flop=IN_A_ROW * case.flop)
    return [BackendRow(
        r.name, case.d, case.causal, case.Nq, case.batch, case.heads,
        r.seconds and r.seconds / IN_A_ROW, r.tflops, r.matmul_share, memory.peak_bytes,
        r.ratio_to_standard, *(r.ratio_spread or (None, None)), r.why)
        for r, memory in zip(rows, profile(case, once, device=device))]


def sdpa(name, causal, *inputs):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        return F.scaled_dot_product_attention(*inputs, is_causal=causal)


def in_a_row(call, *inputs):
    for _ in range(IN_A_ROW):
        found = call(*inputs)
    return found


def print_speed(rows):
    cells = []
    for r in rows:
        shape = r.name, r.d, r.causal, f"{r.batch}x{r.heads}x{r.N}"
        if r.seconds is None:
            cells.append((*shape, "not run", *"-----"))
            continue
        share = "-" if r.matmul_share is None else f"{r.matmul_share:.0%}"
        cells.append((*shape, ms(r), f"{r.tflops:.4g}", share, mib(r.peak_bytes),
                      f"{r.ratio_to_triton:.3g}", f"{r.ratio_low:.3g} to {r.ratio_high:.3g}"))
    print_table("Speed: bfloat16 forward, median of calls in turn",
                ["name", "d", "causal", "B x H x N", "ms", "TFLOP/s", "of matmul", "peak MiB",
                 "times as fast as triton", "quartiles"], cells)
    for name, why in dict.fromkeys((r.name, r.why) for r in rows if r.why):
        console.print(f"{name}: {why}")


def print_held(rows):
    """Say whether the kernel is as fast as the lesson asks on Hopper."""
    for r in rows:
        if r.name == "triton" or r.ratio_to_triton is None or r.N < 2048:
            continue
        if r.name == "FLASH_ATTENTION" and r.ratio_to_triton > 1:
            console.print(f"slower than SDPA's flash at d={r.d}, causal {r.causal}, N={r.N}")
        if r.d == 128 and r.N >= 8192 and r.ratio_to_triton > 1 / 0.9:
            console.print(f"below 0.9 of {r.name} at d=128, causal {r.causal}, N={r.N}")


def write_speed(folder, rows, where):
    """Write speed.csv and speed.png."""
    with whole_file(folder / "speed.csv") as part, open(part, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(BackendRow)])
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, rows))
    panels = sorted({(r.d, r.causal) for r in rows})
    with plotted(folder / "speed.png", 1, len(panels), figsize=(4 * len(panels), 4),
                 sharey=True, squeeze=False) as axes:
        for (d, causal), panel in zip(panels, axes[0]):
            for name in ("triton", *BACKENDS):
                points = [(r.N, r.tflops) for r in rows
                          if (r.name, r.d, r.causal) == (name, d, causal) and r.tflops]
                if points:
                    panel.plot(*zip(*points), marker="o", label=name)
            logarithmic(panel, {r.N for r in rows})
            panel.set(title=f"d={d}{', causal' if causal else ''}", xlabel="sequence length N")
        axes[0][0].set(ylabel=f"TFLOP/s on {where}")
        axes[0][0].legend()


def compare_tiles(case, device):
    """Time the kernel's tiles in turn: [(tile, times as fast as the launcher's), ...]."""
    chosen = tile_of(platform_of(device), case.dtype, case.d, case.d, case.causal)
    rows = benchmark(case, [
        Candidate(tile, partial(in_a_row, partial(flash_attention_triton, causal=case.causal,
                                                  tile=tile)))
        for tile in dict.fromkeys([chosen, *HOPPER_TILES[case.dtype.itemsize]])], device=device)
    print_reasons(rows)  # Triton's OutOfResources: this chip has less
    return [(row.name, row.ratio_to_standard) for row in rows if row.seconds]


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

    checked = []
    for case in track("verify", VERIFY_CASES):
        if time.perf_counter() < end - SECONDS / 2:
            checked += verify(case, device)
    failed = [row for row in checked if not row.passed]
    largest = [max((r for r in checked if r.dtype == dtype), key=lambda r: r.error_flash or 0)
               for dtype in dict.fromkeys(row.dtype for row in checked)]
    print_verify(f"Verify: {len(failed)} of {len(checked)} fail; the largest errors",
                 failed + largest)
    write_json(folder / "verify.json", device, [("verify", row) for row in checked])

    rows, tiles = [], []
    for case in track("speed", SPEED_CASES):
        if time.perf_counter() < end:
            rows += compare_backends(case, device)
    print_speed(rows)
    print_held(rows)
    write_speed(folder, rows, torch.cuda.get_device_name(device))

    for case in track("tiles", [case for case in SPEED_CASES if case.Nq == 8192]):
        if time.perf_counter() < end:
            tiles += [(case.d, case.causal, "{}x{}, {} warps, {} stages".format(*tile),
                       f"{times:.3g}") for tile, times in compare_tiles(case, device)]
    print_table("Tiles at N=8192", ["d", "causal", "Br x Bc", "times as fast as the launcher's"],
                tiles, left=3)
    if len(rows) < len(SPEED_CASES) * (1 + len(BACKENDS)) or time.perf_counter() > end:
        console.print(f"\nnot all was begun: {SECONDS} s were over")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.serve(main)
