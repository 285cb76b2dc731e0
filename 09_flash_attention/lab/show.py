"""The tables and plots of what the tools of flash_attention.py return."""

import math

from common.report import console, mib, plot_curves, print_table, quotient

import torch


def print_verify(title, name, rows):
    print_table(
        title,
        ["Q (K V)", "dtype", f"{name} - standard", f"{name} - float64", "standard - float64",
         "result"],
        [(r.shape, r.dtype, f"{r.max_diff:.2e}", f"{r.error_flash:.2e}", f"{r.error_standard:.2e}",
          "pass" if r.passed else "FAIL") for r in rows])


def print_memory(title, rows):
    standard = {r.shape: r for r in rows if r.name == "standard"}
    print_table(
        title,
        ["name", "Q (K V)", "peak", "formula", "standard / this", "without result",
         "standard / this"],
        [(r.name, r.shape, mib(r.peak_bytes), mib(r.theory_bytes),
          quotient(standard[r.shape].peak_bytes, r.peak_bytes), mib(r.peak_bytes_without_result),
          quotient(standard[r.shape].peak_bytes_without_result, r.peak_bytes_without_result))
         for r in rows])
    console.print("\nformula = the result and what must stand beside it: S and P (standard); a "
                  "tile of S_block, O_block and Q_block and five columns (flash); L (fused).")
    beyond = ", ".join(f"{r.name} {(r.peak_bytes - r.theory_bytes) / 2**20:+.4f}"
                       for r in rows[-3:] if r.peak_bytes is not None)
    console.print(f"peak - formula at {rows[-1].shape}, in MiB: {beyond}. Beyond the formula stand "
                  "the fused kernel's working buffers and further outputs, float32 copies of "
                  "half-precision inputs, and on a GPU or NPU the allocator's rounding.")


def print_speed(title, rows):
    cells = []
    for r in rows:
        name = f"{r.name} {r.Br}x{r.Bc}" if r.Br else r.name
        if r.seconds is None:
            cells.append((name, r.shape, "no room", *"-----"))
            continue
        spread = "{:.3g} to {:.3g}".format(*r.ratio_spread) if r.ratio_spread else "-"
        cells.append((name, r.shape, f"{r.seconds * 1e3:.4g}", quotient(r.ratio_to_standard, 1),
                      spread, f"{r.tflops:.3g}", f"{r.matmul_share:.0%}", r.launches))
    print_table(title, ["name", "Q (K V)", "ms", "times as fast as standard", "quartiles",
                        "TFLOP/s", "of matmul", "launches"], cells)


def fitted_exponents(cases, rows):
    """Return {name: slope of log(seconds) over log(N)}, least squares."""
    lengths = {case.shape: case.Nq for case in cases}
    points = {}
    for r in rows:
        if r.seconds is not None:
            points.setdefault(r.name, []).append((math.log(lengths[r.shape]), math.log(r.seconds)))
    fits = {}
    for name, measured in points.items():
        x, y = torch.tensor(measured, dtype=torch.float64).T
        x, y = x - x.mean(), y - y.mean()
        fits[name] = ((x * y).sum() / x.square().sum()).item()
    return fits


def print_trace(title, steps):
    print_table(title, ["query", "keys", "scores", "m", "correction", "l"],
                [(r.query, r.keys, " ".join(f"{s:6.3f}" for s in r.scores), f"{r.m:.3f}",
                  f"{r.correction:.3f}", f"{r.l:.3f}") for r in steps])


def plot(rows, folder, where, what, prefix):
    """Draw what was measured over N: memory.png and speed.png, with the prefix before them."""
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
            plot_curves(folder / f"{prefix}{mode}.png", f"{mode} of {what} ({where})", label,
                        curves, {"O(N^2)": (2, "standard"), "O(N)": (1, linear)})
