"""Lock the open file 9: lock.py now|wait. Exit 1 where another holds it and `now` was said.

flock(1), which macOS lacks. The lock belongs to the open file, so it outlives this program and ends
with the last process that has the file open.
"""

import fcntl
import sys

try:
    fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1] == "now" else 0))
except BlockingIOError:
    sys.exit(1)
except OSError:
    pass  # a file system without locks
