"""Pages: keys and values in blocks of a few tokens, found through a table, as an OS finds memory.

    python flash_pages.py --mode verify      does attention through the table give the same?
    python flash_pages.py --mode memory      what is reserved for sequences of unlike lengths?

`KVCache` of flash_decoding.py reserves N_max tokens for each sequence, however short it stays. A
`PagedCache` hands out pages of one pool as tokens come, so a sequence wastes less than one page,
and sequences that begin alike can share the pages of their beginning. The pages of a sequence lie
anywhere; its row of the block table lists them in order. The loop of attention stays as it is:
where it took K[..., j : j + Bc, :], it takes a page.
Source: PagedAttention (Kwon et al., arXiv 2309.06180), section 4.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, mib, print_table
from flash_attention import attend_in_tiles, online_softmax_step, standard_attention
from flash_decoding import KVCache
from lab.autocast import without_autocast
from lab.bench import Candidate, verify
from lab.caches import check_new, check_paged
from lab.served import kernels_of, say_why_not
from lab.show import print_verify
from lab.visible import Visible, refuse_gradients

import torch


class PagedCache:
    """Keys and values of many sequences in the pages of one pool.

    K_pages [P, page, Hkv, d], V_pages [P, page, Hkv, dv]. tables: {sequence: its pages in order};
    lengths: {sequence: its tokens}; owners: of each page, how many sequences list it; free: the
    pages that none does. All of them attend by

        paged_attention(Q, cache.K_pages, cache.V_pages, *cache.block_table(sequences))
    """

    def __init__(self, pages, page, kv_heads, d, dv=None, *, dtype=torch.float32, device="cpu"):
        if page < 1:
            raise ValueError(f"page must be 1 or more tokens, got {page}")
        lead, dv = (pages, page, kv_heads), d if dv is None else dv
        self.K_pages = torch.empty(*lead, d, dtype=dtype, device=device)
        self.V_pages = torch.empty(*lead, dv, dtype=dtype, device=device)
        self.owners, self.free = [0] * pages, list(range(pages))
        self.tables, self.lengths = {}, {}

    def append(self, sequence, K_new, V_new):
        """Write K_new [Hkv, n, d] and V_new [Hkv, n, dv] behind what `sequence` has; a new one
        starts empty.

        Raises ValueError for other shapes or devices and where too few pages are free, TypeError
        for another dtype; the cache is then as it was.
        """
        _, page, Hkv, _ = self.K_pages.shape
        check_new((Hkv,), K_new, V_new, self.K_pages, self.V_pages)
        refuse_gradients(K_new=K_new, V_new=V_new)  # the graph would hold the pages of all
        start = self.lengths.get(sequence, 0)
        stop = start + K_new.shape[1]
        wanted = -(-stop // page) - len(self.tables.get(sequence, ()))
        if wanted > len(self.free):
            raise ValueError(f"K_new must fit into {len(self.free)} free pages of {page} tokens, "
                             f"got tokens for {wanted}")
        table = self.tables.setdefault(sequence, [])
        for _ in range(wanted):
            table.append(self.free.pop())
            self.owners[table[-1]] = 1
        for n in range(start // page, -(-stop // page)):  # page by page
            first, last = max(start, n * page), min(stop, n * page + page)
            for pages, new in ((self.K_pages, K_new), (self.V_pages, V_new)):
                rows = new[:, first - start : last - start].transpose(0, 1)  # [n, Hkv, d or dv]
                pages[table[n], first - n * page : last - n * page] = rows
        self.lengths[sequence] = stop

    def fork(self, sequence, new):
        """Let the sequence `new` begin as `sequence` does: its full pages are shared, the tokens
        on its last one are copied, for there both will write.
        """
        page, length = self.K_pages.shape[1], self.lengths[sequence]
        if new in self.tables:
            raise ValueError(f"new must be a sequence that is not there yet, got {new!r}")
        full, rest = divmod(length, page)
        if rest and not self.free:
            raise ValueError("new needs a free page for the tokens on the last one, got none")
        self.tables[new], self.lengths[new] = self.tables[sequence][:full], full * page
        for n in self.tables[new]:
            self.owners[n] += 1
        if rest:
            last = self.tables[sequence][full]
            self.append(new, *(pages[last, :rest].transpose(0, 1)  # [Hkv, rest, d or dv]
                               for pages in (self.K_pages, self.V_pages)))

    def release(self, sequence):
        """Forget a sequence; its pages are free once no other sequence lists them."""
        del self.lengths[sequence]
        for n in self.tables.pop(sequence):
            self.owners[n] -= 1
            if not self.owners[n]:
                self.free.append(n)

    def block_table(self, sequences):
        """Return the table [B, pages] and the lengths [B] of these sequences, int32; an entry that
        no token needs is -1.
        """
        most = max((len(self.tables[s]) for s in sequences), default=0)
        rows = [self.tables[s] + [-1] * (most - len(self.tables[s])) for s in sequences]
        lengths = [self.lengths[s] for s in sequences]
        ints = partial(torch.tensor, dtype=torch.int32, device=self.K_pages.device)
        return ints(rows).view(len(rows), most), ints(lengths)


class PagedRows:
    """The keys or values of one sequence, [1, Hkv, length, d], read through its table."""

    def __init__(self, pages, table, length):
        self.pages, self.table = pages, table
        self.shape = (1, pages.shape[2], length, pages.shape[3])

    def __getitem__(self, where):
        """Return [..., rows, :] as a view, where the rows lie on one page."""
        _, rows, _ = where
        n, start = divmod(rows.start, self.pages.shape[1])
        page = self.pages[self.table[n], start : start + rows.stop - rows.start]  # [Bc, Hkv, d]
        return page.transpose(0, 1).unsqueeze(0)

    def outline(self):
        """Return a tensor of this shape, device and dtype that takes no memory."""
        return self.pages.new_empty(()).expand(self.shape)


@without_autocast
def paged_attention(Q, K_pages, V_pages, block_table, lengths, *, window=None, scale=None,
                    return_lse=False):
    """Return causal attention of each sequence's last tokens to all its tokens, from pages.

    Q [B, H, Nq, d]: the queries of the last Nq tokens of B sequences. K_pages [P, page, Hkv, d],
    V_pages [P, page, Hkv, dv]: the pool; query head h reads head h // (H / Hkv). block_table
    [B, pages]: the pages of each sequence in order; lengths [B]: its tokens; int32 or int64 both.
    Returns O [B, H, Nq, dv], with return_lse also L [B, H, Nq]. dtypes, window, scale and L as in
    `flash_attention_forward`; the right side of the window hides nothing that causal does not.

    Query i of Nq stands at position length - Nq + i. So where length < Nq the first queries stand
    before the first token and see none: O = 0, L = -inf, as all do at length 0. A page on which no
    key is seen is not read, nor is what lies on a page behind the last token: there the table may
    hold anything, and so may the pages.

    Sequences are taken one by one, each page by page: beside the result stands a tile of 64 queries
    and one page. So a sequence has the same bits in any batch, and those of the forward with
    Bc = page wherever that takes `online_softmax_step`.
    Raises ValueError for shapes, devices, lengths, entries of the table that are read and an input
    that wants a gradient, TypeError for dtypes.
    """
    tables, lengths = check_paged(Q, K_pages, V_pages, block_table, lengths, window, scale)
    refuse_gradients(Q=Q, K_pages=K_pages, V_pages=V_pages)
    O = Q.new_empty(*Q.shape[:-1], V_pages.shape[-1])
    wide = torch.promote_types(Q.dtype, torch.float32)
    m_l = [Q.new_empty(*Q.shape[:-1], 1, dtype=wide) for _ in range(2 * return_lse)]
    for b, (table, length) in enumerate(zip(tables, lengths)):
        K, V = (PagedRows(pages, table, length) for pages in (K_pages, V_pages))
        Q_b, *results = (x[b : b + 1] for x in (Q, O, *m_l))  # [1, H, Nq, ...]
        visible = Visible(Q_b, K.outline(), V.outline(), causal=True, window=window, scale=scale)
        attend_in_tiles(visible, 64, K_pages.shape[1], (Q_b, *results), (K, V), online_softmax_step)
    return (O, (m_l[0] + m_l[1].log()).squeeze(-1)) if return_lse else O


# The tools: each returns rows and prints nothing.


def through_pages(attend, Q, K, V, page):
    """Return attend(Q, pages, table, lengths) for K [B, Hkv, N, d] and V [B, Hkv, N, dv].

    The tokens come 24 at a time to each sequence in turn, so their pages lie between each other.
    """
    B, Hkv, N, d = K.shape
    cache = PagedCache(B * -(-N // page), page, Hkv, d, V.shape[-1], dtype=K.dtype, device=K.device)
    for j in range(0, N, 24):
        for b in range(B):
            cache.append(b, K[b, :, j : j + 24], V[b, :, j : j + 24])
    return attend(Q, cache.K_pages, cache.V_pages, *cache.block_table(range(B)))


def compare_and_verify(cases, *, device="cpu", seed=0):
    """Compare attention through pages, and its kernels in Triton where they run, with standard
    attention and float64: VerifyRows.
    """
    rows = []
    for case in cases:
        ways = [("pages", paged_attention, 16), ("pages", paged_attention, 100)]
        kernels, _ = kernels_of("flash_triton_decoding", case, device)
        if kernels:
            ways.append(("triton, pages", kernels.paged_attention_triton, 16))
        rows += verify(case, [Candidate("standard", standard_attention), *(
            Candidate(f"{name} of {page}", partial(through_pages, attend, page=page))
            for name, attend, page in ways)], device=device, seed=seed)
    return rows


@dataclass
class ReservedRow:
    """Bytes reserved for sequences whose tokens take needed_bytes. fit: how many such sequences the
    memory of the first row holds.
    """

    name: str
    reserved_bytes: int
    needed_bytes: int
    fit: int


def reserve(case, sequences=16, *, device="cpu", seed=0):
    """Reserve for sequences of random lengths that begin with the same prompt: ReservedRows."""
    N_max, shape, more = case.Nk, (case.kv_heads, case.d), {"dtype": case.dtype, "device": device}
    prompt = N_max // 8
    lengths = torch.randint(max(1, prompt), N_max + 1, (sequences,),
                            generator=torch.Generator().manual_seed(seed)).tolist()
    cache = KVCache(sequences, shape[0], N_max, shape[1], **more)
    whole = cache.K_buffer.nbytes + cache.V_buffer.nbytes
    a_token = whole // (sequences * N_max)
    rows = [ReservedRow(f"KVCache of {N_max}", whole, sum(lengths) * a_token, sequences)]
    del cache
    tokens = torch.zeros(shape[0], N_max, shape[1], **more)
    for page, share in ((256, False), (64, False), (16, False), (16, True)):
        cache = PagedCache((sequences + 1) * -(-N_max // page), page, *shape, **more)
        cache.append("prompt", tokens[:, :prompt], tokens[:, :prompt])
        for b, length in enumerate(lengths):
            if share:
                cache.fork("prompt", b)
            new = tokens[:, cache.lengths.get(b, 0) : length]
            cache.append(b, new, new)
        cache.release("prompt")
        taken = (len(cache.owners) - len(cache.free)) * page
        needed = sum(lengths) - share * (sequences - 1) * (prompt // page * page)
        rows.append(ReservedRow(f"pages of {page}" + ", prompt shared" * share, taken * a_token,
                                needed * a_token, sequences * sequences * N_max // taken))
    return rows


def show_memory(args, cases):
    found = []
    for case in cases:
        rows = reserve(case, device=args.device, seed=args.seed)
        print_table(
            f"Memory: 16 sequences of {case.Nk // 8} to {case.Nk} tokens, which begin alike",
            ["cache", "reserved, MiB", "needed, MiB", "needed of it", "sequences that fit"],
            [(r.name, mib(r.reserved_bytes), mib(r.needed_bytes),
              f"{r.needed_bytes / r.reserved_bytes:.1%}", r.fit) for r in rows])
        found += rows
    console.print(
        "\nneeded: the bytes of the tokens, a shared one counted once. fit: how many such "
        "sequences the memory of the first row holds.")
    return found


# The command line


def show_verify(args, cases):
    rows = compare_and_verify(cases, device=args.device, seed=args.seed)
    print_verify("Verify: largest differences", rows)
    say_why_not("flash_triton_decoding", cases, args.device)
    return rows


MODES = {"verify": show_verify, "memory": show_memory}


def main():
    names = "device dtype batch heads kv-heads seq-len head-dim seed json"
    options = lesson.parser(__doc__, *names.split())
    options.set_defaults(batch=4, heads=8, kv_heads=2)
    options.add_argument("--mode", choices=[*MODES, "all"], default="all", help="(all)")
    args, device, cases = lesson.begin(options, lengths=(1024,))
    cases = [replace(case, Nq=1, Nk=case.Nq) for case in cases]
    found = [(mode, row) for mode in (MODES if args.mode == "all" else [args.mode])
             for row in MODES[mode](args, cases)]
    return lesson.finish(args, device, found)


if __name__ == "__main__":
    cli.serve(main)
