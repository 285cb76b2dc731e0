"""The one place where a rank sends: it counts the bytes, and can play a slower link."""

import time

import torch
import torch.distributed as dist


def place(group=None):
    """Return this process's number in the group and how many there are."""
    return dist.get_rank(group), dist.get_world_size(group)


class Link:
    """The one place that sends. sent: the bytes that this rank has sent. `speed` changes overlap:
    whether work goes on while a block is under way; and pace: the seconds a byte takes at least.
    """

    sent, overlap, pace = 0, True, 0.0

    @classmethod
    def pass_on(cls, tensors, group):
        """Start to send tensors to the right neighbour and to receive as many from the left one.

        Return arrived(), which waits for both and returns what came. Both are one batch: a send of
        HCCL waits for its receiver, so in a ring where each sends first all would wait for ever.
        """
        rank, ranks = place(group)
        if ranks == 1:
            return lambda: tensors
        right, left = (dist.get_global_rank(group or dist.group.WORLD, (rank + step) % ranks)
                       for step in (1, -1))
        tensors = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in tensors]
        operations = [dist.P2POp(dist.isend, x, right, group) for x in tensors] + [
            dist.P2POp(dist.irecv, x, left, group) for x in received]
        size = sum(x.numel() * x.element_size() for x in tensors)
        cls.sent, ready = cls.sent + size, time.perf_counter() + size * cls.pace
        works = dist.batch_isend_irecv(operations)

        def arrived():
            while works:
                try:
                    works.pop().wait()
                except RuntimeError as fault:
                    raise RuntimeError(f"waited for ranks {left} and {right}: {fault}") from fault
            time.sleep(max(0.0, ready - time.perf_counter()))
            tensors.clear()  # they had to stand until they were sent
            return received

        if not cls.overlap:
            arrived()
        return arrived

    @classmethod
    def exchange(cls, x, cut, join, group):
        """Cut x along one dimension, one part for each rank, and join what comes along another."""
        rank, ranks = place(group)
        parts = torch.stack(x.chunk(ranks, dim=cut))  # [P, ...]
        cls.sent += (parts.numel() - parts[rank].numel()) * parts.element_size()
        received = torch.empty_like(parts)
        as_bytes = received.view(torch.uint8), parts.view(torch.uint8)  # gloo knows few dtypes
        dist.all_to_all_single(*as_bytes, group=group)
        return torch.cat(received.unbind(), dim=join)
