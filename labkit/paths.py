"""Where things lie: what the project ships (`data/`), what runs leave, and what a living server tells its own user.

Each has one environment variable that moves it, and a default that needs none.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def data_dir() -> Path:
    """Models, hardware and workloads that the project ships; `LABKIT_DATA` moves it."""
    return Path(os.environ.get("LABKIT_DATA", _ROOT / "data"))


def read_text(path: str | Path, kind: str = "file") -> str:
    """The text of a file that somebody named: UTF-8, with or without a byte order mark (Excel writes one).

    Raises FileNotFoundError or ValueError with a sentence; `kind` is what should have been there.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        raise ValueError(f"{path} is a folder: give the path of a {kind}.")
    if not given.is_file():
        raise FileNotFoundError(f"There is no {kind} at {path}: give the path of one.")
    try:
        return given.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"{error.reason}, at byte {error.start}"
        raise ValueError(f"{path} is no {kind}: its bytes are no UTF-8 text ({why}). Give a text file.") from None


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
