"""What every command line here does alike: one line and exit 2 for what can't be served, a quiet
end on Ctrl-C.

Import this module first: the quiet end then covers the seconds in which torch loads.
"""

import argparse
import sys


def _quiet_on_interrupt(kind, error, trace, show=sys.excepthook):
    if not issubclass(kind, KeyboardInterrupt):
        show(kind, error, trace)


sys.excepthook = _quiet_on_interrupt


class Refused(Exception):
    """What was asked for can't be served; the message is the one line that the user reads."""


def serve(main):
    """Run main() and exit with what it returns; with 2 and one line where a call is refused."""
    try:
        sys.exit(main())
    except (Refused, OSError) as refusal:
        print(f"{sys.argv[0]}: {' '.join(str(refusal).split())}", file=sys.stderr)
        sys.exit(2)


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
