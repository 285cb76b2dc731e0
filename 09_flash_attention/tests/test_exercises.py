"""Exercises: as shipped each fails in one line; with its solution it holds; mistakes are named."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXERCISES = Path(__file__).resolve().parents[1] / "exercises"
NAMES = sorted(path.stem for path in EXERCISES.glob("[0-9]*.py"))


def loaded(path, monkeypatch):
    """Import an exercise or a solution; return its globals."""
    monkeypatch.syspath_prepend(EXERCISES)
    spec = importlib.util.spec_from_file_location(f"_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def solved(name, monkeypatch):
    """The exercise's globals with the solution's functions."""
    solution = loaded(EXERCISES / "solutions" / f"{name}.py", monkeypatch)
    exercise = loaded(EXERCISES / f"{name}.py", monkeypatch)
    asked = {case.function for case in exercise["CASES"]}
    return {**exercise, **{function: solution[function] for function in asked}}


@pytest.mark.parametrize("name", NAMES)
def test_as_shipped_it_fails_in_one_line_that_names_the_function(name, monkeypatch, capsys):
    exercise = loaded(EXERCISES / f"{name}.py", monkeypatch)
    import check

    assert check.report(exercise) == 1
    out, said = capsys.readouterr()
    assert not out and said.count("\n") == 1
    assert exercise["CASES"][0].function + " is yours to write" in said


@pytest.mark.parametrize("name", NAMES)
def test_each_of_its_functions_has_to_be_written(name, monkeypatch, capsys):
    exercise, done = loaded(EXERCISES / f"{name}.py", monkeypatch), solved(name, monkeypatch)
    import check

    for function in {case.function for case in exercise["CASES"]}:
        assert check.report({**done, function: exercise[function]}) == 1
        assert f"{function} is yours to write" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_holds(name, monkeypatch, capsys):
    names = solved(name, monkeypatch)
    import check

    status = check.report(names)
    out, said = capsys.readouterr()
    assert (status, said) == (0, "") and out.endswith(f"{name}.py: done\n")


@pytest.mark.parametrize("name", NAMES)
def test_each_mistake_it_knows_is_caught_and_named(name, monkeypatch):
    names = solved(name, monkeypatch)
    import check

    known = {(case.function, text): mistaken for case in names["CASES"]
             for text, mistaken in case.mistakes.items()}
    assert known
    for (function, text), mistaken in known.items():
        said = [check.fault_of(case, {**names, function: mistaken}) for case in names["CASES"]
                if case.function == function]
        assert any(line and line.endswith(f"Hint: {text}") for line in said), (text, said)


def test_it_runs_from_anywhere_and_ends_with_one_line_and_status_1(tmp_path):
    done = subprocess.run([sys.executable, EXERCISES / f"{NAMES[0]}.py"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith(f"{NAMES[0]}.py: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("found, said", [
    (None, "it returns nothing"), (1.0, "expected (1, 2), got 1"), ((1.0, 2.5), "got (1, 2.5)")])
def test_what_came_is_said(found, said, monkeypatch):
    monkeypatch.syspath_prepend(EXERCISES)
    import check

    case = check.Case("f", (1,), (1.0, 2.0))
    assert said in check.fault_of(case, {"f": lambda x: found, "__file__": "f.py"})


def test_a_large_tensor_is_compared_at_its_worst_place(monkeypatch):
    monkeypatch.syspath_prepend(EXERCISES)
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


def test_an_error_is_one_line_with_its_place(monkeypatch):
    monkeypatch.syspath_prepend(EXERCISES)
    import check

    names = {"f": lambda x: 1 / 0, "__file__": __file__}
    said = check.fault_of(check.Case("f", (1,), 1), names)
    assert said.startswith("f(1) raised ZeroDivisionError, line ") and "\n" not in said
