"""The simulated operators give and refuse what a card's do, npu_fusion_attention above all."""

import pytest

from simulated_npu.on_cards import Checks, turned

checks = Checks(__file__)


@checks
def a_cast_to_float64_gives_float32_and_says_so_once():
    third = torch.tensor([1 / 3], dtype=torch.float64)
    x = third.float().to("npu:1")
    said = io.StringIO()
    arithmetic.warn_once.cache_clear()
    with contextlib.redirect_stderr(said):
        casts = [x.double(), x.to(torch.float64), x.type(torch.float64), x.half().double()]
    assert {cast.dtype for cast in casts} == {torch.float32}
    (line,) = said.getvalue().splitlines()
    assert "Device do not support double dtype now, dtype cast replace with float." in line
    assert x.double().cpu().dtype == torch.float32
    assert x.cpu().double().dtype == x.to("cpu", torch.float64).dtype == torch.float64
    assert (x.cpu().double() * 3 - 1).item() != 0 == (x.double().cpu() * 3 - 1).item()


@checks
def what_is_made_as_float64_keeps_its_dtype_and_enters_no_matrix_product():
    x = torch.ones(2, 2, dtype=torch.float64, device="npu:0")
    moved = torch.ones(2, 2, dtype=torch.float64).to("npu:0")
    w = torch.ones(2, 2, device="npu:0", requires_grad=True)
    assert x.dtype == moved.dtype == (x.exp() + moved).dtype == torch.float64
    assert x.to(torch.float64, copy=True).dtype == torch.float64
    for call in (lambda: x @ x, lambda: x[None] @ moved[None], lambda: torch.addmm(x, x, x)):
        with pytest.raises(RuntimeError, match="not implemented for .*float64"):
            call()
    (w @ w).sum().backward()
    assert w.grad.tolist() == [[4, 4], [4, 4]]


@checks
def float32_is_multiplied_whole_unless_hf32_is_allowed():
    close_to_1 = 1 + 2**-13
    a = torch.full((1, 2, 2), close_to_1, device="npu:0")
    eye = torch.eye(2).to("npu:0")
    products = [lambda: a @ eye, lambda: a[0] @ eye, lambda: torch.addmm(0 * eye, a[0], eye)]
    assert torch.npu.matmul.allow_hf32 is False
    for product in products:
        assert product().max().item() == close_to_1
    torch.npu.matmul.allow_hf32 = True
    try:
        assert [product().max().item() for product in products] == [1, 1, 1]
        assert (a * 1).max().item() == close_to_1
        assert torch.addmm(a[0], eye, 0 * eye).max().item() == close_to_1
        assert (a.bfloat16() @ eye.bfloat16()).dtype == torch.bfloat16
    finally:
        torch.npu.matmul.allow_hf32 = False


@checks
def in_saturation_mode_an_operator_gives_no_inf_and_no_nan():
    most = torch.finfo(torch.float32).max
    on_host = torch.tensor([float("inf"), float("-inf"), float("nan"), 2.0])
    x = on_host.to("npu:1")
    assert (x * 1).isfinite().tolist() == [False, False, False, True]
    with turned(INF_NAN_MODE_FORCE_DISABLE="1"):
        assert x.cpu()[:2].tolist() == on_host[:2].tolist()  # a copy is not an operator
        assert (x * 1).tolist() == [most, -most, 0, 2]
        assert torch.full((1,), float("-inf"), device="npu:1").tolist() == [-most]
        assert torch.ones(1, device="npu:1").div_(0).tolist() == [most]
        assert torch.full((1,), 12.0, device="npu:1").half().exp().tolist() == [65504]
        blind = torch.zeros(1, 2, device="npu:1").masked_fill_(x[:2] != 5, float("-inf"))
        assert torch.softmax(blind, -1).tolist() == [[0.5, 0.5]]
    assert torch.softmax(torch.full((1, 2), -torch.inf, device="npu:1"), -1).isnan().all()


@checks
def results_and_gradients_are_the_cpus_on_both_cards():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    def gradient(device):
        torch.manual_seed(0)
        x = torch.randn(4, 3).to(device).requires_grad_()
        weights = torch.arange(4, device=device) + torch.full((4,), 0.5, device=device)
        (torch.softmax(Square.apply(x) @ x.T, -1) * weights).sum().backward()
        return x.grad

    expected = gradient("cpu")
    for device in ("npu:0", "npu:1"):
        found = gradient(device)
        assert found.device == torch.device(device)
        torch.testing.assert_close(found.cpu(), expected)


def _attention_inputs(device, shape=(2, 4, 5, 8), kv_heads=4):
    torch.manual_seed(0)
    kv = (shape[0], kv_heads, *shape[2:])
    return [torch.randn(s).to(device) for s in (shape, kv, kv)]


def _fused(*args, **options):
    return torch_npu.npu_fusion_attention(*args, **options)[0].cpu()


def _compressed(device):
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


@checks
def fused_attention_scales_by_1_unless_told():
    inputs = _attention_inputs("cpu")
    cards = _attention_inputs("npu:1")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(_fused(*cards, 4, "BNSD"), sdpa(*inputs, scale=1.0))
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", scale=0.3), sdpa(*inputs, scale=0.3))


