"""Is your kernel right? An attention kernel with SDPA's signature goes through a matrix of calls.

    python judge_kernel.py --kernel fused                the platform's own
    python judge_kernel.py --kernel my_kernel.py:attention --quick
    python judge_kernel.py --kernel flash --json FILE --plot DIR

A kernel is a function (q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False) of
[B, H, N, d]. What it does not take is said by NotImplementedError. Where its output is wrong, it
is compared with wrong formulas, and the one that fits is named with the smallest input that shows
it. The kernel runs in a process of its own: where that dies, a row says so and the rest is run.
"""

import math
import multiprocessing
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, logarithmic, plotted, print_table, progress
from lab.cases import dtype_name
from lab.kernel_worker import FIRST, KERNELS, NO_GRADIENT, JudgeRow, RepeatRow, work
from lab.matrix import problems
from lab.wrong_places import UNNAMED

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Seconds. A call takes less than one; what is left is for kernels that compile as they are loaded,
# and some of them for each shape.
LOADING, PATIENCE, WHOLE = 120, 20, 600
SEEKING = 10  # seconds for a smallest input
UNJUDGED = "refused", "no gradients", "left out"
ENOUGH = 3  # deaths of one group
COLOURS = {"pass": "tab:green", "FAIL": "tab:red", "raised": "tab:orange", "died": "black",
           "refused": "lightgrey", "no gradients": "lightblue", "left out": "gold"}


class Died(Exception):
    """The kernel's process ended, or gave no answer; the message says how."""


class Over(Died):
    """The time for the whole run is over."""


