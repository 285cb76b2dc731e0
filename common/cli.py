"""What every command line here does alike: one line and exit 2 for what can't be served, a quiet
end on Ctrl-C and where nobody reads on.

Import this module first: it loads neither torch nor rich, and the one line and the quiet end then
cover the seconds in which they load.
"""

import argparse
import errno
import io
import os
import re
import signal
import sys
from pathlib import Path

from common import files


class Refused(Exception):
    """What was asked for can't be served; the message is the one line that the user reads."""


def serve(main):
    """Run main() and exit with what it returns; with 2 and one line where it can't be served:
    refused, no file, no module, no room in memory.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdout and sys.stdout is sys.__stdout__:
        sys.stdout = _never_ending(sys.stdout)
    try:
        status = main()
        if sys.stdout:
            sys.stdout.flush()
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says of a program that Ctrl-C ended
    except BrokenPipeError:
        sys.exit(141)  # as it says where a pipe's reader has gone
    except Exception as fault:
        refusal = _refusal(fault)
        if not refusal:
            raise
        _end(refusal)


def is_out_of_memory(error):
    """Whether `error` says that memory could not be had: on the CPU, CUDA or an NPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(re.search(
        r"not enough memory|can't allocate memory|out of memory|bad_alloc|ALLOC_FAILED|"
        r"MEMORY_ALLOCATION|[Ff]ailed to allocate|Storage size calculation overflowed", str(error)))


def _refusal(fault):
    """Return the one line that says why `fault` is no error of the program, or None."""
    said = " ".join(str(fault).split()) or type(fault).__name__
    if isinstance(fault, ImportError):
        cure = "" if "pip install" in said else "; bash scripts/setup.sh makes a .venv that has it"
        return f"{said} ({sys.executable}{cure})"
    if is_out_of_memory(fault):
        return f"no room in memory: {said}"
    return said if isinstance(fault, (Refused, OSError)) else None


def _end(refusal):
    print(f"{sys.argv[0]}: {refusal}", file=sys.stderr)
    sys.exit(2)


def _missing_module(kind, fault, trace):
    """An excepthook: modules are imported before main is served."""
    if issubclass(kind, ImportError) or is_out_of_memory(fault):
        _end(_refusal(fault))
    sys.__excepthook__(kind, fault, trace)


def _runs_a_lesson():
    """Whether the program is a file of a phase, NN_name/, and this no library of another."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "none").resolve()
    root = Path(__file__).resolve().parent.parent
    return root in script.parents and bool(re.match(r"\d\d_", script.relative_to(root).parts[0]))


if _runs_a_lesson():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as torch loads it may swallow an exception
    sys.excepthook = _missing_module


class _Output(io.FileIO):
    """Standard output; where nobody reads on (`| head`) the rest is dropped and the run goes on."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as fault:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # the exit writes once more
            if not isinstance(fault, BrokenPipeError):
                raise
            return len(data)


def _never_ending(stdout):
    """Return `stdout` as an _Output, in which a character that its encoding lacks is escaped."""
    stdout.flush()
    raw = io.BufferedWriter(_Output(stdout.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stdout.encoding, "backslashreplace",
                            line_buffering=stdout.line_buffering or stdout.write_through)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and which refuses paths that can't be written.

    description: a module's __doc__, of which the first line is shown, or None (python -OO). Where
    a file_to_write is '-', standard output is kept for it: what is printed goes to stderr.
    """

    def __init__(self, description=None, **options):
        super().__init__(description=(description or "").partition("\n")[0], **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def parse_args(self, args=None, namespace=None):
        found = super().parse_args(args, namespace)
        refuse = {file_to_write: files.refuse_file, folder_to_write: files.refuse_folder}
        for action in self._actions:
            path = getattr(found, action.dest, None)
            if action.type in refuse and path is not None:
                try:
                    refuse[action.type](path)
                except OSError as fault:
                    self.error(str(argparse.ArgumentError(action, str(fault))))
                if action.type is file_to_write and path == "-":
                    sys.stdout = sys.stderr
        return found


def whole_number(least, most=2**31 - 1):
    """Return an argparse type: a whole number from `least` to `most`."""

    def parse(text):
        if not re.fullmatch("-?[0-9]{1,19}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"a whole number from {least} to {most} is taken, got {text!r}")
        return int(text)

    return parse


def file_to_write(text):
    """An argparse type for Parser: the path of a file that can be written, or '-'.

    Of several the last is checked, when all is read.
    """
    if not text:
        raise argparse.ArgumentTypeError("a file is taken, got ''")
    return text


def folder_to_write(text):
    """An argparse type for Parser: the path of a folder that can be written to, or made."""
    if not text:
        raise argparse.ArgumentTypeError("a folder is taken, got ''")
    return text
