"""Triton's interpreter runs the kernel in these tests; it has to be asked before Triton loads."""

import os

os.environ["TRITON_INTERPRET"] = "1"
