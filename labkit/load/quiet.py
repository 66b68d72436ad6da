"""What a process does to be on time: no garbage collection, a place before others, files enough.

All are settings of the whole process: the first is undone after the run, the others stay.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_gc() -> Iterator[None]:
    """Keeps what exists out of collections, and collections rare, for as long as it lasts."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 100, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def favour_process(niceness: int = -10) -> None:
    """Puts this process before others as far as the system allows it; without root that is not at all.

    The client stands for users who are elsewhere: its share of a core should not wait behind the engine.
    Round robin in real time is used on Linux because niceness does not reach across sessions there.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def scheduling() -> str:
    """How this process is scheduled, for the record: `real time`, or its niceness."""
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    if policy & 0xFF in (getattr(os, "SCHED_FIFO", -1), getattr(os, "SCHED_RR", -1)):
        return "real time"
    return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def raise_file_limit(num_files: int = 8192) -> None:
    """Lets this process hold many connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
