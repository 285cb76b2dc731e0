"""Run the commands that the READMEs and chapters show, and put their output in their place.

    python scripts/refresh_lesson.py                       every command
    python scripts/refresh_lesson.py --only io_model       those with this text in them
    python scripts/refresh_lesson.py --list                name them, run nothing
    python scripts/refresh_lesson.py --check               does each text show its outputs as its
                                                           comments say? Runs nothing

A block that is fenced by ```text and begins with `$ COMMAND` is refreshed. `python` is the one that
runs this script. README.md's commands run in the repository's folder, all others in
09_flash_attention. A command runs once, also where several texts show it. One that fails ends the
run with its message and status 1; what was refreshed before it stays.

What a text shows of an output stands in comments right above the block, one for each part:

    <!-- show: Memory -->
    <!-- show: Trace: 6 queries; columns: query | m | l; rows: 0 | 4 -->
    ```text

A part is a paragraph, named by how it begins. A title, which is one line, takes its table along.
Of a table the named columns are kept, and the rows in which one of these words stands. Words are
whole, are sought in the kept columns, and may run over cells: `flash 1x512x64`. `...` marks what
was cut. The line with the device always stays. Without a comment the whole output is shown.
"""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import compress, groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASE = ROOT / "09_flash_attention"
FENCE, END, CUT = "```text", "```", "..."
SHOW = re.compile(r"<!-- show: (.+?)(?:; columns: (.+?))?(?:; rows: (.+?))? -->")


class Fault(Exception):
    """A text asks for what an output does not have."""


@dataclass
class Block:
    """A command, what is shown of it, and the lines of its output: lines[start:stop] of a text."""

    command: str
    shows: list
    start: int
    stop: int


def texts():
    """Return {path: the folder in which its commands run}."""
    chapters = [*PHASE.glob("README*.md"), *sorted(PHASE.glob("lesson/*/*.md"))]
    return {**dict.fromkeys(ROOT.glob("README*.md"), ROOT), **dict.fromkeys(chapters, PHASE)}


def blocks(lines):
    """Return the blocks of a text in their order."""
    found = []
    for at, line in enumerate(lines[:-1]):
        if line == FENCE and lines[at + 1].startswith("$ "):
            first = at
            while first and SHOW.fullmatch(lines[first - 1]):
                first -= 1
            found.append(Block(lines[at + 1][2:], lines[first:at], at + 2, lines.index(END, at)))
    return found


def selected(output, shows):
    """Return what the comments keep of an output's lines, with `...` where something was cut."""
    if not shows:
        return output
    parts = [list(part) for blank, part in groupby(output, lambda line: not line.strip())
             if not blank]
    long = [len(part) > 1 for part in parts]
    kept = {0: parts[0]} if parts and parts[0][0].startswith("device: ") else {}
    for show in shows:
        start, columns, rows = SHOW.fullmatch(show).groups()
        at = next((i for i, part in enumerate(parts) if part[0].startswith(start)), None)
        if at is None:
            raise Fault(f"no part begins with {start!r}")
        kept[at] = parts[at]
        if long[at:at + 2] == [False, True]:
            at += 1
            kept[at] = parts[at]
        if columns or rows:
            kept[at] = thinner_table(kept[at], columns, rows)
    lines = []
    for is_kept, run in groupby(range(len(parts)), kept.__contains__):
        for part in [kept[i] for i in run] if is_kept else [[CUT]]:
            lines += ["", *part]
    return lines[1:]


