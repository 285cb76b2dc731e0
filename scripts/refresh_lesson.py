"""Run the commands that the READMEs and chapters show, and put their output in their place.

    python scripts/refresh_lesson.py                       every command
    python scripts/refresh_lesson.py --only io_model       those with this text in them
    python scripts/refresh_lesson.py --list                name them, run nothing

A block that is fenced by ```text and begins with `$ COMMAND` is refreshed. `python` is the one that
runs this script. README.md's commands run in the repository's folder, all others in
09_flash_attention. A command runs once, also where several texts show it. One that fails ends the
run with its message and status 1; what was refreshed before it stays.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASE = ROOT / "09_flash_attention"
FENCE = "```text"


def texts():
    """Return {path: the folder in which its commands run}."""
    chapters = [*PHASE.glob("README*.md"), *sorted(PHASE.glob("lesson/*/*.md"))]
    return {**dict.fromkeys(ROOT.glob("README*.md"), ROOT), **dict.fromkeys(chapters, PHASE)}


def commands(text):
    """Return the commands of the blocks, in their order."""
    lines = text.splitlines()
    return [line[2:] for fence, line in zip(lines, lines[1:])
            if fence == FENCE and line.startswith("$ ")]


def replaced(text, command, output):
    """Return the text with another output, a list of lines, in the block of `command`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines)
                 if line == f"$ {command}" and lines[i - 1] == FENCE) + 1
    return "\n".join(lines[:start] + output + lines[lines.index("```", start):]) + "\n"


def output_of(command, folder):
    """Run a command of the shell in `folder`; return the lines that it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True,
                          env={**os.environ, "PATH": path})
    if done.returncode:
        sys.exit(f"{command}\nended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip("\n").splitlines()


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", metavar="TEXT")
    options.add_argument("--list", action="store_true")
    args = options.parse_args()
    shown = {}
    for path, folder in texts().items():
        for command in commands(path.read_text(encoding="utf-8")):
            if args.only in command:
                shown.setdefault((command, folder), []).append(path)
    for (command, folder), paths in shown.items():
        print(f"{folder.name}: {command}", flush=True)
        if not args.list:
            output = output_of(command, folder)
            for path in paths:
                path.write_text(replaced(path.read_text(encoding="utf-8"), command, output),
                                encoding="utf-8")


if __name__ == "__main__":
    main()
