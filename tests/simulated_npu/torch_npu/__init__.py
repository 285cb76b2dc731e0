"""A torch_npu for machines without a card: simulated Ascend cards, for tests only.

Put this folder's parent on PYTHONPATH. A tensor of a card runs every operator on a CPU tensor
inside, so the numbers are the CPU's but for what arithmetic.py tells, and the times say nothing of
an Ascend. What is offered is what tests/torch_npu_surface.json says of every torch_npu, and
torch.npu.matmul.allow_hf32. simulation.py says what the cards refuse and how they count.

SIMULATED_NPU_CARDS        how many cards there are, 1 unless given; 0 is a machine without one
ASCEND_RT_VISIBLE_DEVICES  which of them are seen, as on the card
SIMULATED_NPU_BROKEN       an installation whose import fails: nocann, importerror, oserror or
                           runtimeerror
SIMULATED_NPU_GIB          the memory of each card, 64 unless given
SIMULATED_NPU_WORKSPACES   1: the workspaces of matrix products count as allocated; as on the card,
                           TASK_QUEUE_ENABLE=2 leaves them out
SIMULATED_NPU_MSPROF       0: msprof is not on PATH, the profiler leaves no tables
SIMULATED_NPU_OLD_FUSION   1: npu_fusion_attention gives its output Q's shape, as in op-plugin 6.0.0
SIMULATED_NPU_OLD_CANN     1: npu_fusion_attention takes no float32, as in CANN 7.0.0
INF_NAN_MODE_FORCE_DISABLE 1: saturation mode, as on the card
"""

import os

_FAULTS = {
    "nocann": ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
    "importerror": ImportError("libtorch_npu.so: undefined symbol: _ZN3c1010TensorImplE"),
    "oserror": OSError("libtorch_npu.so: undefined symbol: _ZN3c1010TensorImplE"),
    "runtimeerror": RuntimeError(
        "Two accelerators cannot be used at the same time in PyTorch: npu and cuda.\n"
        "[ERROR] ERR00007 PTA feature not supported"
    ),
}
if "SIMULATED_NPU_BROKEN" in os.environ:
    raise _FAULTS[os.environ["SIMULATED_NPU_BROKEN"]]

# As the wheels do: torch, when it loads, would import this half-loaded package again.
_before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _before

from torch_npu import npu, profiler, simulation

_setup_privateuseone_for_python_backend(rename="npu", backend_module=npu)
# Autograd has a thread for card 0 alone; without threads a backward runs on every card.
torch.autograd.set_multithreading_enabled(False)

from torch_npu.fusion import npu_fusion_attention

__version__ = "2.13.0+simulated"
__all__ = ["npu", "npu_fusion_attention", "profiler", "simulation"]


def _autoload():
    """What torch calls when it loads the backends that are installed: importing was enough."""
