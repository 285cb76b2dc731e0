"""The tables and plots of what `bench` returns."""

import math
from pathlib import Path

import torch

from lab.bench import NO_ROOM
from common.report import console, mib, plot_curves, print_table, quotient

SPANS = 4  # times the shortest length, at least, for an exponent


def print_verify(title, rows, lead=("name",)):
    """Print VerifyRows; lead: the fields that stand first."""
    def error(value):
        return "-" if value is None else f"{value:.2e}"

    print_table(
        title,
        [*(name if name != "gradient" else "" for name in lead), "Q (K V)", "dtype",
         "it - standard", "it - float64", "standard - float64", "result"],
        [(*(getattr(r, name) for name in lead), r.shape, r.dtype, error(r.max_diff),
          error(r.error_flash), error(r.error_standard), "pass" if r.passed else "FAIL")
         for r in rows], left=len(lead))
    print_reasons(rows)


def print_memory(title, rows, note):
    """Print MemoryRows, in MiB. note: what the formula counts and what stands beside it."""
    standard = {r.shape: r for r in rows if r.name == "standard"}

    def saved(row, field):
        whole = standard.get(row.shape)
        return quotient(whole and getattr(whole, field), getattr(row, field))

    def beyond(row):
        return "-" if row.peak_bytes is None else f"{row.peak_bytes - row.theory_bytes:+d}"

    print_table(
        title,
        ["name", "Q (K V)", "peak", "formula", "peak - formula, bytes", "standard / this",
         "without result", "standard / this"],
        [(r.name, r.shape, "failed" if r.failed else mib(r.peak_bytes), mib(r.theory_bytes),
          beyond(r), saved(r, "peak_bytes"),
          "-" if r.peak_bytes is None else mib(r.peak_bytes_without_result),
          saved(r, "peak_bytes_without_result")) for r in rows])
    console.print(f"\n{note}")
    print_reasons(r for r in rows if r.failed)


def print_speed(title, rows):
    """Print SpeedRows; a time that is not to be believed is marked."""
    streamed = any(r.gb_per_s for r in rows)
    cells = []
    for r in rows:
        name = f"{r.name} {r.Br}x{r.Bc}" if r.Br else r.name
        rate = ("-",) if streamed else "--"
        if r.seconds is None:
            cells.append((name, r.shape, "failed" if r.failed else r.why, "-", "-", *rate, "-"))
            continue
        spread = "{:.3g} to {:.3g}".format(*r.ratio_spread) if r.ratio_spread else "-"
        rate = (f"{r.gb_per_s:.3g}",) if streamed else (
            f"{r.tflops:.3g}", "-" if r.matmul_share is None else f"{r.matmul_share:.0%}")
        cells.append((name, r.shape, ms(r), quotient(r.ratio_to_standard, 1), spread, *rate,
                      r.launches))
    rates = ["K, V in GB/s"] if streamed else ["TFLOP/s", "of matmul"]
    print_table(title, ["name", "Q (K V)", "ms", "times as fast as standard", "quartiles", *rates,
                        "launches"], cells)
    print_reasons(rows)


def ms(row):
    """Show a row's seconds in milliseconds, marked where they are not to be believed."""
    return f"{row.seconds * 1e3:.4g}" + " ?" * bool(row.why)


def print_reasons(rows):
    """Say of which rows the figure is missing or not to be believed, and why: a line a reason."""
    reasons = {}
    for row in rows:
        if row.why and row.why != NO_ROOM:
            doubted = getattr(row, "seconds", None) is not None
            verb = "? not to be believed" if doubted else "failed"
            reasons.setdefault((verb, row.why), []).append(f"{row.name} {row.shape}")
    for (verb, why), names in reasons.items():
        console.print(f"{verb}: {', '.join(dict.fromkeys(names))}: {why}")


def print_growth(cases, rows):
    """Say how the time of each candidate grows with N, where its rows can carry an exponent."""
    lengths = {case.shape: case.Nq for case in cases}
    if len(set(lengths.values())) < 2:
        return
    said = []
    for name in dict.fromkeys(r.name for r in rows):
        points = [(lengths[r.shape], r.seconds) for r in rows
                  if r.name == name and r.seconds is not None and not r.why]
        said.append(f"{name} {fitted_exponent(points)}")
    console.print("\ntime grows as N to the power of: " + ", ".join(said))


def fitted_exponent(points):
    """Return the slope of log(seconds) over log(N) in two digits, or in words why there is none.

    It takes three lengths that span a factor of 4, and a line that no point is 25 % off.
    """
    lengths = {N for N, _ in points}
    if len(lengths) < 3 or max(lengths) < SPANS * min(lengths):
        return f"- ({len(lengths)} lengths that can be believed, 3 that span 4x are needed)"
    exponent, furthest = slope(points)
    if furthest > math.log(1.25):
        return "- (the points lie on no line)"
    return f"{exponent:.2f}"


def slope(points):
    """Fit a line to the logarithms of points (x, y); return its slope and the furthest distance."""
    x, y = torch.tensor([[math.log(n) for n in point] for point in points], dtype=torch.float64).T
    x, y = x - x.mean(), y - y.mean()
    fitted = (x * y).sum() / x.square().sum()
    return fitted.item(), (y - fitted * x).abs().max().item()


def plot(rows, folder, where, what, prefix):
    """Draw what was measured over N: memory.png and speed.png, with the prefix before them.

    rows: [(tool, row), ...].
    """
    drawings = {"memory": ("peak memory (MiB)", "peak_bytes", 2**20),
                "speed": ("time (ms)", "seconds", 1e-3)}
    for mode, (label, field, unit) in drawings.items():
        curves = {}
        for tool, row in rows:
            if tool == mode and getattr(row, field) is not None:
                N = int(row.shape.split()[0].split("x")[-2])
                curves.setdefault(row.name, []).append((N, getattr(row, field) / unit))
        if curves:
            linear = "flash" if mode == "memory" else "standard"
            plot_curves(Path(folder) / f"{prefix}{mode}.png", f"{mode} of {what} ({where})", label,
                        curves, {"O(N^2)": (2, "standard"), "O(N)": (1, linear)})
