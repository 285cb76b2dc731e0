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
from collections import Counter
from dataclasses import replace
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, logarithmic, plotted, print_table, progress
from lab.cases import dtype_name
from lab.kernel_worker import KERNELS, JudgeRow, RepeatRow, work
from lab.matrix import problems
from lab.wrong_formulas import UNNAMED

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PATIENCE = 120  # seconds for one call
COLOURS = {"pass": "tab:green", "FAIL": "tab:red", "raised": "tab:orange", "died": "black",
           "refused": "lightgrey"}


class Died(Exception):
    """The kernel's process ended, or gave no answer; the message says how."""


class Worker:
    """The kernel's process: started where it is needed, and anew where it has died."""

    def __init__(self, *arguments):
        self.arguments, self.process = arguments, None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        if self.process:
            self.pipe.close()  # it ends by itself
            self.process.join(5)
            self.process.kill()

    def start(self):
        """Raises Refused where the kernel can't be loaded or its first output has a wrong shape."""
        context = multiprocessing.get_context("spawn")  # a card's runtime does not survive a fork
        self.pipe, its_end = context.Pipe()
        self.process = context.Process(target=work, args=(its_end, *self.arguments))
        self.process.start()
        its_end.close()
        try:
            refused = self.answer()
        except Died as fault:
            raise cli.Refused(f"the kernel's process {fault} as it loaded") from fault
        if refused:
            raise refused

    def ask(self, *question):
        """Return the answer of kernel_worker.py's `work`. Raises Died."""
        if self.process is None:
            self.start()
        try:
            self.pipe.send(question)
        except OSError:  # it has died: the answer says how
            pass
        return self.answer()

    def answer(self):
        try:
            if self.pipe.poll(PATIENCE):
                return self.pipe.recv()
            how = f"gave no answer in {PATIENCE} s"
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            how = (f"was killed by {signal.Signals(-code).name}" if code < 0
                   else f"ended with status {code}")
        self.process.kill()
        self.process = None
        raise Died(how)

    def judge(self, problem, names=None):
        """Return the JudgeRow of a problem. names: the wrong formulas to look at, None for all."""
        try:
            return self.ask("judge", problem, names)
        except Died as fault:
            case = problem.case
            return JudgeRow(problem.group, problem.text, problem.dtype, case.Nq,
                            case.Nk or case.Nq, "died", what=f"the process {fault}")

    def repeats(self, dtype):
        try:
            return self.ask("repeat", dtype)
        except Died as fault:
            return [RepeatRow("the process lives", dtype_name(dtype), str(fault))]

    def smallest(self, problem, name):
        """Return the smallest problem that shows the fault `name`, as far as it was sought."""
        try:
            return self.ask("shrink", problem, name)
        except Died:
            return problem


def named_alike(worker, matrix, rows):
    """Return the rows with as few names as will do: of two that fit a row the more frequent one.

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
    return alike


def with_smallest(worker, matrix, rows, alike):
    """Return `alike` with the smallest input of each fault, sought from the plainest call that
    `rows` names so: from the others a smaller input would show another name.
    """
    found = {}
    for what in dict.fromkeys(row.what for row in alike if row.failed):
        some = [(problem, row) for problem, row in zip(matrix, rows)
                if row.failed and row.what == what]
        problem, row = min(some, key=lambda one: (
            one[0].text.count(","), sum(map(math.prod, one[0].case.shapes))))
        found[what] = (worker.smallest(problem, what) if row.result == "FAIL" else problem).text
    return [replace(row, smallest=found[row.what]) if row.failed else row for row in alike]


# The report


def show(kernel, rows):
    """Print how many problems of each group and dtype pass, and then what is wrong."""
    dtypes = list(dict.fromkeys(r.dtype for r in rows))

    def cell(group, dtype):
        counts = Counter(r.result for r in rows if (r.group, r.dtype) == (group, dtype))
        judged = counts.total() - counts["refused"]
        refused = f"{counts['refused']} refused" if counts["refused"] else ""
        return ", ".join(filter(None, (f"{counts['pass']} of {judged}" * bool(judged), refused)))

    print_table(f"Judge: {kernel}, calls that pass", ["calls", *dtypes],
                [(group, *(cell(group, dtype) for dtype in dtypes))
                 for group in dict.fromkeys(r.group for r in rows)])
    wrong = [r for r in rows if r.failed]
    console.print(
        "\nis_causal means what it means for SDPA: query i sees the keys up to i, upper-left. The "
        "lower-right corner and windows come as masks. A row that sees no key has to be 0.")
    for what in dict.fromkeys(r.what for r in rows if r.result == "refused"):
        console.print(f"\nrefused: {what}")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the worker would live on
    matrix = [problem for dtype in dtypes for problem in problems(dtype, args.quick)]
    with Worker(args.kernel, str(device), args.seed) as worker:
        rows = []
        with progress("judge", len(matrix)) as advance:
            for problem in matrix:
                rows.append(worker.judge(problem))
                advance()
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
