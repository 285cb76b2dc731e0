"""scripts/: an environment is whole or made anew, a step that fails or is stopped is named.

pip and venv are played.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands for python3: `-m venv` makes an environment whose python is this script again, `-m pip
# install` logs its arguments and fails for a package named in $FAIL or where pip would install
# elsewhere. What $HANG names writes its process id down and waits for the file $LOG.go; like a
# Python program it ends on Ctrl-C by an exit status.
PLAYER = r"""#!/usr/bin/env bash
case "$*" in *stamp.py* | *lock.py*) exec "$REAL" "$@" ;; esac
echo "${*//$'\n'/ }" >>"$LOG"
[[ "$*" != *flash_attention.py* ]] || echo "$PWD" >"$LOG.in"
if [ -n "$HANG" ] && [[ "$*" == *"$HANG"* ]]; then
  trap 'exit 130' INT
  echo $$ >"$LOG.hangs"
  while [ ! -e "$LOG.go" ]; do sleep 0.05; done
fi
case "$*" in
  "-I -m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *_base_executable*) echo "$0" ;;
  *pinned.py*) echo "${*: -1}==9.9" ;;
  *ascend_pair.py*) echo "${ASCEND:-none}" ;;
  *09_flash_attention/"$FAIL_LESSON"*) [ -z "$FAIL_LESSON" ] ;;
  *purelib*) mkdir -p "${0%/*}/../lib" && echo "${0%/*}/../lib" ;;
  *pip*install*)
    [ -z "$PIP_TARGET$PIP_USER$PIP_PREFIX$PIP_ROOT$PIP_PYTHON" ] || exit 1
    for word in $FAIL; do case "$*" in *"$word"*) exit 1 ;; esac; done ;;
  *"import torch, numpy"*) exit ${UNLOADABLE:-0} ;;
  *sys.version_info*) exit ${OLD:-0} ;;
  *torch.zeros*) exit ${BLIND:-0} ;;
esac
"""


def heed_signals():
    """Undo what `nohup` and `&` hand down: bash can't trap what was ignored as it began."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """Start a script of a copy of the repository, or a path; the played python3 fills `log`."""
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "common").mkdir()
    shutil.copy(ROOT / "common" / "cann.py", tmp_path / "common")
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PLAYER)
    python.chmod(0o755)
    started = []

    def start(script, *arguments, cwd="/", **environment):
        path = script if "/" in script else tmp_path / "scripts" / script
        started.append(subprocess.Popen(
            ["bash", path, *arguments], cwd=cwd, text=True, start_new_session=True,
            preexec_fn=heed_signals,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
                 "LOG": str(tmp_path / "log"), "REAL": sys.executable, **environment}))
        return started[-1]

    yield start
    (tmp_path / "log.go").touch()
    for process in started:
        process.wait()


@pytest.fixture
def play(start, tmp_path):
    """Run a script to its end, as `start` does; return (process with stderr, lines of the log)."""

    def run(*call, **options):
        (tmp_path / "log").write_text("")
        process = start(*call, **options)
        process.stdout, process.stderr = process.communicate(timeout=30)
        return process, (tmp_path / "log").read_text().splitlines()

    return run


def hanging(tmp_path):
    """Wait until what $HANG names hangs; return its process id."""
    pid = tmp_path / "log.hangs"
    end = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < end, "nothing hangs"
        time.sleep(0.02)
    return int(pid.read_text())


def made(log, folder=".venv"):
    return sum(line.startswith("-I -m venv ") and line.endswith(f"/{folder}") for line in log)


def test_run_makes_a_venv_once_and_passes_its_arguments_on(play, tmp_path):
    done, log = play("run.sh", "--mode", "verify")
    assert done.returncode == 0, done.stderr
    assert any(f"-r {tmp_path}/requirements.txt -c {tmp_path}/constraints.txt" in line
               for line in log)
    assert log[-1] == (f"{tmp_path}/09_flash_attention/flash_attention.py --mode all --json "
                       f"{tmp_path}/results/flash_attention.json --mode verify")
    done, log = play("run.sh")
    assert len(log) == 1 and done.stderr == ""  # nothing but the program
    assert f"--plot {tmp_path}/results" in log[0]


