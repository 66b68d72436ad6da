"""The groups of one rank under one layout: every axis of the layout is a slice of the same array of ranks.

Wires are kept by rank tuple over switches of layout, in a bounded cache; a switch to a layout seen before
opens nothing. A group within a node gets the chosen fabric, one that spans nodes what reaches across
(`labkit.layout.fabrics`). All ranks open their wires in one order (the axes below), and each wire is warmed by one real
call before the layout counts as ready. Two axes over the same ranks share a wire. A rank outside the layout
gets a mesh that is not `active`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from labkit.engine.messages import Configure
from labkit.layout import Deployment, Layout
from labkit.layout.fabrics import fabric_of
from labkit.parallel.comm import Door, Group
from labkit.parallel.ring import EventRing, Ring
from labkit.parallel.wire import Fabric, Wire

AXES = ("world", "dp", "pp", "pcp", "tp", "dcp", "ep")
CAPACITY = 16
"""Wires kept; each holds a few MiB of shared memory, or some sockets."""

_Key = tuple[str, tuple[int, ...]]


class WireCache:
    """Wires of this rank by (fabric, ranks), least recently used first."""

    def __init__(self, fabrics: Mapping[str, Callable[[], Fabric]], capacity: int = CAPACITY) -> None:
        self._makers = fabrics
        self._fabrics: dict[str, Fabric] = {}
        self._capacity = capacity
        self._wires: OrderedDict[_Key, Wire] = OrderedDict()

    def __len__(self) -> int:
        return len(self._wires)

    def get(self, fabric: str, ranks: tuple[int, ...], rank: int, name: str) -> tuple[Wire, bool]:
        """The wire of these ranks, and whether it is new.

        A member may have dropped it meanwhile: then so do we.
        """
        key = (fabric, ranks)
        wire = self._wires.get(key)
        if wire is not None and not wire.is_stale():
            self._wires.move_to_end(key)
            return wire, False
        if wire is not None:
            self._wires.pop(key).close()
        self._wires[key] = wire = self._fabric(fabric).open(name, ranks, ranks.index(rank))
        return wire, True

    def open_apart(self, fabric: str, ranks: tuple[int, ...], rank: int, name: str) -> Wire:
        """A wire that is not kept: whoever asked for it closes it."""
        return self._fabric(fabric).open(name, ranks, rank=ranks.index(rank))

    def suit(self, fabric: str, num_busy_threads: int) -> None:
        self._fabric(fabric).suit(num_busy_threads)

    def trim(self, keep: int) -> None:
        """Close the oldest wires beyond the capacity, but none of the `keep` youngest."""
        while len(self._wires) > max(self._capacity, keep):
            self._wires.popitem(last=False)[1].close()

    def abort(self) -> None:
        for wire in self._wires.values():
            wire.abort()
        self._wires.clear()

    def close(self) -> None:
        while self._wires:
            self._wires.popitem(last=False)[1].close()
        for fabric in self._fabrics.values():
            fabric.close()

    def _fabric(self, name: str) -> Fabric:
        if name not in self._fabrics:
            if name not in self._makers:
                raise ValueError(f"no fabric {name!r} here; there are: {', '.join(self._makers)}")
            self._fabrics[name] = self._makers[name]()
        return self._fabrics[name]


class Mesh:
    """mesh.tp, mesh.pp, … are this rank's groups; `door` carries the tags and the ring that they share."""

    def __init__(self, layout: Layout, rank: int, *, door: Door, wires: WireCache | None = None,
                 fabric: str = "shm", epoch: int = 0, nodes: Sequence[int] = (), first_rank: int = 0,
                 handoff: Sequence[int] = ()) -> None:  # fmt: skip
        """rank: in the layout, whose rank 0 is `first_rank` of the world. handoff: all that hand KV over."""
        self.layout = layout
        self._nodes = nodes
        self._first_rank = first_rank
        self.rank = rank
        self.door = door
        self.active = rank < layout.world_size
        self._new: list[Wire] = []
        self._groups = {axis: self._open(axis, wires, fabric, epoch) for axis in AXES} if self.active else {}
        if self.active and len(handoff) > 1:
            # Its bytes pass beside the steps, on a thread of their own: their rows are no step's, so no ring has them.
            beside = Door(recording=False)
            self._groups["handoff"] = self._join("handoff", 0, tuple(handoff), wires, fabric, epoch, beside)
        if wires is not None:
            wires.trim(keep=len({group.ranks for group in self._groups.values() if group.size > 1}))

    def __getattr__(self, axis: str) -> Group:
        groups = self.__dict__.get("_groups", {})
        if axis in groups:
            return groups[axis]
        raise AttributeError(
            f"rank {self.__dict__.get('rank')} has no group {axis!r}"
            + ("" if groups else ": it stands outside the layout and idles")
        )

    def group(self, axis: str) -> Group:
        return self._groups[axis]

    def warm(self) -> None:
        """One real call on each wire opened for this mesh.

        What is slow the first time is over before a request comes.
        """
        device = "cuda" if isinstance(self.door.ring, EventRing) else "cpu"
        for wire in self._new:
            wire.all_reduce(torch.zeros(16, device=device))
            wire.barrier()
        self._new.clear()

    def _open(self, axis: str, wires: WireCache | None, fabric: str, epoch: int) -> Group:
        local = self.layout.group_of(axis, self.rank)
        ranks = tuple(self._first_rank + rank for rank in local)
        return self._join(axis, self.layout.groups(axis).index(local), ranks, wires, fabric, epoch, self.door)

    def _join(
        self, axis: str, index: int, ranks: tuple[int, ...], wires: WireCache | None, fabric: str, epoch: int,
        door: Door,
    ) -> Group:  # fmt: skip
        me, wire = self._first_rank + self.rank, None
        if len(ranks) > 1:
            if wires is None:
                raise ValueError(f"{self.layout} needs {self.layout.world_size} ranks; this process is a single one")
            name = f"{epoch}-{axis}-{index}-{ranks[0]}"
            wire, new = wires.get(fabric_of(ranks, fabric, self._nodes), ranks, me, name)
            if new:
                self._new.append(wire)
        return Group(ranks.index(me), len(ranks), axis, ranks, index=index, wire=wire, door=door)


