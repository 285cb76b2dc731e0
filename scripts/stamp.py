"""Print what an environment rests on: the kind of this Python, CANN's release, and files' sums."""

import sys
import sysconfig
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cann

sums = (zlib.crc32(Path(file).read_bytes()) for file in sys.argv[1:])
print(sysconfig.get_config_var("SOABI"), cann.release(), *sums)
