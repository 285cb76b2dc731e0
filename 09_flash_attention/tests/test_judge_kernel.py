"""judge_kernel.py: a right kernel passes, a planted fault is found, named and shown small; a kernel
that raises, dies or refuses is a row; what is no kernel is one line.
"""

import json
import math
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import judge_kernel
import pytest
import torch
from lab import judge, kernel_worker
from lab.cases import Case
from lab.kernel_worker import judge_problem, load, repeats, shrink
from lab.matrix import Call, Problem, problems

CPU = torch.device("cpu")
LESSON = Path(judge_kernel.__file__)
GOOD = ("math", "fused", "flash", "standard")


def judged(kernel, dtype=torch.float32, seed=0, groups=None):
    """Return (problem, row) of the quick matrix without its largest, or of these groups of it."""
    return [(problem, judge_problem(kernel, problem, CPU, seed))
            for problem in problems(dtype, quick=True)
            if (groups is None or problem.group in groups) and max(problem.case.shapes[0][2],
                                                                  problem.case.shapes[1][2]) < 1024
            and math.prod(problem.case.shapes[0][:3]) * problem.case.shapes[1][2] < 2**17]


# A kernel in tiles of 64 keys with a place for each fault


def wrong(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, *, fault=""):
    d, dtype, H = q.shape[-1], q.dtype, q.shape[1]
    q, k, v = of_memory(fault, q, k, v)
    half = torch.float16 if fault == "tf32" else dtype if fault == "half sums" else torch.float32
    G = H // k.shape[1]
    order = torch.arange(H) % k.shape[1] if fault == "tiled heads" else torch.arange(H) // G
    k, v = k[:, order].to(half).float(), v[:, order].to(half).float()
    used = 64 if fault == "64 dimensions" else d
    S = q.to(half).float()[..., :used] @ k[..., :used].mT * scale_of(fault, d, scale)
    if fault == "one head" and H > 1:
        S = S[:, :1].expand(S.shape)
    S = S + bias_of(fault, attn_mask, is_causal, S, scale_of(fault, d, scale))
    if fault == "base 2":
        S = S * 0.6931471805599453
    blind = (S == -torch.inf).all(-1, keepdim=True)
    if fault == "average of blind rows":
        S, blind = S.masked_fill(blind, 0), blind & False
    if fault == "uniform average" and attn_mask is None and not is_causal:
        S = S * 0
    O = in_tiles(fault, S, v, dtype)
    return (O if fault == "NaN in blind rows" else O.masked_fill(blind, 0)).to(dtype)


def of_memory(fault, q, k, v):
    if fault == "strides" and k.stride(-1) == 1:
        if k.stride(-2) != k.shape[-1] and k.untyped_storage().nbytes() >= k.numel() * 4:
            k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (k, v))
    if fault == "reads on" and k.stride(1) > k.shape[2] * k.stride(2):
        more = (*k.shape[:2], k.shape[2] + 1, k.shape[3])
        seen = v.as_strided(more, v.stride())[:, :, -1:] * 0  # a weight of 0 on the key behind
        v = v + seen
    if fault == "batch 0":
        k, v = k[:1].expand(k.shape), v[:1].expand(v.shape)
    return q, k, v


def scale_of(fault, d, scale):
    right = d**-0.5 if scale is None else scale
    return {"scale missing": 1.0, "scale twice": right**2, "scale ignored": d**-0.5}.get(
        fault, right)


def bias_of(fault, mask, is_causal, S, scale):
    Nq, Nk = S.shape[-2:]
    i, j = torch.arange(Nq)[:, None], torch.arange(Nk)
    bias = torch.zeros(Nq, Nk)
    if is_causal:
        shift = {"lower-right": Nk - Nq, "causal + 1": 1, "causal - 1": -1}.get(fault, 0)
        if fault == "causal by tiles":
            i, j = i // 64, j // 64
        bias = bias.masked_fill(j > i + shift, 0 if fault == "no causal" else -torch.inf)
    if mask is None or fault == "mask ignored":
        return bias
    if mask.dtype != torch.bool:
        return bias + (mask.float() * scale if fault == "scaled mask" else mask.float())
    mask = mask.expand(S.shape)
    if fault == "0 and 1":
        return bias + mask.float()
    if fault == "inverted":
        mask = ~mask
    if fault == "beyond 512":
        mask = mask | (j >= 512)
    if fault == "mask of batch 0":
        mask = mask[:1]
    if fault in ("upper-left", "window - 1") and mask[0, 0].sum() < Nq * Nk:
        offset = j - i - (Nk - Nq)
        seen = offset[mask[0, 0]]
        a, b = seen.min(), seen.max()
        if mask.equal(((offset >= a) & (offset <= b)).expand(mask.shape)):
            offset = offset + (Nk - Nq if fault == "upper-left" else 0)
            mask = (offset >= a + (fault == "window - 1")) & (offset <= b)
    return bias.masked_fill(~mask, -torch.inf)


