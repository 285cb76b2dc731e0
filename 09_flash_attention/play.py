"""A page that plays attention tile by tile: what running code fetched, computed and stored.

    python play.py --html FILE           write the page: one file, to be opened in any browser
    python play.py --causal --html FILE  the same, opened at the causal mask
    python play.py                       three orders of the same work, and what each one moves

The page plays standard attention, FlashAttention-1 (K and V outside) and FlashAttention-2 (Q
outside), without a mask and with a causal one. Its numbers were written down while the loops ran.
It adds O up again from them and shows how far that is from Python's O. figures/ holds one:

    python play.py --html figures/play.html --still figures/play.png

Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (2307.08691).
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from os.path import dirname, realpath
from pathlib import Path
from typing import Optional

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
import lab
from common import cli
from common.files import whole_file
from common.report import print_table
from flash_attention import attend_in_tiles, flash_attention_forward, online_softmax_step
from lab import lesson
from lab.cases import Case
from lab.judge import exact
from lab.traffic import total, traffic
from lab.visible import Visible, fill

import torch

PAGE = Path(lab.__file__).parent / "page"
ORDERS = "standard", "FA1", "FA2"
MOST_ROWS, MOST_COLUMNS = 16, 8  # more can't be told apart on a phone
MOST_BYTES = 150_000  # of a page
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def attend_by_operators(visible, queries, keys, squares):
    """Fill O as standard attention does: each operator reads from memory and writes to memory.

    queries: Q, O; keys: K, V; squares: S, P [Nq, Nk], which this fills too.
    """
    (Q, O), (K, V), (S, P) = queries, keys, squares
    rows, cols = slice(0, visible.Nq), slice(0, visible.Nk)
    scores = visible.row_block(Q, rows) @ visible.key_block(K, cols).transpose(1, 2)
    visible.store([S], rows, [scores * visible.scale])
    if visible.hides:
        visible.store([S], rows, [visible.restrict(visible.row_block(S, rows), rows, cols)])
    scores = visible.row_block(S, rows)
    weights = fill(torch.softmax(scores, dim=-1), visible.blind_rows(scores), 0)
    visible.store([P], rows, [weights])
    visible.store([O], rows, [visible.row_block(P, rows) @ visible.key_block(V, cols)])


def attend_keys_outside(visible, Br, Bc, queries, keys, step=online_softmax_step):
    """Fill O, m and l with K and V outside and Q inside: for each block of keys, all queries.

    queries: Q, O, m, l; keys: K, V. O, m and l lie in memory and are read and written for each
    tile. O is divided by l in every step, so what lies there is the attention to the keys so far.
    Source: FlashAttention (arXiv 2205.14135), Algorithm 1.
    """
    (Q, O, m, l), (K, V) = queries, keys
    lowest, nothing = torch.full_like(m, visible.finite[0]), torch.zeros_like(m)
    visible.store([O, m, l], slice(0, visible.Nq), [torch.zeros_like(O), lowest, nothing])
    for j in range(0, visible.Nk, Bc):
        cols = slice(j, min(j + Bc, visible.Nk))
        K_block, V_block = visible.key_block(K, cols), visible.key_block(V, cols)  # [1, Bc, d]
        for rows in visible.query_blocks(Br):
            if visible.key_range(rows).stop <= j:
                continue  # the mask empties this tile
            Q_block, O_block, m_block, l_block = (
                visible.row_block(x, rows).clone() for x in (Q, O, m, l))  # [1, Br, d or 1]
            S_block = Q_block @ K_block.transpose(1, 2) * visible.scale  # [1, Br, Bc]
            S_block = visible.restrict(S_block, rows, cols)
            O_block.mul_(l_block)  # as it was before it was divided
            m_block, l_block, O_block = step(m_block, l_block, O_block, S_block, V_block)
            O_block = O_block / l_block.masked_fill(l_block == 0, 1)  # l = 0: saw no key
            visible.store([O, m, l], rows, [O_block, m_block, l_block])


# The trace


@dataclass
class Event:
    """What happens between two fetches: perhaps a step, perhaps a store."""

    rows: tuple  # (first, one after the last) of the queries at work
    read: dict = field(default_factory=dict)  # bytes by array
    written: dict = field(default_factory=dict)  # bytes by array
    stored: dict = field(default_factory=dict)  # the values written, by array
    step: Optional[dict] = None  # cols, and m_old, S, m, correction, P, l, O (not yet divided)


class Watched(Visible):
    """A Visible that writes down what passes through it: `events`, in their order.

    arrays: {name: tensor} of whatever is fetched or stored; Q [Nq, d], K [Nk, d], V [Nk, d].
    """

    def __init__(self, arrays, causal):
        super().__init__(arrays["Q"], arrays["K"], arrays["V"], causal)
        self.arrays, self.events = arrays, []
        self.rows = self.cols = None  # of Q's block and of K's on the chip

    def name_of(self, x):
        return next(name for name, array in self.arrays.items() if array is x)

    def fetched(self, x, block):
        """Add to the event at work; after a step or a store the next one begins."""
        if not self.events or self.events[-1].step or self.events[-1].written:
            self.events.append(Event(self.rows))
        event, name = self.events[-1], self.name_of(x)
        event.rows = self.rows
        event.read[name] = event.read.get(name, 0) + block.numel() * block.element_size()
        return block

    def row_block(self, x, rows):
        self.rows = rows.start, rows.stop
        return self.fetched(x, super().row_block(x, rows))

    def key_block(self, x, cols):
        self.cols = cols.start, cols.stop
        return self.fetched(x, super().key_block(x, cols))

    def store(self, wholes, rows, blocks):
        super().store(wholes, rows, blocks)
        if not self.events:
            self.events.append(Event((rows.start, rows.stop)))
        event = self.events[-1]
        for whole in wholes:
            name, block = self.name_of(whole), whole[rows]
            event.written[name] = block.numel() * block.element_size()
            event.stored[name] = numbers(block)

    def step(self, m, l, O_block, S_block, V_block):
        """Take online_softmax_step, which leaves P_block where S_block was, and write it down."""
        m_old, scores = m, S_block.clone()
        m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
        self.events[-1].step = {"cols": self.cols, **{
            name: numbers(x[0]) for name, x in {
                "m_old": m_old, "S": scores, "m": m, "correction": torch.exp(m_old - m),
                "P": S_block, "l": l, "O": O_block}.items()}}
        return m, l, O_block


def numbers(x):
    """Return a tensor as lists: float32 to nine digits, which is exact, and -inf as None."""
    if x.dim():
        return [numbers(part) for part in x]
    return None if x == -math.inf else float(f"{x.item():.9g}")


def play(order, Q, K, V, Br, Bc, causal):
    """Run one of ORDERS on [N, d] tensors: its Events, and O."""
    O, m, l = (Q.new_empty(len(Q), columns) for columns in (Q.shape[1], 1, 1))
    S, P = (Q.new_empty(len(Q), len(K)) for _ in range(2))
    watched = Watched(dict(Q=Q, K=K, V=V, O=O, m=m, l=l, S=S, P=P), causal)
    if order == "standard":
        attend_by_operators(watched, (Q, O), (K, V), (S, P))
    elif order == "FA1":
        attend_keys_outside(watched, Br, Bc, (Q, O, m, l), (K, V), watched.step)
    else:
        attend_in_tiles(watched, Br, Bc, (Q, O), (K, V), watched.step)
    return watched.events, O


@dataclass
class OrderRow:
    """One order under one mask. formula: bytes by lab/traffic.py; None under a mask and for Nq !=
    Nk, which it does not know. error: of O, against float64.
    """

    order: str
    causal: bool
    tiles: Optional[int]
    skipped: Optional[int]
    read: int
    written: int
    formula: Optional[int]
    error: float
    passed: bool


def collect(case, Br, Bc, seed):
    """Run each order without and with a causal mask: OrderRows, and what the page plays."""
    Q, K, V = (x[0] for x in case.inputs("cpu", seed))
    Nq, Nk = len(Q), len(K)
    rows, results, traces = [], {}, {}
    for mask in ("none", "causal"):
        masked = replace(case, causal=mask == "causal")
        results[mask] = numbers(flash_attention_forward(Q, K, V, Br, Bc, **masked.masks))
        traces[mask] = {}
        for order in ORDERS:
            events, O = play(order, Q, K, V, Br, Bc, masked.causal)
            traces[mask][order] = [asdict(event) for event in events]
            rows.append(summary(order, masked, (Q, K, V), Br, Bc, events, O))
    sizes = {"Nq": Nq, "Nk": Nk, "d": case.d, "Br": min(Br, Nq), "Bc": min(Bc, Nk)}
    return rows, {"sizes": sizes, "Q": numbers(Q), "K": numbers(K), "V": numbers(V), "O": results,
                  "traces": traces}


def summary(order, case, inputs, Br, Bc, events, O):
    """Return the OrderRow of one run; it passes if O and the bytes are what they have to be."""
    Q, K, V = inputs
    expected, floor = exact(case, *(x[None] for x in inputs))[0]
    error = (O - expected[0]).abs().max().item()
    read, written = (sum(sum(getattr(event, way).values()) for event in events)
                     for way in ("read", "written"))
    formula, tiles, skipped = None, None, None
    if not case.causal and len(Q) == len(K):
        formula = total(traffic(order, *Q.shape, Br, Bc)) * Q.element_size()
    if order != "standard":
        tiles = sum(event.step is not None for event in events)
        skipped = math.ceil(len(Q) / Br) * math.ceil(len(K) / Bc) - tiles
    return OrderRow(order, case.causal, tiles, skipped, read, written, formula, error,
                    error <= floor and formula in (None, read + written))


# The page


def page(trace):
    """Return the page: lab/page/page.html with its style, its texts, its script and the trace."""
    parts = {name: (PAGE / name).read_text(encoding="utf-8")
             for name in ("page.css", "texts.json", "trace.js", "draw.js", "page.js")}
    parts["trace.json"] = json.dumps(trace, separators=(",", ":"))
    html = (PAGE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        html = html.replace(f"@{name}@", text.strip())
    return html


def still(html, path):
    """Let Chromium draw a page as PNG, in English, at a step in the middle."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        raise cli.Refused(f"--still needs a browser, one of: {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder, whole_file(path) as part:
        (Path(folder) / "page.html").write_text(html, encoding="utf-8")
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-background-networking", f"--user-data-dir={folder}/profile",
             "--window-size=1100,1090", "--force-device-scale-factor=0.8", f"--screenshot={part}",
             f"file://{folder}/page.html#language=en&step=10"], capture_output=True, timeout=60)
        if done.returncode or not part.stat().st_size:
            raise cli.Refused(f"--still: {browser} drew nothing: {done.stderr.decode()[-200:]}")


