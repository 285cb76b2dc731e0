"""torch.npu: the calls that every torch_npu offers and this repository makes."""

from types import SimpleNamespace

from torch_npu import simulation
from torch_npu.arithmetic import matmul as matmul
from torch_npu.simulation import cards, index_of


def is_available():
    return device_count() > 0


def device_count():
    return len(cards)


def current_device():
    return index_of(None)


def set_device(device):
    simulation.current = index_of(device)


class device:
    """Make a card the current one within a `with`."""

    def __init__(self, device):
        self.index = index_of(device)

    def __enter__(self):
        self.before, simulation.current = simulation.current, self.index

    def __exit__(self, *error):
        simulation.current = self.before


def synchronize(device=None):
    card = cards[index_of(device)]
    card.done = card.queued


def get_device_name(device_name=None):
    return get_device_properties(device_name).name


def get_device_properties(device_name=None):
    card = cards[index_of(device_name, AssertionError)]
    return SimpleNamespace(name="Ascend910B3", total_memory=card.total)


def mem_get_info(device=None):
    card = cards[index_of(device, AssertionError)]
    return card.total - card.reserved, card.total


def empty_cache():
    for card in cards:
        card.reserved = card.current


def memory_allocated(device=None):
    return cards[index_of(device)].current


def max_memory_allocated(device=None):
    return cards[index_of(device)].peak


def reset_peak_memory_stats(device=None):
    card = cards[index_of(device)]
    card.peak = card.current


def memory_stats(device=None):
    card = cards[index_of(device)]
    return {
        "allocated_bytes.all.allocated": card.allocated,
        "allocated_bytes.all.current": card.current,
        "allocated_bytes.all.freed": card.allocated - card.current,
        "allocated_bytes.all.peak": card.peak,
        "reserved_bytes.all.current": card.reserved,
    }


def manual_seed_all(seed):
    """The numbers are the CPU's, and so is the generator."""


def _is_in_bad_fork():
    return False


class Event:
    """A mark in the queue of the card that is current when it is recorded.

    Stricter than the card, whose elapsed_time waits for both events by itself.
    """

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._timed = enable_timing
        self._card = None

    def record(self):
        card = cards[current_device()]
        if self._card not in (None, card):
            raise RuntimeError("the event was recorded on another card before")
        card.queued += 1
        self._card, self._place, self._time = card, card.queued, card.clock

    def query(self):
        return self._card is None or self._place <= self._card.done

    def synchronize(self):
        if self._card is not None:
            self._card.done = max(self._card.done, self._place)

    def elapsed_time(self, end_event):
        """Milliseconds of work that the card did between this event and `end_event`."""
        both = (self, end_event)
        if not all(event._timed for event in both):
            raise RuntimeError("Both events must be created with enable_timing=True.")
        if any(event._card is None for event in both):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if self._card is not end_event._card:
            raise RuntimeError("Both events must be recorded on one card.")
        if not all(event.query() for event in both):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end_event._time - self._time) * 1000