@pytest.mark.parametrize("given", [("--json", "mine.json"), ("--json=mine.json",)])
def test_run_stays_in_the_callers_folder_and_leaves_out_a_default_that_is_replaced(
        play, tmp_path, given):
    there = tmp_path / "there"
    there.mkdir()
    _, log = play("run.sh", *given, "--plot", "here", cwd=there)
    assert (tmp_path / "log.in").read_text().strip() == str(there)
    assert log[-1].endswith("flash_attention.py --mode all " + " ".join(given) + " --plot here")


@pytest.mark.parametrize("script", ["run.sh", "test.sh", "setup.sh", "report_910b.sh",
                                    "gpu_check.sh", "compile.sh"])
def test_a_symlink_and_cdpath_lead_nowhere_else(play, tmp_path, script):
    other = tmp_path / "other"
    (other / "scripts").mkdir(parents=True)
    (other / "scripts" / "setup.sh").write_text("echo hijacked >&2; exit 3")
    (other / script).symlink_to(tmp_path / "scripts" / script)
    argument = ["hopper"] if script == "compile.sh" else []
    readlink = tmp_path / "bin" / "readlink"
    readlink.write_text("#!/bin/sh\nexit 1\n")  # macOS before 12.3: no readlink -f
    readlink.chmod(0o755)
    done, _ = play(f"scripts/{script}", *argument, cwd=tmp_path, CDPATH=str(other), BLIND="1")
    assert done.returncode == 0, done.stderr
    readlink.unlink()
    (tmp_path / ".venv" / "complete").unlink()
    done, log = play(f"other/{script}", *argument, cwd=tmp_path, BLIND="1")
    assert done.returncode == 0 and made(log), done.stderr
    assert not (other / ".venv").exists()


def test_test_runs_pytest_with_its_arguments(play):
    assert play("test.sh", "-k", "name")[1][-1] == "-m pytest -n 2 --dist loadfile -k name"


@pytest.mark.parametrize("word, step", [("torch", "install torch"), ("-r", "the other packages")])
def test_a_failed_step_is_named_and_its_venv_is_not_taken_for_a_whole_one(
        play, tmp_path, word, step):
    done, _ = play("setup.sh", FAIL=word)
    assert done.returncode != 0 and step in done.stderr.splitlines()[-1]
    assert done.stderr.count("failed at") == 1
    (tmp_path / ".venv" / "half").touch()
    done, log = play("setup.sh")
    assert done.returncode == 0 and made(log) and not (tmp_path / ".venv" / "half").exists()


def test_what_does_not_load_is_not_vouched_for(play):
    done, _ = play("setup.sh", UNLOADABLE="1")
    assert done.returncode != 0 and "failed at: import what was" in done.stderr.splitlines()[-1]
    assert made(play("setup.sh")[1])


def test_a_venv_whose_python_is_gone_or_is_not_the_wanted_one_is_made_anew(play, tmp_path):
    play("setup.sh")
    (tmp_path / ".venv/bin/python").unlink()
    done, log = play("run.sh")
    assert done.returncode == 0 and made(log)
    other = tmp_path / "bin" / "other"
    other.write_text(PLAYER.replace('exec "$REAL" "$@"', "echo of another kind; exit"))
    other.chmod(0o755)
    assert not made(play("setup.sh", PYTHON="python3")[1])
    assert made(play("setup.sh", PYTHON=str(other))[1])


def test_the_stamp_knows_for_which_python_extension_modules_were_built():
    code = ("import runpy, sysconfig; sysconfig.get_config_var = {'SOABI': 'cpython-399'}.get; "
            f"runpy.run_path({str(ROOT / 'scripts' / 'stamp.py')!r})")
    stamp = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert stamp.startswith("cpython-399 ")


def test_a_new_cann_makes_a_new_venv(play, tmp_path):
    info = tmp_path / "latest" / "x86_64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    counts = []
    for release in ("8.3.RC1", "8.3.RC1", "8.5.0"):
        info.write_text(f"version={release}\n")
        counts.append(made(play("setup.sh", ASCEND_HOME_PATH=str(tmp_path / "latest"))[1]))
    assert counts == [1, 0, 1]


