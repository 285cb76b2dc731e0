"""Find CANN, Ascend's toolkit, and its release. Standard library only: setup runs before torch is there."""

import os
import re
from pathlib import Path

PLACES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")


def toolkit():
    """Return the folder of the toolkit: where set_env.sh says, else the first usual place that exists, else None."""
    named = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    return next((Path(place) for place in ([named] if named else PLACES) if Path(place).is_dir()), None)


def set_env():
    """Return the path of CANN's set_env.sh: in the toolkit's folder or the one above it, else the usual path."""
    folder = toolkit() or Path(PLACES[0])
    return next((f / "set_env.sh" for f in (folder, folder.parent) if (f / "set_env.sh").exists()),
                folder.parent / "set_env.sh")


def release():
    """Return CANN's release, such as '8.0.RC3' or '8.0.1', or None where there is no CANN."""
    for info in sorted(toolkit().glob("*-linux/ascend_toolkit_install.info")) if toolkit() else ():
        found = re.search(r"^version=(\S+)", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return None
