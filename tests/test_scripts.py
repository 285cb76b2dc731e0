"""scripts/: a .venv is whole or made anew, and a failed step is named. pip and venv are played."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands for python3: `-m venv` makes a .venv whose python is this script again, `-m pip install`
# logs its arguments and fails for a package named in $FAIL.
PLAYER = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *pinned.py*) echo torch==9.9 ;;
  *pip*install*) for word in $FAIL; do case "$*" in *"$word"*) exit 1 ;; esac; done ;;
  *sys.version_info*) exit ${OLD:-0} ;;
esac
"""


@pytest.fixture
def play(tmp_path):
    """Run a script of a copy of the repository with a played python3; return (process, log)."""
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PLAYER)
    python.chmod(0o755)

    def run(script, *arguments, **environment):
        log = tmp_path / "log"
        log.write_text("")
        environment = {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "LOG": str(log),
            "HOME": str(tmp_path),
            **environment,
        }
        done = subprocess.run(
            ["bash", str(tmp_path / "scripts" / script), *arguments],
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done, log.read_text().splitlines()

    return run


def test_run_makes_a_venv_once_and_passes_its_arguments_on(play):
    done, log = play("run.sh", "--mode", "verify")
    assert done.returncode == 0, done.stderr
    assert any("-r requirements.txt -c constraints.txt" in line for line in log)
    assert log[-1].startswith("09_flash_attention/flash_attention.py --mode all --json results/")
    assert log[-1].endswith("--mode verify")
    done, log = play("run.sh")
    assert len(log) == 1 and done.stderr == ""  # nothing but the program


def test_test_runs_pytest_with_its_arguments(play):
    assert play("test.sh", "-k", "name")[1][-1] == "-m pytest -k name"


@pytest.mark.parametrize("word, step", [("torch", "install torch"), ("-r", "the other packages")])
def test_a_failed_step_is_named_and_its_venv_is_not_taken_for_a_whole_one(play, word, step):
    done, _ = play("setup.sh", FAIL=word)
    assert done.returncode != 0 and step in done.stderr.splitlines()[-1]
    done, log = play("setup.sh")
    assert done.returncode == 0 and "-m venv .venv" in log


def test_an_old_python_is_refused(play):
    done, log = play("setup.sh", OLD="1")
    assert done.returncode != 0 and "3.9 or newer" in done.stderr
    assert "-m venv .venv" not in log


def test_the_cpu_build_is_tried_first_where_there_is_no_gpu(play):
    if shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU")
    _, log = play("setup.sh")
    assert sum("torch==9.9" in line for line in log) == 1 and any(
        "torch==9.9+cpu" in line for line in log
    )
    _, log = play("setup.sh", FAIL="+cpu", PYTHON="python3")
    assert log == []  # whole already


def test_torch_falls_back_to_the_plain_build(play):
    done, log = play("setup.sh", FAIL="+cpu")
    assert done.returncode == 0
    assert [line.split()[-1] for line in log if "torch==9.9" in line][-1] == "torch==9.9"


def test_changed_requirements_make_a_new_venv(play, tmp_path):
    play("setup.sh")
    (tmp_path / "requirements.txt").write_text("torch\n")
    assert "-m venv .venv" in play("setup.sh")[1]
