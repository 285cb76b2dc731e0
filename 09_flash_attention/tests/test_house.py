"""The house: which room may take from which, and that ours are found whatever else is there."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import flash_attention
import pytest
import torch
from flash_attention import flash_attention_forward, plain_flash_attention

PHASE = Path(flash_attention.__file__).parent
ROOT = PHASE.parent
LESSONS = {path.stem: path for path in PHASE.glob("*.py")}
# What a lesson teaches, and so may be taken by others; everything else is a helper.
TAUGHT = {
    "flash_attention": {
        "standard_attention", "flash_attention_forward", "attend_in_tiles", "online_softmax_step",
        "trace", "compare_and_verify", "profile_memory", "benchmark_speed"},
    "flash_backward": {"flash_attention", "flash_attention_backward"},
    "generations": {"flash_attention_1", "busy_cores", "count"},
    "overlap": {"hopper", "rates"},
    "io_model": {"article_claims", "counted"},
    "approximate": {"METHODS", "SHARE", "by_kind", "errors"},
    "lazy_rescale": {"flash_attention_4", "polynomial_exp2"},
    "flash_decoding": {"KVCache", "merge"},
    "flash_pages": {"through_pages"},
    "flash_triton": {"flash_attention_triton", "online_softmax_step"},
    "flash_triton_backward": {"flash_attention_triton_backward"},
    "flash_variants": {"with_sink"},
    "play": {"play"},
    "mini_gpt": {"CausalSelfAttention", "Training", "TEXT"},
}
MAY_BE_MISSING = {"flash_triton", "torch.nn.attention", "matplotlib"}  # flash_triton needs Triton


def imports(path):
    """Yield (module, names, whether inside a function) of each import statement of a file."""
    tree = ast.parse(path.read_text())
    inside = {node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
              for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, set(), node in inside
        if isinstance(node, ast.ImportFrom):
            yield node.module, {name.name for name in node.names}, node in inside


def ours(module):
    return module.split(".")[0] in {"common", "lab", *LESSONS}


@pytest.mark.parametrize("folder, allowed", [("common", {"common"}), ("lab", {"common", "lab"})])
def test_what_is_shared_knows_nothing_of_what_is_built_on_it(folder, allowed):
    place = ROOT / folder if folder == "common" else PHASE / folder
    for path in place.glob("*.py"):
        taken = {module.split(".")[0] for module, _, _ in imports(path) if ours(module)}
        assert taken <= allowed, path


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_takes_from_another_only_what_that_one_teaches(lesson):
    for module, names, inside in imports(LESSONS[lesson]):
        if module in LESSONS and not inside:
            assert names and names <= TAUGHT[module], (lesson, module, names)


def test_nothing_is_imported_at_call_time_but_what_may_be_missing():
    for path in [*ROOT.glob("common/*.py"), *PHASE.glob("*.py"), *PHASE.glob("[lc]*/*.py")]:
        for module, _, inside in imports(path):
            if inside and path.name != "device.py":  # there the device's own package is asked for
                assert any(module.startswith(name) for name in MAY_BE_MISSING), (path, module)


def test_no_import_goes_round_in_a_circle():
    graph = {path: {LESSONS[module] for module, _, _ in imports(path) if module in LESSONS}
             for path in LESSONS.values()}
    while graph:
        ends = [path for path, taken in graph.items() if not taken & set(graph)]
        assert ends, sorted(path.stem for path in graph)
        for path in ends:
            del graph[path]


def test_common_is_found_in_one_place():
    to_the_root = [path for path in PHASE.rglob("*.py") if "tests" not in path.parts
                   and "parents[2]" in path.read_text()]
    assert [path.relative_to(PHASE).as_posix() for path in to_the_root] == ["lab/__init__.py"]


TAKEN = ("common", "lab", "cases", "tiles", "visible", "judge", "show", "report", "lesson",
         "flash_attention", "bench")


@pytest.mark.parametrize("flags", [[], ["-I"], ["-OO"], ["-P"]])
@pytest.mark.parametrize("lesson", ["flash_attention", "flash_backward"])
def test_a_lesson_runs_beside_modules_of_the_same_names(tmp_path, flags, lesson):
    if flags == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    done = subprocess.run(
        [sys.executable, *flags, PHASE / f"{lesson}.py", "--seq-len", "16", "--device", "cpu"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True)
    assert done.returncode == 0 and "pass" in done.stdout, done.stderr


def test_a_lesson_runs_through_a_link(tmp_path):
    (tmp_path / "mine.py").symlink_to(PHASE / "flash_attention.py")
    done = subprocess.run([sys.executable, tmp_path / "mine.py", "--seq-len", "16"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "pass" in done.stdout, done.stderr


# The whole algorithm, on one screen


@pytest.mark.parametrize("Nq, Nk, dv", [(7, 7, 4), (64, 64, 4), (130, 70, 9), (1, 5, 4)])
@pytest.mark.parametrize("Br, Bc", [(64, 64), (3, 5), (1, 1)])
def test_the_plain_algorithm_is_the_full_one(Nq, Nk, dv, Br, Bc):
    generator = torch.Generator().manual_seed(Nq)
    Q, K, V = (torch.randn(s, generator=generator, dtype=torch.float64)
               for s in ((Nq, 4), (Nk, 4), (Nk, dv)))
    expected = flash_attention_forward(Q, K, V)
    found = plain_flash_attention(Q, K, V, Br, Bc)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_the_plain_algorithm_comes_first_and_needs_torch_alone():
    source = (PHASE / "flash_attention.py").read_text()
    tree = ast.parse(source)
    first = next(node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    assert first.name == "plain_flash_attention" and first.end_lineno < 40
    assert first.end_lineno - first.lineno < 22
    assert "_(" not in ast.get_source_segment(source, first)
    names = {node.id for node in ast.walk(first) if isinstance(node, ast.Name)
             and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in ast.walk(first) if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)} | set("QKV") | {"Br", "Bc"}
    assert names - made == {"torch", "zip"}
