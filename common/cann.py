"""Find CANN, Ascend's toolkit, and its release. Standard library only: setup comes before torch."""

import os
import re
from pathlib import Path

PLACES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")


def toolkit():
    """Return the toolkit's folder: where set_env.sh says, else the usual place, or None."""
    named = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    places = [Path(place) for place in ([named] if named else PLACES)]
    return next((place for place in places if place.is_dir()), None)


def set_env():
    """Return the path of CANN's set_env.sh: in the toolkit's folder, else in the one above it."""
    folder = toolkit() or Path(PLACES[0])
    inside = folder / "set_env.sh"
    return inside if inside.exists() else folder.parent / "set_env.sh"


def release():
    """Return CANN's release, such as '8.0.RC3' or '8.0.1', or None where there is no CANN."""
    infos = toolkit().glob("*-linux/ascend_toolkit_install.info") if toolkit() else ()
    for info in sorted(infos):
        found = re.search(r"^version=(\S+)", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return None
