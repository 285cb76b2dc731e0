"""Choose the device that does the work (NPU, else CUDA, else CPU), wait for it, say what it is.

Import this module before torch: torch 2.5 and later load torch_npu by themselves, and a torch_npu
that can't load (no CANN, another torch) then breaks `import torch`. Here torch_npu is imported by
hand, and what went wrong is kept.
"""

import os
import platform
import re
import resource
import sys
from pathlib import Path

from common import cann
from common.cli import Refused

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below it torch.profiler writes to stderr
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_before = os.environ.get(_AUTOLOAD)
os.environ[_AUTOLOAD] = "0"
import torch  # noqa: E402

if _before is None:
    del os.environ[_AUTOLOAD]
else:
    os.environ[_AUTOLOAD] = _before

try:
    import torch_npu

    _npu_fault = None
except Exception as fault:  # a broken torch_npu raises ImportError, OSError or RuntimeError
    torch_npu = None
    _npu_fault = fault

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class DeviceError(Refused):
    """The device that was asked for can't be served. The message says why and what to do."""


def choose(name="auto"):
    """Return the torch.device for `name`, and make it the current one.

    name: 'auto', 'cpu', 'cuda', 'cuda:i', 'npu' or 'npu:i'. 'auto' takes an NPU, else CUDA, else
    the CPU, and says on stderr why an installed torch_npu is not used. No other name is replaced.
    Raises DeviceError for another name and for a device that is not there.
    """
    match = re.fullmatch(r"(auto|cpu)|(cuda|npu)(?::(\d+))?", name)
    if not match:
        raise DeviceError(f"device must be auto, cpu, cuda[:i] or npu[:i], got {name!r}")
    kind = match.group(1) or match.group(2)
    if kind == "auto":
        npu_trouble = _npu_trouble()
        if npu_trouble and not _npu_missing():
            print(f"NPU not used: {npu_trouble}", file=sys.stderr)
        kind = "npu" if not npu_trouble else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    trouble = _npu_trouble() if kind == "npu" else _cuda_trouble()
    if trouble:
        raise DeviceError(f"no device {name!r}: {trouble}")
    runtime = accelerator(kind)
    index = int(match.group(3)) if match.group(3) else runtime.current_device()
    if index >= runtime.device_count():
        seen = f"{runtime.device_count()} seen, numbered from 0{_visible(kind)}"
        raise DeviceError(f"no device {name!r}: {seen}")
    device = torch.device(kind, index)
    runtime.set_device(device)  # events and streams belong to the current device
    if kind == "npu":
        _ask_for_float32(runtime)
    return device


def _ask_for_float32(npu):
    """Have float32 multiplied as float32, and say where the card would lose -inf."""
    if hasattr(getattr(npu, "matmul", None), "allow_hf32"):
        npu.matmul.allow_hf32 = False
    if os.environ.get("INF_NAN_MODE_FORCE_DISABLE") == "1":
        print("INF_NAN_MODE_FORCE_DISABLE=1: -inf becomes a finite number, so causal masks and "
              "rows that see nothing go wrong; unset it", file=sys.stderr)


def accelerator(kind):
    """Return torch.cuda or torch.npu, which offer the same calls, or None for 'cpu'."""
    return {"cuda": torch.cuda, "npu": getattr(torch, "npu", None), "cpu": None}[kind]


def synchronize(device):
    """Wait until everything queued on `device` is done."""
    if device.type != "cpu":
        accelerator(device.type).synchronize(device)


def describe(device):
    """Return one line: the device, its name and memory, and the versions that `versions` lists."""
    if device.type == "cpu":
        name, total = f"{_cpu_name()}, {torch.get_num_threads()} threads", _cpu_memory()
    else:
        runtime = accelerator(device.type)
        name, total = runtime.get_device_name(device), runtime.mem_get_info(device)[1]
    stack = ", ".join(f"{package} {version}" for package, version in versions().items())
    return f"{device} ({name}, {total / 2**30:.1f} GiB), {stack}"


def versions():
    """Return the versions that a figure depends on: Python, torch, CUDA, torch_npu, CANN."""
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch_npu is not None:
        found["torch_npu"] = torch_npu.__version__
    if cann.release():
        found["CANN"] = cann.release()
    return found


def _npu_missing():
    return isinstance(_npu_fault, ModuleNotFoundError) and _npu_fault.name == "torch_npu"


def _npu_trouble():
    """Why there is no NPU to use, in one line, or None."""
    if _npu_missing():
        return "torch_npu is not installed; on an Ascend machine, bash scripts/setup.sh installs it"
    if _npu_fault is None and torch.npu.is_available():
        return None
    if _npu_fault is None:
        cause = "torch.npu.is_available() is False: no card or no driver is seen"
    else:
        said = " ".join(str(_npu_fault).split())
        cause = f"import torch_npu failed: {type(_npu_fault).__name__}: {said}"
    stack = f"torch {torch.__version__}, torch_npu {_torch_npu_version()}{_visible('npu')}"
    return f"{cause} ({stack}); try: source {cann.set_env()}"


def _cuda_trouble():
    if torch.cuda.is_available():
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (f"torch {torch.__version__} is {built} and sees no GPU{_visible('cuda')}; "
            "use --device cpu or auto")


def _torch_npu_version():
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return "of unknown version"


def _visible(kind):
    variable = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}[kind]
    return f", {variable}={os.environ[variable]!r}" if variable in os.environ else ""


def _cpu_name():
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = re.findall(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE)
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _cpu_memory():
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device):
    """Return the bytes that `device` can still hand out, what its allocator keeps unused included;
    on a CPU to this process: the least of what is free and what the limits of the process and of
    its control groups leave.
    """
    if device.type != "cpu":
        runtime = accelerator(device.type)
        stats = runtime.memory_stats(device)
        kept, used = (stats.get(f"{what}_bytes.all.current", 0)
                      for what in ("reserved", "allocated"))
        return runtime.mem_get_info(device)[0] + kept - used
    return max(0, min([_free_of_machine(), *_left_of_address_space(), *_left_of_groups()]))


def _free_of_machine():
    meminfo = PROC / "meminfo"
    if not meminfo.exists():  # macOS
        return _cpu_memory()
    return int(re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M).group(1)) * 1024


def _left_of_address_space():
    limit, statm = resource.getrlimit(resource.RLIMIT_AS)[0], PROC / "self" / "statm"
    if limit != resource.RLIM_INFINITY and statm.exists():
        yield limit - int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _left_of_groups():
    """Yield what each control group (v1, v2) around this process leaves; its cache can go."""
    member = PROC / "self" / "cgroup"
    for line in member.read_text().splitlines() if member.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = CGROUPS / "memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")  # in a container there may be the top alone
        for folder in (group, *group.parents):
            if folder == top or top in folder.parents:
                yield from _left_of_group(folder, *names)


def _left_of_group(folder, limit, used, cache):
    try:
        most, now = (folder / limit).read_text().strip(), (folder / used).read_text()
        cached = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.M)
    except OSError:
        return
    if most != "max":
        yield int(most) - int(now) + (int(cached.group(1)) if cached else 0)