# The command line


def show(rows, case, Br, Bc):
    def cell(value):
        return "-" if value is None else value

    print_table(
        f"The same work in three orders: {case.Nq} queries, {case.Nk or case.Nq} keys, "
        f"d = {case.d}, tiles {Br}x{Bc}, bytes of float32",
        ["order", "mask", "tiles", "skipped", "read", "written", "moved", "formula",
         "it - float64", "result"],
        [(r.order, "causal" if r.causal else "none", cell(r.tiles), cell(r.skipped), r.read,
          r.written, r.read + r.written, cell(r.formula), f"{r.error:.2e}",
          "pass" if r.passed else "FAIL") for r in rows], left=2)


def main():
    rows, columns = cli.whole_number(1, MOST_ROWS), cli.whole_number(1, MOST_COLUMNS)
    options = lesson.parser(__doc__, "causal", "seed", "json")
    for name, kind, letter, told in (
            ("seq-len", rows, "N", "queries (16)"),
            ("kv-len", rows, "N", "keys (as many as queries)"),
            ("head-dim", columns, "d", "(4)"), ("br", rows, "N", "rows of a query block (4)"),
            ("bc", rows, "N", "rows of a key/value block (4)")):
        options.add_argument(f"--{name}", type=kind, metavar=letter, help=told)
    options.add_argument("--html", type=cli.file_to_write, metavar="FILE", help="write the page")
    options.add_argument("--still", type=cli.file_to_write, metavar="FILE",
                         help="write a picture of it, as PNG; needs Chromium")
    options.set_defaults(device="cpu")
    args, device, _ = lesson.begin(options)
    case = Case(args.seq_len or 16, Nk=args.kv_len, d=args.head_dim or 4)
    Br, Bc = args.br or 4, args.bc or 4
    found, trace = collect(case, Br, Bc, args.seed)
    html = page({**trace, "mask": "causal" if args.causal else "none", "seed": args.seed})
    size = len(html.encode())
    if size > MOST_BYTES:
        options.error(f"argument --br: {Br}x{Bc} tiles make a page of {size} bytes, {MOST_BYTES} "
                      "are the most; take larger tiles or a shorter --seq-len")
    show(found, case, Br, Bc)
    if args.html is not None:
        with whole_file(args.html) as part:
            part.write_text(html, encoding="utf-8")
    if args.still is not None:
        still(html, args.still)
    return lesson.finish(args, device, [("order", row) for row in found])


if __name__ == "__main__":
    cli.serve(main)
