"""A few processes that stay warm and play ranks: each runs the function it is told, with its own wire or
mesh.

They are started by multiprocessing, not by torchrun, so that a test of a collective costs milliseconds. A
function is named by module and name; what it returns comes back as a list in rank order, and what it raises
is raised here.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0


class RankRaised(AssertionError):
    """Some ranks raised; the message has their tracebacks."""


@dataclass
class Rank:
    """What a function run on a rank gets first."""

    rank: int
    folder: Path
    kept: dict[str, Any] = field(default_factory=dict)
    """Wires and the like that live from one call to the next."""


def _play(rank: int, folder: Path, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    me = Rank(rank, folder)
    while (told := pipe.recv()) is not None:
        module, name, arguments = told
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(me, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Team:
    def __init__(self, size: int, folder: Path) -> None:
        self.folder = folder
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_play, args=(rank, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Any, *arguments: Any, ranks: tuple[int, ...] | None = None) -> list[Any]:
        """function(rank, *arguments) on the ranks (default all) at once."""
        chosen = range(len(self._pipes)) if ranks is None else ranks
        for rank in chosen:
            self._pipes[rank].send((function.__module__, function.__name__, arguments))
        answers = [self._answer(rank) for rank in chosen]
        broken = [f"rank {r}:\n{a}" for r, (ok, a) in zip(chosen, answers, strict=True) if not ok]
        if broken:
            raise RankRaised("\n".join(broken))
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(_TIMEOUT_S):
            self.close()
            raise RankRaised(f"rank {rank} did not answer within {_TIMEOUT_S:g} s")
        return self._pipes[rank].recv()

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