@checks
def fused_attention_hides_what_is_true_and_ignores_a_mode_without_a_mask():
    inputs, cards = _attention_inputs("cpu"), _attention_inputs("npu:0")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    causal = sdpa(*inputs, is_causal=True, scale=1.0)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = hidden.to("npu:0")
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", atten_mask=mask), causal)
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", atten_mask=mask, sparse_mode=1), causal)
    every = sdpa(*inputs, scale=1.0)
    torch.testing.assert_close(_fused(*cards, 4, "BNSD", sparse_mode=3, next_tockens=0), every)
    with pytest.raises(RuntimeError, match="on the same device"):
        _fused(*cards, 4, "BNSD", atten_mask=hidden)
    with pytest.raises(RuntimeError, match="sparse_mode 3 takes a mask of"):
        _fused(*cards, 4, "BNSD", atten_mask=mask, sparse_mode=3)
    with pytest.raises(RuntimeError, match="upper triangle"):
        _fused(*cards, 4, "BNSD", atten_mask=_compressed("npu:0").T, sparse_mode=2)


@checks
def fused_attention_aligns_mode_2_to_the_first_key_and_mode_3_to_the_last():
    q, k, v = _attention_inputs("npu:1", (1, 2, 3, 8), kv_heads=2)
    k, v = (torch.cat([x, x + 1], dim=2) for x in (k, v))  # 3 queries, 6 keys
    for mode, last in ((2, 0), (3, 3)):
        found = _fused(q, k, v, 2, "BNSD", atten_mask=_compressed("npu:1"), sparse_mode=mode)
        hidden = torch.ones(3, 6, dtype=torch.bool).triu(last + 1).to("npu:1")
        torch.testing.assert_close(found, _fused(q, k, v, 2, "BNSD", atten_mask=hidden))


@checks
def fused_attention_gives_0_for_a_row_without_keys_only_if_told():
    cards = _attention_inputs("npu:0")
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    options = {"atten_mask": mask.to("npu:0"), "sparse_mode": 1}
    assert _fused(*cards, 4, "BNSD", **options)[:, :, 2].isnan().all()
    told = _fused(*cards, 4, "BNSD", inner_precise=2, **options)
    assert (told[:, :, 2] == 0).all() and told.isfinite().all()


@checks
def fused_attention_takes_every_layout_and_grouped_heads():
    q, k, v = _attention_inputs("npu:1", kv_heads=2)
    expected = _fused(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), 4, "BNSD")
    torch.testing.assert_close(_fused(q, k, v, 4, "BNSD"), expected)
    back = {
        "BSND": lambda x: x.transpose(1, 2),
        "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
    }
    for layout, turn in back.items():
        found = _fused(turn(q), turn(k), turn(v), 4, layout)
        torch.testing.assert_close(found, turn(expected))


@checks
def fused_attention_returns_the_statistics_of_its_softmax_and_a_gradient():
    q, k, v = (x.requires_grad_() for x in _attention_inputs("npu:1"))
    out, largest, total, _, *numbers = torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD")
    assert largest.shape == total.shape == (2, 4, 5, 8) and largest.dtype == torch.float32
    assert numbers == [0, 0, 0]
    L = torch.logsumexp(q @ k.transpose(-2, -1), -1)
    torch.testing.assert_close((largest + total.log())[..., 0], L)
    out.sum().backward()
    found, q.grad = q.grad, None
    (torch.softmax(q @ k.transpose(-2, -1), -1) @ v).sum().backward()
    assert found.device == torch.device("npu:1")
    torch.testing.assert_close(found, q.grad)


@checks
def fused_attention_refuses_float64_and_a_wrong_number_of_heads():
    cards = _attention_inputs("npu:0")
    many = torch.ones(1, 257, 2, 8, device="npu:0")
    with pytest.raises(RuntimeError, match="at most 256 heads"):
        _fused(many, many, many, 257, "BNSD")
    with pytest.raises(RuntimeError, match="float64"):
        _fused(*(x.cpu().double().to("npu:0") for x in cards), 4, "BNSD")
    with pytest.raises(RuntimeError, match="do not fit"):
        _fused(*cards, 2, "BNSD")
    with pytest.raises(NotImplementedError):
        _fused(*_attention_inputs("cpu"), 4, "BNSD")


@checks
def fused_attention_of_old_gives_the_shape_of_q_where_v_is_narrower():
    q, k, v = _attention_inputs("npu:0")
    narrow = v[..., :6].contiguous()
    expected = _fused(q, k, narrow, 4, "BNSD")
    assert expected.shape == (2, 4, 5, 6)
    with turned(SIMULATED_NPU_OLD_FUSION="1"):
        assert _fused(q, k, v, 4, "BNSD").shape == (2, 4, 5, 8)
        found = _fused(q, k, narrow, 4, "BNSD")
    assert found.shape == (2, 4, 5, 8) and not found[..., :6].equal(expected)


@checks
def fused_attention_of_cann_7_takes_no_float32():
    cards = _attention_inputs("npu:0")
    with turned(SIMULATED_NPU_OLD_CANN="1"):
        with pytest.raises(RuntimeError, match="float32"):
            _fused(*cards, 4, "BNSD")
        assert _fused(*(x.half() for x in cards), 4, "BNSD").dtype == torch.float16


@pytest.mark.parametrize("name", checks)
def test_on_two_cards(name):
    checks.assert_held(name)


if __name__ == "__main__":
    import contextlib
    import io

    import torch_npu  # before torch: see there

    import torch
    from torch_npu import arithmetic

    checks.run()
