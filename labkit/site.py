"""`labkit lab`: the lab server, JupyterLab and Voila as three processes behind one landing page, ended together.

JupyterLab is for whoever owns the machine: its token runs code. Voila shows the dashboards and cannot run a visitor's
code, so it is what a workshop's guests get (`--guests` serves it alone). Each listens on loopback with a token of its
own, passed by environment and never on a command line, where every local user could read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit import paths

if TYPE_CHECKING:
    from labkit.server.client import ServerClient

_PR_SET_PDEATHSIG = 1
_DESCRIPTIONS = {
    "layouts": "Live: compose a layout, put a load on it, and watch what moves.",
    "fabric": "Live: where the ranks stand, what joins them as measured, and what they do with it.",
    "planner": "From a model, GPUs, traffic and wishes to the smallest layout that does, and why; predicted.",
}
"""Of the dashboards, by their notebook's name."""


@dataclass(frozen=True)
class Part:
    """One of the site's web servers, once it answers."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    """With its token: opens without a login."""
    log: Path


class PartFailed(RuntimeError):
    """A part of the site did not come up; the message has the end of its log."""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def die_with_parent() -> None:
    """Run in the child before exec: on Linux it ends when its starter does, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_jupyterlab(port: int, token: str) -> Part:
    root = paths.repo_dir()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", "--LabApp.news_url=None",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--allow-root")  # a container's usual user; Jupyter refuses it unless told
    url = f"http://127.0.0.1:{port}/lab/tree/labs?token={token}"
    return _start("JupyterLab", command, {"JUPYTER_TOKEN": token}, url, f"http://127.0.0.1:{port}/login")


def start_voila(port: int, token: str, host: str = "127.0.0.1") -> Part:
    dashboards = paths.repo_dir() / "dashboards"
    environment = {
        "LABKIT_VOILA_TOKEN": token,
        "JUPYTER_PATH": _with_existing("JUPYTER_PATH", dashboards / "share" / "jupyter"),
        "JUPYTER_CONFIG_PATH": _with_existing("JUPYTER_CONFIG_PATH", dashboards / "config"),
    }
    command = [
        sys.executable, "-m", "voila", str(dashboards), "--no-browser", f"--Voila.ip={host}", f"--port={port}",
    ]  # fmt: skip
    url = f"http://{host}:{port}/?token={token}"
    return _start("Voila", command, environment, url, f"http://127.0.0.1:{port}/voila/static/voila.js")


def _with_existing(name: str, first: Path) -> str:
    return os.pathsep.join(filter(None, [str(first), os.environ.get(name, "")]))


def _start(name: str, command: list[str], environment: dict[str, str], url: str, probe_url: str) -> Part:
    log = paths.runtime_dir() / f"{name.lower()}-{os.getpid()}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    part = Part(name, process, url, log)
    _wait_until_up(part, probe_url)
    return part


