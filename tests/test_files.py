"""What is written and what the command line refuses: files, streams, text, a full disk."""

import argparse
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from common import cli, files, report
from common.profiling import profile_call

ROOT = Path(files.__file__).resolve().parent.parent
CPU = torch.device("cpu")


@dataclass
class Row:
    value: object


def write(path, text="whole\n"):
    with files.whole_file(path) as part:
        part.write_text(text)


def parsed(*arguments):
    options = cli.Parser("What it does.\n\nMore of it.")
    options.add_argument("--json", type=cli.file_to_write)
    options.add_argument("--plot", type=cli.folder_to_write)
    return options.parse_args(arguments)


def run(program, *arguments, **options):
    """Run a program's text, its common the one here; its loading of torch is what takes long."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"
    return subprocess.run([sys.executable, "-c", program, *arguments], text=True, timeout=60,
                          **{"capture_output": True, **options})


def test_a_device_is_written_through_and_stays_a_device(tmp_path):
    null = tmp_path / "null"
    try:
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        null.write_text("")
    except OSError:
        pytest.skip("no device may be made here")
    assert parsed("--json", str(null)).json == str(null)
    write(null)
    assert stat.S_ISCHR(null.stat().st_mode) and list(tmp_path.iterdir()) == [null]


def test_a_pipe_with_a_name_is_written_through(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write(parsed("--json", str(pipe)).json)
    reader.join(10)
    assert read == ["whole\n"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_descriptor_is_written_through_by_its_path_and_by_a_link(tmp_path):
    out, into = os.pipe()
    link = tmp_path / "link"
    link.symlink_to(f"/dev/fd/{into}")
    for path in (f"/dev/fd/{into}", str(link)):
        write(parsed("--json", path).json)
    os.close(into)
    with open(out) as pipe:
        assert pipe.read() == "whole\n" * 2
    assert link.is_symlink()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_to_a_file_that_is_there_or_not(there, tmp_path):
    target, link = tmp_path / "kept" / "target", tmp_path / "link.json"
    target.parent.mkdir()
    if there:
        target.write_text("old")
    link.symlink_to("kept/target")
    write(parsed("--json", str(link)).json)
    assert link.is_symlink() and target.read_text() == "whole\n"
    assert list(target.parent.iterdir()) == [target]


def test_a_file_keeps_its_mode_and_a_new_one_gets_what_umask_leaves(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("")
    old.chmod(0o640)
    before = os.umask(0o077)
    try:
        write(old), write(new)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o640, 0o600]


def test_parts_of_a_killed_run_are_swept_and_those_of_a_living_one_kept(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead, living, other = (tmp_path / name for name in (
        f".part-{child.pid}-0a.json", f".part-{os.getppid()}-0a.json", ".part-notes"))
    for path in (dead, living, other):
        path.touch()
    write(tmp_path / "rows.json")
    assert set(tmp_path.iterdir()) == {living, other, tmp_path / "rows.json"}


@pytest.mark.parametrize("path", [
    "/proc/x.json", "dead/x.json", "dead.json", "a" * 300, "folder", "new/", "file/x.json",
    "/dev/fd/987", "loop", ""])
def test_what_can_not_be_written_is_refused_before_the_work(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dead").symlink_to("nowhere")
    Path("dead.json").symlink_to("nowhere/x.json")
    Path("loop").symlink_to("loop")
    Path("folder").mkdir()
    Path("file").touch()
    there = set(tmp_path.iterdir())
    with pytest.raises(SystemExit) as ended:
        parsed("--json", path)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and "--json" in said
    assert set(tmp_path.iterdir()) == there


@pytest.mark.parametrize("path", ["/proc/x", "dead", "dead/x", "file", "file/x"])
def test_a_folder_that_can_not_be_made_is_refused(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dead").symlink_to("nowhere")
    Path("file").touch()
    with pytest.raises(SystemExit):
        parsed("--plot", path)
    assert "argument --plot" in capsys.readouterr().err


def test_of_an_option_given_twice_the_last_is_checked(tmp_path):
    path = str(tmp_path / "made" / "x.json")
    assert parsed("--json", f"{__file__}/x.json", "--json", path).json == path
    assert not list(tmp_path.iterdir())


def test_a_dash_is_standard_output_and_what_is_printed_goes_to_stderr(tmp_path):
    program = """
from common import cli, files
def main():
    options = cli.Parser(None)
    options.add_argument("--json", type=cli.file_to_write)
    path = options.parse_args().json
    print("a table")
    with files.whole_file(path) as part:
        part.write_text("{}")
cli.serve(main)"""
    done = run(program, "--json", "-", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{}", "a table\n")
    assert not list(tmp_path.iterdir())


def test_json_is_strict_and_says_why_a_field_is_null(tmp_path):
    nan, inf = float("nan"), float("inf")
    rows = [("tool", Row(value)) for value in (1.5, nan, (1.0, -inf), [[nan], [2.0]], {"a": inf})]
    report.write_json(tmp_path / "x.json", CPU, rows)
    found = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert [row["value"] for row in found] == [
        1.5, None, [1.0, None], [[None], [2.0]], {"a": None, "a_why": "inf"}]
    assert [row.get("value_why") for row in found] == [
        None, "nan", [None, "-inf"], [["nan"], None], None]


def test_an_error_of_the_writer_keeps_its_words(tmp_path):
    with pytest.raises(OSError, match="^encoder error$"), files.whole_file(tmp_path / "x"):
        raise OSError("encoder error")


@contextmanager
def full_disk():
    """No file may grow beyond 1 KiB: a write then fails as on a full disk, with another name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