def in_tiles(fault, S, v, dtype):
    Nk, m = S.shape[-1], torch.full((*S.shape[:-1], 1), -1e30)
    l = O = torch.zeros(())
    Bc = 4 if fault == "half sums" else 64
    for t in range(0, Nk // Bc * Bc if fault == "tail" and Nk > Bc else Nk, Bc):
        tile = S[..., t : t + Bc]
        m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
        m_new = m_new * 0 if fault == "no maximum" else m_new
        correction = torch.exp(m - m_new)
        if fault == "maximum lost" and t:
            correction = torch.ones_like(correction)
        P = torch.exp(tile - m_new)
        l = l * correction + P.sum(-1, keepdim=True)
        O = O * correction + P @ v[..., t : t + Bc, :]
        if fault == "half sums":
            O, l = O.to(dtype).float(), l.to(dtype).float()
        m = m_new
    unguarded = fault in ("NaN in blind rows", "no maximum")
    return O / (l if unguarded else torch.where(l == 0, 1, l))


PLANTED = {  # fault: (group that has it, the name it gets, how its smallest input begins)
    "mask ignored": ("masks", "mask ignored", "1x1x1x1"),
    "beyond 512": ("masks", "mask ignored beyond a key", "1x1x1x1 1x1x51"),
    "inverted": ("masks", "mask inverted", "1x1x1x1"),
    "0 and 1": ("masks", "bool mask added as 0 and 1", "1x1x1x1"),
    "scaled mask": ("masks", "mask multiplied by the scale", "1x1x1x2"),
    "mask of batch 0": ("masks", "mask of batch 0 for all", "2x1x1x1"),
    "upper-left": ("windows", "upper-left in place of lower-right", "1x1x1x1"),
    "window - 1": ("windows", "window off by one", "1x1x"),
    "lower-right": ("causal", "lower-right in place of upper-left", "1x1x"),
    "no causal": ("causal", "is_causal ignored", "1x1x1x1 1x1x2x1"),
    "causal + 1": ("causal", "causal off by one", "1x1x"),
    "causal - 1": ("causal", "causal off by one", "1x1x1x1"),
    "scale missing": ("head sizes", "scale missing", "1x1x2x2"),
    "scale twice": ("head sizes", "scale applied twice", "1x1x2x2"),
    "scale ignored": ("scale", "scale argument ignored", "1x1x2x2"),
    "tiled heads": ("groups", "heads mapped by tiling", "1x4x1x1 1x2x1x1"),
    "64 dimensions": ("head sizes", "dimensions of q and k dropped", "1x1x2x65"),
    "batch 0": ("lengths", "k and v of batch 0 for all", "2x1x1x1"),
    "strides": ("layouts", "strides of k and v ignored", "1x2x2x1"),
    "reads on": ("layouts", "memory beside the tensors is read", "1x1x1x1"),
    "tail": ("lengths", "tail dropped", "1x1x65x1"),
    "uniform average": ("lengths", "uniform average", "1x1x2x1"),
    "maximum lost": ("lengths", "a tile's maximum lost", "1x1x65x"),
    "base 2": ("lengths", "base 2 in place of e", "1x1x2x1"),
    "no maximum": ("scores", "scores overflow", "1x1x1x1"),
    "NaN in blind rows": ("blind rows", "NaN in rows that see no key", "1x1x1x1"),
    "average of blind rows": ("blind rows", "average of V in rows that see no key", "1x1x"),
    "tf32": ("lengths", "float32 multiplied as tf32 or half", "1x1x"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_named_and_shown_small(fault):
    group, name, size = PLANTED[fault]
    kernel = partial(wrong, fault=fault)
    failing = [(problem, row) for problem, row in judged(kernel, groups=(group,)) if row.failed]
    names = {row.what for _, row in failing if row.result == "FAIL"}
    if fault == "strides":  # where NaN stands between the rows, it is read
        names.discard("memory beside the tensors is read")
    assert names == {name}
    problem = next(problem for problem, row in failing if row.what == name)
    small = shrink(kernel, problem, CPU, 0, name)
    assert small.case.shape.startswith(size)
    assert judge_problem(kernel, small, CPU, 0).what == name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_sums_are_named(dtype):
    rows = [row for _, row in judged(partial(wrong, fault="half sums"), dtype, groups=["scores"])]
    assert {row.what for row in rows if row.failed} == {"sums in half precision"}


def test_the_same_kernel_without_a_fault_passes():
    for problem, row in judged(wrong):
        assert row.result == "pass", (problem, row)


@pytest.mark.parametrize(
    "seed, dtype", [(0, torch.float32), (1, torch.float16), (2, torch.bfloat16)])
@pytest.mark.parametrize("name", GOOD)
def test_a_right_kernel_raises_no_alarm(name, seed, dtype):
    groups = {"head sizes", "groups", "layouts", "causal", "masks", "windows", "blind rows",
              "scale", "together", "gradients"}
    for problem, row in judged(load(name), dtype, seed, groups):
        assert row.result == "pass", (problem, row)


# Gradients


class Backward(torch.autograd.Function):
    """Attention with a backward written out, one step of it wrong."""

    @staticmethod
    def forward(ctx, q, k, v, bias, fault):
        G, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        k_full, v_full = (x.repeat_interleave(G, dim=1) for x in (k, v))
        S = q @ k_full.mT * scale + bias
        O = torch.softmax(S, -1) @ v_full
        ctx.saved = q, k_full, v_full, S, O, scale, G, fault, q @ k_full.mT * scale
        return O

    @staticmethod
    def backward(ctx, dO):
        q, k, v, S, O, scale, G, fault, bare = ctx.saved
        if fault == "dO":  # taken as contiguous
            dO = dO.as_strided(dO.shape, torch.empty(dO.shape).stride()) if (
                dO.stride(2) == 0) else dO
        L = torch.logsumexp(S, -1, keepdim=True)
        L = L * 1.4426950408889634 if fault == "L" else L
        P = torch.exp((bare if fault == "mask" else S) - L)
        D = 0 if fault == "D" else (dO * O).sum(-1, keepdim=True)
        dS = P * (dO @ v.mT - D) * (1 if fault == "scale" else scale)
        dk, dv = (x.unflatten(1, (-1, G)) for x in (dS.mT @ q, P.mT @ dO))
        group = (lambda x: x[:, :, -1]) if fault == "group" else (lambda x: x.sum(2))
        return dS @ k, group(dk), group(dv), None, None


def wrong_backward(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, *,
                   fault=""):
    bias = torch.zeros(q.shape[-2], k.shape[-2])
    if is_causal:
        bias = bias.masked_fill(torch.ones_like(bias).triu(1).bool(), -torch.inf)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            raise NotImplementedError("float masks")
        bias = bias.masked_fill(~attn_mask, -torch.inf)
    return Backward.apply(q, k, v, bias, fault)


@pytest.mark.parametrize("fault, name", [
    ("", None), ("D", "backward: D missing"), ("L", "backward: L in base 2"),
    ("scale", "backward: scale missing in dQ and dK"), ("dO", "strides of dO ignored"),
    ("group", "backward: one head of a group"), ("mask", "backward: mask or is_causal ignored")])
def test_a_wrong_step_of_the_backward_is_named(fault, name):
    rows = [row for _, row in judged(partial(wrong_backward, fault=fault), groups=["gradients"])]
    assert {row.what for row in rows if row.failed} == ({name} if name else set())


def test_an_output_without_a_gradient_refuses_gradients():
    rows = [row for _, row in judged(lambda *x, **y: load("math")(*x, **y).detach(),
                                     groups=["gradients"])]
    assert {row.result for row in rows} == {"refused"}


# What is right


@pytest.mark.parametrize(
    "case", [Case(17, 2, 2, d=8), Case(9, 1, 4, 2, 8, 20), Case(5, 1, 1, Nk=3)])
def test_what_is_right_is_what_the_lessons_take_as_right(case):
    problem = Problem("", case, is_causal=case.Nk is None)
    inputs = problem.inputs(CPU, 0)
    call = Call.of(problem, *inputs)
    q, k, v, dO, _ = inputs
    same = Case(**{**vars(case), "causal": case.Nk is None})
    for (found, floor), (expected, limit) in zip(
            [call.output(), *call.gradients()],
            [*judge.exact(same, q, k, v), *judge.exact(same, q, k, v, dO)]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert floor == pytest.approx(limit)


def test_a_float_mask_and_a_scale_are_what_torch_takes_them_for():
    problem = Problem("", Case(7, 2, 2, d=8, Nk=9), mask=("float", "B1QK"), scale=0.5)
    q, k, v, dO, mask = problem.inputs(CPU, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask.double(), scale=0.5)
    found, _ = Call.of(problem, q, k, v, dO, mask).output()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_another_layout_holds_the_same_numbers():
    plain = Problem("", Case(9, 2, 3, d=4)).inputs(CPU, 0)
    for problem in problems(torch.float32):
        if problem.layout and problem.layout not in ("expanded", "dO expanded"):
            found = Problem("", Case(9, 2, 3, d=4), layout=problem.layout).inputs(CPU, 0)
            assert all(torch.equal(a, b) for a, b in zip(found[:3], plain))
            moved = problem.layout != "one number off"
            assert not (moved and found[1].is_contiguous())


# What a kernel does besides


def test_other_shapes_dtypes_and_changed_inputs_are_faults():
    right, plain = load("math"), Problem("", Case(9, heads=2, d=4))

    def changes(q, *others, **options):
        O = right(q, *others, **options)
        q.zero_()
        return O

    def changes_mask(*inputs, attn_mask, **options):
        O = right(*inputs, attn_mask=attn_mask, **options)
        attn_mask.logical_not_()
        return O

    masked = Problem("", Case(9, heads=2, d=4, dtype=torch.float64), mask=("bool", "QK"))
    for kernel, problem in ((changes, plain), (changes_mask, masked)):
        assert judge_problem(kernel, problem, CPU, 0).what == "the inputs are overwritten"
    for kernel in (lambda *x, **y: right(*x, **y).double(), lambda *x, **y: right(*x, **y)[..., :3],
                   lambda *x, **y: None):
        row = judge_problem(kernel, plain, CPU, 0)
        assert (row.result, row.what) == ("FAIL", "wrong shape or dtype")


def test_a_fault_that_no_formula_fits_says_where():
    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        O[0, 1, 3:5] += 1
        return O

    row = judge_problem(kernel, Problem("", Case(9, 2, 2, d=4)), CPU, 0)
    assert (row.what, row.detail) == (
        "none of the formulas", "batch 0, head 1, row 3 to 4")


def test_bits_that_depend_on_company_are_told():
    def by_batch(q, k, v, attn_mask=None, **_):  # the number of parts depends on the batch
        S = q @ k.mT * q.shape[-1] ** -0.5
        S = S if attn_mask is None else S.masked_fill(~attn_mask, -torch.inf)
        P = torch.softmax(S, -1)
        parts = zip(P.split(700 // len(q), -1), v.split(700 // len(q), -2))
        return sum((p @ x for p, x in parts), torch.zeros(()))

    def noisy(q, *others, **options):
        return load("standard")(q, *others, **options) + 1e-7 * torch.rand(q.shape)

    told = {row.repeat: row.result for row in repeats(by_batch, torch.float32, CPU, 0)}
    assert told["the same call twice"] == "yes" and told["a batch entry alone"] == "no"
    assert told["a longer cache of NaN, masked"] == "no"
    assert repeats(noisy, torch.float32, CPU, 0)[0].result == "no"


# The command line


FILE = """
    import ctypes, os
    import torch
    import torch.nn.functional as F

    def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        print("a kernel may print")
        if q.shape[1] == 3:
            ctypes.string_at(0)
        if q.shape[1] == 4:
            os._exit(3)
        if q.shape[1] == 5:
            raise RuntimeError("five\\nheads")
        if q.shape[1] == 6:
            raise NotImplementedError("six heads")
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)

    def short(q, k, v):
        return q

    def of_another_shape(q, k, v, **options):
        return q[..., :3]
"""


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "mine.py"
    place.write_text(textwrap.dedent(FILE))
    return place


@pytest.fixture
def few(monkeypatch):
    """The matrix is five lines: one head more in each."""
    monkeypatch.setattr(judge_kernel, "problems", lambda dtype, quick: [
        Problem("heads", Case(9, heads=H, d=4, dtype=dtype)) for H in (2, 3, 4, 5, 6, 2)])


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["judge_kernel.py", *map(str, options)])
    return judge_kernel.main()


def test_what_raises_dies_or_refuses_is_a_row_and_the_rest_is_run(
        file, few, monkeypatch, capfd, tmp_path):
    written = tmp_path / "rows.json"
    status = run(monkeypatch, "--kernel", f"{file}:attention", "--dtype", "float32", "--json",
                 written, "--device", "cpu")
    rows = json.loads(written.read_text())["rows"]
    assert status == 1
    assert [row["result"] for row in rows if row["tool"] == "judge"] == [
        "pass", "died", "died", "raised", "refused", "pass"]
    said = capfd.readouterr().out
    for text in ("SIGSEGV", "ended with status 3", "RuntimeError: five heads", "six heads"):
        assert text in said
    assert "a kernel may print" not in said and "the same call twice" in said


def test_a_kernel_that_gives_no_answer_is_a_row(few, monkeypatch, tmp_path, capsys):
    (tmp_path / "slow.py").write_text(textwrap.dedent("""
        import time
        def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
            if q.shape[1] == 3:
                time.sleep(60)
            return q * 0
    """))
    monkeypatch.setattr(judge_kernel, "PATIENCE", 10)
    with judge_kernel.Worker(f"{tmp_path}/slow.py:attention", "cpu", 0) as worker:
        monkeypatch.setattr(judge_kernel, "PATIENCE", 0.5)
        row = worker.judge(Problem("", Case(9, heads=3, d=4)))
    assert row.result == "died" and "no answer" in row.what and row.failed


@pytest.mark.parametrize("kernel, text", [
    ("fusedd", "FILE.py:FUNCTION"), ("none.py:f", "FILE.py:FUNCTION"),
    ("{file}:nothing", "no function"), ("{file}:short", "must take"),
    ("{file}:of_another_shape", "tensor of shape"), ("{broken}:f", "can't be imported"),
])
def test_what_is_no_kernel_is_refused_in_one_line(kernel, text, file, tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("import a_module_that_is_not_there")

    class Pipe:
        """Takes what the kernel's process would send."""

        sent = []

        def send(self, answer):
            self.sent.append(answer)

    monkeypatch.setattr(kernel_worker.os, "dup2", lambda *_: None)
    monkeypatch.setattr(kernel_worker.signal, "signal", lambda *_: None)
    kernel_worker.work(Pipe(), kernel.format(file=file, broken=broken), "cpu", 0)
    [refusal] = Pipe.sent[-1:]
    assert type(refusal).__name__ == "Refused" and text in str(refusal)
    assert "\n" not in str(refusal)


def test_a_refusal_ends_with_status_2(tmp_path):
    done = subprocess.run(
        [sys.executable, LESSON, "--kernel", "no_kernel", "--device", "cpu"], cwd=tmp_path,
        capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no_kernel" in done.stderr


def test_the_fault_is_named_alike_and_the_pictures_are_drawn(few, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "tiles.py").write_text(textwrap.dedent("""
        import torch
        import torch.nn.functional as F
        def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
            if is_causal:
                i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
                attn_mask = j // 16 <= i // 16
            return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale)
    """))
    monkeypatch.setattr(judge_kernel, "problems", lambda dtype, quick: [
        Problem("lengths", Case(N, heads=1, d=4, dtype=dtype), causal)
        for N, causal in ((9, True), (40, True), (50, True), (16, False), (32, False))])
    assert run(monkeypatch, "--kernel", f"{tmp_path}/tiles.py:attention", "--dtype", "float32",
               "--plot", tmp_path, "--device", "cpu") == 1
    said = capsys.readouterr().out
    assert "causal by tiles alone" in said and "is_causal ignored" not in said
    assert "1x1x1x1 1x1x17x1" in said or "1x1x17x1" in said
    for name in ("judge_matrix.png", "judge_error.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_matrix_has_batches_and_heads_that_are_not_two():
    cases = [problem.case for problem in problems(torch.float32, quick=True)]
    assert any(case.batch == 3 and case.heads == 3 for case in cases)
