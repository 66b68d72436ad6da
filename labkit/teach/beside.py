"""A lesson, or a part of one, on a server of its own: another model, or nodes with a link between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from labkit.cluster.topology import look_at_machine
from labkit.lab import Lab
from labkit.teach.lesson import Lesson
from labkit.teach.own_server import OwnServer, on_two_nodes
from labkit.teach.reference import ReferenceCase


@contextlib.contextmanager
def own_lab(**serve: Any) -> Iterator[Lab]:
    """A server that ends with the block, also when the block raises. Raises ServerError when it does not start."""
    with OwnServer(**serve) as server, Lab(server.client) as lab:
        yield lab


@contextlib.contextmanager
def beside(lesson: Lesson, model: str = "", **serve: Any) -> Iterator[Lesson]:
    """The same lesson on a server of its own: same reader, same list of runs.

    `serve`: what `labkit serve` takes (ranks, nodes, ranks_per_node, link …). ServerError when it does not start.
    """
    model = model or lesson.case.model
    with OwnServer(**{**_like(lesson), "model": model, **serve}) as server, _moved(lesson, server, model) as other:
        yield other


@contextlib.contextmanager
def two_nodes(lesson: Lesson, ranks_per_node: int = 1, link: str = "") -> Iterator[Lesson | None]:
    """`beside` on two nodes made on this machine. Where they cannot be made: one sentence, and None."""
    server, reason = on_two_nodes(ranks_per_node=ranks_per_node, link=link, **_like(lesson))
    if server is None:
        print(f"No nodes can be made here, so this part stays unmeasured: {reason}")
        yield None
        return
    with server, _moved(lesson, server, lesson.case.model) as far:
        yield far


def _like(lesson: Lesson) -> dict[str, Any]:
    device = lesson.lab.state()["environment"]["backend"]
    return {"model": lesson.case.model, "dtype": lesson.case.dtype, "device": device}


@contextlib.contextmanager
def _moved(lesson: Lesson, server: OwnServer, model: str) -> Iterator[Lesson]:
    with Lab(server.client) as lab:
        case = ReferenceCase(model, server.found.ranks, lesson.case.dtype)
        other = Lesson(lesson.number, lab, case, lesson.book)
        other.runs = lesson.runs
        yield other


def two_halves(model: str, ranks_per_node: int, link: str) -> OwnServer:
    """A whole lesson's server: two nodes with a link between them. Where none can be made, as many ranks on one node,
    with the sentence that says why.
    """
    num_ranks = 2 * ranks_per_node
    device: dict[str, Any] = {"device": "cpu"} if len(look_at_machine().gpus) < num_ranks else {}
    server, reason = on_two_nodes(model=model, ranks_per_node=ranks_per_node, link=link, **device)
    if server is not None:
        made = f"Two nodes of {ranks_per_node} ranks on this machine, each with a link of {link}"
        server.note = f"{made}; they go with this kernel."
        return server
    server = OwnServer(model=model, ranks=num_ranks, **device)
    made = f"One node of {num_ranks} ranks, so no link is slow here, and only the bytes can be compared"
    server.note = f"{made}: {reason}"
    return server
