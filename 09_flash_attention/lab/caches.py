"""What the caches of decoding take: new keys and values, pages and the tables that list them."""

import torch

from lab.checks import check_call


def check_new(lead, K_new, V_new, K_buffer, V_buffer):
    """Raise ValueError or TypeError unless K_new is [*lead, n, d] and V_new [*lead, n, dv], of the
    dtype and the device of the buffers [..., d] and [..., dv].
    """
    both = ("K_new", K_new, K_buffer), ("V_new", V_new, V_buffer)
    for name, new, _ in both:
        if not isinstance(new, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(new).__name__}")
    n = K_new.shape[-2] if K_new.dim() > 1 else "n"
    for name, new, buffer in both:
        if new.shape != (*lead, n, buffer.shape[-1]):
            wanted = ", ".join(map(str, (*lead, "n", buffer.shape[-1])))
            raise ValueError(f"{name} must be [{wanted}] with one n for both, "
                             f"got shape {tuple(new.shape)}")
        if new.dtype != buffer.dtype:
            raise TypeError(f"{name} must have the cache's {buffer.dtype}, got {new.dtype}")
        if new.device != buffer.device:
            raise ValueError(f"{name} must be on {buffer.device}, got {new.device}")


def check_paged(Q, K_pages, V_pages, block_table, lengths, window, scale):
    """Raise ValueError or TypeError for what no attention through a block table takes; return the
    table and the lengths as lists.

    An entry is checked where some query sees a key of its page. For that the table and the lengths
    are read to the host.
    """
    check_call(Q, Q, Q, None, window, scale, None, None)
    for name, x, dtypes in (("K_pages", K_pages, (Q.dtype,)), ("V_pages", V_pages, (Q.dtype,)),
                            ("block_table", block_table, (torch.int32, torch.int64)),
                            ("lengths", lengths, (torch.int32, torch.int64))):
        dtype = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        if dtype not in dtypes:
            raise TypeError(f"{name} must be a tensor of {' or '.join(map(str, dtypes))}, "
                            f"got {dtype}")
        if x.device != Q.device:
            raise ValueError(f"{name} must be on Q's device {Q.device}, got {x.device}")
    _check_shapes(Q, K_pages, V_pages, block_table, lengths)
    P, page = K_pages.shape[:2]
    table, lengths = block_table.cpu().long(), lengths.cpu().long()
    most = table.shape[1] * page
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            raise ValueError(f"lengths must be from 0 to {most}, the keys of {table.shape[1]} pages"
                             f" of {page}, got {length} for batch entry {b}")
    starts, ends = torch.arange(table.shape[1]) * page, lengths[:, None]
    used = starts < ends
    left = window[0] if window else None
    if left is not None:
        used &= starts + page > ends - Q.shape[-2] - left
    wrong = (used & ((table < 0) | (table >= P))).nonzero().tolist()
    if wrong:
        b, n = wrong[0]
        raise ValueError(f"block_table must list pages from 0 to {P - 1} where keys are seen, "
                         f"got {table[b, n]} for page {n} of batch entry {b}")
    return table.tolist(), lengths.tolist()


def _check_shapes(Q, K_pages, V_pages, block_table, lengths):
    shapes = (f"got Q {tuple(Q.shape)}, K_pages {tuple(K_pages.shape)}, "
              f"V_pages {tuple(V_pages.shape)}, block_table {tuple(block_table.shape)}, "
              f"lengths {tuple(lengths.shape)}")
    if Q.dim() != 4 or K_pages.dim() != 4 or V_pages.dim() != 4:
        raise ValueError("Q must be [B, H, Nq, d], K_pages [P, page, Hkv, d], V_pages "
                         f"[P, page, Hkv, dv], {shapes}")
    if K_pages.shape[:3] != V_pages.shape[:3] or K_pages.shape[1] < 1:
        raise ValueError("K_pages and V_pages must have the same number of pages, keys of a page, "
                         f"1 or more, and heads, {shapes}")
    if K_pages.shape[3] != Q.shape[3]:
        raise ValueError(f"Q and K_pages must have the same last dimension, {shapes}")
    if Q.shape[1] % max(1, K_pages.shape[2]) or (Q.shape[1] == 0) != (K_pages.shape[2] == 0):
        raise ValueError(f"K_pages must have a number of heads that divides Q's, {shapes}")
    if block_table.dim() != 2 or lengths.dim() != 1 or (
            not len(Q) == len(block_table) == len(lengths)):
        raise ValueError(f"block_table must be [B, pages] and lengths [B] with Q's B, {shapes}")
