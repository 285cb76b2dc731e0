"""What training adds: score_mod, L, masks that learn, autocast, and what a step keeps."""

import math
import warnings
import weakref
from functools import partial

import flash_backward
import pytest
import torch
import torch.nn.functional as F
from common.memory import measure_peak
from common.timing import count_launches
from flash_attention import flash_attention_forward, standard_attention
from flash_backward import flash_attention, flash_attention_backward
from hypothesis import given, settings
from lab import bench, tiles
from lab.cases import Case
from lab.flex import flex, flex_attention
from lab.learned import BLIND
from test_forward import inputs, problems
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
sees_index = pytest.mark.skipif(BLIND, reason="before torch 2.5 an index is not seen")


def leaf(*shape, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def softcap(score, b, h, i, j):
    return 2 * torch.tanh(score / 2)


def alibi(slopes):
    return lambda score, b, h, i, j: score - slopes.take(h).exp() * (i - j).abs()


def table(bias):
    return lambda score, b, h, i, j: score + bias.take(5 * h + (i - j).clamp(-2, 2) + 2)


def temperature(x):  # of every batch entry and head
    return lambda score, b, h, i, j: score * x.take(2 * b + h) + b


MODS = {"softcap": (None, None), "slopes": (alibi, (2,)), "table": (table, (2, 5)),
        "temperature": (temperature, (2, 2))}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("tile", [(3, 2), (64, 64)])
def test_score_mod_has_the_gradients_of_finite_differences(name, tile):
    QKV = [x.requires_grad_() for x in inputs(4, 5, d=2, lead=(2, 2))]
    build, shape = MODS[name]
    learned = [] if shape is None else [leaf(*shape)]

    def attend(Q, K, V, *learned):
        score_mod = build(*learned) if learned else softcap
        return flash_attention(Q, K[:, :1], V[:, :1], *tile, causal=True, score_mod=score_mod)

    assert torch.autograd.gradcheck(attend, (*QKV, *learned))


@pytest.mark.parametrize("shape", [
    (5, 6), (6,), (5, 1), (2, 1, 5, 6), (2, 1, 6), (1, 2, 5, 1), (2, 2, 5, 6), (2, 1, 1, 6)])
def test_a_mask_has_a_gradient_of_its_own_broadcast_shape(shape):
    Q, K, V = inputs(5, 6, d=3, lead=(2, 2))
    mask = leaf(*shape)
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.2
    call = partial(flash_attention, Q, K[:, :1], V[:, :1], 2, 4, causal=True)
    assert torch.autograd.gradcheck(
        lambda mask: call(attn_mask=mask.masked_fill(hidden, -math.inf)), mask)


def test_l_and_o_have_their_gradients():
    QKV = [x.requires_grad_() for x in inputs(5, 4, d=3)]
    attend = partial(flash_attention, Br=2, Bc=3, return_lse=True, window=(3, 1))
    assert torch.autograd.gradcheck(attend, QKV)
    assert torch.autograd.gradcheck(lambda *QKV: attend(*QKV)[1], QKV)


# Against autograd through standard attention


def trained(attend, tensors, learned=(), seed=1):
    """Return O(, L) of attend(*tensors) and the gradients of a random weighting of all of it."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = attend(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(seed)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).masked_fill(
        x == -math.inf, 0).sum() for x in results)
    for x in learned:
        x.grad = None
    if loss.requires_grad:
        loss.backward(retain_graph=True)
    return [*results, *(torch.zeros_like(x) if x.grad is None else x.grad
                        for x in (*leaves, *learned))]


def agree(tensors, *tile, learned=(), atol=1e-11, **options):
    flash, standard = (trained(partial(attend, **options), tensors, learned) for attend in (
        partial(flash_attention, Br=tile[0], Bc=tile[1]), standard_attention))
    for a, b in zip(flash, standard):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_any_problem_is_trained_as_by_autograd(problem):
    tensors, tile, options = problem
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].requires_grad_()
    learned = [x for x in (options.get("attn_mask"),) if x is not None and x.requires_grad]
    agree(tensors, *tile, learned=learned, return_lse=True, dropout_p=0.3, seed=5, **options)


@pytest.mark.parametrize("share", [64, 2**20])
def test_heads_taken_a_few_at_a_time_learn_and_drop_the_same(monkeypatch, share):
    monkeypatch.setattr(tiles, "SCORES_BYTES", share)
    monkeypatch.setattr(tiles, "LEAST", (2, 2))
    mask, slopes = leaf(4, 1, 6), leaf(4)
    agree(inputs(5, 6, lead=(3, 4)), "auto", "auto", learned=[mask, slopes], attn_mask=mask,
          score_mod=alibi(slopes), dropout_p=0.5, seed=3, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["slopes", "mask", "L", "dropout"])
def test_half_types_err_at_most_three_times_as_much_as_standard(dtype, kind):
    tensors = inputs(192, lead=(1, 2), d=32, dtype=dtype)
    x = leaf(2, 1, 192).detach().to(dtype) if kind == "mask" else leaf(2).detach().to(dtype)

    def run(attend, wide=lambda x: x):
        learned = [wide(x).requires_grad_()] if kind in ("slopes", "mask") else []
        options = {"slopes": lambda: {"score_mod": alibi(*learned)},
                   "mask": lambda: {"attn_mask": learned[0]}, "L": lambda: {"return_lse": True},
                   "dropout": lambda: {"dropout_p": 0.2}}[kind]()
        return trained(partial(attend, **options), map(wide, tensors), learned)

    exact = run(standard_attention, torch.Tensor.double)
    for flash, standard, oracle in zip(run(flash_attention), run(standard_attention), exact):
        error, allowed = ((x.double() - oracle).abs().max() for x in (flash, standard))
        assert error <= 3 * allowed + torch.finfo(torch.float32).eps * oracle.abs().max()


# What a score_mod learns


class Bias(torch.nn.Module):
    def __init__(self, build):
        super().__init__()
        self.rows = torch.nn.ParameterList([torch.nn.Parameter(leaf(3).detach())])
        self.linear, self.build = torch.nn.Linear(3, 1).double(), build

    def forward(self, score, b, h, i, j):
        return score + self.build(self) * (i - j)


@sees_index
def test_what_is_learned_is_found_wherever_it_is_read():
    """In a module, a list, a product made before, a default, a whole result."""
    module = Bias(lambda self: self.linear(self.rows[0])[0])
    agree(inputs(), 4, 4, learned=list(module.parameters()), score_mod=module)
    x, mask = leaf(3), leaf(7)
    made = (x * 2).exp()  # no leaf
    for learned, score_mod in (
        ([x], lambda s, b, h, i, j, y=made: s * y[0] + x[1] * y[2]),
        ([x], lambda s, b, h, i, j: made.sum()),
        ([], lambda s, b, h, i, j: torch.zeros(()).double()),
        ([mask], lambda s, b, h, i, j: s * mask[j]),
    ):
        agree(inputs(), 4, 4, learned=learned, score_mod=score_mod, attn_mask=mask)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, d):
        return 2 * d


def test_what_can_not_be_followed_is_refused_and_never_zero():
    x, tensors = leaf(3), inputs()
    with pytest.raises(ValueError, match="must learn by torch's own operators"):
        flash_attention(*tensors, score_mod=lambda s, b, h, i, j: s + Twice.apply(x)[0])
    y = leaf(3)
    O = flash_attention(*tensors, 4, 4, score_mod=lambda s, b, h, i, j: (
        s * (y if i.max() > 4 else x).sum()))
    with pytest.raises(ValueError, match="must learn the same tensors in every tile"):
        O.sum().backward()


@pytest.mark.parametrize("score_mod", [lambda s, *_: s.add_(1), lambda s, *_: s.tanh_()])
def test_a_score_mod_that_writes_in_place_is_refused(score_mod):
    Q, K, V = inputs()
    saved = flash_attention_forward(Q, K, V, return_m_l=True, score_mod=score_mod)
    with pytest.raises(ValueError, match="score_mod must return new scores, .* writes in place"):
        flash_attention(Q.requires_grad_(), K, V, score_mod=score_mod)
    with pytest.raises(ValueError, match="score_mod must return new scores, .* writes in place"):
        flash_attention_backward(torch.ones_like(Q), Q, K, V, *saved, score_mod=score_mod)


def test_a_score_mod_may_look_at_the_tile_s_shape():
    x = leaf(3)

    def centered(score, b, h, i, j):
        return score * x.sum() - score.shape[-3] * torch.ones(score.shape[-2:]).mean()

    agree(inputs(5, 5, lead=(2, 2)), 5, 5, learned=[x], score_mod=centered)


@pytest.mark.parametrize("Nq, Nk", [(0, 4), (4, 0), (0, 0)])
def test_without_scores_what_is_learned_has_the_gradient_0(Nq, Nk):
    x = leaf(2)
    O = flash_attention(*inputs(Nq, Nk, lead=(1, 2)), score_mod=lambda s, b, h, i, j: s * x.take(h))
    assert torch.equal(torch.autograd.grad(O.sum(), x)[0], torch.zeros_like(x))


def test_the_backward_takes_what_it_differentiates_and_refuses_the_rest():
    Q, K, V = inputs()
    x, dO = leaf(7), torch.ones_like(Q)
    options = {"score_mod": lambda s, b, h, i, j: s * x.take(i), "attn_mask": leaf(7, 7).detach()}
    with torch.no_grad():
        saved = flash_attention_forward(Q, K, V, return_m_l=True, **options)
    found = flash_attention_backward(
        dO, Q, K, V, *saved, mask_gradient=True, learned=[x], **options)
    assert [d.shape for d in found] == [Q.shape, K.shape, V.shape, (7, 7), (7,)]
    with pytest.raises(ValueError, match="is not among `learned`"):
        flash_attention_backward(dO, Q, K, V, *saved, **options)
    with pytest.raises(TypeError, match="return_lse"):
        flash_attention_backward(dO, Q, K, V, *saved, return_lse=True)
    O, m, l = saved
    for wrong in (dict(O=O[..., :1]), dict(m=m[..., :3]), dict(l=l[0]), dict(dO=dO[..., :4, :])):
        [name] = wrong
        with pytest.raises(ValueError, match=f"^{name} must be "):
            flash_attention_backward(**{"dO": dO, "Q": Q, "K": K, "V": V, "O": O, "m": m, "l": l,
                                        **wrong})
    for mask in (None, torch.ones(7, 7, dtype=torch.bool)):
        with pytest.raises(TypeError, match="mask_gradient takes an attn_mask of floats"):
            flash_attention_backward(dO, Q, K, V, *saved, mask_gradient=True, attn_mask=mask)


@pytest.mark.parametrize("wrong, error, said", [
    (3, TypeError, "score_mod must be a function or None, got int"),
    (lambda s, *_: None, TypeError, "score_mod must return a tensor, got NoneType"),
    (lambda s, *_: 1.0, TypeError, "score_mod must return a tensor, got float"),
    (lambda s, *_: s[..., :1, :1].expand(9, 9, *s.shape), ValueError, "scores that broadcast")])
@pytest.mark.parametrize("attend", [flash_attention, flash_attention_forward, standard_attention])
def test_what_is_no_score_mod_is_told(attend, wrong, error, said):
    with pytest.raises(error, match=said):
        attend(*inputs(), score_mod=wrong)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_what_is_no_tensor_is_told_as_by_the_forward(place):
    tensors = [*inputs(), torch.zeros(7, 7)]
    tensors[place] = [[1.0]]
    with pytest.raises(TypeError, match=" must be a .* tensor, got list"):
        flash_attention(*tensors[:3], attn_mask=tensors[3])


def test_what_is_learned_and_changed_before_the_backward_is_noticed():
    x = leaf(3)
    O = flash_attention(*inputs(), score_mod=lambda s, b, h, i, j: s * x.sum())
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        O.sum().backward()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("attend", [standard_attention, partial(flash_attention, Br=4, Bc=3)])
def test_a_nan_where_no_query_looks_reaches_no_gradient(attend, bad):
    Q, K, V = inputs(7, 9, lead=(1, 2))
    hidden, x = torch.tensor([2, 8]), leaf(2)
    options = {"attn_mask": ~torch.isin(torch.arange(9), hidden), "return_lse": True,
               "score_mod": lambda s, b, h, i, j: torch.tanh(s * x.take(h))}
    expected = trained(partial(attend, **options), (Q, K, V), [x])
    unused = [x.index_fill(-2, hidden, bad) for x in (K, V)]
    for a, b in zip(trained(partial(attend, **options), (Q, *unused), [x]), expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


# Autocast


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (
    torch.float32, torch.bfloat16, torch.float16), (torch.bfloat16,) * 3])
def test_autocast_takes_mixed_dtypes_as_the_fused_operator_does(dtypes):
    QKV = [x.to(dtype) for x, dtype in zip(inputs(40, lead=(1, 2)), dtypes)]
    mask = leaf(40, 40).detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        O, *gradients = trained(partial(flash_attention, attn_mask=mask), QKV)
        if not BLIND:  # torch 2.1 left the fused operator of a CPU out
            assert F.scaled_dot_product_attention(*QKV, attn_mask=mask).dtype == torch.bfloat16
    assert O.dtype == torch.bfloat16
    assert [x.dtype for x in gradients] == list(dtypes)
    wide = trained(partial(standard_attention, attn_mask=mask), [x.bfloat16() for x in QKV])
    for a, b in zip((O, *gradients), wide):
        torch.testing.assert_close(a.bfloat16(), b, rtol=0.02, atol=0.02)
    if len(set(dtypes)) > 1:
        with pytest.raises(TypeError, match="K must have Q's dtype torch.float32, got .*bfloat16"):
            flash_attention(*QKV)


def test_a_backward_ignores_autocast_and_float64_is_left_alone():
    QKV = inputs(40, lead=(1, 2), dtype=torch.float32)
    weight = leaf(8, 8).detach().float()

    def score_mod(score, b, h, i, j):  # a product, which autocast would take in half precision
        return score * (weight @ weight)[i % 8, j % 8]

    half = [x.bfloat16().requires_grad_() for x in QKV]
    for attend in (flash_attention, standard_attention):
        O = attend(*half, score_mod=score_mod)
        expected = torch.autograd.grad(O, half, torch.ones_like(O), retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(O, attend(*half, score_mod=score_mod))
            found = torch.autograd.grad(O, half, torch.ones_like(O))
        assert attend is standard_attention or all(map(torch.equal, found, expected))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(*inputs()).dtype == torch.float64
        assert torch.equal(standard_attention(*QKV), standard_attention(*QKV).float())


# One function for inference and training, and what it keeps


def measured(call):
    return measure_peak(call, CPU).total, count_launches(call)


@pytest.mark.parametrize("options", [
    {}, {"return_lse": True}, {"dropout_p": 0.1}, {"attn_mask": torch.zeros(256)}])
def test_without_a_gradient_it_costs_what_the_forward_costs(options):
    QKV = inputs(256, lead=(1, 2), d=16, dtype=torch.float32)
    calls = [partial(f, *QKV, **options) for f in (flash_attention, flash_attention_forward)]
    assert measured(calls[0]) == measured(calls[1])
    QKV[0].requires_grad_()
    with torch.no_grad():
        assert measured(calls[0]) == measured(calls[1])


LEARNED = {
    "causal": lambda: {"causal": True},
    "mask": lambda: {"attn_mask": leaf(512).detach().float().requires_grad_()},
    "L": lambda: {"return_lse": True},
    "dropout": lambda: {"dropout_p": 0.1},
    "slopes": lambda: {"score_mod": alibi(leaf(2).detach().float().requires_grad_())},
}


@pytest.mark.parametrize("name", LEARNED)
def test_from_forward_to_backward_o_m_and_l_are_kept_and_nothing_else(name):
    QKV = [x.requires_grad_() for x in inputs(512, lead=(1, 2), d=16, dtype=torch.float32)]
    options = LEARNED[name]()
    attend = partial(flash_attention, **options)
    own = [*QKV, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    if name == "slopes":
        own.append(options["score_mod"].__closure__[0].cell_contents)
    kept = saved(attend, QKV, own)
    assert kept == 2 * 512 * (16 + 2) * 4  # O, m and l
    assert saved(partial(standard_attention, **options), QKV, own) > 2 * 512 * 512 * 4


class Held:
    """What autograd gets in place of a tensor that it saves."""

    def __init__(self, x):
        self.x = x


def saved(attend, QKV, own):
    """Return the bytes of the storages that stand because of a backward to come, beside `own`."""
    held = weakref.WeakSet()  # a Held leaves it together with the graph that saved it

    def pack(x):
        held.add(holder := Held(x.detach()))  # its graph would hold itself
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.x):
        results = attend(*QKV)
    own = {x.untyped_storage().data_ptr() for x in own}
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in (holder.x for holder in held)}
    del results
    return sum(size for place, size in kept.items() if place not in own)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_learns_the_same_and_drops_the_same_again(reentrant):
    x, slopes, table = inputs(20, lead=(1, 2))[0], leaf(2), leaf(2, 20, 20)

    def layer(x, slopes, table):
        scaled = slopes * 2  # made inside of what is computed again
        return flash_attention(x, x, x, 8, 8, attn_mask=table, dropout_p=0.3, seed=4,
                               score_mod=lambda s, b, h, i, j: s * scaled.take(h).exp())

    expected = trained(layer, (x, slopes, table))
    again = trained(partial(checkpoint, layer, use_reentrant=reentrant), (x, slopes, table))
    assert all(map(torch.equal, expected, again))


# torch.compile, torch.export, torch.func


class Masked(torch.nn.Module):
    def forward(self, Q, K, V, mask):
        return flash_attention(Q, K, V, 8, 8, causal=True, attn_mask=mask, return_lse=True)


@pytest.mark.skipif(BLIND, reason="torch.export of torch 2.1 takes no module")
def test_a_forward_with_a_mask_is_one_graph():
    QKV, mask = inputs(20, lead=(1, 2)), leaf(20, 20) > 0
    expected = Masked()(*QKV, mask)
    compiled = torch.compile(Masked(), fullgraph=True, backend="eager")
    exported = torch.export.export(Masked(), (*QKV, mask), strict=False).module()
    for module in (compiled, exported):
        for a, b in zip(module(*QKV, mask), expected):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_what_is_learned_is_found_under_torch_compile_too():
    def softcapped(attend):
        tensors, cap = [x.float().requires_grad_() for x in inputs()], leaf(1)
        def call(*QKV):
            return attend(*QKV, score_mod=lambda s, *_: cap.exp() * torch.tanh(s))
        return torch.autograd.grad(call(*tensors).sum() if attend is standard_attention else
                                   torch.compile(call, backend="eager")(*tensors).sum(),
                                   [*tensors, cap])

    for a, b in zip(softcapped(flash_attention), softcapped(standard_attention)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_backward_runs_in_inference_mode():
    QKV, options = inputs(), {"score_mod": lambda s, *_: torch.tanh(s)}
    saved = flash_attention_forward(*QKV, return_m_l=True, **options)
    expected = flash_attention_backward(torch.ones_like(QKV[0]), *QKV, *saved, **options)
    with torch.inference_mode():
        Q, K, V = (x.clone() for x in QKV)
        found = flash_attention_backward(torch.ones_like(Q), Q, K, V, *saved, **options)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def test_transforms_of_what_score_mod_reads_are_refused():
    QKV, slopes = [x.requires_grad_() for x in inputs()], torch.ones(2, 1)

    def attend(slope):
        return flash_attention(*QKV, score_mod=lambda s, *_: s * slope).sum()

    for transformed in (torch.func.vmap(attend), lambda x: torch.func.grad(attend)(x[0, 0])):
        with pytest.raises(TypeError, match="what score_mod reads must be plain tensors"):
            transformed(slopes)


@pytest.mark.parametrize("attend", [flash_attention, flash_attention_forward])
def test_transforms_of_torch_func_are_refused_in_one_line(attend):
    Q, K, V = inputs()
    for transformed in (lambda: torch.func.vmap(lambda Q: attend(Q, K[0], V[0]))(Q),
                        lambda: torch.func.grad(lambda V: attend(Q, K, V).sum())(V),
                        lambda: torch.func.jvp(lambda K: attend(Q, K, V), (K,), (K,))):
        with pytest.raises(TypeError, match="must be plain tensors, got one inside vmap") as raised:
            transformed()
        assert "\n" not in str(raised.value)


# The tools


@pytest.mark.parametrize("case", [
    Case(100), Case(64, heads=4, kv_heads=2, causal=True), Case(40, Nk=70, dv=24, heads=2, batch=2),
    Case(64, dtype=torch.float64), Case(96, heads=2, dtype=torch.bfloat16)])
def test_extras_pass_and_hold_no_more_than_their_formulas(case, monkeypatch):
    monkeypatch.setattr(flash_backward, "benchmark", lambda *args, **options: [])
    rows = flash_backward.try_extras([case], 16, 16)
    verified, profiled = ([row for row in rows if isinstance(row, kind)]
                          for kind in (bench.VerifyRow, bench.MemoryRow))
    assert all(row.passed for row in verified), [row for row in verified if not row.passed]
    assert [row.gradient for row in verified][6] == "dslopes" and len(profiled) == 10
    exact = case.kv_heads is None and case.dtype.itemsize > 2
    for row in profiled[1::2]:  # of flash
        beyond = row.peak_bytes - row.theory_bytes
        assert beyond <= 64, row
        assert beyond >= -64 or not (exact and row.shape.endswith((", L", ", dropout"))), row


def test_a_wrong_gradient_of_each_extra_fails(monkeypatch):
    right, raw = flash_backward.row_blocks, flash_backward.raw_gradient
    monkeypatch.setattr(flash_backward, "row_blocks", lambda *args: right(*args[:7]))  # no dL
    monkeypatch.setattr(flash_backward, "raw_gradient", lambda *args: raw(*args).mul_(1.001))
    monkeypatch.setattr(flash_backward, "benchmark", lambda *args, **options: [])
    verdicts = {}
    for row in flash_backward.try_extras([Case(100)], 16, 16):
        if isinstance(row, bench.VerifyRow):
            verdicts.setdefault(row.shape, []).append(row.passed)
    assert not any(all(passed) for passed in verdicts.values()) and len(verdicts) == 5


@pytest.mark.skipif(flex_attention is None, reason="torch before 2.6")
def test_flex_is_the_same_attention():
    for case in (Case(64, heads=4, kv_heads=2, causal=True), Case(40, Nk=70, window=(9, 3))):
        inputs = case.inputs("cpu", 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow uncompiled
            found = flex(*inputs, **case.masks)
        torch.testing.assert_close(found, standard_attention(*inputs, **case.masks))


def test_a_table_that_changes_before_the_backward_is_told():
    Q, K, V = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    table = torch.rand(9)
    O = flash_attention(Q, K, V, 4, 4, score_mod=lambda s, b, h, i, j: s * table.take(j))
    table.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        O.sum().backward()