class Worker:
    """The kernel's process: started where it is needed, and anew where it has died."""

    def __init__(self, *arguments):
        self.arguments, self.process, self.deaths = arguments, None, Counter()
        self.until = time.monotonic() + WHOLE

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.process:
            if kind is None:  # it ends by itself, and in order, once the pipe is closed
                self.pipe.close()
                self.process.join(5)
            self.stop()

    def stop(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process = None

    def begin(self):
        """Raises Refused where the kernel can't be loaded or its first output has a wrong shape."""
        when = "as it loaded"
        try:
            refused = self.start()
            if not refused:
                when = f"in its first call, q, k and v of {FIRST.case.shape}"
                refused = self.ask("first", None, patience=LOADING)
        except Died as fault:
            raise cli.Refused(f"the kernel's process {fault} {when}") from fault
        if refused:
            raise refused

    def start(self):
        """Return None, or the Refused that says why the kernel can't be loaded. Raises Died."""
        context = multiprocessing.get_context("spawn")  # a card's runtime does not survive a fork
        self.pipe, its_end = context.Pipe()
        self.process = context.Process(target=work, args=(its_end, *self.arguments))
        self.process.start()
        its_end.close()
        return self.answer(LOADING)

    def ask(self, *question, patience=None):
        """Return the answer of kernel_worker.py's `work`. Raises Died."""
        if time.monotonic() > self.until:
            raise Over(f"{WHOLE // 60} minutes are over")
        refused = self.start() if self.process is None else None
        if refused:
            self.stop()
            raise Died(f"could not be started again: {refused}")
        try:
            self.pipe.send(question)
        except OSError:  # it has died: the answer says how
            pass
        return self.answer(patience or PATIENCE)

    def answer(self, patience):
        until, how = time.monotonic() + patience, ""
        try:  # a child of the kernel's may hold the pipe open when the process has ended
            while not how and (self.process.is_alive() or self.pipe.poll()):
                if self.pipe.poll(0.2):
                    return self.pipe.recv()
                if time.monotonic() > until:
                    how = f"gave no answer in {patience} s"
        except (EOFError, OSError):
            pass
        if not how:
            self.process.join()
            code = self.process.exitcode
            how = (f"was killed by {signal.Signals(-code).name}" if code < 0
                   else f"ended with status {code}")
        self.stop()
        raise Died(how)

    def judge(self, problem, names=None):
        """Return the JudgeRow of a problem. names: the wrong formulas to look at, None for all."""
        if self.deaths[problem.group] == ENOUGH:
            return JudgeRow.of(problem, "left out", what=f"the rest of {problem.group!r}, {ENOUGH} "
                               "calls of which ended the process")
        try:
            return self.ask("judge", problem, names)
        except Over as fault:
            return JudgeRow.of(problem, "left out", what=str(fault))
        except Died as fault:
            self.deaths[problem.group] += 1
            return JudgeRow.of(problem, "died", what=f"the process {fault}")

    def repeats(self, dtype):
        try:
            return self.ask("repeat", dtype)
        except Died as fault:
            return [RepeatRow("the process lives", dtype_name(dtype), str(fault))]

    def smallest(self, problem, name):
        """Return the smallest problem of this name, by steps that halve in each size, in SEEKING s,
        and whether others ended the process.
        """
        until, died = time.monotonic() + SEEKING, False
        for field in ("batch", "heads", "Nq", "Nk", "d") * 2:
            step = getattr(problem.case, field)
            if step is None or field == "heads" and problem.case.kv_heads:
                continue
            while step > 1 and time.monotonic() < until:
                step = (step + 1) // 2
                size = max(1, getattr(problem.case, field) - step)
                smaller = replace(problem, case=replace(problem.case, **{field: size}))
                try:
                    if smaller != problem and self.ask("judge", smaller).what == name:
                        problem = smaller
                except Over:
                    return problem, died
                except Died:
                    died = True
        return problem, died


def without_gradients(rows):
    """Return the rows; of a kernel that never has a gradient that is told, and no fault."""
    judged = {r.what for r in rows if r.group == "gradients" and r.result in ("pass", "FAIL")}
    return [replace(row, result="no gradients")
            if judged == {NO_GRADIENT} and row.what == NO_GRADIENT else row for row in rows]


def named_alike(worker, matrix, rows):
    """Return the rows with as few names as will do: of two that fit a row the more frequent one,
    or the rarer one where that fits all rows of the other.

    Small inputs can't tell some formulas apart, and large ones are compared with few.
    """
    counts = Counter(r.what for r in rows if r.result == "FAIL" and r.what not in UNNAMED)
    names, alike = [name for name, _ in counts.most_common()], []
    for problem, row in zip(matrix, rows):
        for name in names if row.result == "FAIL" else ():
            if name == row.what or counts[name] == counts[row.what]:
                break
            again = worker.judge(problem, [name])
            if again.what == name:
                row = again
                break
        alike.append(row)
    for common, rare in combinations(names, 2):
        left, again = {row.what for row in alike}, {}
        for i, row in enumerate(alike) if left >= {common, rare} else ():
            if row.what == common:
                again[i] = worker.judge(matrix[i], [rare])
                if again[i].what != rare:
                    break
        else:
            alike = [again.get(i, row) for i, row in enumerate(alike)]
    return alike


def with_smallest(worker, matrix, rows, alike):
    """Return `alike` with the smallest input of each fault, sought from the plainest call that
    `rows` names so: from the others a smaller input would show another name.
    """
    found = {}
    for what in dict.fromkeys(row.what for row in alike if row.wrong):
        some = [(problem, row) for problem, row in zip(matrix, rows)
                if row.wrong and row.what == what]
        problem, row = min(some, key=lambda one: (
            one[0].text.count(","), sum(map(math.prod, one[0].case.shapes))))
        small, died = (problem, False) if row.result != "FAIL" else worker.smallest(problem, what)
        found[what] = small.text, ["smaller inputs end the process"] * died
    return [replace(row, smallest=found[row.what][0], detail="; ".join(
        [row.detail] * bool(row.detail) + found[row.what][1])) if row.wrong else row
            for row in alike]


# The report


def show(kernel, rows):
    """Print how many problems of each group and dtype pass, and then what is wrong."""
    dtypes = list(dict.fromkeys(r.dtype for r in rows))

    def cell(group, dtype):
        counts = Counter(r.result for r in rows if (r.group, r.dtype) == (group, dtype))
        others = [f"{counts[result]} {result}" for result in UNJUDGED if counts[result]]
        judged = counts.total() - sum(counts[result] for result in UNJUDGED)
        return ", ".join([f"{counts['pass']} of {judged}"] * bool(judged) + others)

    print_table(f"Judge: {kernel}, calls that pass", ["calls", *dtypes],
                [(group, *(cell(group, dtype) for dtype in dtypes))
                 for group in dict.fromkeys(r.group for r in rows)])
    wrong = [r for r in rows if r.wrong]
    console.print(
        "\nis_causal means what it means for SDPA: query i sees the keys up to i, upper-left. The "
        "lower-right corner and windows come as masks. A row that sees no key has to be 0.")
    for result, what in dict.fromkeys((r.result, r.what) for r in rows if r.result in UNJUDGED):
        console.print(f"\n{result}: {what}")
    if wrong:
        print_table(
            "What it is instead", ["fault", "in detail", "calls", "error", "allowed", "dtypes",
                                   "the smallest input that shows it"],
            [fault_cells(what, [r for r in wrong if r.what == what])
             for what, _ in Counter(r.what for r in wrong).most_common()], left=2)


def fault_cells(what, rows):
    measured = [r for r in rows if r.error is not None]
    worst = max(measured, key=lambda r: r.error, default=None)
    details = Counter(r.detail for r in rows if r.detail).most_common(1)
    dtypes = " ".join(dict.fromkeys(r.dtype for r in rows))
    return (what if rows[0].result == "FAIL" else f"{rows[0].result}: {what}",
            details[0][0] if details else "", len(rows),
            *((f"{worst.error:.1e}", f"{worst.allowed:.1e}") if worst else "--"), dtypes,
            rows[0].smallest)


def show_repeats(rows):
    dtypes = list(dict.fromkeys(r.dtype for r in rows))
    cells = {(r.repeat, r.dtype): r.result + (
        f", {r.difference:.1e}" if r.result == "no" else "") for r in rows}
    print_table("The same bits? Where not, the largest difference", ["the same row in", *dtypes],
                [(name, *(cells.get((name, dtype), "") for dtype in dtypes))
                 for name in dict.fromkeys(r.repeat for r in rows)])
    console.print("\nNo kernel has to hold this, so a no is told and not counted as a fault.")


def draw_matrix(path, kernel, rows):
    """Draw the matrix: a line a call, a column a dtype."""
    dtypes = list(dict.fromkeys(r.dtype for r in rows))
    lines = list(dict.fromkeys((r.group, r.problem) for r in rows))
    with plotted(path, figsize=(9, 1.5 + 0.16 * len(lines))) as axes:
        for result, colour in COLOURS.items():
            at = [(dtypes.index(r.dtype), lines.index((r.group, r.problem)))
                  for r in rows if r.result == result]
            if at:
                axes.scatter(*zip(*at), marker="s", s=40, color=colour, label=result)
        axes.set_xticks(range(len(dtypes)), dtypes)
        axes.set_yticks(range(len(lines)), [": ".join(line) for line in lines], fontsize=6)
        axes.set(title=f"{kernel}: which calls it computes right", xlim=(-0.5, len(dtypes) - 0.5),
                 ylim=(len(lines), -1))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_errors(path, kernel, rows, device):
    """Draw the error over N, and dashed what is allowed: twice standard's, and the floor."""
    rows = [r for r in rows if r.group == "lengths" and r.Nq == r.Nk and r.error]
    with plotted(path, figsize=(7, 4.5)) as axes:
        for number, dtype in enumerate(dict.fromkeys(r.dtype for r in rows)):
            some = sorted((r for r in rows if r.dtype == dtype), key=lambda r: r.Nq)
            N, colour = [r.Nq for r in some], f"C{number}"
            axes.plot(N, [r.error for r in some], marker="o", color=colour, label=dtype)
            axes.plot(N, [r.allowed for r in some], "--", color=colour, label=f"{dtype}: allowed")
        logarithmic(axes, {2 ** round(math.log2(r.Nq)) for r in rows})
        axes.set(xlabel="sequence length N", ylabel="largest |O - float64|",
                 title=f"{kernel}: error over N ({device}); allowed: 2x standard's, and the floor")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def main():
    options = lesson.parser(__doc__, *"device dtype seed json plot".split())
    options.add_argument("--kernel", default="fused", metavar="KERNEL",
                         help=f"{', '.join(KERNELS)} or FILE.py:FUNCTION (fused)")
    options.add_argument("--quick", action="store_true", help="fewer lengths, and none above 513")
    args, device, _ = lesson.begin(options)
    dtypes = [getattr(torch, args.dtype)] if args.dtype else DTYPES
    if device.type == "npu" and torch.float64 in dtypes:
        options.error("argument --dtype: the NPU takes no float64, it has no float64 matmul")
    for number in (signal.SIGTERM, signal.SIGHUP):  # or the worker would live on
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    matrix = [problem for dtype in dtypes for problem in problems(dtype, args.quick)]
    with Worker(args.kernel, str(device), args.seed) as worker:
        worker.begin()
        rows = []
        with progress("judge", len(matrix)) as advance:
            for problem in matrix:
                rows.append(worker.judge(problem))
                advance()
        rows = without_gradients(rows)
        rows = with_smallest(worker, matrix, rows, named_alike(worker, matrix, rows))
        repeated = [row for dtype in dtypes for row in worker.repeats(dtype)]
    if all(row.result == "refused" for row in rows):
        raise cli.Refused(f"the kernel refuses every call: {rows[0].what}")
    show(args.kernel, rows)
    show_repeats(repeated)
    if args.plot:
        draw_matrix(Path(args.plot) / "judge_matrix.png", args.kernel, rows)
        draw_errors(Path(args.plot) / "judge_error.png", args.kernel, rows, device)
    return lesson.finish(args, device, [*(("judge", row) for row in rows),
                                        *(("repeat", row) for row in repeated)])


if __name__ == "__main__":
    cli.serve(main)