def test_pips_variables_that_lead_elsewhere_are_not_followed(play):
    done, log = play("setup.sh", PIP_TARGET="t", PIP_USER="1", PIP_PREFIX="p", PIP_ROOT="r",
                     PIP_PYTHON="python2")
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("-I -m pip") for line in log if "pip install" in line)


def test_the_second_of_two_set_ups_waits_and_says_so(start, tmp_path):
    first = start("setup.sh", HANG="-m venv")
    hanging(tmp_path)
    second = start("setup.sh")
    said = ""
    while "wait for another set-up of .venv" not in said:
        line = second.stderr.readline()
        assert line, said
        said += line
    (tmp_path / "log.go").touch()
    assert (first.wait(30), second.wait(30)) == (0, 0)
    assert made((tmp_path / "log").read_text().splitlines()) == 1


def test_a_set_up_that_was_killed_blocks_only_while_what_it_started_runs(start, tmp_path):
    first = start("setup.sh", HANG="-m venv")
    hanging(tmp_path)
    first.kill()
    second = start("setup.sh")
    while "wait for another" not in second.stderr.readline():
        assert second.poll() is None
    (tmp_path / "log.go").touch()
    assert second.wait(30) == 0
    assert made((tmp_path / "log").read_text().splitlines()) == 2


