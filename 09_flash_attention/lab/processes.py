"""Ranks: processes that work together through torch.distributed, started here or by torchrun.

Started here, a rank is the same command once more, with RANK and WORLD_SIZE in its environment as
torchrun sets them. A rank ends with the process that started it, however that one ends.
"""

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from common.cli import Refused, is_out_of_memory, whole_number
from common.device import DeviceError, accelerator, choose
from common.report import console
from lab.bench import reason

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
FOLDER = "RANKS_MEET_IN"  # in the environment of a rank that was started here
GRACE = 1.0  # seconds for ranks that fail because another did
LOST = r"waited for|closed by peer|reset by peer|[Tt]imed out|[Tt]imeout|Broken pipe"
PHASE = str(Path(__file__).resolve().parents[1])
_objects = None  # the group that exchanges Python objects, where the ranks' own can't


class RankFault(BaseException):
    """What a rank can't go on from; the cause is told. No `except Exception` makes it a result."""


class AllRefused(Refused):
    """What all ranks are refused alike, so that one of them tells it."""


def is_rank():
    """Whether this process is a rank."""
    return "RANK" in os.environ


def is_first():
    """Whether this process is rank 0, or no rank: the one that prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def add_options(options):
    """Add --ranks and --patience to a parser. --device is cpu, but auto where torchrun started.

    In a rank an error of the options is raised, for `as_rank` to tell.
    """
    if is_rank():
        options.error = _refuse
    options.set_defaults(device="auto" if is_rank() and FOLDER not in os.environ else "cpu")
    options.add_argument("--ranks", type=whole_number(1, 64), metavar="P",
                         help="how many processes (4, or as many as torchrun started)")
    options.add_argument("--patience", type=whole_number(1), default=120, metavar="S",
                         help="seconds that a rank waits for another (120)")


def _refuse(message):
    raise AllRefused(" ".join(message.split()))


def check(args, options):
    """Refuse what no ranks can be had for; return the device that was asked for.

    args.device becomes its kind, or in a rank the rank's own card; args.ranks how many there are.
    """
    if not dist.is_available():
        raise Refused(f"torch {torch.__version__} is built without torch.distributed; pip install "
                      "torch has it")
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks or 4))
    if args.ranks not in (None, ranks):
        options.error(f"argument --ranks: {ranks} were started, got {args.ranks}")
    if ":" in args.device and ranks > 1:
        options.error(f"argument --device: each rank takes a card of its own, got {args.device!r}")
    args.ranks = ranks
    try:
        device = choose(args.device)
    except DeviceError as refusal:
        options.error(str(refusal))
    if ":" not in args.device:
        args.device = device.type
        if is_rank() and device.type != "cpu":
            args.device += f":{os.environ.get('LOCAL_RANK', 0)}"
    return device


def start_again(args, options):
    """Run the command of this process as args.ranks ranks, each on a card of its own; return their
    exit status. What --device auto means is settled here, once.
    """
    cards = accelerator(args.device.partition(":")[0])
    if cards and cards.device_count() < args.ranks:
        options.error(f"argument --ranks: each rank takes a card of its own and "
                      f"{cards.device_count()} are seen, got {args.ranks}")
    return start(args.ranks, [sys.executable, *sys.argv, "--device", args.device])


def start(ranks, command):
    """Run `command` as so many ranks on this machine; return their exit status.

    Where one fails the others are ended, and one line says which and why. The ranks find each other
    through a file and talk over the loopback interface.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, they end the ranks too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    children = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                children.append(_started(rank, ranks, command, folder))
            return _watch(children, Path(folder))
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.wait()


def _started(rank, ranks, command, folder):
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        FOLDER: folder, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // ranks)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)


def _watch(children, folder):
    """Wait for the ranks; return the highest exit status."""
    while True:
        codes = [child.poll() for child in children]
        if any(codes) or list(folder.glob("fault*")):
            break
        if None not in codes:
            return 0
        time.sleep(0.02)
    for _ in range(10):
        time.sleep(GRACE)
        codes = [child.poll() for child in children]
        status, line = _first_fault(codes, folder)
        if "does not answer" not in line or codes.count(None) == 1:
            break  # of several who are silent, some may still wait for the others
    if line:
        print(f"{sys.argv[0]}: {line}", file=sys.stderr)
    return status


def _first_fault(codes, folder):
    """Return the exit status and the line of the fault that the others follow from: one that is
    not about another rank; or else a rank that died, or that does not answer.
    """
    told, died, silent = [], [], []
    for rank, code in enumerate(codes):
        fault = folder / f"fault{rank}"
        if fault.exists():
            told.append(json.loads(fault.read_text()))
        elif code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            died.append((code, f"rank {rank} {how}"))
        elif code is None:
            silent.append(rank)
    own = [fault for fault in told if not re.search(LOST, fault[2])]
    if own:
        return tuple(min(own)[1:])
    if died and (told or silent or died[0][0] != 1):
        return 1, died[0][1]
    if not told:
        return 1, ""  # rank 0's exit status: a comparison failed
    return 1, f"rank {silent[0]} does not answer; {min(told)[2]}" if silent else min(told)[2]


def as_rank(work):
    """Return the exit status of work(); a fault is told in one line, with the rank before it where
    it is one rank's own.
    """
    if FOLDER in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
        threading.Thread(target=_end_with_parent, daemon=True).start()
    console.quiet = not is_first()
    try:
        return work()
    except RankFault as fault:
        return _tell(fault.__cause__)
    except Exception as fault:
        return _tell(fault)


def _end_with_parent():
    while os.read(0, 1):  # the other end of this pipe closes with the parent
        pass
    os._exit(1)


def _tell(fault):
    """Leave the line of a fault to the process that started this one, or print it; where all ranks
    have the same to print, rank 0 does.
    """
    alike = isinstance(fault, AllRefused)
    refused = isinstance(fault, Refused) or is_out_of_memory(fault)
    said = str(fault) if refused else reason(fault)
    said = re.sub(r"\[/\S+\] |\. This is typically.*", "", said)  # gloo's source, gloo's advice
    frames = [f for f in traceback.extract_tb(fault.__traceback__) if f.filename.startswith(PHASE)]
    if frames and not refused and not re.search(LOST, said):
        said += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    status, line = 2 if refused else 1, said if alike else f"rank {os.environ['RANK']}: {said}"
    if FOLDER not in os.environ:
        if is_first() or not alike:
            print(f"{sys.argv[0]}: {line}", file=sys.stderr)
        return status
    part = Path(os.environ[FOLDER]) / f"part{os.environ['RANK']}"
    part.write_text(json.dumps([time.time(), status, line]))
    part.rename(part.with_name(f"fault{os.environ['RANK']}"))
    return status


def join(device, patience):
    """Join the other ranks. patience: seconds after which waiting for one of them is a fault."""
    global _objects
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = os.environ.get(FOLDER)
    store = dist.FileStore(f"{folder}/store", ranks) if folder else None
    limit = datetime.timedelta(seconds=patience)
    dist.init_process_group(
        BACKENDS[device.type], store=store, rank=rank, world_size=ranks, timeout=limit)
    _objects = None if device.type == "cpu" else dist.new_group(backend="gloo", timeout=limit)


def leave():
    """Wait for the others, then end what `join` began."""
    gather(None)
    dist.destroy_process_group()


def gather(value):
    """Return what each rank gives, a list in their order; every rank calls it."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=_objects)
    return found
