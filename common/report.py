"""Show what was measured: tables and progress on the terminal, JSON and plots in files.

A file is written beside its place and moved there when it is whole, so an interrupted run leaves
no half of it.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.device import describe, versions

console = Console(highlight=False, soft_wrap=True)  # nothing is cut to the width of the terminal


def print_table(title, columns, rows, left=1):
    """Print a Markdown table; each cell is shown by str(), the first `left` columns to the left."""
    table = Table(box=box.MARKDOWN)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    wide = Console(width=10_000, color_system=None)  # as wide as its cells are
    with wide.capture() as shown:
        wide.print(table)
    console.print(f"\n[bold]{title}[/bold]\n")
    for line in shown.get().splitlines():
        if line.strip():
            console.print(line, markup=False)


def mib(count):
    """Show a number of bytes in MiB, to four digits; None as 'no room'."""
    return "no room" if count is None else f"{count / 2**20:.4g}"


def quotient(numerator, denominator):
    """Show a quotient to four digits; '-' where a part is missing or zero."""
    return f"{numerator / denominator:.4g}" if numerator and denominator else "-"


def track(title, items):
    """Yield the items, with a progress bar on a terminal."""
    with progress(title, len(items)) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def progress(title, total):
    """Show a bar of `total` steps on a terminal, nothing in a pipe. Yields advance()."""
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    shown = Console(stderr=True)
    bar = Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal)
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.update(task, advance=1)


def write_json(path, device, rows):
    """Write {"device": describe's line, "versions": {...}, "rows": [{"tool": ..., fields}, ...]}.

    rows: [(tool, dataclass instance), ...].
    """
    found = {"device": describe(device), "versions": versions(),
             "rows": [{"tool": tool, **dataclasses.asdict(row)} for tool, row in rows]}
    with whole_file(path) as part:
        part.write_text(json.dumps(found, indent=2) + "\n")


@contextlib.contextmanager
def whole_file(path):
    """Yield a path to write to; it becomes `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-", suffix=path.suffix)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        os.chmod(part, 0o644)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def plotted(path, *shape, **options):
    """Yield the axes of a new figure (plt.subplots(*shape, **options)); then write it to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*shape, layout="constrained", **options)
    try:
        yield axes
        with whole_file(path) as part:
            figure.savefig(part, dpi=120)
    finally:
        plt.close(figure)


def plot_curves(path, title, ylabel, curves, guides):
    """Draw curves over the sequence length N, both axes logarithmic, and write them to `path`.

    curves: {label: [(N, value), ...]}. guides: {label: (exponent, curve that it runs along)}.
    """
    with plotted(path, figsize=(7, 4.5)) as axes:
        for label, points in curves.items():
            axes.plot(*zip(*points), marker="o", label=label)
        for (label, (exponent, beside)), style in zip(guides.items(), ("--", ":")):
            if beside in curves:
                (first, _), (last, value) = curves[beside][0], curves[beside][-1]
                value *= 1.5  # beside its curve, not on it
                ends = [value * (first / last) ** exponent, value]
                axes.plot([first, last], ends, style, color="grey", label=label)
        logarithmic(axes, {n for points in curves.values() for n, _ in points})
        axes.set(xlabel="sequence length N", ylabel=ylabel, title=title)
        axes.legend()


def logarithmic(axes, ticks):
    """Make both axes logarithmic, with ticks on the horizontal one."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)], minor=False)
    axes.set_xticks([], minor=True)
