"""What every command line here does alike: one line and exit 2 for what can't be served, a quiet
end on Ctrl-C.

Import this module first: the quiet end then covers the seconds in which torch loads.
"""

import argparse
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


def whole_number(least):
    """Return an argparse type: a whole number of at least `least`."""

    def parse(text):
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"a whole number of at least {least} is taken, got {text!r}")
        return int(text)

    return parse
