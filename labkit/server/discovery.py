"""Find the lab server of this user, or start one: two people's shells and pages meet at one engine.

A living server's address and token lie in the private runtime folder. Whoever finds none takes a lock, looks once
more, and starts one detached: in a session of its own, so that it outlives the shell that happened to be first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.paths import runtime_dir
from labkit.server.client import ServerClient, ServerError

FIRST_LINE_TIMEOUT_S = 60.0


class ServesOther(ServerError):
    """A lab server runs here, with another model."""


@dataclass(frozen=True)
class Found:
    url: str
    token: str
    pid: int
    model: str
    ranks: int

    def client(self) -> ServerClient:
        return ServerClient(self.url, self.token)


def _file() -> Path:
    return runtime_dir() / "server.json"


def log_file() -> Path:
    """What a detached server says after its first line."""
    return runtime_dir() / "server.log"


# ---- the server's side


def register(me: Found) -> Found | None:
    """Write down where this server is. When another one lives there already, it stays and is returned."""
    other = find()
    if other is not None and other.url != me.url:
        return other
    draft = _file().with_suffix(f".{me.pid}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(me), file)
    os.replace(draft, _file())
    return None


def unregister(url: str) -> None:
    found = _read()
    if found is not None and found.url == url:
        _file().unlink(missing_ok=True)


# ---- the client's side


def find() -> Found | None:
    """The registered server if it answers. A stale entry (its process is gone) is ignored."""
    found = _read()
    if found is None or not _is_alive(found.pid):
        return None
    try:
        found.client().health()
    except ServerError:
        return None
    return found


def _read() -> Found | None:
    try:
        return Found(**json.loads(_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def connect(url: str | None = None, token: str | None = None, start: bool = True, **serve: Any) -> ServerClient:
    """The server at `url`, else this user's, else (with `start`) a new one started with `serve`'s options.

    `serve` takes what `labkit serve` does (model="lab-30m", layout="tp2", ranks=2, no_record=True, …). Raises
    ServerError when there is none, when it does not start, or when the one that runs serves something else.
    """
    if url is not None:
        return ServerClient(url, os.environ.get("LABKIT_TOKEN", "") if token is None else token)
    found = find()
    if found is None and not start:
        raise ServerError("No lab server runs here: start one with `labkit serve`, or give its url and token.")
    if found is None:
        with _starters_lock():
            found = find() or start_detached(serve)
    _check_same(found, serve)
    return found.client()


def _check_same(found: Found, wanted: Mapping[str, Any]) -> None:
    model, ranks = wanted.get("model"), wanted.get("ranks") or 0
    if model and model != found.model and Path(str(model)).name != found.model:
        raise ServesOther(
            f"The lab server at {found.url} serves {found.model}, and you asked for {model}: end it with "
            f"`labkit stop`, or connect without naming a model."
        )
    _check_nodes(found, wanted)
    if ranks > found.ranks:
        raise ServerError(
            f"The lab server at {found.url} has {found.ranks} ranks, and you asked for {ranks}: end it with "
            f"`labkit stop` first."
        )


def _check_nodes(found: Found, wanted: Mapping[str, Any]) -> None:
    """A figure over a slow link must not come from a server that has none."""
    if not wanted.get("nodes"):
        return
    from labkit.cluster.nodes import Link  # a page's kernel, which asks for no nodes, does without it

    asked = f"{wanted['nodes']} nodes, link {Link.parse(wanted.get('link', ''), wanted.get('link_delay_ms', 0.0))}"
    topology = found.client().state()["topology"]
    there = f"{topology['num_nodes']} nodes, link {topology.get('link')}"
    if asked != there:
        raise ServerError(
            f"The lab server at {found.url} has {there}, and you asked for {asked}: end it with `labkit stop` first."
        )


@contextlib.contextmanager
def _starters_lock() -> Iterator[None]:
    with open(runtime_dir() / "server.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start_detached(
    options: Mapping[str, Any], env: Mapping[str, str] | None = None, log: Path | None = None
) -> Found:
    """Start a server that outlives this process; returns once it listens (its ranks may still be starting).

    `env` and `log`: for one beside the lab server, with a runtime folder and a log of its own.
    """
    command, log = [sys.executable, "-m", "labkit.server", "serve", *arguments(options)], log or log_file()
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    first = json.loads(_first_line(process, log))
    state = ServerClient(**first).state()
    return Found(first["url"], first["token"], process.pid, state["model"], state["num_ranks"])


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as the command line has them: no_record=True becomes --no-record."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value not in (None, False):
            words += [flag, str(value)]
    return words


def _first_line(process: subprocess.Popen[bytes], log: Path) -> bytes:
    assert process.stdout is not None
    with process.stdout as pipe:
        ready, _, _ = select.select([pipe], [], [], FIRST_LINE_TIMEOUT_S)
        line = pipe.readline() if ready else b""
    if line:
        return line
    if not ready:
        process.terminate()
    process.wait(timeout=10)
    tail = log.read_text(errors="replace")[-2000:].strip()
    raise ServerError(f"The lab server did not start:\n{tail or '(it said nothing)'}")
