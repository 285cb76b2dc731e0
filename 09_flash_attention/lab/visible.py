"""What a query may see, and so which tiles are visited: causal, window, masks, grouped heads.

Causal, 8 queries and keys in 2 x 2 tiles (`flash_attention.py --mode trace --causal` draws it):

    / . . .     # wholly seen: nothing to hide
    # / . .     / on the edge: what is hidden gets the score -inf
    # # / .     . wholly hidden: never visited, which is why causal costs about half
    # # # /
"""

import math
from functools import partial

import torch

from lab.checks import (  # noqa: F401  DTYPES for others
    DTYPES, broadcasts, check_call, check_dropout)
from lab.dropout import Dropout
from lab.tiles import choose_tile, head_parts

is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling  # 2.1


class Visible:
    """The keys that each query of one call may see, and its inputs cut into tiles.

    A tile is 3-D: the leading dimensions in one, X, then its rows. Query head h reads key/value
    head h // G, and the G heads of a group become rows of one tile: Q_block [X, G*Br, d] meets
    K_block [X, Bc, d], which is read as it is. Without heads G is 1.
    The arguments are those of `flash_attention_forward`; wrong ones raise here, before any work.
    """

    def __init__(self, Q, K, V, causal=False, q_start=None, window=None, scale=None,
                 attn_mask=None, score_mod=None, dropout_p=0.0, seed=0):
        check_call(Q, K, V, q_start, window, scale, attn_mask, score_mod)
        check_dropout(dropout_p, seed)
        if attn_mask is not None:  # of as many dimensions as Q
            attn_mask = attn_mask.reshape((1,) * (Q.dim() - attn_mask.dim()) + attn_mask.shape)
        self.options = causal, q_start, window, scale, attn_mask, score_mod
        self.lead = K.shape[:-2]  # [B, Hkv], or whatever stands before N
        self.X = self.lead.numel()
        heads, kv_heads = (Q.shape[-3], K.shape[-3]) if Q.dim() > 3 else (1, 1)
        self.G = heads // kv_heads if kv_heads else 1
        self.Nq, self.Nk = Q.shape[-2], K.shape[-2]
        self.scale = 1 / math.sqrt(Q.shape[-1]) if scale is None else float(scale)
        self.dtype = Q.dtype if Q.dtype.itemsize >= 4 else torch.float32  # of m, l, O, the scores
        self.finite = torch.finfo(self.dtype).min, torch.finfo(self.dtype).max
        self.q_start = self.Nk - self.Nq if q_start is None else int(q_start)
        # Query i sees the keys from q_start + i - left to q_start + i + right.
        unbounded = self.Nq + self.Nk + abs(self.q_start)
        self.left, self.right = (
            unbounded if w is None else int(w) for w in window or (None, None))
        if causal:
            self.right = min(self.right, 0)
        self.is_causal = self.right == 0 and self.left == unbounded
        self.attn_mask = None if attn_mask is None else self.grouped(attn_mask)
        self.attn_mask_gradient = None  # of attn_mask's shape, where dS is summed up
        self.dropout = Dropout(dropout_p, seed, Q) if dropout_p else None
        self.score_mod = score_mod
        if score_mod is not None:
            self.b = self.h = torch.zeros((), dtype=torch.long, device=Q.device)
            if Q.dim() > 2:  # [B, 1, ...] against a tile's [B, Hkv, G, Br, Bc]
                self.b = torch.arange(len(Q), device=Q.device).view(-1, *[1] * Q.dim())
            if Q.dim() > 3:
                self.h = torch.arange(heads, device=Q.device).view(kv_heads, self.G, 1, 1)

    @property
    def hides(self):
        """Whether a query may be kept from a key at all."""
        everything = self.sees_all(slice(0, self.Nq), slice(0, self.Nk))
        return not everything or self.attn_mask is not None or self.score_mod is not None

    @property
    def blinds(self):
        """Whether a query may be kept from every key."""
        first, last = self.q_start + self.right, self.q_start + self.Nq - 1 - self.left
        seen = self.attn_mask is None and self.score_mod is None
        return not (seen and self.Nk and first >= 0 and last < self.Nk)

    def grouped(self, x):
        """View x [..., Hq or 1, N, ?] as [..., Hkv or 1, G or 1, N, ?]; without heads G is 1."""
        if x.dim() > 3 and x.shape[-3] > 1:
            return x.unflatten(-3, (self.lead[-1], self.G))
        return x.unsqueeze(-3)

    def parts(self, Br, Bc, queries, keys):
        """Yield (visible, Br, Bc, queries, keys), of as many heads as suit the tile at a time.

        queries: Q, and what else has its leading dimensions; keys: K, V, and theirs. With 'auto'
        tiles on a CPU the heads may come in several parts, each with a Visible of its own.
        """
        Q, K, V = queries[0], *keys[:2]
        Br, Bc, at_once = choose_tile(Br, Bc, Q, K, V.shape[-1], Q.device.type)
        for q, k in head_parts(Q, K, at_once) if at_once < self.X else [((), ())]:
            part = self._of_heads(Q[q], K[k], V[k], q) if q else self
            yield part, Br, Bc, [x[q] for x in queries], [x[k] for x in keys]

    def _of_heads(self, Q, K, V, q):
        """Return the Visible of the heads of `q`, slices of Q's leading dimensions."""
        *options, attn_mask, score_mod = self.options
        b0, h0 = q[0].start, q[1].start if len(q) > 1 else 0

        def mask_of(x):
            sides = zip(q, () if x is None else x.shape)
            return x if x is None else x[tuple(s if n > 1 else slice(None) for s, n in sides)]

        def score_mod_of(score, b, h, q_idx, kv_idx):
            return score_mod(score, b + b0, h + h0, q_idx, kv_idx)

        part = Visible(Q, K, V, *options, mask_of(attn_mask), score_mod and score_mod_of)
        part.attn_mask_gradient = mask_of(self.attn_mask_gradient)
        part.dropout = self.dropout and self.dropout.of_heads(q)
        return part

    # What is visited

    def query_blocks(self, Br):
        """Yield the slices of Br query rows; the last one is as long as what is left."""
        return (slice(i, min(i + Br, self.Nq)) for i in range(0, self.Nq, Br))

    def key_range(self, rows):
        """Return the slice of keys that causal and window let some query of `rows` see."""
        stop = max(0, min(self.Nk, self.q_start + rows.stop + self.right))
        return slice(min(stop, max(0, self.q_start + rows.start - self.left)), stop)

    def key_blocks(self, rows, Bc):
        """Yield the slices of at most Bc keys of the tiles that `rows` visits."""
        seen = self.key_range(rows)
        if seen.start == seen.stop:
            return
        for j in range(seen.start // Bc * Bc, seen.stop, Bc):
            cols = slice(max(j, seen.start), min(j + Bc, seen.stop))
            # A compiler can't know what a mask holds, so there its tiles are visited all the same.
            if self.attn_mask is None or is_compiling() or self._mask_tile(rows, cols)[1].any():
                yield cols

    def sees_all(self, rows, cols):
        """Whether causal and window hide nothing of a tile."""
        return (cols.stop - 1 <= self.q_start + rows.start + self.right
                and cols.start >= self.q_start + rows.stop - 1 - self.left)

    def drawing(self, Br, Bc):
        """Return which tiles are visited, a query block a line, in the signs of this file's top."""
        lines = []
        for rows in self.query_blocks(Br):
            line = ["."] * -(-self.Nk // Bc)
            for cols in self.key_blocks(rows, Bc):
                j = cols.start // Bc * Bc
                whole = slice(j, min(j + Bc, self.Nk))
                seen = self.attn_mask is None or self._mask_tile(rows, whole)[1].all()
                line[j // Bc] = "#" if seen and self.sees_all(rows, whole) else "/"
            lines.append(" ".join(line))
        return "\n".join(lines)

    def kept_pairs(self):
        """Return how many (query, key) pairs causal and window keep: the work that FLOPs count."""
        position = self.q_start + torch.arange(self.Nq)
        stop = (position + self.right + 1).clamp(0, self.Nk)
        start = (position - self.left).clamp(0, self.Nk)
        return int((stop - start).clamp(min=0).sum())

    # The tiles themselves

    def row_block(self, x, rows):
        """Return rows of Q, O or their like in the dtype of the scores, [X, G*Br, ?]."""
        block = self.grouped(x)[..., rows, :].to(self.dtype)  # [..., Hkv, G, Br, ?]
        return block.reshape(self.X, self.G * (rows.stop - rows.start), x.shape[-1])

    def key_block(self, x, cols):
        """Return the rows `cols` of K or V in the dtype of the scores, [X, Bc, d]."""
        return x[..., cols, :].to(self.dtype).reshape(self.X, cols.stop - cols.start, x.shape[-1])

    def store(self, wholes, rows, blocks):
        """Write each block [X, G*Br, ?] to the rows of its whole [..., Nq, ?]."""
        for whole, block in zip(wholes, blocks):
            shape = (*self.lead, self.G, rows.stop - rows.start, block.shape[-1])
            self.grouped(whole)[..., rows, :] = block.view(shape)

    def score_blocks(self, Q, K, V, rows, Bc, scratch):
        """Yield cols, S_block [X, G*Br, Bc], V_block [X, Bc, dv] of each tile that `rows` visits.

        scratch [X * G*Br * Bc]: every S_block is written there.
        """
        Q_block = self.row_block(Q, rows)  # [X, G*Br, d]
        for cols in self.key_blocks(rows, Bc):
            K_block, V_block = self.key_block(K, cols), self.key_block(V, cols)  # [X, Bc, ...]
            shape = (*Q_block.shape[:2], K_block.shape[1])
            # A compiler lays memory out by itself, and may run this generator to its end first.
            place = None if is_compiling() else scratch[: math.prod(shape)].view(shape)
            S_block = torch.bmm(Q_block, K_block.transpose(1, 2), out=place).mul_(self.scale)
            S_block = self.restrict(S_block, rows, cols)
            refuse_gradients(score_mod=S_block)
            yield cols, S_block, self.seen_keys(V_block, S_block)

    def restrict(self, S_block, rows, cols, unseen=None):
        """Apply score_mod, attn_mask, causal and window to S_block [X, G*Br, Bc], overwriting it.

        Hidden scores become -inf, and so do those of the keys `unseen` [X, Bc, 1].
        """
        Br, Bc = rows.stop - rows.start, cols.stop - cols.start
        S = S_block.view(*self.lead, self.G, Br, Bc)  # [..., Hkv, G, Br, Bc]
        if self.score_mod is not None:
            changed = self.modified(S, rows, cols).to(self.dtype)
            S = changed.expand(S.shape).clone()  # autograd may keep what score_mod returned
        if self.attn_mask is not None:
            bias, seen = self._mask_tile(rows, cols)
            if bias is not None:
                if bias.dtype.itemsize > self.dtype.itemsize:  # its finite numbers stay finite
                    bias = bias.clamp(*self.finite)
                S = S.add_(bias)
            S = S.masked_fill_(~seen, -math.inf)
        if not self.sees_all(rows, cols):
            first = self.q_start + rows.start - cols.start  # row 0 of the tile is at this column
            ones = partial(torch.ones, Br, Bc, dtype=torch.bool, device=S.device)
            hidden = ones().triu_(first + self.right + 1)  # [Br, Bc]
            if cols.start < self.q_start + rows.stop - 1 - self.left:
                hidden |= ones().tril_(first - self.left - 1)
            S = S.masked_fill_(hidden, -math.inf)
        S = S.view(S_block.shape)
        return S if unseen is None else S.masked_fill_(unseen.transpose(1, 2), -math.inf)

    def modified(self, S, rows, cols):
        """Return what score_mod makes of a tile's scores [..., Hkv, G, Br, Bc]."""
        changed = self.score_mod(S, *self.positions(rows, cols))
        if not isinstance(changed, torch.Tensor):
            raise TypeError(f"score_mod must return a tensor, got {type(changed).__name__}")
        if not broadcasts(changed.shape, S.shape):
            raise ValueError(f"score_mod must return scores that broadcast to those it was given, "
                             f"{tuple(S.shape)}, got shape {tuple(changed.shape)}")
        return changed

    def positions(self, rows, cols):
        """Return b, h, q_idx and kv_idx of a tile, as score_mod gets them: they broadcast to it."""
        i = torch.arange(rows.start, rows.stop, device=self.b.device)[:, None]  # [Br, 1]
        return self.b, self.h, i, torch.arange(cols.start, cols.stop, device=self.b.device)

    def dropping(self, rows, cols):
        """Return {'drop': of a tile [X, G*Br, Bc] -> what dropout leaves of it}, {} without one."""
        if self.dropout is None:
            return {}
        shape = self.X, self.G * (rows.stop - rows.start), cols.stop - cols.start
        dropped = self.dropout.dropped(rows, cols).view(shape)  # [..., Hq, Br, Bc] -> [X, G*Br, Bc]
        return {"drop": lambda x: x.masked_fill(dropped, 0).div_(1 - self.dropout.p)}

    def add_to_mask(self, dS_block, rows, cols):
        """Add a tile's dS [X, G*Br, Bc] to attn_mask_gradient, summed over what is broadcast."""
        dS = dS_block.view(*self.lead, self.G, rows.stop - rows.start, cols.stop - cols.start)
        tile = tile_of(self.grouped(self.attn_mask_gradient), rows, cols)  # [..., Br|1, Bc|1]
        tile += dS.sum_to_size(tile.shape)

    def seen_keys(self, block, S_block):
        """Return a tile's K_block or V_block with zeros for keys that no query of it sees: a weight
        of 0 does not hide the NaN of an unused key, since 0 * NaN is NaN.
        """
        return fill(block, self.unseen_keys(S_block), 0)

    def unseen_keys(self, S_block):
        """Return which keys of a tile no query of it sees, [X, Bc, 1]; None where each is seen."""
        if self.score_mod is None and self.attn_mask is None:
            return None
        return (S_block == -math.inf).all(-2).unsqueeze(-1)

    def hidden_keys(self, Q_rows, K_cols):
        """Return which keys no query sees, [X, Nk, 1], or None, for who lets autograd through all
        scores: it multiplies K by dS, which is 0 there, and 0 * NaN is NaN.
        """
        if self.score_mod is None and self.attn_mask is None:
            return None
        rows = slice(0, self.Nq)
        with torch.no_grad():
            S = Q_rows @ K_cols.transpose(1, 2) * self.scale  # [X, G*Nq, Nk]
            return self.unseen_keys(self.restrict(S, rows, self.key_range(rows)))

    def blind_rows(self, S):
        """Return which rows of S [X, G*Nq, Nk] see no key, [X, G*Nq, 1], or None where all see one.

        The softmax of such a row of only -inf is NaN, and so is its gradient: `fill` S with 0 there
        before it, and O with 0 and L with -inf after it.
        """
        return (S == -math.inf).all(-1, keepdim=True) if self.blinds else None

    def rounded(self, x, dtype):
        """Return x rounded to dtype; on a CPU as `self.dtype`, in which it multiplies."""
        return x.to(dtype).to(self.dtype if x.device.type == "cpu" else dtype)

    def _mask_tile(self, rows, cols):
        """Return attn_mask's tile: what it adds, or None, and what it keeps [..., Br|1, Bc|1]."""
        tile = tile_of(self.attn_mask, rows, cols)
        return (None, tile) if tile.dtype == torch.bool else (tile, tile != -math.inf)


def tile_of(mask, rows, cols):
    """Return the tile of a mask [..., Nq or 1, Nk or 1], a view."""
    mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., cols]


def same(x):
    """Return x: what stands where nothing is dropped."""
    return x


def wants_gradient(*tensors):
    """Return whether a gradient is to be computed for one of these tensors; None is none."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


def refuse_gradients(**inputs):
    """Raise ValueError for an input that wants a gradient."""
    for name, tensor in inputs.items():
        if wants_gradient(tensor):
            raise ValueError(f"{name} wants a gradient, got requires_grad=True: this is the "
                             "forward alone, call it under torch.no_grad()")


def refuse_transforms(*tensors):
    """Raise TypeError for a tensor of torch.func, of which there is no tile to write to."""
    is_one = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)  # torch 2.2
    if is_one and not is_compiling() and any(map(is_one, filter(torch.is_tensor, tensors))):
        raise TypeError("Q, K, V, attn_mask and what score_mod reads must be plain tensors, got "
                        "one inside vmap, grad or jvp of torch.func: standard_attention takes it")


def fill(x, where, value):
    """Return x with `value` where `where` says, a mask or None."""
    return x if where is None else x.masked_fill(where, value)


def batched(x):
    """View x [..., N, d] as [B, H, N, d]; [B, N, d] has one head."""
    lead = x.shape[:-2]
    shape = (lead[:-1].numel(), lead[-1]) if len(lead) > 1 else (lead.numel(), 1)
    return x.reshape(*shape, *x.shape[-2:])
