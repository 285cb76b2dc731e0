"""The same loop in C, under a simulated cache: valgrind counts what is read from memory."""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.cli import Refused
from lab.traffic import square_tile, traffic

LINE = 64  # bytes
SOURCE = Path(__file__).with_name("loops.c")


@dataclass
class CacheRow:
    """Bytes read by loops.c under a simulated cache, and by the formula, which adds O's own read:
    a cache fetches a line before it changes it.
    """

    N: int
    memory: int
    B: int
    read: int
    formula_read: int


def cachegrind(N, d, memories):
    """Return a CacheRow for each size of the cache. Raises Refused without valgrind or compiler."""
    rows = []
    for memory in memories:
        B = min(square_tile(memory // 4, d), N)
        read = sum(p.read for p in traffic("FA2", N, d, B, B)) + N * d
        rows.append(CacheRow(N, memory, B, read_in_c(N, d, B, memory), round(4 * read)))
    return rows


def compiler():
    """Return the C compiler. Raises Refused without one, or without valgrind."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not found or not shutil.which("valgrind"):
        raise Refused("--cachegrind needs valgrind and a C compiler: "
                      "apt-get install valgrind gcc libc6-dev")
    return found


def read_in_c(N, d, B, memory):
    """Return the bytes that loops.c reads into a cache of `memory` bytes, its last level.

    What starting up and filling Q, K and V read is taken off. memory: 1 KiB times a power of 2.
    Raises Refused without valgrind or a C compiler.
    """
    watch = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null",
             f"--LL={memory},16,{LINE}", f"--D1=8192,8,{LINE}", f"--I1=32768,8,{LINE}"]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "loops"
        run([compiler(), "-O2", "-o", program, SOURCE, "-lm"])
        before, after = (read_misses(run([*watch, program, N, d, tile])) for tile in (0, B))
    return (after - before) * LINE


def read_misses(said):
    """Return the read misses of the last level that cachegrind reports."""
    return int(re.search(r"LLd misses:.*\(\s*([\d,]+) rd", said).group(1).replace(",", ""))


def run(command):
    """Return what a command says on stderr; raises Refused with its last line where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Refused(f"{Path(command[0]).name} failed with {done.returncode}: {said}")
    return done.stderr
