"""Show what was measured: tables and progress on the terminal, JSON and plots in files."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
import warnings

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.device import describe, versions
from common.files import whole_file

AS_IT_IS = {"highlight": False, "markup": False, "emoji": False}  # [a] and :b: may be in a path
console = Console(soft_wrap=True, **AS_IT_IS)  # nothing is cut to the width of the terminal


def print_table(title, columns, rows, left=1):
    """Print a Markdown table; each cell is shown by str(), the first `left` columns to the left."""
    table = Table(box=box.MARKDOWN)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    wide = Console(width=10_000, color_system=None, **AS_IT_IS)  # as wide as its cells are
    with wide.capture() as shown:
        wide.print(table)
    console.print(f"\n{title}\n", style="bold")
    for line in shown.get().splitlines():
        if line.strip():
            console.print(line)


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
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    shown = Console(stderr=True, **AS_IT_IS)
    bar = Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal)
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.update(task, advance=1)


def write_json(path, device, rows):
    """Write {"device": describe's line, "versions": {...}, "rows": [{"tool": ..., fields}, ...]}.

    path: as for `whole_file`: '-' is standard output. rows: [(tool, dataclass instance), ...]. JSON
    has no NaN and no infinity: they are null, and beside the field "<field>_why" says 'nan', 'inf'
    or '-inf'; beside a list a list, null where a number stands. Raises OSError.
    """
    found = {"device": describe(device), "versions": versions(),
             "rows": [{"tool": tool, **dataclasses.asdict(row)} for tool, row in rows]}
    with whole_file(path) as part:
        text = json.dumps(_finite(found)[0], indent=2, allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8")


def _finite(value):
    """Return `value` with null for what JSON has not, and why: a word, a list of them or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, str(value)
    if isinstance(value, (list, tuple)):
        parts = [_finite(part) for part in value]
        whys = [why for _, why in parts]
        return [part for part, _ in parts], whys if any(whys) else None
    if not isinstance(value, dict):
        return value, None
    found = {}
    for field, part in value.items():
        found[field], why = _finite(part)
        if why:
            found[f"{field}_why"] = why
    return found, None


@contextlib.contextmanager
def plotted(path, *shape, figsize=None, **options):
    """Yield the axes of a new figure (Figure.subplots(*shape, **options)); then write it to `path`.

    pyplot and its backend, which may be a notebook's, are left alone.
    """
    with _quietly():
        Figure = _figure_class()
        figure = Figure(figsize=figsize, layout="constrained")
        yield figure.subplots(*shape, **options)
        with whole_file(path) as part:
            figure.savefig(part, dpi=120)


def _figure_class():
    """Import matplotlib's Figure, whatever backend MPLBACKEND names: it need not be installed."""
    backend = os.environ.pop("MPLBACKEND", None)
    first = "matplotlib" not in sys.modules
    try:
        import matplotlib
        from matplotlib.figure import Figure
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if first and backend:
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend  # as the import would have
    return Figure


@contextlib.contextmanager
def _quietly():
    """Keep matplotlib's warnings and its log (fonts, folders of its own) off stderr."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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