@pytest.mark.parametrize("script, hang, step", [
    ("run.sh", "-m venv", "setup: stopped at: make .venv"),
    ("run.sh", "torch==", "setup: stopped at: install torch"),
    ("report_910b.sh", "articles.py", "report: stopped at: articles"),
])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_says_at_which_step_and_ends_what_was_started(
        start, tmp_path, script, hang, step, number):
    process = start(script, HANG=hang)
    pid = hanging(tmp_path)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == step
    assert hang in (tmp_path / "log").read_text().splitlines()[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_old_python_is_refused(play):
    done, log = play("setup.sh", OLD="1")
    assert done.returncode != 0 and "3.9 or newer" in done.stderr
    assert not made(log)


needs_no_gpu = pytest.mark.skipif(
    sys.platform != "linux" or bool(shutil.which("nvidia-smi")), reason="takes the plain build")


@needs_no_gpu
def test_the_cpu_build_is_tried_first_where_there_is_no_gpu(play):
    done, log = play("setup.sh")
    assert [line.split()[-1] for line in log if "torch==9.9" in line] == ["torch==9.9+cpu"]
    assert "no CPU build" not in done.stderr


@needs_no_gpu
def test_the_plain_build_of_torch_is_announced_before_it_is_fetched(play):
    done, _ = play("setup.sh", FAIL="torch==")
    assert "plain build" in done.stderr and "no CPU build was found" in done.stderr
    done, log = play("setup.sh", FAIL="+cpu")
    assert done.returncode == 0
    assert [line.split()[-1] for line in log if "torch==9.9" in line][-1] == "torch==9.9"


def test_the_report_runs_each_lesson_on_the_card_and_packs_what_came_out(play, tmp_path):
    done, log = play("report_910b.sh", "npu:1", FAIL_LESSON="flash_decoding.py")
    assert done.returncode == 0, done.stderr
    ran = [line for line in log if line.startswith(f"{tmp_path}/09_flash_attention/")]
    lessons = {Path(line.split()[0]).name for line in ran}
    assert lessons == {
        "flash_attention.py", "fast_tiles.py", "articles.py", "cross_reference.py", "roofline.py",
        "generations.py", "lazy_rescale.py", "approximate.py", "judge_kernel.py",
        "flash_variants.py", "flash_decoding.py", "flash_pages.py", "flash_backward.py",
        "mini_gpt.py", "small_attention.py", "safe_softmax.py"}
    results = tmp_path / "results"
    assert all(f"--device npu:1 --json {results}/report_910b/" in line for line in ran)
    archive = results / "report_910b.tar.gz"
    names = subprocess.run(["tar", "-tf", archive], capture_output=True, text=True).stdout
    assert "report_910b/machine.txt" in names and "report_910b/articles.txt" in names
    summary = (results / "report_910b/summary.txt").read_text().splitlines()
    assert "decoding: exit status 1" in summary and len(summary) == len(ran)
    assert {path.name for path in results.iterdir()} == {"report_910b", "report_910b.tar.gz"}


def test_a_chosen_ascend_pair_is_installed_without_the_pins_of_other_machines(play):
    _, log = play("setup.sh", ASCEND="torch==2.4.0 torch_npu==2.4.0.post2")
    installs = [line for line in log if "pip install" in line]
    assert any("torch==2.4.0+cpu" in line for line in installs)
    assert any("torch_npu==2.4.0.post2" in line for line in installs)
    assert not any("constraints.txt" in line for line in installs)


def test_a_matching_ascend_pair_is_seen_and_not_touched(play, tmp_path):
    _, log = play("setup.sh", ASCEND="keep\n/opt/site-packages\n/home/a b")
    installs = [line.split()[-2:] for line in log if "pip install" in line]
    assert installs == [["-r", f"{tmp_path}/requirements.txt"]]
    assert (tmp_path / ".venv/lib/kept.pth").read_text() == "/opt/site-packages\n/home/a b\n"


def test_triton_is_installed_beside_a_cpu_build_of_torch(play):
    _, log = play("setup.sh")
    assert any(line.endswith("triton==9.9") for line in log) == (sys.platform == "linux")


def test_the_910b_compilers_have_an_environment_of_their_own_made_once(play, tmp_path):
    done, log = play("compile.sh", "910b", "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    assert made(log, ".venv-910b") and not (tmp_path / ".venv").exists()
    assert any(line.endswith("--no-deps triton_ascend==3.2.0") for line in log)
    folders = [f"{tmp_path}/.venv-910b/ascendnpu-ir-{n}" for n in ("1.0.0", "1.1.0", "1.2.0")]
    for folder in folders:
        package = folder.rpartition("/")[2].replace("ir-", "ir==")
        assert any(line.endswith(f"--no-deps --target {folder} {package}") for line in log)
    assert log[-1] == (f"{tmp_path}/09_flash_attention/chips/compile_kernel.py 910b --compilers "
                       f"{' '.join(folders)} --dtype float16")
    assert play("compile.sh", "910b", "--dtype", "float16")[1] == log[-1:]


def test_the_910b_compilers_need_python_3_10_or_3_11_and_say_which_step_failed(play):
    done, log = play("compile.sh", "910b", OLD="1")
    assert done.returncode != 0 and "3.10 or 3.11" in done.stderr and not made(log, ".venv-910b")
    done, _ = play("compile.sh", "910b", FAIL="triton_ascend")
    assert done.returncode != 0 and "failed at: install triton-ascend" in done.stderr
    assert made(play("compile.sh", "910b")[1], ".venv-910b")


def test_hopper_is_compiled_for_in_the_common_environment(play):
    _, log = play("compile.sh", "hopper", "--head-dim", "64")
    assert made(log)
    assert log[-1].endswith("09_flash_attention/chips/compile_kernel.py hopper --head-dim 64")


@pytest.mark.parametrize("arguments", [[], ["910c"], ["--dtype", "float16"]])
def test_another_chip_is_refused_in_one_line(play, arguments):
    done, log = play("compile.sh", *arguments)
    assert done.returncode == 2 and log == []
    assert done.stderr.count("\n") == 1 and "910b or hopper" in done.stderr


def test_gpu_check_takes_a_python_that_sees_a_gpu_and_else_makes_a_venv(play, tmp_path):
    done, log = play("gpu_check.sh", "--device", "cuda:1")
    assert done.returncode == 0
    assert log[-1] == (f"{tmp_path}/09_flash_attention/chips/gpu_check.py --folder "
                       f"{tmp_path}/results/gpu_check --device cuda:1")
    assert not made(log)
    assert made(play("gpu_check.sh", BLIND="1")[1])


def test_changed_requirements_make_a_new_venv(play, tmp_path):
    play("setup.sh")
    (tmp_path / "requirements.txt").write_text("torch\n")
    assert made(play("setup.sh")[1])
