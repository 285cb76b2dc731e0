"""What a query may see, and so which tiles are visited: causal, window, attn_mask, score_mod, grouped heads.

The band of `causal` and `window`, for Nq = Nk = 8 and 2 x 2 tiles (`--mode trace --causal` draws it):

    causal      # tile wholly seen: nothing to hide
    / . . .     / tile on the edge: its hidden scores become -inf
    # / . .     . tile wholly hidden: never visited, which is why causal costs about half
    # # / .
    # # # /
"""

import math
import numbers

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Visible:
    """The keys that each query of one call may see, and the inputs in the form in which the loops use them.

    Q [..., Hq, Nq, d] becomes Q [..., Hkv, G, Nq, d]: query head h reads key/value head h // G, and the G heads of
    a group become rows of one tile, so K and V are read as they are. Without heads G is 1. The arguments are those
    of `flash_attention_forward`; wrong ones raise here, before any work.
    """

    def __init__(self, Q, K, V, *, causal=False, q_start=None, window=None, scale=None, attn_mask=None,
                 score_mod=None):
        _check(Q, K, V, q_start, window, scale, attn_mask, score_mod)
        heads, self.kv_heads = (Q.shape[-3], K.shape[-3]) if Q.dim() > 3 else (1, 1)
        self.G = heads // self.kv_heads
        self.Nq, self.Nk = Q.shape[-2], K.shape[-2]
        self.Q = self._split(Q) if Q.dim() > 3 else Q.unsqueeze(-3)  # [..., Hkv, G, Nq, d]
        self.scale = 1 / math.sqrt(Q.shape[-1]) if scale is None else scale
        self.dtype = Q.dtype if Q.dtype.itemsize >= 4 else torch.float32  # m, l, O and the scores
        self.q_start = self.Nk - self.Nq if q_start is None else q_start
        left, right = (None, None) if window is None else window
        # Query i sees keys from q_start + i - left to q_start + i + right; a band as wide as this is unbounded.
        self.left = self.Nq + self.Nk + abs(self.q_start) if left is None else left
        self.right = self.Nq + self.Nk + abs(self.q_start) if right is None else right
        if causal:
            self.right = min(self.right, 0)
        self.score_mod = score_mod
        self.hides = causal or window is not None or attn_mask is not None or score_mod is not None
        self.attn_mask = None
        if attn_mask is not None:
            mask = attn_mask.reshape((1,) * (Q.dim() - attn_mask.dim()) + attn_mask.shape)
            self.attn_mask = self._split(mask) if Q.dim() > 3 else mask.unsqueeze(-3)
        self.batch_index = self.head_index = torch.zeros((), dtype=torch.long, device=Q.device)
        if score_mod is not None and Q.dim() > 2:
            self.batch_index = torch.arange(len(Q), device=Q.device).view(-1, *[1] * Q.dim())  # [B, 1.., 1, 1]
            self.head_index = torch.arange(heads, device=Q.device).view(self.kv_heads, self.G, 1, 1)

    def _split(self, x):
        """[..., Hq or 1, N, d] -> [..., Hkv or 1, G or 1, N, d]"""
        return x.unsqueeze(-3) if x.shape[-3] == 1 else x.unflatten(-3, (self.kv_heads, self.G))

    def query_block(self, rows):
        """Return Q's rows in the dtype of the scores, [..., G*Br, d]."""
        return self.Q[..., rows, :].to(self.dtype).flatten(-3, -2)

    def start(self, rows, dv):
        """Return m, l and O_block as they stand before the first tile.

        m starts at the lowest finite number, not at -inf: a tile with nothing to see then gives
        correction = exp(0) = 1 and P_block = exp(-inf) = 0, where -inf - -inf would be NaN.
        """
        lead = (*self.Q.shape[:-3], self.G * (rows.stop - rows.start))
        m = self.Q.new_full((*lead, 1), torch.finfo(self.dtype).min, dtype=self.dtype)
        return m, torch.zeros_like(m), m.new_zeros((*lead, dv))

    def store(self, target, rows, block):
        """Write block [..., G*Br, x] to the rows of target [..., Nq, x]."""
        grouped = self._split(target) if target.dim() > 3 else target.unsqueeze(-3)
        grouped[..., rows, :] = block.unflatten(-2, (self.G, rows.stop - rows.start))

    def query_blocks(self, Br):
        """Yield the slices of Br query rows, the last one as long as what is left."""
        return (slice(i, min(i + Br, self.Nq)) for i in range(0, self.Nq, Br))

    def key_blocks(self, rows, Bc):
        """Yield the slices of Bc keys that some query of `rows` may see: the tiles that are visited."""
        first = max(0, self.q_start + rows.start - self.left)
        stop = min(self.Nk, self.q_start + rows.stop + self.right)
        for j in range(first // Bc * Bc, stop, Bc):
            cols = slice(j, min(j + Bc, self.Nk))
            if self.attn_mask is None or self._mask_tile(rows, cols)[1].any():
                yield cols

    def sees_all(self, rows, cols):
        """Whether causal and window hide nothing of a tile."""
        return (cols.stop - 1 <= self.q_start + rows.start + self.right
                and cols.start >= self.q_start + rows.stop - 1 - self.left)

    def restrict(self, S_block, V_block, rows, cols):
        """Apply score_mod, attn_mask and the band to a tile: S_block [..., G*Br, Bc], V_block [..., Bc, dv].

        Hidden scores become -inf. The values of a key that no query of the tile sees become 0, for a weight of 0
        does not hide the NaN of an unused key: 0 * NaN is NaN.
        """
        if self.sees_all(rows, cols) and self.attn_mask is None and self.score_mod is None:
            return S_block, V_block
        S_block = S_block.unflatten(-2, (self.G, rows.stop - rows.start))  # [..., G, Br, Bc]
        i = torch.arange(rows.start, rows.stop, device=S_block.device)[:, None]  # [Br, 1]
        j = torch.arange(cols.start, cols.stop, device=S_block.device)  # [Bc]
        hidden = self.hidden(rows, cols, S_block.device)
        if self.score_mod is not None:
            S_block = self.score_mod(S_block, self.batch_index, self.head_index, i, j).to(self.dtype)
        if self.attn_mask is not None:
            bias, seen = self._mask_tile(rows, cols)
            S_block = S_block if bias is None else S_block + bias
            hidden = hidden | ~seen
        S_block = S_block.masked_fill(hidden, -math.inf)
        unseen = (S_block == -math.inf).all(-2).all(-2)  # [..., Bc]
        return S_block.flatten(-3, -2), V_block.masked_fill(unseen.unsqueeze(-1), 0)

    def hidden(self, rows, cols, device):
        """Return what causal and window hide of a tile: bool [Br, Bc], True may not be seen."""
        position = self.q_start + torch.arange(rows.start, rows.stop, device=device)[:, None]  # [Br, 1]
        j = torch.arange(cols.start, cols.stop, device=device)  # [Bc]
        return (j > position + self.right) | (j < position - self.left)

    def _mask_tile(self, rows, cols):
        """The tile of attn_mask: what it adds (or None), and which scores it keeps, both [..., Br or 1, Bc or 1]."""
        tile = self.attn_mask
        tile = tile if tile.shape[-2] == 1 else tile[..., rows, :]
        tile = tile if tile.shape[-1] == 1 else tile[..., cols]
        return (None, tile) if tile.dtype == torch.bool else (tile, tile > -math.inf)

    def kept_pairs(self):
        """How many (query, key) pairs causal and window keep: the work that FLOPs count."""
        position = self.q_start + torch.arange(self.Nq)
        stop = (position + self.right + 1).clamp(0, self.Nk)
        return int((stop - (position - self.left).clamp(0, self.Nk)).clamp(min=0).sum())


def _check(Q, K, V, q_start, window, scale, attn_mask, score_mod):
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
            given = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a float16, bfloat16, float32 or float64 tensor, got {given}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions [..., N, d], got shape {tuple(tensor.shape)}")
        if tensor.dtype != Q.dtype:
            raise TypeError(f"Q, K and V must have one dtype, got Q {Q.dtype} and {name} {tensor.dtype}")
        if tensor.device != Q.device:
            raise ValueError(f"Q, K and V must be on one device, got Q on {Q.device} and {name} on {tensor.device}")
    shapes = f"got Q {tuple(Q.shape)}, K {tuple(K.shape)}, V {tuple(V.shape)}"
    if Q.shape[-1] != K.shape[-1] or Q.shape[-1] == 0:
        raise ValueError(f"Q and K must have the same last dimension d >= 1, {shapes}")
    if K.shape[:-1] != V.shape[:-1]:
        raise ValueError(f"K and V must agree in all but the last dimension, {shapes}")
    grouped = Q.dim() > 3 and K.dim() == Q.dim() and K.shape[-3] > 0 and Q.shape[-3] % K.shape[-3] == 0
    if Q.shape[:-2] != K.shape[:-2] and not (grouped and Q.shape[:-3] == K.shape[:-3]):
        raise ValueError("K must have Q's leading dimensions, or with [B, H, N, d] a number of heads that divides "
                         f"Q's, {shapes}")
    if q_start is not None and not _is_int(q_start):
        raise ValueError(f"q_start must be an int or None, got {q_start!r}")
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2
                                   and all(w is None or _is_int(w) and w >= 0 for w in window)):
        raise ValueError(f"window must be (left, right), each an int >= 0 or None, got {window!r}")
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    if score_mod is not None and Q.dim() > 4:
        raise ValueError(f"score_mod takes [B, H, N, d] or fewer dimensions, got Q {tuple(Q.shape)}")
    if attn_mask is not None:
        _check_mask(Q, K, attn_mask)


def _check_mask(Q, K, attn_mask):
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        raise TypeError(f"attn_mask must be bool (True keeps) or floating point (added), got {attn_mask.dtype}")
    if attn_mask.device != Q.device:
        raise ValueError(f"attn_mask must be on Q's device {Q.device}, got {attn_mask.device}")
    scores = (*Q.shape[:-1], K.shape[-2])
    fits = attn_mask.dim() <= len(scores) and all(
        have in (1, want) for have, want in zip(reversed(attn_mask.shape), reversed(scores)))
    if not fits:
        raise ValueError(f"attn_mask must broadcast to the scores {scores}, got shape {tuple(attn_mask.shape)}")


def _is_int(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
