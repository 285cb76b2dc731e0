"""common/: the device that is chosen, what is measured, and files that are whole or not there."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from common import cann, device, memory, report, timing
from common.cli import Refused

ROOT = Path(device.__file__).parent.parent
CPU = torch.device("cpu")


def choose_in_a_child(torch_npu, name, tmp_path, **environment):
    """Run choose(name) where `import torch_npu` runs the given source."""
    (tmp_path / "torch_npu.py").write_text(torch_npu)
    program = ("from common import cli, device; "
               f"cli.serve(lambda: print('chosen', device.choose({name!r})))")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", **environment}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True,
                          text=True, timeout=60)


BROKEN = [
    "raise RuntimeError('Failed to load the backend')",
    "raise OSError('undefined symbol: _ZN3c10')",
    "raise ImportError('libhccl.so: cannot open shared object file')",
]


@pytest.mark.parametrize("torch_npu", BROKEN)
def test_a_broken_torch_npu_is_told_and_the_cpu_taken_under_auto(torch_npu, tmp_path):
    done = choose_in_a_child(
        torch_npu, "auto", tmp_path, CUDA_VISIBLE_DEVICES="", ASCEND_RT_VISIBLE_DEVICES="9"
    )
    assert done.stdout == "chosen cpu\n"
    assert len(done.stderr.splitlines()) == 1
    cause = torch_npu.split("'")[1]
    for told in (
        cause,
        f"torch {torch.__version__}",
        "ASCEND_RT_VISIBLE_DEVICES='9'",
        "set_env.sh",
    ):
        assert told in done.stderr


@pytest.mark.parametrize("torch_npu", BROKEN)
def test_a_broken_torch_npu_refuses_an_explicit_npu(torch_npu, tmp_path):
    done = choose_in_a_child(torch_npu, "npu", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert torch_npu.split("'")[1] in done.stderr and "set_env.sh" in done.stderr


def test_a_missing_torch_npu_is_not_spoken_of_under_auto(capsys):
    assert device.choose("auto").type in ("cpu", "cuda")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["gpu", "npu:", "cuda:x", "cpu:0", "auto:1", "", "npu:-1"])
def test_an_unknown_device_name_is_refused_with_its_name(name):
    with pytest.raises(Refused, match="device must be .* got " + repr(name)):
        device.choose(name)


def test_the_device_line_names_what_a_figure_depends_on():
    line = device.describe(CPU)
    assert line.startswith("cpu (") and "GiB" in line and f"torch {torch.__version__}" in line


def test_cann_is_found_where_set_env_says(tmp_path, monkeypatch):
    monkeypatch.setattr(cann, "PLACES", ())
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert cann.release() is None
    info = tmp_path / "latest" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.0.1\ninnerversion=V100R001\n")
    (tmp_path / "set_env.sh").touch()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "latest"))
    assert cann.release() == "8.0.1"
    assert cann.set_env() == tmp_path / "set_env.sh"


def test_peak_counts_what_stands_at_once_above_what_stood_before():
    before = torch.ones(2**20)

    def call():
        a = torch.empty(2**18)  # 1 MiB
        b = torch.neg(a)  # and 1 MiB beside it
        del a
        return torch.neg(b[:0]) + torch.neg(before[:0])

    for _ in range(2):
        assert memory.measure_peak(call, CPU).total == 2 * 2**20


def test_peak_without_the_result_counts_shared_storage_once():
    def call():
        x = torch.ones(2**18)
        return x, x[1:]

    assert memory.measure_peak(call, CPU) == (2**20, 0)


def test_calls_are_timed_in_turn_after_a_warm_up_and_often_enough():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = timing.time_in_turn(calls, CPU, budget=0)
    assert order == ["a", "b"] * (1 + timing.MIN_ROUNDS)
    assert {name: len(s) for name, s in seconds.items()} == {"a": 5, "b": 5}
    assert timing.ratio([2, 40, 6, 9, 1], [1, 10, 2, 9, 1]) == (2, (1, 3))


def test_launches_count_operators_and_not_views():
    x = torch.ones(4, 4)
    assert timing.count_launches(lambda: (x.t()[1:] @ x).add_(1)) == 2


@dataclass
class Row:
    name: str
    value: float


def test_json_holds_device_versions_and_rows(tmp_path):
    report.write_json(tmp_path / "a" / "rows.json", CPU, [("tool", Row("x", 1.5))])
    found = json.loads((tmp_path / "a" / "rows.json").read_text())
    assert found["rows"] == [{"tool": "tool", "name": "x", "value": 1.5}]
    assert found["versions"]["torch"] == torch.__version__


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), report.whole_file(path) as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_table_is_markdown_and_is_not_cut_to_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    report.print_table("Title", ["name", "value"], [("a" * 50, 1)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "Title"] and lines[3].startswith("| name ")
    assert lines[-1] == f"| {'a' * 50} |     1 |"
