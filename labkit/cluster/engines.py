"""A production engine's own server, started here and ended here: vLLM or SGLang in a process group, its log in sight.

Until the server answers `/health` its log is followed, line by line; a server that dies first is a sentence with the
end of that log. Whatever ends the `with`, every process that it left is ended too, the ones that moved to sessions of
their own included, and its temporary files and its shared memory go with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from labkit.cluster.engine_log import LogFollower, plain_line, tail
from labkit.cluster.engine_plan import EngineError, EnginePlan
from labkit.cluster.engine_shm import SharedMemory, remove_noted
from labkit.cluster.topology import Machine

OnLine = Callable[[float, str], None]
"""on_line(seconds since the start, a line of the log): what a shell shows while a server starts."""
START_TIMEOUT_S = 1200.0
"""A first start compiles, which takes minutes."""
_POLL_S, _GRACE_S, _TAIL_LINES = 0.25, 20.0, 12
_VERSION_PATHS = {"vllm": "/version", "sglang": "/get_server_info"}
_PR_SET_PDEATHSIG = 1


class EngineServer:
    """A server that answers. `url` is its address; `check` raises EngineError once it has gone away."""

    def __init__(
        self, plan: EnginePlan, command: Sequence[str], process: subprocess.Popen[bytes], url: str, log: Path,
        shared: SharedMemory,
    ) -> None:  # fmt: skip
        self.plan, self.command, self.url, self.log = plan, list(command), url, log
        self.variables: dict[str, str] = {}
        self.start_s = 0.0
        """From its start to its first healthy answer."""
        self._process, self._shared = process, shared
        self._family: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        code = self._process.poll()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise EngineError(f"The {self.plan.engine} server {how}. {self._last_words()}")

    def _last_words(self) -> str:
        lines = [plain for line in tail(self.log) if (plain := plain_line(line))]
        return f"The end of its log ({self.log}):\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])

    def wait_healthy(self, on_line: OnLine | None, timeout_s: float) -> None:
        """Until /health answers 200. Raises EngineError when it dies first or the time is over."""
        begin_s = time.monotonic()
        follow = LogFollower(self.log)
        while True:
            elapsed_s = time.monotonic() - begin_s
            for line in follow.new_lines():
                if on_line is not None:
                    on_line(elapsed_s, line)
            self.check()
            self._note_family()
            if _answers(f"{self.url}/health"):
                self.start_s = time.monotonic() - begin_s
                return
            if elapsed_s > timeout_s:
                raise EngineError(
                    f"The {self.plan.engine} server is not healthy after {timeout_s:.0f} s. {self._last_words()}"
                )
            time.sleep(_POLL_S)

    def version(self) -> str:
        """As the server says; empty where it does not."""
        try:
            return str(json.loads(fetch(self.url + _VERSION_PATHS[self.plan.engine]))["version"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def served(self) -> dict[str, Any]:
        """Its first model: {id, max_model_len where it says one, …}."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return dict(json.loads(fetch(f"{self.url}/v1/models"))["data"][0])
        return {}

    def _note_family(self) -> None:
        """Children are remembered while their parent lives: orphans could not be told from strangers."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                self._family[child.pid] = child
        self._shared.look([self.pid, *self._family])

    def stop(self) -> None:
        """Asked first (its main process, which ends its ranks), then ended by force with all that it started.

        Another Ctrl-C while it is asked takes the patience away, not the rest.
        """
        self._note_family()
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT if self.plan.engine == "vllm" else signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_S)
        finally:
            self._end_family()

    def _end_family(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        left = [child for child in self._family.values() if child.is_running()]
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._process.wait()
        psutil.wait_procs(left, 5.0)
        self._shared.remove()


@contextlib.contextmanager
def started(
    plan: EnginePlan, machine: Machine, log: Path, on_line: OnLine | None = None, timeout_s: float = START_TIMEOUT_S
) -> Iterator[EngineServer]:
    """A healthy server while the block lasts. Raises EngineError with a sentence when it cannot be had."""
    port = _free_port()
    command, variables = plan.command(port, machine), plan.variables(machine)
    log.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_folder() as scratch:
        shared = SharedMemory(Path(scratch))
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, env={**os.environ, **variables, "TMPDIR": scratch}, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=sink, preexec_fn=_as_a_child, process_group=0,
            )  # fmt: skip
        server = EngineServer(plan, command, process, f"http://127.0.0.1:{port}", log, shared)
        server.variables = variables
        try:
            server.wait_healthy(on_line, timeout_s)
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """Where the engine's sockets and temporary files go."""
    remove_left()
    prefix = f"{_folder_prefix()}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as scratch:
        yield scratch


def _folder_prefix() -> str:
    return f"labkit-engine-{os.getuid()}-"


def remove_left() -> None:
    """Temporary files and shared memory of starts whose starter was killed before it could remove them."""
    for left in Path(tempfile.gettempdir()).glob(f"{_folder_prefix()}*"):
        owner = left.name.removeprefix(_folder_prefix()).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            remove_noted(left)
            shutil.rmtree(left, ignore_errors=True)


def _as_a_child() -> None:
    """Run in the child before exec: it hears Ctrl-C's signal, by which it is asked to end, also where this process was
    started in the background and does not; on Linux it ends with the thread that started it, even when that is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, timeout_s: float = 5.0) -> str:
    """A page of a server on this machine, past any proxy. Raises OSError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_s) as answer:
            return str(answer.read().decode(errors="replace"))
    except http.client.HTTPException as error:
        raise OSError(f"{url} did not answer in HTTP: {error!r}") from error


def _answers(url: str) -> bool:
    try:
        fetch(url)
    except (OSError, ValueError):
        return False
    return True
