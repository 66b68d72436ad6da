"""One mapped file that the ranks of a group share, and how they wait for each other in it.

Rank 0 of the group makes the file under a name nobody used before, the others map it, and it is unlinked as
soon as all have: from then on it lives as long as its processes, and a crash leaves nothing. Its head holds
one cache line of words per rank, each written by one rank only, so that no lock is needed: data first, then
the word that says so. x86 keeps stores in order; elsewhere `fence` does. Waiting spins first, then yields,
then sleeps; on a machine with more ranks than cores it yields at once, since the rank that it waits for
needs the core.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.parallel.wire import PeerLost

_WORDS_PER_LINE = 8
_LINE_BYTES = 64
_OPEN_TIMEOUT_S = 30.0
_NUM_SPINS = 50
"""Two microseconds: a peer that is near comes within them, and one that shares our core cannot come at all
before we yield. (2,000 spins were no faster on a quiet machine and 2-4 times slower beside busy
neighbours.)"""
_YIELD_S = 0.002
_NAP_SHARE, _MAX_NAP_S = 1 / 50, 500e-6
"""A nap's share of what was waited before: who oversleeps takes that for transfer, so it must stay small beside the
wait (80 µs of 5 ms). Napping costs a tenth of a core in the first milliseconds, and a fortieth later."""
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


def _make_fence() -> Callable[[], object] | None:
    """A full memory barrier, or None where the processor orders stores and loads as this protocol needs
    (x86).
    """
    if platform.machine().lower() in ("x86_64", "amd64", "i686", "i386"):
        return None
    if sys.platform == "darwin":
        return ctypes.CDLL(None).OSMemoryBarrier
    lock = threading.Lock()

    def two_locks() -> None:  # a release followed by an acquire: neither loads nor stores cross both
        with lock:
            pass
        with lock:
            pass

    return two_locks


fence = _make_fence()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Patience:
    """How the ranks of this process wait, over all their wires: it changes with the layout."""

    deadline_s: float = 60.0
    num_spins: int = _NUM_SPINS

    def suit(self, num_busy_threads: int) -> None:
        """Spin only where every thread at work on this host has a core of its own."""
        self.num_spins = _NUM_SPINS if num_busy_threads <= usable_cores() else 0


class Waiter:
    """Waits for a word of the block; gives up when a member has aborted or the deadline has passed."""

    def __init__(self, words: memoryview, abort_word: int, patience: Patience) -> None:
        self._words = words
        self._abort_word = abort_word
        self._patience = patience

    def until(self, at: int, value: int, peer: int, progress: Callable[[], object] | None = None) -> None:
        """Return once words[at] >= value. peer: the global rank to name; progress: called between looks."""
        words = self._words
        for _ in range(self._patience.num_spins):
            if words[at] >= value:
                return
        began = time.monotonic()
        while words[at] < value:
            if progress is not None:
                progress()
            waited_s = time.monotonic() - began
            if waited_s < _YIELD_S:
                _yield()
                continue
            self._check(waited_s, peer)
            time.sleep(min(waited_s * _NAP_SHARE, _MAX_NAP_S))

    def _check(self, waited_s: float, peer: int) -> None:
        if self._words[self._abort_word]:
            raise PeerLost(self._words[self._abort_word] - 1, "left the group in the middle of its work")
        deadline_s = self._patience.deadline_s
        if waited_s > deadline_s:
            raise PeerLost(
                peer,
                f"did not come to a call within {deadline_s:g} s; it hangs, or its machine is overloaded",
            )


class Block:
    """A file of `num_bytes` mapped by `size` ranks; line 0 belongs to all, line 1 + r to rank r."""

    MAPPED, CLOSED = 6, 7
    """Words of a rank's line: it has the file; it will not use it again. (0..5 are the wire's.)"""

    def __init__(self, path: Path, rank: int, size: int, num_bytes: int, reserve_bytes: int) -> None:
        """reserve_bytes: how much of the file must really be there (the rest is taken when it is first
        used).
        """
        self._rank, self._size = rank, size
        self._fd = _create(path, num_bytes, reserve_bytes) if rank == 0 else _attach(path)
        self._map = mmap.mmap(self._fd, num_bytes)
        self.words = memoryview(self._map)[: num_bytes // 8 * 8].cast("q")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.words[self.line(rank) + self.MAPPED] = 1
        if rank == 0:
            try:
                self._wait_all_mapped()
            finally:
                path.unlink(missing_ok=True)

    @staticmethod
    def line(rank: int) -> int:
        """Index of the first word of a rank's line; -1 is the common line."""
        return (1 + rank) * _WORDS_PER_LINE

    @staticmethod
    def head_bytes(size: int) -> int:
        return (1 + size) * _LINE_BYTES

    def tensor(self, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """[num_bytes / itemsize] over the file's bytes from offset (a multiple of 64)."""
        return self._bytes[offset : offset + num_bytes].view(dtype)

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Make sure of memory for a part of the file.

        Without it, a full /dev/shm would be a bus error later.
        """
        _reserve(self._fd, offset, num_bytes)

    def close(self) -> None:
        """Say that this end is closed. The memory goes when the last tensor over it does."""
        if self._fd >= 0:
            self.words[self.line(self._rank) + self.CLOSED] = 1
            os.close(self._fd)
            self._fd = -1

    def any_closed(self) -> bool:
        return any(self.words[self.line(rank) + self.CLOSED] for rank in range(self._size))

    def _wait_all_mapped(self) -> None:
        give_up = time.monotonic() + _OPEN_TIMEOUT_S
        for rank in range(self._size):
            while not self.words[self.line(rank) + self.MAPPED]:
                if time.monotonic() > give_up:
                    raise PeerLost(-1, f"member {rank} of a group did not map its memory in {_OPEN_TIMEOUT_S:g} s")
                time.sleep(100e-6)


def _create(path: Path, num_bytes: int, reserve_bytes: int) -> int:
    """Make the whole file under another name, then show it: who sees it sees it complete."""
    hidden = path.with_suffix(".new")
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, num_bytes)
        _reserve(fd, 0, reserve_bytes)
        os.rename(hidden, path)
    except BaseException:
        os.close(fd)
        hidden.unlink(missing_ok=True)
        raise
    return fd


def _attach(path: Path) -> int:
    give_up = time.monotonic() + _OPEN_TIMEOUT_S
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.monotonic() > give_up:
                raise PeerLost(
                    -1, f"the first rank of a group did not make its shared memory in {_OPEN_TIMEOUT_S:g} s"
                ) from None
            time.sleep(100e-6)


def _reserve(fd: int, offset: int, num_bytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS: the file lies on disk, where a write fails with an error
        return
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    except OSError as error:
        raise RuntimeError(
            f"shared memory has no room for {num_bytes / 2**20:.1f} MiB ({error.strerror}); give the container more "
            f"(docker run --shm-size=1g), or use the other fabric (--fabric gloo)"
        ) from error