def thinner_table(table, columns, rows):
    """Return the lines of a table with some columns and rows alone, and what is said right below.

    columns, rows: `a | b`.
    """
    if not table[0].startswith("|"):
        raise Fault(f"{table[0]!r} begins no table")
    cells = [line[1:-1].split("|") for line in table if line.startswith("|")]
    if len(cells[0][0]) < 5:  # room for the dots
        cells = [[row[0].ljust(5, row[0][-1]), *row[1:]] for row in cells]
    head, rule, *body = cells
    names = [cell.strip() for cell in head]
    asked = columns.split(" | ") if columns else names
    if set(asked) - set(names):
        raise Fault(f"no column is called {min(set(asked) - set(names))!r}")
    keep = [name in asked for name in names]
    if rows:
        said = [f" {' '.join(cell.strip() for cell in compress(row, keep))} " for row in body]
        words = [f" {word} " for word in rows.split(" | ")]
        for word in words:
            if not any(word in row for row in said):
                raise Fault(f"no row has the words {word.strip()!r}")
        gap = [f" {CUT}".ljust(len(head[0])), *(" " * len(cell) for cell in head[1:])]
        body = thinned(body, [any(word in row for word in words) for row in said], gap)
    gap = [f" {CUT} ", "-----", *("     " for _ in body)]
    across = thinned([narrow(column) for column in zip(head, rule, *body)], keep, gap)
    notes = [line for line in table if not line.startswith("|")]
    return [*(f"|{'|'.join(row)}|" for row in zip(*across)), *notes]


def narrow(column):
    """Return the cells without the width that rows took which were cut."""
    said = [cell for cell in (column[0], *column[2:]) if cell.strip()]
    left = min((len(cell) - len(cell.lstrip()) for cell in said), default=1) - 1
    right = min((len(cell) - len(cell.rstrip()) for cell in said), default=1) - 1
    return [cell[left:len(cell) - right] for cell in column]


def thinned(items, keep, gap):
    """Return the items that are kept, and one gap in place of each run of others."""
    return [item for is_kept, run in groupby(zip(items, keep), lambda pair: pair[1])
            for item in ([item for item, _ in run] if is_kept else [gap])]


def refreshed(text, command, output):
    """Return the text with a new output, a list of lines, in each block of `command`."""
    lines = text.splitlines()
    for block in reversed(blocks(lines)):
        if block.command == command:
            lines[block.start:block.stop] = selected(output, block.shows)
    return "\n".join(lines) + "\n"


def output_of(command, folder):
    """Run a command of the shell in `folder`; return the lines that it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True,
                          env={**os.environ, "PATH": path})
    if done.returncode:
        sys.exit(f"{command}\nended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip("\n").splitlines()


def faults(found):
    """Return what is wrong with the texts, {path: folder}, as far as no command has to run."""
    wrong, first = [], {}
    for path, folder in found.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        shown = blocks(lines)
        if lines.count(FENCE) != len(shown):
            wrong.append(f"{path}: an output without a command")
        if sum(line.startswith("<!-- show") for line in lines) != sum(len(b.shows) for b in shown):
            wrong.append(f"{path}: a comment that shows nothing")
        for block in shown:
            output = lines[block.start:block.stop]
            try:
                if selected(output, block.shows) != output:
                    raise Fault("its comments say otherwise")
                key = folder, block.command, *block.shows
                if first.setdefault(key, (path, output))[1] != output:
                    raise Fault(f"{first[key][0]} has another output")
            except Fault as fault:
                wrong.append(f"{path}: {block.command}: {fault}")
    return wrong


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", metavar="TEXT")
    options.add_argument("--list", action="store_true")
    options.add_argument("--check", action="store_true")
    args = options.parse_args()
    found = texts()
    if args.check:
        sys.exit("\n".join(faults(found)) or 0)
    shown = {}
    for path, folder in found.items():
        for block in blocks(path.read_text(encoding="utf-8").splitlines()):
            if args.only in block.command:
                shown.setdefault((block.command, folder), {})[path] = None
    for (command, folder), paths in shown.items():
        print(f"{folder.name}: {command}", flush=True)
        if not args.list:
            output = output_of(command, folder)
            for path in paths:
                try:
                    text = refreshed(path.read_text(encoding="utf-8"), command, output)
                except Fault as fault:
                    sys.exit(f"{path}: {command}: {fault}")
                path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
