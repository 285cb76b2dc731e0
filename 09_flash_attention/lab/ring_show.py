"""The rows and tables of flash_ring.py."""

from dataclasses import dataclass

from common.report import console, logarithmic, mib, plotted, print_table, quotient
from lab.bench import VerifyRow
from lab.machines import CHIPS
from lab.ring_costs import LINKS, least_rows, seconds
from lab.show import ms

MERGED = {"wide": "all in float32", "O": "O in bfloat16", "O_m_l": "O, m and l in bfloat16"}


@dataclass
class RingRow(VerifyRow):
    """A VerifyRow of one result, O, dQ, dK or dV, of all ranks together."""

    of: str = "O"
    ranks: int = 1


@dataclass
class RankRow:
    """Bytes of one rank, those sent counted and by formula, in a forward and in the backward.

    pairs: of a query and a key that causal keeps, a head, on the average. rows: which it has.
    """

    name: str
    shape: str
    rank: int
    peak_bytes: int
    sent_forward: int
    sent_backward: int
    formula_forward: int
    formula_backward: int
    pairs: int
    rows: str
    passed: bool


@dataclass
class TimeRow:
    """seconds: the median of the rounds, until the last rank is ready."""

    name: str
    shape: str
    ranks: int
    seconds: float
    times_as_fast: float
    why: str = ""


@dataclass
class OverlapRow:
    """Seconds of a forward and of its halves. hidden: of the sending, by overlap."""

    link: str
    gb_per_s: float
    computing: float
    sending: float
    in_turn: float
    overlapped: float
    hidden: float
    hidden_spread: tuple
    why: str = ""


@dataclass
class TrainRow:
    """The loss of a step in one process and on the ranks."""

    step: int
    N: int
    ranks: int
    loss: float
    loss_split: float
    passed: bool


@dataclass
class MergeRow:
    """The error of O, root of the mean square over that of O, by what is bfloat16 between hops."""

    ranks: int
    N: int
    wide: float
    O: float
    O_m_l: float


@dataclass
class LinkRow:
    """The least rows a rank for each pass; seconds of a causal forward of N rows on 8 cards."""

    name: str
    gb_per_s: float
    forward: float
    zigzag: float
    backward: float
    N: int
    heads: int
    computing: float
    ring: float
    ulysses: float


def print_verify(rows):
    """Print RingRows, a line a form: its error, and in brackets that of standard attention."""
    lines = {}
    for r in rows:
        line = lines.setdefault((r.name, r.shape, r.dtype, "yes" if r.causal else "no"), [])
        line.append((f"{r.error_flash:.1e} ({r.error_standard:.1e})", r.passed))
    print_table(
        f"Verify: {rows[0].ranks} ranks, largest difference from float64; in brackets that of "
        "standard attention in one process",
        ["name", "Q (K V)", "dtype", "causal", "O", "dQ", "dK", "dV", "result"],
        [(*key, *(cell for cell, _ in line), "pass" if all(held for _, held in line) else "FAIL")
         for key, line in lines.items()])


def print_ranks(rows, case, peak_of_one):
    """Print RankRows: what a rank holds and sends, a line a form; and its pairs, a line a rank."""
    forms = {name: [r for r in rows if r.name == name] for name in dict.fromkeys(
        r.name for r in rows)}
    ranks = len(rows) // len(forms)

    def most(some, field):
        return max(getattr(r, field) for r in some)

    print_table(
        f"Memory: a forward and a backward of {case.shape}, causal, on {ranks} ranks; MiB a rank",
        ["name", "peak", "in one process", "one / rank", "sent forward", "formula",
         "sent backward", "formula", "to the byte"],
        [(name, mib(most(some, "peak_bytes")), mib(peak_of_one),
          quotient(peak_of_one, most(some, "peak_bytes")),
          *(mib(most(some, f"{what}_{way}"))
            for way in ("forward", "backward") for what in ("sent", "formula")),
          "yes" if all(r.passed for r in some) else "NO") for name, some in forms.items()])
    print_table("Pairs of a query and a key that causal keeps, a head",
                ["rank", *(f"{name}{word}" for name in forms for word in ("", ": rows"))],
                [(rank, *(cell for some in forms.values()
                          for cell in (some[rank].pairs, some[rank].rows)))
                 for rank in range(ranks)])


