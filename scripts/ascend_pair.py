"""Choose torch and torch_npu for this machine's CANN. Standard library only.

Prints 'none' off Ascend; 'keep', and the folders where they lie, where an installed torch and
torch_npu match; else the two requirements to install. Says on stderr what it chose and why. Exit 2
where nothing fits.
"""

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cann

# CANN release -> torch_npu, best first, with the oldest and the newest Python 3.x that has a wheel.
# From COMPATIBILITY.en.md of github.com/Ascend/pytorch and the wheels on PyPI. The torch that
# belongs to torch_npu X.Y.Z.anything is X.Y.Z. With 8.5.0, 2.7.1 is the best: triton-ascend 3.2.0
# is made for these two, and nothing here needs a newer torch.
TORCH_NPU = {
    "9.1.0": {"2.12.0": (10, 13), "2.11.0": (10, 13), "2.10.0.post4": (10, 13),
              "2.9.0.post6": (10, 13), "2.7.1.post8": (9, 13)},
    "9.0.0": {"2.9.0.post2": (10, 13), "2.8.0.post4": (9, 13), "2.7.1.post4": (9, 13)},
    "8.5.0": {"2.7.1.post2": (9, 12), "2.9.0": (10, 12), "2.8.0.post2": (9, 12),
              "2.6.0.post5": (9, 12)},
    "8.3.RC1": {"2.8.0": (9, 11), "2.7.1": (9, 11), "2.6.0.post3": (9, 11),
                "2.1.0.post17": (9, 11)},
    "8.2.RC1": {"2.6.0": (9, 11), "2.5.1.post1": (9, 11), "2.1.0.post13": (9, 11)},
    "8.1.RC1": {"2.5.1": (9, 11), "2.4.0.post4": (9, 11), "2.3.1.post6": (9, 11),
                "2.1.0.post12": (9, 11)},
    "8.0.0": {"2.4.0.post2": (9, 11), "2.3.1.post4": (9, 11), "2.1.0.post10": (9, 11)},
    "8.0.RC3": {"2.4.0": (9, 11), "2.3.1.post2": (9, 11), "2.1.0.post8": (9, 11)},
    "8.0.RC2": {"2.3.1": (9, 10), "2.2.0.post2": (9, 10), "2.1.0.post6": (9, 10)},
    "8.0.RC1": {"2.2.0": (9, 10)},
    "7.0.0": {"2.1.0": (9, 10)},
}


def main():
    release = cann.release()
    if release is None and not shutil.which("npu-smi"):
        return "none"
    torch, torch_npu = installed("torch"), installed("torch_npu")
    if torch and torch_npu and torch_of(torch) == torch_of(torch_npu):
        say(f"torch {torch} and torch_npu {torch_npu} are installed and match: kept as they are")
        folders = [Path(find_spec(name).origin).parents[1] for name in ("torch", "torch_npu")]
        return "\n".join(map(str, dict.fromkeys(["keep", *folders])))
    if release is None:
        refuse(f"npu-smi is here but no CANN in {' or '.join(cann.PLACES)}: install CANN, or "
               "source its set_env.sh if it lies elsewhere")
    chosen = pair_of(release)
    return f"torch=={torch_of(chosen)} torch_npu=={chosen}"


def pair_of(release):
    """Return the torch_npu for a CANN release and this Python. An unknown one takes what the known
    one before it takes."""
    known = next((known for known in TORCH_NPU if order(known) <= order(release)), None)
    if known is None:
        refuse(f"no torch_npu is known for CANN {release} (known: {', '.join(TORCH_NPU)}): install "
               "a torch and torch_npu that match, then run again")
    if order(known)[:2] != order(release)[:2]:
        say(f"warning: no torch_npu is known for CANN {release}; that of CANN {known}, the newest "
            "known before it, is tried")
    pythons, minor = TORCH_NPU[known], sys.version_info[1]
    fitting = [npu for npu, (oldest, newest) in pythons.items() if oldest <= minor <= newest]
    if not fitting:
        oldest, newest = min(p[0] for p in pythons.values()), max(p[1] for p in pythons.values())
        refuse(f"CANN {release} has torch_npu for Python 3.{oldest} to 3.{newest}, not for "
               f"3.{minor}: set PYTHON to one of them")
    say(f"CANN {release}, as {known}, and Python 3.{minor}: torch_npu {fitting[0]} and its torch, "
        f"the first of {', '.join(pythons)} that this Python has")
    return fitting[0]


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_of(release):
    """'2.4.0' for '2.4.0.post2', '2.4.0+cpu' or '2.4.0rc1'."""
    return re.match(r"\d+\.\d+\.\d+", release).group()


def order(release):
    """A key that sorts CANN's releases: 8.0.RC3, then 8.0.0 and its alphas, then 8.0.1."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(RC)?(\d+))?", release)
    if not found:
        return (0,)
    major, minor, candidate, patch = found.groups()
    return int(major), int(minor), not candidate, int(patch or 0)


def say(text):
    print(f"setup: {text}", file=sys.stderr)


def refuse(text):
    say(text)
    sys.exit(2)


if __name__ == "__main__":
    print(main())
