"""What exercises/18_910b.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math

import torch

UB = 192 * 1024  # bytes: where a vector unit of a 910B computes


def fusion_attention(Q, K, V, head_num, input_layout, *, atten_mask=None, scale=1.0,
                     inner_precise=0):
    """What torch_npu documents of its operator, in the options that are asked for here."""
    if input_layout not in ("BNSD", "BSND"):
        raise ValueError(f"input_layout must be BNSD or BSND here, got {input_layout!r}")
    Q, K, V = (x if input_layout == "BNSD" else x.transpose(1, 2) for x in (Q, K, V))
    if Q.shape[1] != head_num:
        raise ValueError(f"head_num must be Q's number of heads, {Q.shape[1]}, got {head_num!r}")
    S = Q @ K.transpose(-2, -1) * scale
    if atten_mask is not None:
        S = S.masked_fill(atten_mask, -1e30)
    m = S.amax(-1, keepdim=True)
    P = torch.exp(S - m)
    l = P.sum(-1, keepdim=True)
    O = P / l @ V
    if atten_mask is not None and inner_precise == 2:
        O = O.masked_fill(atten_mask.all(-1, keepdim=True), 0.0)
    O = O if input_layout == "BNSD" else O.transpose(1, 2)
    return O, m, l, torch.empty(0), 0, 0, 0


def counted(tile=14, block=7, whole=math.ceil, unit=1e-3):
    """Return a `launch_ms` that counts in another way."""
    def launch_ms(N, Br, Bc, us):
        rows, columns = whole(N / Br), whole(N / Bc)
        return (tile * rows * columns + block * rows) * us * unit
    return launch_ms


def tallest(row):
    """Return a `most_rows` for row(d, Bc) bytes a row."""
    return lambda d, Bc: 2 ** int(math.log2(UB / row(d, Bc)))


def called(scale=True, inverted=True, precise=2, layout="BNSD", first=True):
    """Return a `call_npu` that leaves something out."""
    def call_npu(operator, Q, K, V, visible=None):
        hidden = None if visible is None else ~visible if inverted else visible
        found = operator(Q, K, V, Q.shape[1], layout, atten_mask=hidden,
                         scale=Q.shape[-1] ** -0.5 if scale else 1.0, inner_precise=precise)
        return found[0] if first else found
    return call_npu


def exact(Q, K, V, visible=None):
    S = Q @ K.transpose(-2, -1) / Q.shape[-1] ** 0.5
    if visible is not None:
        S = S.masked_fill(~visible, -torch.inf)
    return torch.softmax(S, dim=-1).nan_to_num(0.0) @ V


LAUNCH_MISTAKES = {
    "the last block is shorter, but it is launched all the same: round up": counted(whole=int),
    "each block of queries has 7 launches of its own": counted(block=0),
    "a tile is 14 launches": counted(tile=1, block=0),
    "a millisecond has 1000 microseconds": counted(unit=1),
    "the 7 come once a block of queries, not once a tile": counted(tile=21, block=0),
}
ROW_MISTAKES = {
    "a number in float32 has 4 bytes": tallest(lambda d, Bc: Bc + d + 2),
    "O_block stands there as well, d numbers a row": tallest(lambda d, Bc: 4 * (Bc + 2)),
    "S_block has Bc numbers a row": tallest(lambda d, Bc: 4 * (d + 2)),
    "P_block comes in S_block's place": tallest(lambda d, Bc: 4 * (2 * Bc + d + 2)),
    "it has to be a power of 2": lambda d, Bc: UB // (4 * (Bc + d + 2)),
    "the next power of 2 above that does not fit":
        lambda d, Bc: 2 * tallest(lambda d, Bc: 4 * (Bc + d + 2))(d, Bc),
}
CALL_MISTAKES = {
    "its scale is 1 unless you give it": called(scale=False),
    "True hides in atten_mask, and shows in `visible`": called(inverted=False),
    "a row that sees no key is 0 with inner_precise=2 alone": called(precise=0),
    "the heads come before the sequence here": lambda operator, Q, K, V, visible=None: exact(
        *(x.transpose(1, 2) for x in (Q, K, V))).transpose(1, 2),
    "it returns seven things, the output first": called(first=False),
}
Q, K, V = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
BLIND = CAUSAL.clone()
BLIND[1, :, 2] = False  # the third query of the second sequence sees nothing

CASES = [
    Case("launch_ms", (2048, 64, 64, 23.4), counted()(2048, 64, 64, 23.4), LAUNCH_MISTAKES),
    Case("launch_ms", (2048, 1024, 512, 23.4), counted()(2048, 1024, 512, 23.4), LAUNCH_MISTAKES),
    Case("launch_ms", (1000, 128, 64, 10.0), counted()(1000, 128, 64, 10.0), LAUNCH_MISTAKES),
    Case("most_rows", (64, 64), 256, ROW_MISTAKES),
    Case("most_rows", (128, 64), 128, ROW_MISTAKES),
    Case("most_rows", (64, 256), 128, ROW_MISTAKES),
    Case("most_rows", (256, 128), 64, ROW_MISTAKES),
    Case("call_npu", (fusion_attention, Q, K, V), exact(Q, K, V), CALL_MISTAKES,
         said="an operator, Q, K, V [2, 4, 6, 8]"),
    Case("call_npu", (fusion_attention, Q, K, V, CAUSAL), exact(Q, K, V, CAUSAL), CALL_MISTAKES,
         said="the same, and a causal mask"),
    Case("call_npu", (fusion_attention, Q, K, V, BLIND), exact(Q, K, V, BLIND), CALL_MISTAKES,
         said="the same, where a row sees no key"),
]
