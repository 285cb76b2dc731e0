"""ascend_pair.py: the torch and torch_npu of each CANN and Python, or one line why none fits."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pair(tmp_path, release=None, smi=False, **packages):
    """Run ascend_pair.py under a faked CANN and faked installed packages."""
    site, bin_ = tmp_path / "site", tmp_path / "bin"
    bin_.mkdir(parents=True)
    for name, version in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
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


here = f"3.{sys.version_info[1]}"


@pytest.mark.parametrize("release, pairs", [  # {Python: torch_npu}
    ("8.0.1", {"3.9 3.10 3.11": "2.4.0.post2"}),  # the article's machine
    ("8.0.0", {"3.9 3.10 3.11": "2.4.0.post2"}),
    ("8.0.RC3", {"3.9 3.10 3.11": "2.4.0"}),
    ("8.0.RC2", {"3.9 3.10": "2.3.1"}),
    ("8.1.RC1", {"3.9 3.10 3.11": "2.5.1"}),
    ("8.2.RC1", {"3.9 3.10 3.11": "2.6.0"}),
    ("8.2.RC2", {"3.9 3.10 3.11": "2.6.0"}),
    ("8.3.RC1", {"3.9 3.10 3.11": "2.8.0"}),
    ("8.5.0", {"3.9 3.10 3.11 3.12": "2.7.1.post2"}),  # the pair of triton-ascend 3.2.0
    ("9.0.0", {"3.9": "2.8.0.post4", "3.10 3.11 3.12 3.13": "2.9.0.post2"}),
    ("9.1.0", {"3.9": "2.7.1.post8", "3.10 3.11 3.12 3.13": "2.12.0"}),
    ("9.1.0-beta.1", {"3.9": "2.7.1.post8", "3.10 3.11 3.12 3.13": "2.12.0"}),
])
def test_the_pair_follows_the_cann_release_and_the_python(tmp_path, release, pairs):
    code, chosen, why = pair(tmp_path, release)
    torch_npu = next((npu for pythons, npu in pairs.items() if here in pythons.split()), None)
    if torch_npu is None:
        assert (code, chosen) == (2, "") and "set PYTHON" in why
        return
    assert (code, chosen) == (0, f"torch=={torch_npu.split('.post')[0]} torch_npu=={torch_npu}")
    assert f"CANN {release}" in why and torch_npu in why and "warning" not in why


def test_an_installed_pair_that_matches_is_kept_whatever_the_release(tmp_path):
    for release in ("8.0.1", "99.0"):
        code, chosen, why = pair(tmp_path / release, release, torch="2.1.0+cpu",
                                 torch_npu="2.1.0.post17")
        assert (code, chosen) == (0, f"keep\n{tmp_path / release / 'site'}")
        assert "2.1.0.post17" in why


def test_an_installed_pair_that_does_not_match_is_not_kept(tmp_path):
    assert "keep" not in pair(tmp_path, "9.1.0", torch="2.4.0", torch_npu="2.5.1")[1]


@pytest.mark.parametrize("release, last", [("99.1", "9.1.0"), ("9.2.0", "9.1.0"),
                                           ("8.6.1", "8.5.0")])
def test_an_unknown_newer_release_takes_the_last_known_pair_and_says_so(tmp_path, release, last):
    known = pair(tmp_path / "known", last)[:2]
    code, chosen, why = pair(tmp_path / "new", release)
    assert (code, chosen) == known
    assert f"warning: no torch_npu is known for CANN {release}; that of CANN {last}" in why


def test_a_release_before_all_known_ones_or_none_stops_with_what_to_do(tmp_path):
    for release in ("6.3.RC2", "unreadable"):
        code, chosen, why = pair(tmp_path / release, release)
        assert (code, chosen) == (2, "") and f"no torch_npu is known for CANN {release}" in why
    code, chosen, why = pair(tmp_path / "b", smi=True)
    assert (code, chosen) == (2, "") and "no CANN" in why and "set_env.sh" in why


def test_off_ascend_there_is_no_pair(tmp_path):
    assert pair(tmp_path) == (0, "none", "")