WRITERS = {
    "json": lambda folder: report.write_json(folder / "x.json", CPU, [("a", Row("b" * 2000))]),
    "plot": lambda folder: report.plot_curves(folder / "x.png", "", "", {"a": [(1, 1)]}, {}),
    "trace": lambda folder: profile_call(lambda: torch.ones(4) + 1, CPU, folder, "x"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_nothing(kind, tmp_path):
    if kind == "plot":
        pytest.importorskip("matplotlib")
        WRITERS[kind](tmp_path / "fonts")  # matplotlib writes what it found of fonts once
        shutil.rmtree(tmp_path / "fonts")
    with full_disk(), pytest.raises(OSError, match=str(tmp_path)):
        WRITERS[kind](tmp_path)
    assert not list(tmp_path.iterdir())


PRINTS = """
from common import cli, files, report
def main():
    report.console.print("[bold]/a[0]/:smile:.json[/bold] \\u4e2d\\u00e9")
    report.print_table("[red]Title :smile:", ["[a]"], [("[/b] :smile:",)])
    for line in range(20000):
        report.console.print(line)
    with files.whole_file(sys.argv[1]) as part:
        part.write_text("whole")
cli.serve(main)"""


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_text_is_printed_as_it_is_in_any_encoding_and_head_ends_no_run(encoding, tmp_path):
    path = tmp_path / "x.json"
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PRINTS}"
    with subprocess.Popen(
            [sys.executable, "-c", program, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONIOENCODING": encoding}) as child:
        lines = [child.stdout.readline().decode(encoding) for _ in range(7)]
        child.stdout.close()
        said = child.stderr.read()
    character = "\u4e2d" if encoding == "gbk" else "\\u4e2d"
    assert lines[0].startswith(f"[bold]/a[0]/:smile:.json[/bold] {character}")
    assert lines[2:7:2] == ["[red]Title :smile:\n", "| [a]          |\n", "| [/b] :smile: |\n"]
    assert (child.returncode, said, path.read_text()) == (0, b"", "whole")


@pytest.mark.parametrize("length", [1, 10**5])
def test_a_full_standard_output_is_one_line_and_exit_2(length):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = run(f"from common import cli\ncli.serve(lambda: print('x' * {length}))",
                   env={**os.environ, "PYTHONUNBUFFERED": ""},
                   stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "No space" in done.stderr


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize("fault", [
    MemoryError(), OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate"
                 " memory: you tried to allocate 4 bytes.\nError code 12"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; ...)"),
    OSError(12, "Cannot allocate memory")])
def test_no_room_in_memory_is_one_line_and_exit_2(fault, capsys):
    def main():
        raise fault

    with pytest.raises(SystemExit) as ended:
        cli.serve(main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and "no room in memory" in said


def test_what_torch_says_when_there_is_no_room_is_known():
    for shape in ((2**45,), (2**40, 2**40)):
        with pytest.raises(RuntimeError) as found:
            torch.empty(*shape)
        assert cli.is_out_of_memory(found.value)
    assert not cli.is_out_of_memory(RuntimeError("shapes do not fit"))


def test_another_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a fault"):
        cli.serve(lambda: exec("raise RuntimeError('a fault')"))


def test_a_description_is_the_first_line_of_a_docstring_or_nothing():
    assert cli.Parser("What it does.\n\nMore of it.").description == "What it does."
    assert "usage" in cli.Parser(None).format_help()  # python -OO has no docstrings
    assert isinstance(cli.Parser(None), argparse.ArgumentParser)


@pytest.mark.parametrize("module", ["torch", "rich"])
def test_a_lesson_without_a_module_is_one_line_and_a_library_an_import_error(module, tmp_path):
    shutil.copytree(ROOT / "common", tmp_path / "common")
    lesson = tmp_path / "09_lesson" / "lesson.py"
    lesson.parent.mkdir()
    (tmp_path / "lacks").mkdir()
    (tmp_path / "lacks" / f"{module}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')")
    lesson.write_text("import sys\n"
                      f"sys.path[:0] = [{str(tmp_path)!r}, {str(tmp_path / 'lacks')!r}]\n"
                      "from common import cli\nfrom common.report import console\n")
    done = subprocess.run([sys.executable, lesson], text=True, capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"No module named '{module}'" in done.stderr and "setup.sh" in done.stderr
    done = subprocess.run([sys.executable, "-c", f"exec(open({str(lesson)!r}).read())"],
                          text=True, capture_output=True)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_another_common_on_the_path_does_not_win(tmp_path):
    (tmp_path / "common.py").write_text("raise SystemExit('the other common')")
    done = run("import common; print(common.__file__)",
               env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout.strip() == str(ROOT / "common" / "__init__.py"), done.stderr
