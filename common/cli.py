"""What every command line here does alike: one line and exit 2 for what can't be served, a quiet
end on Ctrl-C.

Import this module first: the quiet end then covers the seconds in which torch loads.
"""

import argparse
import os
import re
import signal
import sys
from pathlib import Path

_script = Path(getattr(sys.modules["__main__"], "__file__", None) or "none").resolve()
if _script.parent.parent == Path(__file__).resolve().parent.parent:  # a lesson runs, not a library
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as torch loads it may swallow an exception


class Refused(Exception):
    """What was asked for can't be served; the message is the one line that the user reads."""


def serve(main):
    """Run main() and exit with what it returns; with 2 and one line where a call is refused."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main())
    except (Refused, OSError) as refusal:
        print(f"{sys.argv[0]}: {' '.join(str(refusal).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says of a program that Ctrl-C ended


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(least, most=2**31 - 1):
    """Return an argparse type: a whole number from `least` to `most`."""

    def parse(text):
        if not re.fullmatch("-?[0-9]{1,19}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"a whole number from {least} to {most} is taken, got {text!r}")
        return int(text)

    return parse


def file_to_write(text):
    """An argparse type: the path of a file that can be written, in a folder that can be made."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"a file is taken, got the folder {text!r}")
    folder_to_write(Path(text).parent)
    return text


def folder_to_write(text):
    """An argparse type: the path of a folder that can be written to, or made."""
    folder = Path(text).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{str(there)!r} can't be written to")
    return text
