"""Collectives of torch.distributed behind the same wire: gloo over TCP (the slow link of a laptop) and NCCL
on GPUs.

The ranks meet at the store that torchrun keeps for them. Each wire is a process group of its own under a
name never used before, so making and dropping groups needs no order among the ranks outside it. A gloo call
that fails because a member has gone raises PeerLost: who sees it is not the one to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.wire import Fabric, PeerLost, Pending, Wire

_TIMEOUT = timedelta(seconds=60)


def torchrun_store() -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, as torchrun's environment names it."""
    store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    return dist.PrefixStore("labkit", store)


class TorchFabric(Fabric):
    """backend: gloo (CPU tensors) or nccl (tensors of this rank's GPU, which must be the current device)."""

    def __init__(self, backend: str, store: dist.Store | Callable[[], dist.Store] = torchrun_store) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"torch.distributed carries the fabrics gloo and nccl here, not {backend!r}")
        self.name = backend
        self._given = store
        self._store: dist.Store | None = None

    @property
    def store(self) -> dist.Store:
        if self._store is None:
            self._store = self._given if isinstance(self._given, dist.Store) else self._given()
        return self._store

    def open(self, name: str, ranks: tuple[int, ...], rank: int) -> Wire:
        with _peers_blamed(self.name):
            group = self._make_group(f"{self.name}/{name}", rank, len(ranks))
        wire = NcclWire if self.name == "nccl" else GlooWire
        return wire(group, self.store, f"closed/{self.name}/{name}", ranks, rank)

    def _make_group(self, name: str, rank: int, size: int) -> Any:
        store = dist.PrefixStore(name, self.store)
        if self.name == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, timeout=_TIMEOUT)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _peers_blamed(fabric: str):
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(-1, f"{fabric} lost a member of the group: {str(error).splitlines()[0]}") from error


class TorchWire(Wire):
    """What gloo and NCCL do alike. `group` is a torch ProcessGroup; nothing else of the process knows it."""

    def __init__(self, group: Any, store: dist.Store, closed_key: str, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks, rank)
        self._group = group
        self._store = store
        self._closed_key = closed_key

    def _finish(self, work: Any) -> None:
        """Wait for one call: on CPUs until it is over, on CUDA until the current stream is ordered behind
        it.
        """
        with _peers_blamed("torch.distributed"):
            work.wait()

    def all_reduce(self, x: Tensor) -> None:
        whole = x.contiguous()
        self._finish(self._group.allreduce([whole]))
        if whole is not x:
            x.copy_(whole)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        size = len(self.ranks)
        whole = x.new_empty(size * x.shape[0], *x.shape[1:])
        self._finish(self._group._allgather_base(whole, x))
        return whole if dim == 0 else torch.cat(whole.view(size, *x.shape).unbind(), dim)

    def broadcast(self, x: Tensor, src: int) -> None:
        whole = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._finish(self._group.broadcast([whole], options))
        if whole is not x:
            x.copy_(whole)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        parts = torch.stack(x.chunk(self.size, dim))
        out = torch.empty_like(parts[0])
        self._finish(
            self._group._reduce_scatter_base(out, parts.view(-1, *parts.shape[2:]), dist.ReduceScatterOptions())
        )
        return out

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        like = parts[0]
        counts = self._swap_counts(torch.tensor([part.shape[0] for part in parts], device=like.device))
        given = [part.shape[0] for part in parts]
        out = like.new_empty((sum(counts), *like.shape[1:]))
        self._finish(self._group.alltoall_base(out, torch.cat(list(parts)), counts, given, dist.AllToAllOptions()))
        return list(out.split(counts))

    def _swap_counts(self, given: Tensor) -> list[int]:
        taken = torch.empty_like(given)
        ones = [1] * self.size
        self._finish(self._group.alltoall_base(taken, given, ones, ones, dist.AllToAllOptions()))
        return taken.tolist()

    def isend(self, x: Tensor, dst: int) -> Pending:
        x = x.contiguous()
        return _Work(self, self._group.send([x], dst, 0), x)

    def irecv(self, x: Tensor, src: int) -> Pending:
        if not x.is_contiguous():
            raise ValueError("irecv writes into a contiguous tensor; pass x.contiguous() and copy afterwards")
        return _Work(self, self._group.recv([x], src, 0), x)

    def barrier(self) -> None:
        self._finish(self._group.barrier(dist.BarrierOptions()))

    def is_stale(self) -> bool:
        return self._store.check([self._closed_key])

    def close(self) -> None:
        if self._group is not None:
            self._store.set(self._closed_key, "1")
            self._group.shutdown()
            self._group = None

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


class GlooWire(TorchWire):
    """gloo moves CPU tensors over TCP; its calls are over when `wait` returns."""

    def gather(self, x: Tensor) -> list[Tensor] | None:
        x = x.contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        out = [torch.empty_like(x) for _ in self.ranks] if self.rank == 0 else None
        self._finish(self._group.gather([out] if out else [], [x], options))
        return out


class NcclWire(TorchWire):
    """NCCL orders its work on the current stream.

    A gather is an all-gather of which only rank 0 keeps the result.
    """

    def gather(self, x: Tensor) -> list[Tensor] | None:
        x = x.contiguous()
        out = [torch.empty_like(x) for _ in self.ranks]
        self._finish(self._group.allgather([out], [x]))
        return out if self.rank == 0 else None

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())))


class _Work:
    def __init__(self, wire: TorchWire, work: Any, x: Tensor) -> None:
        self._wire, self._work, self._x = wire, work, x

    def wait(self) -> None:
        self._wire._finish(self._work)

    def advance(self) -> bool:
        return True  # gloo's threads, or the device, carry it