def print_times(rows):
    """Print TimeRows."""
    print_table(f"Speed: a causal forward on {rows[0].ranks} ranks, until the last is ready",
                ["name", "Q (K V)", "ms", "times as fast as one rank alone"],
                [(r.name, r.shape, ms(r), f"{r.times_as_fast:.3g}") for r in rows])
    print_doubts(rows)


def print_doubts(rows):
    """Say why figures with a ? are not to be believed."""
    for why in dict.fromkeys(r.why for r in rows if r.why):
        console.print(f"? not to be believed: {why}")


def print_overlap(rows, shape):
    """Print OverlapRows."""
    print_table(f"Overlap: a forward round the ring without a mask, {shape}, ms",
                ["link", "GB/s", "computing alone", "sending alone", "one after the other",
                 "overlapped", "of the sending hidden", "quartiles"],
                [(r.link, f"{r.gb_per_s:.3g}",
                  *(f"{s * 1e3:.4g}" for s in (r.computing, r.sending, r.in_turn, r.overlapped)),
                  f"{r.hidden:.0%}{' ?' * bool(r.why)}",
                  "{:.0%} to {:.0%}".format(*r.hidden_spread)) for r in rows])
    print_doubts(rows)
    console.print("\nslowed down: a block counts as sent when as much time has passed as computing "
                  "it takes. Meanwhile no core works on it, as with a card's own link.")


def print_training(rows):
    """Print TrainRows."""
    print_table(f"Training: the loss of a small GPT, N={rows[0].N}, each text split over "
                f"{rows[0].ranks} ranks", ["step", "one process", "split", "difference", "result"],
                [(r.step, f"{r.loss:.6f}", f"{r.loss_split:.6f}",
                  f"{abs(r.loss - r.loss_split):.1e}", "pass" if r.passed else "FAIL")
                 for r in rows])


def print_merges(rows):
    """Print MergeRows."""
    print_table(f"The trap: {rows[0].N} keys in parts, merged hop by hop; error of O in %",
                ["ranks", *MERGED.values()],
                [(r.ranks, *(f"{100 * getattr(r, field):.3f}" for field in MERGED)) for r in rows])
    console.print("\nEach part is computed in float32 and the last O rounded to bfloat16: what "
                  "differs is kept between two hops. Root of the mean square, over that of O.")


def plot_merges(rows, path):
    """Draw the errors over the number of ranks."""
    with plotted(path, figsize=(7, 4.5)) as axes:
        for field, label in MERGED.items():
            axes.plot([r.ranks for r in rows], [100 * getattr(r, field) for r in rows],
                      marker="o", label=label)
        logarithmic(axes, {r.ranks for r in rows})
        axes.set(xlabel="ranks", ylabel="error of O, %", yscale="linear", ylim=(0, None),
                 title="Parts merged hop by hop, by what is rounded between two hops")
        axes.legend()


def link_rows(N=65536, heads=32, d=128, ranks=8):
    """Return the LinkRows of LINKS."""
    return [LinkRow(x.name, x.one / 1e9, least_rows(x), least_rows(x, causal=True),
                    least_rows(x, backward=True), N, heads, *seconds(x, N, heads, d, ranks))
            for x in LINKS]


def links(args, device, cases):
    """Print what the links of a server allow, by arithmetic: LinkRows."""
    rows = link_rows()
    print_table(f"Links, float16: rows a rank from which on computing hides sending; and a causal "
                f"forward of {rows[0].heads} heads, N={rows[0].N}, d=128, on 8 cards, in ms",
                ["links", "GB/s to one", "forward", "zigzag, causal", "backward",
                 "computing", "sending, ring", "sending, Ulysses"],
                [(r.name, f"{r.gb_per_s:.0f}", *(f"{x:.0f}" for x in (
                    r.forward, r.zigzag, r.backward)),
                  *(f"{x * 1e3:.3g}" for x in (r.computing, r.ring, r.ulysses))) for r in rows])
    console.print()
    for x in LINKS:
        console.print(f"{x.name}: {x.one / 1e9:.0f} GB/s one way to a neighbour, "
                      f"{x.all / 1e9:.0f} to all together ({x.source}); "
                      f"{CHIPS[x.chip].peak / 1e12:.0f} TFLOP/s.")
    console.print("Not measured: products at the peak, links at their rate.")
    return rows
