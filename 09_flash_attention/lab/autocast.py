"""What torch.autocast asks of attention: its dtype for Q, K and V, and none of it inside."""

from functools import wraps

import torch


def autocast_dtype(device_type):
    """Return the dtype of autocast for a kind of device, or None where it is off."""
    if device_type not in ("cpu", "cuda", "npu"):
        return None
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) \
            else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.npu.get_autocast_dtype() if torch.npu.is_autocast_enabled() else None


def _kind(arguments):
    """Return the kind of device of the first tensor."""
    return [*(x.device.type for x in arguments if isinstance(x, torch.Tensor)), "cpu"][0]


def as_autocast(*tensors):
    """Return Q, K and V as F.scaled_dot_product_attention takes them: under autocast in its dtype,
    but for float64.
    """
    dtype = autocast_dtype(_kind(tensors))
    if dtype is None:
        return tensors
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point()
            and x.dtype != torch.float64 else x for x in tensors]


def without_autocast(function):
    """Let `function` compute in the dtypes that it is given. Its first tensor says which device."""

    @wraps(function)
    def outside(*args, **options):
        kind = _kind(args)
        if autocast_dtype(kind) is None:
            return function(*args, **options)
        with torch.autocast(kind, enabled=False):
            return function(*args, **options)

    return outside
