"""Choose torch and torch_npu for this machine's CANN. Standard library only.

Prints 'none' off Ascend, 'keep' where an installed torch and torch_npu match, else the two
requirements to install. Says on stderr what it chose and why. Exit 2 where nothing fits.
"""

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cann

# From the README inside the torch_npu 2.13.0 wheel: CANN release -> torch_npu, best first. The
# torch that belongs to torch_npu X.Y.Z.anything is X.Y.Z.
TORCH_NPU = {
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3.RC1": ("2.8.0", "2.7.1", "2.6.0.post3", "2.1.0.post17"),
    "8.2.RC1": ("2.6.0", "2.5.1.post1", "2.1.0.post13"),
    "8.1.RC1": ("2.5.1", "2.4.0.post4", "2.3.1.post6", "2.1.0.post12"),
    "8.0.0": ("2.4.0.post2", "2.3.1.post4", "2.1.0.post10"),
    "8.0.RC3": ("2.4.0", "2.3.1.post2", "2.1.0.post8"),
    "8.0.RC2": ("2.3.1", "2.2.0.post2", "2.1.0.post6"),
    "8.0.RC1": ("2.2.0", "2.1.0.post4"),
    "7.0.0": ("2.1.0",),
}
# Its other table: the Python versions, 3.x, of each torch.
PYTHON = {
    "2.1.0": range(8, 12), "2.2.0": range(8, 11), "2.3.1": range(8, 12), "2.4.0": range(8, 12),
    "2.5.1": range(9, 12), "2.6.0": range(9, 12), "2.7.1": range(9, 12), "2.8.0": range(9, 12),
    "2.9.0": range(10, 13),
}


def main():
    release = cann.release()
    if release is None and not shutil.which("npu-smi"):
        return "none"
    torch, torch_npu = installed("torch"), installed("torch_npu")
    if torch and torch_npu and torch_of(torch) == torch_of(torch_npu):
        say(f"torch {torch} and torch_npu {torch_npu} are installed and match: kept as they are")
        return "keep"
    if release is None:
        refuse(f"npu-smi is here but no CANN in {cann.PLACES[0]}: install CANN, or source its "
               "set_env.sh if it lies elsewhere")
    row = release if release in TORCH_NPU else patch_of(release)
    if row not in TORCH_NPU:
        refuse(f"CANN {release} is not in the table of torch_npu 2.13.0 (known: "
               f"{', '.join(TORCH_NPU)}): install a torch and torch_npu that match, then run again")
    minor = sys.version_info[1]
    fitting = [npu for npu in TORCH_NPU[row] if minor in PYTHON[torch_of(npu)]]
    if not fitting:
        refuse(f"CANN {release} has no torch_npu for Python 3.{minor}: set PYTHON to another one")
    chosen = fitting[0]
    say(f"CANN {release}, as {row}, and Python 3.{minor}: torch {torch_of(chosen)} with torch_npu "
        f"{chosen}, the newest of {', '.join(TORCH_NPU[row])} that this Python has")
    return f"torch=={torch_of(chosen)} torch_npu=={chosen}"


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_of(release):
    """'2.4.0' for '2.4.0.post2', '2.4.0+cpu' or '2.4.0rc1'."""
    return re.match(r"\d+\.\d+\.\d+", release).group()


def patch_of(release):
    """'8.0.0' for '8.0.1' and '8.0.0.alpha': a patch takes what its first release takes."""
    found = re.match(r"(\d+\.\d+)\.\d+", release)
    return f"{found.group(1)}.0" if found else None


def say(text):
    print(f"setup: {text}", file=sys.stderr)


def refuse(text):
    say(text)
    sys.exit(2)


if __name__ == "__main__":
    print(main())
