"""Exercises: as shipped each fails in one line; with its solution it holds; mistakes are named."""

import subprocess
import sys
from pathlib import Path

import pytest

EXERCISES = Path(__file__).resolve().parents[1] / "exercises"
NAMES = sorted(path.stem for path in EXERCISES.glob("[0-9]*.py"))


@pytest.fixture(autouse=True)
def _reader_s_folder(monkeypatch):
    monkeypatch.syspath_prepend(EXERCISES)


def shipped(name):
    """The exercise's globals."""
    import check

    return check.load(EXERCISES / f"{name}.py")


def solved(name, old="", new=""):
    """The exercise's globals with the solution's functions, in which `new` stands for `old`.

    Without `old`, `new` comes behind the solution.
    """
    source = (EXERCISES / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    assert old in source, old
    solution, exercise = {"__name__": name}, shipped(name)
    exec(source.replace(old, new) if old else f"{source}\n\n{new}\n", solution)
    return {**exercise, **{function: solution[function] for function in asked(name)}}


def cases_of(name):
    import check

    return check.cases_of(f"{name}.py")


def asked(name):
    """The names of the functions that the reader writes, in their order."""
    return list(dict.fromkeys(case.function for case in cases_of(name)))


@pytest.mark.parametrize("name", NAMES)
def test_as_shipped_it_fails_in_one_line_that_names_the_function(name, capsys):
    import check

    assert check.report(shipped(name)) == 1
    out, said = capsys.readouterr()
    assert not out and said.count("\n") == 1
    assert asked(name)[0] + " is yours to write" in said


@pytest.mark.parametrize("name", NAMES)
def test_each_of_its_functions_has_to_be_written(name, capsys):
    import check

    exercise, done = shipped(name), solved(name)
    for function in asked(name):
        assert check.report({**done, function: exercise[function]}) == 1
        assert f"{function} is yours to write" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_holds(name, capsys):
    import check

    names = solved(name)
    status = check.report(names)
    out, said = capsys.readouterr()
    assert (status, said) == (0, "") and out.endswith(f"{name}.py: done\n")


@pytest.mark.parametrize("name", NAMES)
def test_each_mistake_it_knows_is_caught_and_named(name):
    import check

    names, cases = solved(name), cases_of(name)
    known = {(case.function, text): mistaken for case in cases
             for text, mistaken in case.mistakes.items()}
    assert known
    for (function, text), mistaken in known.items():
        said = [check.fault_of(case, {**names, function: mistaken}) for case in cases
                if case.function == function]
        assert any(line and line.endswith(f"Hint: {text}") for line in said), (text, said)


def test_it_runs_from_anywhere_and_ends_with_one_line_and_status_1(tmp_path):
    done = subprocess.run([sys.executable, EXERCISES / f"{NAMES[0]}.py"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith(f"{NAMES[0]}.py: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("found, said", [
    (None, "it returns nothing"), (1.0, "expected (1, 2), got 1"), ((1.0, 2.5), "got (1, 2.5)")])
def test_what_came_is_said(found, said):
    import check

    case = check.Case("f", (1,), (1.0, 2.0))
    assert said in check.fault_of(case, {"f": lambda x: found, "__file__": "f.py"})


def test_a_large_tensor_is_compared_at_its_worst_place():
    import check
    import torch

    right = torch.zeros(4, 5)
    wrong = right.clone()
    wrong[2, 3] = 7
    names = {"f": lambda x: wrong, "__file__": "f.py"}
    assert "at [2, 3] expected 0, got 7" in check.fault_of(check.Case("f", (1,), right), names)
    names["f"] = lambda x: right[0]
    assert "its shape has to be [4, 5], it is [5]" in check.fault_of(
        check.Case("f", (1,), right), names)


def test_an_error_is_one_line_with_its_place():
    import check

    names = {"f": lambda x: 1 / 0, "__file__": __file__}
    said = check.fault_of(check.Case("f", (1,), 1), names)
    assert said.startswith("f(1) raised ZeroDivisionError, line ") and "\n" not in said


WRONG = [  # an exercise, what stands in its solution, what stands there instead, words of the line
    ("01_attention", "dim=-1", "dim=1", "dim=1 is another one here"),
    ("01_attention", "K.transpose(-2, -1)", "K.T", "raised RuntimeError"),
    ("01_attention", "K.transpose(-2, -1)", "K.T", "K.transpose(-2, -1)"),
    ("01_attention", "Q.shape[-1] ** 0.5", "V.shape[-1] ** 0.5", "not of V"),
    ("02_safe_softmax", "", "def safe_softmax(x):\n    return torch.softmax(x, -1)",
     "no softmax here: take exp, sum and the maximum"),
    ("02_safe_softmax", "", "def safe_softmax(x):\n    return torch.exp(x - x.logsumexp(-1, True))",
     "no logsumexp here"),
    ("02_safe_softmax", "", "def log_sum_exp(x):\n    return torch.logsumexp(x, -1)",
     "no logsumexp here"),
    ("02_safe_softmax", "x.amax(-1, keepdim=True))", "x.amax(-1))", "take them with keepdim=True"),
    ("02_safe_softmax", "numerators.sum(-1, keepdim=True)", "numerators.sum(-1)",
     "take them with keepdim=True"),
    ("02_safe_softmax", "m = x.amax(-1, keepdim=True)", "m = x.max().expand(x[..., :1].shape)",
     "each row needs a maximum of its own"),
    ("02_safe_softmax", "m = x.amax(-1, keepdim=True)", "m = x.amax(-1)", "x - m needs m with its"),
    ("02_safe_softmax", "m.squeeze(-1)", "m", "take the 1 away"),
    ("02_safe_softmax", "torch.log(", "torch.log2(", "the natural logarithm"),
    ("02_safe_softmax", "math.log(", "math.log2(", "not to the base 2"),
    ("03_online_softmax", "return m_new, l * math.exp(m - m_new) + math.exp(score - m_new)",
     "return l * math.exp(m - m_new) + math.exp(score - m_new), m_new", "m comes first"),
    ("03_online_softmax", "l * math.exp(m - m_new) + math.exp(score - m_new)",
     "(l + math.exp(score - m_new)) * math.exp(m - m_new)", "only the old l gets the correction"),
    ("03_online_softmax", " + math.exp(score - m_new)", "", "a term of its own"),
    ("03_online_softmax", "math.exp(score - m_new)", "math.exp(score)", "exp(score) overflows"),
    ("03_online_softmax", "        m = m_new\n", "", "set to m_new at the end of the loop"),
    ("03_online_softmax", "torch.tensor(-math.inf)", "torch.tensor(0.0)", "has to start at -inf"),
    ("03_online_softmax", "torch.maximum(m, s.max())", "s.max()", "the larger of m and the"),
    ("03_online_softmax", "torch.exp(s - m_new)", "torch.exp(s)", "weights are exp(s - m_new)"),
    ("03_online_softmax", "torch.maximum(m, s.max())", "torch.zeros(())", "exp overflows"),
    ("03_online_softmax", "", "def attend(scores, values, Bc):\n"
     "    return torch.softmax(scores, 0) @ values", "no softmax here"),
    ("03_online_softmax", "", "def attend(scores, values, Bc):\n    P = torch.exp(scores - "
     "scores.max())\n    return P @ values / P.sum()", "max takes 10 numbers: a piece has 1"),
    ("03_online_softmax", "math.exp(part[0] - m)", "math.exp(m - part[0])", "the other way round"),
    ("03_online_softmax", "for part in (first, second)]", "for part in (second, first)]",
     "not the other part's"),
    ("03_online_softmax", "l = sum(w * part[1]", "l = sum(part[1]", "the same factor as O"),
    ("04_tiling", "Tr * Tc", "Tr + Tc", "a product, not a sum"),
    ("04_tiling", "torch.exp(S_block - m_new)", "torch.exp(S_block)",
     "P_block is exp(S_block - m_new)"),
    ("04_tiling", "torch.maximum(m, S_block.amax(dim=1, keepdim=True))", "torch.zeros_like(m)",
     "exp overflows"),
    ("04_tiling", "-torch.inf)  # [Br, 1]", "0.0)", "flash_attention(scores near -1000, 4x2"),
    ("04_tiling", "(len(Q), 1), -torch.inf)", "(len(Q), 1), 0.0)",
     "keys_outside(scores near -1000, 4x2"),
    ("04_tiling", "-torch.inf", "0.0", "m has to start at -inf"),
    ("04_tiling", "torch.maximum(m, S_block.amax(dim=1, keepdim=True))",
     "S_block.amax(dim=1, keepdim=True)", "the larger of m and the tile's maximum"),
    ("04_tiling", "def flash_attention(Q, K, V, Br, Bc):",
     "def flash_attention(Q, K, V, Bc, Br):", "Br cuts the queries, Bc the keys"),
    ("04_tiling", "", "def flash_attention(Q, K, V, Br, Bc):\n"
     "    return torch.softmax(Q @ K.T / Q.shape[1] ** 0.5, 1) @ V", "never Q @ K.T"),
    ("04_tiling", "Q.split(Br)", "Q.split(len(Q))", "the queries are cut"),
    ("04_tiling", "", "def keys_outside(*inputs):\n    return flash_attention(*inputs)",
     "got 18 loads of a block of V. Hint: here the loop over blocks of K and V is outside"),
    ("04_tiling", "return m_new, l,", "return m, l,", "set m to m_new"),
    ("04_tiling", "O.append(O_block / l)", "O.append(O_block)", "O has to be divided by l"),
    ("04_tiling", "    return O / l\n", "    return O\n", "O has to be divided by l"),
    ("04_tiling", "K_block, V_block)\n    return O / l",
     "K_block, V_block)\n            O[rows] /= l[rows]\n    return O", "divided in each step: "),
    ("04_tiling", "K_block, V_block)\n    return O / l",
     "K_block, V_block)\n            O[rows] /= l[rows]\n    return O / l", "once more at the end"),
    ("04_tiling", "K_block, V_block)\n    return O / l", "K_block, V_block)\n        O /= l\n"
     "    return O", "O is divided in each step: "),
    ("04_tiling", "amax(dim=1, keepdim=True)", "amax(dim=1)", "m is a column"),
    ("04_tiling", "P_block.sum(dim=1, keepdim=True)", "P_block.sum(dim=1)", "l is a column"),
    ("04_tiling", "Q_block.shape[1] ** 0.5", "len(K_block) ** 0.5", "not by sqrt(Bc)"),
    ("06_io", "scores + softmax + output", "scores + softmax + output - N * N",
     "the softmax reads S"),
    ("06_io", "scores + softmax + output", "2 * (scores + softmax + output)",
     "not bytes of float16"),
    ("06_io", "scores + softmax + output", "4 * (scores + softmax + output)",
     "not bytes of float32"),
    ("06_io", "matrix = N * d", "matrix = 2 * N * d", "not bytes of float16"),
    ("08_masks", "j <= Nk - Nq + i", "(j <= Nk - Nq + i).float()", "a mask of bool"),
    ("08_masks", "j <= Nk - Nq + i", "(j <= Nk - Nq + i).int()",
     "its dtype has to be torch.bool, it is torch.int32"),
    ("08_masks", "return j <= Nk - Nq + i", "return torch.ones(Nq, Nk).triu(Nk - Nq).bool()",
     "triu keeps what lies above"),
    ("08_masks", "", "def visited(Nq, Nk, Br, Bc):\n    mask = causal_mask(Nq, Nk)\n"
     "    return sum(mask[i:i + Br, j:j + Bc].any().item()\n"
     "               for i in range(0, Nq, Br) for j in range(0, Nk, Bc))", "without a mask"),
    ("08_masks", "", "def visited(Nq, Nk, Br, Bc):\n    T = -(-Nq // Br)\n"
     "    return T * (T + 1) // 2", "where Br and Bc are equal"),
    ("08_masks", ".masked_fill(~seen, -math.inf)", " * seen", "S * mask makes a hidden score 0"),
    ("13_fp8", "(torch.frexp(x).exponent - 1)", "torch.log2(x).floor()",
     "log2 of a negative number is NaN"),
    ("13_fp8", "largest = block.abs().max()\n        scale = largest / 127 if largest > 0 else "
     "torch.ones_like(largest)", "scale = block.abs().amax(1, keepdim=True) / 127", "not one each"),
    ("13_fp8", "math.log2(largest) - offset", "math.floor(math.log2(largest) - offset)",
     "need not be a whole number"),
]


@pytest.mark.parametrize("name, old, new, words", WRONG)
def test_a_wrong_function_is_refused_in_a_line_that_leads_on(name, old, new, words, capsys):
    import check

    assert check.report(solved(name, old, new)) == 1
    out, said = capsys.readouterr()
    assert not out and said.count("\n") == 1 and words in said
