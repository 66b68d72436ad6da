"""torchrun with a conscience: `python -m labkit.cluster.launch SHM_FOLDER <torchrun's arguments>`.

It is `python -m torch.distributed.run` in this very process (or `labkit.engine.forking`, where the ranks are forked
from it), plus two threads. One reads stdin, whose other end the pool holds: when it ends, however the pool went, the
ranks and this process are ended and the shared memory is removed. (PR_SET_PDEATHSIG would fire when the pool's *thread*
ends, and exists on Linux only; a pipe has neither trap.) The other prints a JSON line on stdout the moment a rank has
ended, with its exit code, also a zero, which torchrun takes for success; it looks without reaping, which stays
torchrun's.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

FORK = "--start-method=fork"


def main(arguments: list[str]) -> int:
    shm_folder, *torchrun_arguments = arguments
    threading.Thread(target=_end_with_owner, args=(shm_folder, os.getppid()), daemon=True).start()
    if hasattr(os, "waitid"):  # not on macOS: there, torchrun's own report has to do
        threading.Thread(target=_watch_children, daemon=True).start()
    sys.argv = ["torchrun", *torchrun_arguments]
    try:
        module = "labkit.engine.forking" if FORK in torchrun_arguments else "torch.distributed.run"
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:  # torch's ChildFailedError, known by what it carries: no torch is imported here
        failures = getattr(error, "failures", None)
        if failures is None:
            raise
        for rank, failure in failures.items():
            _say(pid=failure.pid, rank=rank, exit_code=failure.exitcode)
        return 1
    return 0


def _say(**ended: Any) -> None:
    print(json.dumps({"ended": ended}), flush=True)


def _watch_children() -> None:
    seen: set[int] = set()
    while True:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            child = None
        if child is None or child.si_pid in seen:  # none yet, or one that torchrun has not reaped so far
            time.sleep(0.02)
            continue
        seen.add(child.si_pid)
        _say(pid=child.si_pid, exit_code=child.si_status * (1 if child.si_code == os.CLD_EXITED else -1))


def _end_with_owner(shm_folder: str, owner: int) -> None:
    while os.read(0, 4096):
        pass
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=1.0)  # reaped here: not every container has an init that does
    shutil.rmtree(shm_folder, ignore_errors=True)
    if os.getppid() != owner:  # killed: nobody else is left to tidy up, or to read the logs
        _remove(Path(os.environ["LABKIT_TOKEN_FILE"]).parent)
    os._exit(1)


def _remove(folder: Path) -> None:
    """This start's folder, and the pool's own when nothing else is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
