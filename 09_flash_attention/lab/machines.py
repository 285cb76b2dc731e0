"""Chips as data, this machine measured the same way, and the time that a roofline allows."""

from dataclasses import dataclass

import torch

from common.timing import square_matmul, time_in_turn
from lab.bench import need_room
from lab.traffic import flop, square_tile, tallest_tile, total, traffic

COPIED = {"cpu": 2**28}  # bytes, far more than the caches hold; on other devices 2**30
KEPT = 2**25  # bytes: a CPU's allocator (glibc) returns larger blocks to the system
CALLS = 1000


@dataclass(frozen=True)
class Chip:
    """peak: FLOP/s of products. bandwidth: bytes/s of the large memory. on_chip: bytes that one
    core keeps blocks in. width: bytes of an element. Where measured, in seconds: an operator call,
    one exponential, the first touch of a byte that the system hands out.
    """

    name: str
    peak: float
    bandwidth: float
    on_chip: int
    cores: int
    source: str
    width: int = 2
    call: float = 0.0
    exp: float = 0.0
    fresh: float = 0.0

    @property
    def ridge(self):
        """FLOPs a byte at which products and memory take the same time."""
        return self.peak / self.bandwidth


_NVIDIA = "NVIDIA's data sheet; dense float16"
_ASCEND = "CANN's platform_config/{0}.ini (cores x clock x 8192 FLOP); float16; on chip: L1"
CHIPS = {chip.name: chip for chip in (
    Chip("A100-40GB", 312e12, 1.555e12, 192 * 1024, 108, _NVIDIA),
    Chip("A100-80GB", 312e12, 2.039e12, 192 * 1024, 108, _NVIDIA),
    Chip("H100-SXM", 989e12, 3.35e12, 228 * 1024, 132, _NVIDIA),
    Chip("910B2", 353.8e12, 1.6e12, 512 * 1024, 24, _ASCEND.format("Ascend910B2")),
    Chip("910B3", 294.9e12, 1.6e12, 512 * 1024, 20, _ASCEND.format("Ascend910B3")),
    Chip("910B4", 245.7e12, 0.8e12, 512 * 1024, 20, _ASCEND.format("Ascend910B4")),
)}


# One head, d = 128, float16: {N: (hand-written kernel, torch_npu's fused operator)} in us, measured
# by others on a 910B2: pto-isa, kernels/manual/common/flash_atten/README.md.
PUBLISHED_910B2 = {
    1024: (20.96, 58.46), 2048: (32.46, 70.80), 4096: (88.9, 118.3), 8192: (292.6, 353.1),
    16384: (909, 1118), 32768: (3263, 3646)}


def measured_chip(device, dtype, on_chip):
    """Measure `device`: a large matmul, a copy, a call on one number, exp on 2 MiB of numbers, and
    what it costs more to fill new memory than to fill old.

    The copy reads and writes; bandwidth is both over the time. on_chip is taken as given.
    """
    need_room("the copy that measures the bandwidth", 3 * COPIED.get(device.type, 2**30), device)
    matmul, matmul_flop = square_matmul(dtype, device)
    one = torch.zeros(1, device=device)
    tile = torch.randn(2**19).to(device)
    exps = torch.empty_like(tile)
    source = torch.zeros(COPIED.get(device.type, 2**30) // 4, device=device)
    copy = torch.empty_like(source)

    def many_calls():
        for _ in range(CALLS):
            one.add_(1)

    rounds = time_in_turn({
        "matmul": matmul, "copy": lambda: copy.copy_(source), "calls": many_calls,
        "exp": lambda: torch.exp(tile, out=exps), "old": source.zero_,
        "new": lambda: torch.zeros_like(source)}, device)
    fresh = max(0.0, rounds.median("new") - rounds.median("old"))
    return Chip(str(device), matmul_flop / rounds.median("matmul"),
                2 * source.nbytes / rounds.median("copy"), on_chip, 1,
                "; ".join(filter(None, ["measured in this run", rounds.doubt("matmul")])),
                dtype.itemsize, rounds.median("calls") / CALLS, rounds.median("exp") / tile.numel(),
                fresh / source.nbytes)


def best_tile(name, M, d):
    """Return Br, Bc for M elements on the chip: the paper's for FA1, as many rows as fit for FA2.

    Sources: 2205.14135, Algorithm 1, line 1. For FA2 Bc is 64: only Br decides what is moved.
    """
    if name == "standard":
        return None, None
    if name == "FA1":
        return min(-(-M // (4 * d)), d), -(-M // (4 * d))
    return (square_tile(M, d),) * 2 if tallest_tile(M, d) < 64 else (tallest_tile(M, d), 64)


def intensity(name, N, d, chip):
    """Return the FLOPs a byte of a forward with the tile that suits the chip."""
    passes = traffic(name, N, d, *best_tile(name, chip.on_chip // chip.width, d))
    return flop(name, N, d) / (total(passes) * chip.width)


def attainable(chip, flop_a_byte):
    """Return the FLOP/s that the roofline allows."""
    return min(chip.peak, flop_a_byte * chip.bandwidth)


def predicted(chip, name, N, d, launches=1, tile=None):
    """Return the seconds of one head's forward by what they are spent on: products, memory, calls.

    Steps of 'standard' follow each other; in each, memory and products overlap: the longer counts.
    """
    passes = traffic(name, N, d, *(tile or best_tile(name, chip.on_chip // chip.width, d)))
    groups = [[p for p in passes if p.step == step] for step in dict.fromkeys(
        p.step for p in passes)] if name == "standard" else [passes]
    spent = {"products": 0.0, "memory": 0.0, "calls": launches * chip.call}
    for group in groups:
        work = flop(name, N, d) / (1 if len(groups) == 1 else 2) * ("softmax" not in group[0].step)
        products = work / chip.peak
        memory = total(group) * chip.width / chip.bandwidth
        spent["products" if products >= memory else "memory"] += max(products, memory)
    return spent
