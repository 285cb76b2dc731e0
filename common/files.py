"""Files that are written whole or not at all; what can't be written is told before the work.

A file is written beside its place, as .part-PID-..., and moved there when it is whole, so an
interrupted run leaves no half of it. What a killed run left is swept by the next one that writes
into that folder. Standard library only: a command line is read before torch loads.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
from pathlib import Path


@contextlib.contextmanager
def whole_file(path):
    """Yield the path of a file to write to; it becomes `path` when the block ends without an error.

    Links are followed and a file that exists keeps its mode. What is no plain file (a device, a
    pipe, /dev/fd/N, '-' for standard output) is written to instead of replaced. Raises OSError.
    """
    path = os.fspath(path)
    stream = _descriptor(path) is not None or (os.path.exists(path) and not os.path.isfile(path))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    place = _place(path)
    part = _part(Path(tempfile.gettempdir()) if stream else place.parent, Path(path).suffix)
    try:
        yield part
        if stream:
            with open(part, "rb") as written, _opened(path) as out:
                shutil.copyfileobj(written, out)
        else:
            if place.exists():
                part.chmod(place.stat().st_mode & 0o7777)
            part.replace(place)
    except OSError as fault:
        if fault.errno and not fault.filename:
            fault.filename = path  # a full disk names no file
        raise
    finally:
        part.unlink(missing_ok=True)


def refuse_file(path):
    """Raise OSError where `whole_file` could not write `path`."""
    descriptor = _descriptor(path)
    if descriptor is not None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(f"{path!r} is open for reading alone")
        return
    if os.path.isdir(path) or path.endswith(os.sep):
        raise OSError(f"a file is taken, got the folder {path!r}")
    there = _is_there(path)
    if there and os.path.exists(path) and not os.access(path, os.W_OK):
        raise OSError(f"{path!r} can't be written to")
    if os.path.islink(path):
        _refuse(_place(path).parent)
    elif not there or os.path.isfile(path):
        refuse_folder(Path(path).parent)


def refuse_folder(path):
    """Raise OSError where `path` is no folder that can be written to, or made."""
    folder = Path(path).absolute()
    _refuse(next(place for place in (folder, *folder.parents) if _is_there(place)))


def _refuse(folder):
    """Try it: a read-only file system and /proc refuse root as well, whom os.access believes."""
    try:
        _part(folder, "").unlink()
    except OSError as fault:
        raise OSError(f"{str(folder)!r} can't be written to: {fault.strerror}") from fault


def _place(path):
    """Return where the links of `path` lead. Raises OSError where they lead round in a circle."""
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return place


def _is_there(path):
    """Whether there is a file, a folder or a link, dead or not. Raises OSError: a name too long."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _descriptor(path):
    """Return N where `path` is, or links to, /dev/fd/N; 1 for '-'; else None."""
    if path == "-":
        return 1
    path = os.path.abspath(path)
    for _ in range(40):  # as many links as Linux follows
        named = re.fullmatch(r"(?:/dev|/proc/self)/fd/(\d{1,9})", path)
        if named or not os.path.islink(path):
            return int(named[1]) if named else None
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return None


def _opened(path):
    """Open a stream to write bytes to, after what was printed so far."""
    descriptor = _descriptor(path)
    if sys.stdout:
        sys.stdout.flush()
    return open(path if descriptor is None else os.dup(descriptor), "wb")


def _part(folder, suffix):
    """Make an empty .part- file in `folder`, with the mode that umask gives; return its path."""
    for left in folder.glob(".part-*"):
        writer = re.match(r"\.part-(\d{1,9})-", left.name)
        if writer and not _runs(int(writer[1])):
            with contextlib.suppress(OSError):
                left.unlink()
    part = folder / f".part-{os.getpid()}-{secrets.token_hex(4)}{suffix}"
    os.close(os.open(part, os.O_CREAT | os.O_EXCL, 0o666))
    return part


def _runs(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True
