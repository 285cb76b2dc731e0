"""common/: the device that is chosen, what is measured, and files that are whole or not there."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from common import cann, device, report, timing
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
        "try: source",
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


NPU = """
import torch, types
torch.utils.rename_privateuse1_backend("npu")
matmul = types.SimpleNamespace({options})
torch.npu = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, matmul=matmul,
                                  current_device=lambda: 0, set_device=lambda device: None)
"""


@pytest.mark.parametrize("options, after", [("allow_hf32=True", {"allow_hf32": False}), ("", {})])
def test_on_an_npu_float32_stays_float32_and_saturation_is_told(options, after, tmp_path):
    (tmp_path / "torch_npu.py").write_text(NPU.format(options=options))
    done = subprocess.run(
        [sys.executable, "-c", "from common import device; device.choose('npu'); "
                               "print(vars(device.torch.npu.matmul))"],
        text=True, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "INF_NAN_MODE_FORCE_DISABLE": "1"})
    assert (done.returncode, done.stdout) == (0, f"{after}\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and "-inf" in done.stderr


def limited(tmp_path, monkeypatch, member, files, most=resource.RLIM_INFINITY):
    """Return free_bytes of a machine with 8 MiB free and the given control groups."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    texts = {"proc/meminfo": "MemAvailable: 8192 kB\n", "proc/self/cgroup": member,
             "proc/self/statm": "256 1 1 1 0 1 0\n",
             **{f"cgroup/{name}": text for name, text in files.items()}}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(device, "PROC", proc)
    monkeypatch.setattr(device, "CGROUPS", groups)
    monkeypatch.setattr(device.resource, "getrlimit", lambda _: (most, most))
    return device.free_bytes(CPU)


def group(folder, most, now, cached, v1=False):
    names = (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file") if v1 else
             ("memory.max", "memory.current", "inactive_file"))
    return {f"{folder}/{names[0]}": f"{most}\n", f"{folder}/{names[1]}": f"{now}\n",
            f"{folder}/memory.stat": f"anon 5\n{names[2]} {cached}\n"}


@pytest.mark.parametrize("member, files, free", [
    ("", {}, 2**23),
    ("0::/\n", group(".", "max", 5, 5), 2**23),
    ("0::/\n", group(".", 2**22, 3000, 1000), 2**22 - 2000),
    ("0::/a/b\n", {**group("a/b", "max", 5, 0), **group("a", 2**21, 100, 0)}, 2**21 - 100),
    ("0::/a/b\n", group(".", 2**21, 2**22, 0), 0),
    ("4:cpu,memory:/a/b\n0::/\n", group("memory/a", 2**20, 100, 50, v1=True), 2**20 - 50),
    ("4:memory:/docker/b\n", group("memory", 2**20, 100, 0, v1=True), 2**20 - 100),
    ("4:memory:/\n", group("memory", 2**63 - 4096, 100, 0, v1=True), 2**23),
])
def test_free_memory_is_what_the_control_groups_leave(member, files, free, tmp_path, monkeypatch):
    assert limited(tmp_path, monkeypatch, member, files) == free


def test_free_memory_is_what_the_address_space_leaves(tmp_path, monkeypatch):
    mapped = 256 * os.sysconf("SC_PAGE_SIZE")
    assert limited(tmp_path, monkeypatch, "", {}, most=2**21) == max(0, 2**21 - mapped)
    assert 0 < device.free_bytes(CPU)


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


PLOTS = """
import os, sys
from common.report import plot_curves
plot_curves(sys.argv[1], "title \u4e2d", "", {"a": [(1, 1), (2, 0)]}, {})
print(os.environ["MPLBACKEND"], "matplotlib.pyplot" in sys.modules)
"""


@pytest.mark.parametrize("backend", ["module://not_there", "not_there", "svg"])
def test_a_plot_needs_no_backend_and_changes_none(backend, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    done = subprocess.run([sys.executable, "-c", PLOTS, path], text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": backend,
                               "MPLCONFIGDIR": "/proc/no"})
    assert (done.stdout, done.stderr) == (f"{backend} False\n", "")
    assert path.read_bytes().startswith(b"\x89PNG")


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
