"""Where things lie: what the project ships (`data/`), what runs leave, and what a living server tells its own user.

Each has one environment variable that moves it, and a default that needs none.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

STDIN = "-"
_ROOT = Path(__file__).resolve().parent.parent


def data_dir() -> Path:
    """Models, hardware and workloads that the project ships; `LABKIT_DATA` moves it."""
    return Path(os.environ.get("LABKIT_DATA", _ROOT / "data"))


def read_text(path: str | Path, kind: str = "file") -> str:
    """The text of a file that somebody named, of a pipe, or of the standard input for "-": UTF-8, with or without a
    byte order mark (Excel writes one).

    Raises FileNotFoundError or ValueError with a sentence; `kind` is what should have been there.
    """
    try:
        return _bytes_of(path, kind).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"{error.reason}, at byte {error.start}"
        raise ValueError(f"{path} is no {kind}: its bytes are no UTF-8 text ({why}). Give a text file.") from None


def _bytes_of(path: str | Path, kind: str) -> bytes:
    if str(path) == STDIN:
        return sys.stdin.buffer.read()
    given = Path(path).expanduser()
    if given.is_dir():
        raise ValueError(f"{path} is a folder: give the path of a {kind}.")
    if not is_readable(given):
        raise FileNotFoundError(f"There is no {kind} at {path}: give the path of one.")
    return given.read_bytes()


def is_readable(path: str | Path) -> bool:
    """Whether there is a file, a pipe such as the shell's <(zcat trace.gz), or "-" for the standard input."""
    given = Path(path).expanduser()
    return str(path) == STDIN or given.is_file() or given.is_fifo()


def sentence(error: BaseException) -> str:
    """What an error says to a person; of one that the system raised: the file, and the system's word for it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


def require_writable(path: str | Path, option: str = "--out") -> Path:
    """Asked before work begins, so that nobody learns of it after minutes. Raises ValueError with a sentence."""
    given, why = Path(path).expanduser(), ""
    if not str(path).strip() or str(path) == STDIN or given.is_dir():
        why = "that is no file"
    elif not given.parent.is_dir():
        why = f"there is no folder {given.parent}"
    elif not os.access(given if given.exists() else given.parent, os.W_OK):
        why = "you may not write there"
    if why:
        raise ValueError(f"{option} {path} cannot be written, {why}: give the path of a file in a folder that exists.")
    return given


def write_whole(path: Path, text: str) -> Path:
    """A file is written whole or not at all; a device or a pipe (/dev/null, /dev/stdout) is written to as it stands."""
    target = path.resolve()  # what a link names is written, the link stays
    draft = target.with_name(f"{target.name}.begun")
    straight = (path.exists() and not path.is_file()) or path.is_relative_to("/dev")
    try:
        (path if straight else draft).write_text(text, encoding="utf-8")
        if not straight:
            draft.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        draft.unlink(missing_ok=True)
    return path


def repo_dir() -> Path:
    """The checkout that holds labs/ and dashboards/."""
    return _ROOT


def home_dir() -> Path:
    """What runs leave (store.sqlite, parquet files); `LABKIT_HOME` moves it."""
    default = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "labkit"
    path = Path(os.environ.get("LABKIT_HOME", default))
    path.mkdir(parents=True, exist_ok=True)
    return path


def runtime_dir() -> Path:
    """Private to this user (0700): the server's address and token, sockets, shared memory of the ranks.

    Raises PermissionError when the folder exists and belongs to somebody else or is open to others.
    """
    base = os.environ.get("LABKIT_RUNTIME") or os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "labkit" if base else Path(tempfile.gettempdir()) / f"labkit-{os.getuid()}"
    path.mkdir(parents=True, mode=0o700, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(
            f"{path} must belong to you and be closed to others (mode 0700): it holds the lab server's token. "
            f"Remove it, or set LABKIT_RUNTIME to a folder of your own."
        )
    return path