class MeshFactory:
    """Makes this rank's mesh of each `Configure`.

    It owns the wires, the door and the ring of the rank's process.
    """

    def __init__(self, rank: int, shm_folder: Path, device: str = "cpu", *, node_is_a_machine: bool = False) -> None:
        """node_is_a_machine: ranks of other nodes do not share this one's cores, as those of nodes made here do."""
        self.rank = rank
        self.device = torch.device(device)
        self._node_is_a_machine = node_is_a_machine
        self.door = Door(EventRing() if device == "cuda" else Ring())
        self._beside: Wire | None = None
        self._beside_key: _Key | None = None
        self._suited: tuple[str, int] | None = None
        self.wires = WireCache(
            {
                "shm": lambda: _shm(shm_folder),
                "gloo": lambda: _torch("gloo"),
                "nccl": lambda: _torch("nccl"),
            }
        )

    def __call__(self, message: Configure) -> Mesh:
        """A warm mesh: every wire of it has carried a real call."""
        layout = Layout.parse(message.layout)
        deployment = Deployment.parse(message.deployment) if message.deployment else None
        world_size = deployment.world_size if deployment else layout.world_size
        self.door.recording = message.record
        self.door.tag()
        self._suited = (message.fabric, self._num_neighbours(world_size, message.nodes) * message.threads)
        self.wires.suit(*self._suited)
        handoff = deployment.handoff_ranks if deployment and deployment.hands_off else ()
        me = self.rank
        mesh = Mesh(layout, me - message.first_rank, door=self.door, wires=self.wires, fabric=message.fabric,
                    epoch=message.epoch, nodes=message.nodes, first_rank=message.first_rank,
                    handoff=handoff if me in handoff else ())  # fmt: skip
        mesh.warm()
        return mesh

    def _num_neighbours(self, world_size: int, nodes: Sequence[int]) -> int:
        """Ranks in use that share this machine's cores, this one included."""
        if not (nodes and self._node_is_a_machine):
            return world_size
        return nodes[:world_size].count(nodes[self.rank])

    def between(self, ranks: Sequence[int], fabric: str, name: str, threads: int) -> Group | None:
        """A group beside any layout, for measuring; None on a rank that is not in it. All ranks of the pool call it.

        Its wire stays open while the same ranks are asked for again; it goes when others are, or none. name: never
        used before. While it is open ranks wait as suits `threads` of each member.
        """
        wanted = (fabric, tuple(ranks))
        if wanted != self._beside_key:
            self.drop_beside()
            self._beside_key = wanted
            if self.rank in ranks:
                self.wires.suit(fabric, len(ranks) * threads)
                self._beside = self.wires.open_apart(fabric, tuple(ranks), self.rank, name)
                self._beside.all_reduce(torch.zeros(16, device=self.device))  # what is slow the first time
                self._beside.barrier()
        if self._beside is None:
            return None
        door = Door(recording=False)
        return Group(ranks.index(self.rank), len(ranks), "world", tuple(ranks), wire=self._beside, door=door)

    def drop_beside(self) -> None:
        """Close it; the layout's own ranks wait as before."""
        wire, self._beside, self._beside_key = self._beside, None, None
        if wire is not None:
            wire.close()
            if self._suited is not None:
                self.wires.suit(*self._suited)

    def close(self) -> None:
        self.drop_beside()
        self.wires.close()


def single_rank_mesh(layout: Layout | None = None, recording: bool = True) -> Mesh:
    """A mesh without peers, for one process: every group has size 1."""
    return Mesh(layout or Layout(), 0, door=Door(recording=recording))


def _shm(folder: Path) -> Fabric:
    from labkit.parallel.fabric_shm import ShmFabric

    return ShmFabric(folder)


def _torch(backend: str) -> Fabric:
    from labkit.parallel.fabric_torch import TorchFabric

    return TorchFabric(backend)
