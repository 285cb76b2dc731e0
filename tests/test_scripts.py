"""scripts/: a .venv is whole or made anew, a failed step is named, Ascend's pair is chosen.

pip, venv and CANN are played.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands for python3: `-m venv` makes a .venv whose python is this script again, `-m pip install`
# logs its arguments and fails for a package named in $FAIL.
PLAYER = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *pinned.py*) echo "${*: -1}==9.9" ;;
  *ascend_pair.py*) echo "${ASCEND:-none}" ;;
  09_flash_attention/"$FAIL_LESSON"*) [ -z "$FAIL_LESSON" ] ;;
  *purelib*) mkdir -p .venv/lib && echo .venv/lib ;;
  *find_spec*) echo /opt/site-packages ;;
  *pip*install*) for word in $FAIL; do case "$*" in *"$word"*) exit 1 ;; esac; done ;;
  *sys.version_info*) exit ${OLD:-0} ;;
  *torch.zeros*) exit ${BLIND:-0} ;;
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
    assert play("test.sh", "-k", "name")[1][-1] == "-m pytest -n 2 --dist loadfile -k name"


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
    assert [line.split()[-1] for line in log if "torch==9.9" in line] == ["torch==9.9+cpu"]


def test_torch_falls_back_to_the_plain_build(play):
    done, log = play("setup.sh", FAIL="+cpu")
    assert done.returncode == 0
    assert [line.split()[-1] for line in log if "torch==9.9" in line][-1] == "torch==9.9"


def test_the_report_runs_each_lesson_on_the_card_and_packs_what_came_out(play, tmp_path):
    done, log = play("report_910b.sh", "npu:1", FAIL_LESSON="flash_decoding.py")
    assert done.returncode == 0, done.stderr
    ran = [line for line in log if line.startswith("09_flash_attention/")]
    lessons = {line.split()[0].split("/")[1] for line in ran}
    here = {p.name for p in (ROOT / "09_flash_attention").glob("*.py")}
    assert lessons | {"compile_kernel.py", "gpu_check.py"} == {
        name for name in here
        if "cli.serve(main)" in (ROOT / "09_flash_attention" / name).read_text()}
    assert all("--device npu:1" in line and "--json results/report_910b/" in line for line in ran)
    archive = tmp_path / "results" / "report_910b.tar.gz"
    names = subprocess.run(["tar", "-tf", archive], capture_output=True, text=True).stdout
    assert "report_910b/machine.txt" in names and "report_910b/articles.txt" in names
    summary = (tmp_path / "results/report_910b/summary.txt").read_text().splitlines()
    assert "decoding: exit status 1" in summary and len(summary) == len(ran)


def test_a_chosen_ascend_pair_is_installed_without_the_pins_of_other_machines(play):
    _, log = play("setup.sh", ASCEND="torch==2.4.0 torch_npu==2.4.0.post2")
    installs = [line for line in log if "pip install" in line]
    assert any("torch==2.4.0+cpu" in line for line in installs)
    assert any("torch_npu==2.4.0.post2" in line for line in installs)
    assert not any("constraints.txt" in line for line in installs)


def test_a_matching_ascend_pair_is_seen_and_not_touched(play, tmp_path):
    _, log = play("setup.sh", ASCEND="keep")
    installs = [line.split()[-2:] for line in log if "pip install" in line]
    assert installs == [["-r", "requirements.txt"]]
    assert (tmp_path / ".venv/lib/kept.pth").read_text() == "/opt/site-packages\n"


def pair(tmp_path, release=None, smi=False, **packages):
    """Run ascend_pair.py under a faked CANN and faked installed packages."""
    site, bin_ = tmp_path / "site", tmp_path / "bin"
    bin_.mkdir(parents=True)
    for name, version in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    if release:
        info = tmp_path / "latest" / "x86_64-linux" / "ascend_toolkit_install.info"
        info.parent.mkdir(parents=True)
        info.write_text(f"version={release}\n")
    if smi:
        (bin_ / "npu-smi").write_text("#!/bin/sh\n")
        (bin_ / "npu-smi").chmod(0o755)
    environment = {"PATH": str(bin_), "PYTHONPATH": str(site),
                   "ASCEND_HOME_PATH": str(tmp_path / "latest")}
    # -S: without this Python's own packages, where a torch lies
    done = subprocess.run([sys.executable, "-S", str(ROOT / "scripts" / "ascend_pair.py")],
                          env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr


for_python_3_9_to_3_11 = pytest.mark.skipif(
    sys.version_info[1] not in (9, 10, 11), reason="these torch_npu are for Python 3.9 to 3.11")


@for_python_3_9_to_3_11
@pytest.mark.parametrize("release, torch, torch_npu", [
    ("8.0.1", "2.4.0", "2.4.0.post2"),  # the article's machine
    ("8.0.0", "2.4.0", "2.4.0.post2"),
    ("8.0.RC3", "2.4.0", "2.4.0"),
    ("8.1.RC1", "2.5.1", "2.5.1"),
    ("8.2.RC1", "2.6.0", "2.6.0"),
])
def test_the_pair_follows_the_cann_release(tmp_path, release, torch, torch_npu):
    code, chosen, why = pair(tmp_path, release)
    assert (code, chosen) == (0, f"torch=={torch} torch_npu=={torch_npu}")
    assert f"CANN {release}" in why and torch_npu in why


def test_an_installed_pair_that_matches_is_kept_whatever_the_release(tmp_path):
    for release in ("8.0.1", "99.0"):
        code, chosen, why = pair(tmp_path / release, release, torch="2.1.0+cpu",
                                 torch_npu="2.1.0.post17")
        assert (code, chosen) == (0, "keep") and "2.1.0.post17" in why


@for_python_3_9_to_3_11
def test_an_installed_pair_that_does_not_match_is_not_kept(tmp_path):
    assert pair(tmp_path, "8.1.RC1", torch="2.4.0", torch_npu="2.5.1")[1].startswith("torch==2.5.1")


def test_an_unknown_release_or_none_stops_with_what_to_do(tmp_path):
    code, chosen, why = pair(tmp_path / "a", "99.1")
    assert (code, chosen) == (2, "") and "CANN 99.1 is not in the table" in why
    code, chosen, why = pair(tmp_path / "b", smi=True)
    assert (code, chosen) == (2, "") and "no CANN" in why and "set_env.sh" in why


def test_off_ascend_there_is_no_pair(tmp_path):
    assert pair(tmp_path) == (0, "none", "")


def test_triton_is_installed_beside_a_cpu_build_of_torch(play):
    _, log = play("setup.sh")
    assert any(line.endswith("triton==9.9") for line in log) == (sys.platform == "linux")


def test_the_910b_compiler_has_an_environment_of_its_own_made_once(play, tmp_path):
    done, log = play("compile_910b.sh", "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    assert f"-m venv {tmp_path}/.venv-910b" in log and not (tmp_path / ".venv").exists()
    assert any("--no-deps triton_ascend==3.2.0 ascendnpu-ir==1.2.0" in line for line in log)
    command = f"{tmp_path}/09_flash_attention/compile_kernel.py 910b --dtype float16"
    assert log[-1] == command
    assert play("compile_910b.sh", "--dtype", "float16")[1] == [command]


def test_the_910b_compiler_needs_python_3_10_or_3_11_and_says_which_step_failed(play, tmp_path):
    done, log = play("compile_910b.sh", OLD="1")
    assert done.returncode != 0 and "3.10 or 3.11" in done.stderr and len(log) == 1
    done, _ = play("compile_910b.sh", FAIL="triton_ascend")
    assert done.returncode != 0 and "failed at: install triton-ascend" in done.stderr
    assert f"-m venv {tmp_path}/.venv-910b" in play("compile_910b.sh")[1]


def test_gpu_check_takes_a_python_that_sees_a_gpu_and_else_makes_a_venv(play, tmp_path):
    done, log = play("gpu_check.sh", "--folder", "x")
    assert done.returncode == 0
    assert log[-1] == f"{tmp_path}/09_flash_attention/gpu_check.py --folder x"
    assert "-m venv .venv" not in log
    assert "-m venv .venv" in play("gpu_check.sh", BLIND="1")[1]


def test_changed_requirements_make_a_new_venv(play, tmp_path):
    play("setup.sh")
    (tmp_path / "requirements.txt").write_text("torch\n")
    assert "-m venv .venv" in play("setup.sh")[1]
