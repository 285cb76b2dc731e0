"""What exercises/09_decoding.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math

import torch


def merged(weigh, total=None):
    """Return a merge with other weights; weigh and total: functions of m_parts - m and l_parts."""
    def merge(O_parts, m_parts, l_parts):
        m = m_parts.max()
        weight = weigh(m_parts - m, l_parts)
        l = (torch.exp(m_parts - m) * l_parts).sum()
        return (weight / (total or weigh)(m_parts - m, l_parts).sum()) @ O_parts, m, l
    return merge


def without_m(O_parts, m_parts, l_parts):
    weight = torch.exp(m_parts) * l_parts
    m = m_parts.max()
    return weight / weight.sum() @ O_parts, m, (torch.exp(m_parts - m) * l_parts).sum()


def by_L(O_parts, m_parts, l_parts):
    m = m_parts.max()
    weight = torch.softmax(m_parts + l_parts.log(), 0)
    return weight @ O_parts, m, (torch.exp(m_parts - m) * l_parts).sum()


def parts_of(scores, values, sizes):
    """Return O_parts, m_parts and l_parts of a row that is cut into parts of these sizes."""
    found = []
    for s, v in zip(scores.split(sizes), values.split(sizes)):
        m = s.max() if len(s) else torch.tensor(-math.inf)
        P = torch.exp(s - m)
        found.append((P @ v / max(P.sum(), 1e-30), m, P.sum()))
    return tuple(torch.stack(x) for x in zip(*found))


def whole(scores, values):
    m = scores.max()
    return torch.softmax(scores, 0) @ values, m, torch.exp(scores - m).sum()


def read(numbers, last_whole=False, ways=lambda key, page: divmod(key, page), scaled=True):
    """Return a paged attention that takes the pages `numbers(table)`."""
    def attend(q, K_pages, V_pages, table, length):
        page = K_pages.shape[1]
        end = -(-length // page) * page if last_whole else length
        places = [ways(j, page) for j in range(end)]
        K, V = (torch.stack([x[numbers(table)[n], row] for n, row in places])
                for x in (K_pages, V_pages))
        return torch.softmax(K @ q / (len(q) ** 0.5 if scaled else 1), 0) @ V
    return attend


BYTES = {
    "a key and a value: two vectors for each token": lambda n, h, d, t, e: n * h * d * t * e,
    "every layer has keys and values of its own": lambda n, h, d, t, e: 2 * h * d * t * e,
    "bytes, not numbers": lambda n, h, d, t, e: 2 * n * h * d * t,
}
MERGES = {
    "where no part saw a key, m is -inf, and -inf - -inf and 0 / 0 are NaN":
        merged(lambda m, l: torch.exp(m) * l),
    "-1e9 + log(5) is -1e9 in float32: merge by m and l, not by L": by_L,
    "a part weighs exp(m_p - m) * l_p: l_p is missing": merged(lambda m, l: torch.exp(m)),
    "each O_p is divided by its l_p already: multiply by l_p before the sum":
        merged(lambda m, l: torch.exp(m), lambda m, l: torch.exp(m) * l),
    "a part weighs exp(m_p - m) * l_p: exp(m_p - m) is missing": merged(lambda m, l: l),
    "a part weighs exp(m_p - m) * l_p, not the same as the others":
        merged(lambda m, l: torch.ones_like(l)),
    "take the largest m off before the exp": without_m,
}
PAGES = {
    "the pages lie in the table's order: take table[j // page]": read(lambda table: range(9)),
    "the last page may be filled in part: stop at `length`":
        read(lambda table: table, last_whole=True),
    "j // page is the place in the table, j % page the row of the page":
        read(lambda table: table * 9, ways=lambda key, page: divmod(key, page)[::-1]),
    "divide the scores by sqrt(d)": read(lambda table: table, scaled=False),
}

generator = torch.Generator().manual_seed(0)
SCORES = torch.tensor([2.0, 1.0, 3.0, -1.0, 0.5, 4.0, 3.5, 6.0, 5.0, -2.0])
VALUES = torch.arange(20.0).reshape(10, 2)
HIDDEN = torch.full((6,), -1e9)
NOTHING = torch.zeros(2, 2), torch.full((2,), -math.inf), torch.zeros(2)
ROWS = [torch.randn(10, 4, generator=generator) for _ in range(2)]
q = 2 * torch.randn(4, generator=generator)
PAGE, TABLE = 4, [5, 2, 0]


def pool(rows, table):
    """Return 6 pages of 4 rows that hold `rows` by the table; the rest is of no sequence."""
    pages = 3 * torch.randn(6, PAGE, rows.shape[1], generator=generator)
    for j, row in enumerate(rows):
        pages[table[j // PAGE], j % PAGE] = row
    return pages


K_PAGES, V_PAGES = (pool(rows, TABLE) for rows in ROWS)


def exact(length):
    K, V = (rows[:length] for rows in ROWS)
    return torch.softmax(K @ q / 2, 0) @ V


CASES = [
    Case("cache_bytes", (1, 1, 4, 3, 4), 96, BYTES),
    Case("cache_bytes", (32, 8, 128, 8192, 2), 2**30, BYTES),
    *(Case("merge", parts_of(scores, VALUES[:len(scores)], sizes),
           whole(scores, VALUES[:len(scores)]), MERGES, said=f"parts of {sizes} keys{more}")
      for scores, sizes, more in (
        (SCORES, [10], ""), (SCORES, [4, 6], ""), (SCORES, [3, 0, 7], ""),
        (SCORES + 1000, [5, 5], ", scores near 1000"),
        (HIDDEN, [5, 1], ", all scores -1e9"))),
    Case("merge", NOTHING, torch.zeros(2), MERGES, call=lambda merge, *parts: merge(*parts)[0],
         said="two parts that saw no key"),
    *(Case("paged_attention", (q, K_PAGES, V_PAGES, [*TABLE[:-(-length // PAGE)], -1], length),
           exact(length), PAGES, said=f"pages of 4, table {[*TABLE[:-(-length // PAGE)], -1]}, "
                                      f"length {length}") for length in (8, 10, 1)),
]
