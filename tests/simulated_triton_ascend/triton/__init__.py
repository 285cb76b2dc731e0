"""It looks like triton-ascend 3.2.0 and runs no kernel, for tests of what happens where one fails.

Put this folder's parent on PYTHONPATH. SIMULATED_TRITON_TILE is the largest Br * Bc that "fits".
"""

from triton import backends, language, runtime
from triton.runtime import JITFunction

__version__ = "3.2.0"
__all__ = ["JITFunction", "backends", "cdiv", "jit", "language", "next_power_of_2", "runtime"]


def jit(kernel=None, **options):
    return JITFunction(kernel) if kernel else JITFunction


def cdiv(x, y):
    return -(-x // y)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length()