def _wait_until_up(part: Part, probe_url: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if part.process.poll() is not None:
            raise PartFailed(f"{part.name} ended with exit code {part.process.returncode}:\n{_tail(part.log)}")
        if _answers(probe_url):
            return
        time.sleep(0.2)
    part.process.kill()
    raise PartFailed(f"{part.name} did not answer within {timeout_s:.0f} s:\n{_tail(part.log)}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True  # it speaks HTTP; which status is not the question here
    except OSError:
        return False


def _tail(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def _end(part: Part) -> None:
    """Politely, then not: Jupyter asks its kernels to stop on SIGTERM."""
    part.process.terminate()
    try:
        part.process.wait(10)
    except subprocess.TimeoutExpired:
        part.process.kill()
        part.process.wait()
    part.log.unlink(missing_ok=True)


@contextlib.contextmanager
def running_site(guests_only: bool, say: Callable[[str], None]) -> Iterator[list[Part]]:
    """Start the web servers, yield them, and end them whatever happens."""
    parts: list[Part] = []
    try:
        say("Starting Voila (the dashboards) …")
        parts.append(start_voila(free_port(), secrets.token_urlsafe(24)))
        if not guests_only:
            say("Starting JupyterLab (the labs) …")
            parts.append(start_jupyterlab(free_port(), secrets.token_urlsafe(24)))
        yield parts
    finally:
        for part in reversed(parts):
            _end(part)


def links(parts: list[Part]) -> list[dict[str, str]]:
    """What the landing page lists, each with the token that opens it."""
    found = []
    for part in parts:
        if part.name == "Voila":
            found += [_dashboard_link(part, notebook) for notebook in _dashboards()]
        else:
            found.append({"title": "Labs", "url": part.url, "description": "JupyterLab: the lessons, read in order."})
    return found


def _dashboards() -> list[Path]:
    return sorted((paths.repo_dir() / "dashboards").glob("*.ipynb"))


def _dashboard_link(voila: Part, notebook: Path) -> dict[str, str]:
    base, _, query = voila.url.partition("?")
    return {
        "title": notebook.stem.capitalize(),
        "url": f"{base}voila/render/{notebook.name}?{query}",
        "description": _DESCRIPTIONS.get(notebook.stem, "Live dashboard."),
    }


def wait_for_the_end(parts: list[Part]) -> str:
    """Block until a part has gone (returns the sentence that says so) or Ctrl-C or SIGTERM interrupts."""
    while True:
        for part in parts:
            if part.process.poll() is not None:
                return f"{part.name} ended with exit code {part.process.returncode}:\n{_tail(part.log)}"
        time.sleep(0.5)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# ---- the command


def register(app: typer.Typer) -> None:
    app.command()(lab)


def lab(
    model: Annotated[str, typer.Option(help="As in labkit serve; by default the server that runs, or lab-30m.")] = "",
    ranks: Annotated[int, typer.Option(help="As in labkit serve; 0: what suits the machine.")] = 0,
    guests: Annotated[bool, typer.Option("--guests", help="Dashboards only: visitors who must not run code.")] = False,
) -> None:
    """Open the lab: a running engine, the dashboards, JupyterLab, and one URL that leads to all of them."""
    from labkit.server import discovery
    from labkit.server.client import ServerError

    say = _console_line
    try:
        ours = discovery.find() is None
        say("Starting the lab server and its ranks …" if ours else "Found a lab server that runs already.")
        client = discovery.connect(model=model or None, ranks=ranks or None)
    except ServerError as error:
        _console_line(str(error))
        raise typer.Exit(2) from error
    try:
        _keep_open(client, guests, say)
    except PartFailed as error:
        say(str(error))
        raise typer.Exit(1) from error
    finally:
        if ours:
            say("Ending the lab server and its ranks …")
            _shut_down(client)


def _keep_open(client: ServerClient, guests: bool, say: Callable[[str], None]) -> None:
    signal.signal(signal.SIGTERM, _raise_interrupt)
    with contextlib.suppress(KeyboardInterrupt), running_site(guests, say) as parts:
        client.set_links(links(parts))
        _await_ranks(client, say)
        say("Ctrl-C ends it. The lab is open at")
        print(f"\n    {client.url}/?token={client.token}\n", flush=True)
        with staying(client):
            if gone := wait_for_the_end(parts):
                raise PartFailed(gone)


def _await_ranks(client: ServerClient, say: Callable[[str], None]) -> None:
    """The page says what the ranks do while they start; here it is said once, so that the URL leads to a ready lab."""
    said = ""
    while (status := client.health()) not in ("ready", "failed", "stopped"):
        message = client.state().get("message") or status
        if message != said:
            say(f"  {message}")
            said = message
        time.sleep(0.3)
    if status != "ready":
        say(f"The ranks did not start: {client.state().get('message', status)}")


@contextlib.contextmanager
def staying(client: ServerClient) -> Iterator[None]:
    """Stay a client of the server, which otherwise leaves ten minutes after its last one."""
    stream = client.events(lambda event: None, ["lease"], on_end=_say_that_it_went)
    try:
        yield
    finally:
        stream.close()


def _say_that_it_went(why: str) -> None:
    _console_line(f"The lab server has gone ({why}). A notebook's labkit.connect() starts a new one.")


def _shut_down(client: ServerClient) -> None:
    from labkit.server.client import ServerError

    with contextlib.suppress(ServerError):
        client.shutdown()


def _console_line(text: str) -> None:
    print(f"labkit: {text}", file=sys.stderr, flush=True)
