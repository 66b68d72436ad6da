"""A server of a lesson's own, beside the lab server: another model, or nodes with a link between them.

It lives as long as its `with` block and is found by nobody else, for its runtime folder is its own. Should the kernel
be killed inside the block, the server ends by itself soon after, and takes its nodes with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.cluster.nodes import why_not
from labkit.lab import Lab
from labkit.server.client import ServerError
from labkit.server.discovery import Found, start_detached
from labkit.server.streams import Event
from labkit.teach.lesson import Lesson
from labkit.teach.reference import ReferenceCase

_LINGER_S, _END_S = 30.0, 30.0
_NOT_MADE = "nodes could not be made"
"""Root and the tools are there, and the kernel still says no: as in a container without the right to it."""


@contextlib.contextmanager
def beside(lesson: Lesson, model: str = "", **serve: Any) -> Iterator[Lesson]:
    """The same lesson on a server of its own: same reader, same list of runs.

    `serve`: what `labkit serve` takes (ranks, nodes, ranks_per_node, link …). ServerError when it does not start.
    """
    model = model or lesson.case.model
    device = lesson.lab.state()["environment"]["backend"]
    with own_lab(**{"model": model, "dtype": lesson.case.dtype, "device": device, **serve}) as lab:
        num_ranks = lab.state()["num_ranks"]
        other = Lesson(lesson.number, lab, ReferenceCase(model, num_ranks, lesson.case.dtype), lesson.book)
        other.runs = lesson.runs
        yield other


@contextlib.contextmanager
def two_nodes(lesson: Lesson, ranks_per_node: int = 1, link: str = "") -> Iterator[Lesson | None]:
    """`beside` on two nodes made on this machine. Where they cannot be made: one sentence, and None."""
    with contextlib.ExitStack() as stack:
        reason, far = why_not(), None
        if not reason:
            try:
                far = stack.enter_context(beside(lesson, nodes=2, ranks_per_node=ranks_per_node, link=link))
            except ServerError as error:
                if _NOT_MADE not in str(error):
                    raise
                reason = str(error)
        if reason:
            print(f"No nodes can be made here, so this part stays unmeasured: {reason}")
        yield far


@contextlib.contextmanager
def own_lab(**serve: Any) -> Iterator[Lab]:
    """A server that ends with the block, also when the block raises. Raises ServerError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="labkit-beside-", ignore_cleanup_errors=True) as folder:
        env = {"LABKIT_RUNTIME": folder, "LABKIT_LINGER_S": str(_LINGER_S)}
        found = start_detached(serve, env, Path(folder) / "server.log")
        try:
            with Lab(found.client()) as lab, contextlib.closing(lab.client.events(_ignore, ["lease"])):
                lab.wait_ready()
                yield lab
        finally:
            _end(found)


def _ignore(event: Event) -> None:
    """Somebody listens for as long as the block lasts: so the server stays, whatever the reader does in it."""


def _end(found: Found) -> None:
    """Returns when its process is gone; its ranks, and the nodes that were made for them, go before it does."""
    with contextlib.suppress(ServerError):
        found.client().shutdown()
    give_up = time.monotonic() + _END_S
    while not _is_gone(found.pid):
        if time.monotonic() > give_up:
            os.kill(found.pid, signal.SIGKILL)  # whatever it made is removed by those who watch it
        time.sleep(0.05)


def _is_gone(pid: int) -> bool:
    """It is a child of this process, so its end must be collected."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
