"""Print what constraints.txt pins a package to for this Python: pinned.py torch -> torch==2.13.0"""

import sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

for line in (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines():
    pin = Requirement(line)
    if pin.name == sys.argv[1] and (pin.marker is None or pin.marker.evaluate()):
        print(f"{pin.name}{pin.specifier}")
