"""What the tests of this folder have each rank do. Inputs are drawn from the rank's number, so that the
test can make them too and compute in one process what must come out."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.layout import Layout
from labkit.measure.recorder import PREFILL, RING_DTYPE
from labkit.parallel.comm import Door, Fabric, Group, PeerLost, Wire
from labkit.parallel.expert import Exchange
from labkit.parallel.fabric_shm import ShmFabric
from labkit.parallel.fabric_torch import TorchFabric
from labkit.parallel.mesh import Mesh, WireCache
from labkit.parallel.pipeline import Boundary
from labkit.parallel.shm_block import Patience
from tests.parallel.team import Rank

SMALL_SLOT_BYTES = 4096


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def _fabric(me: Rank, name: str) -> Fabric:
    if name not in me.kept:
        if name == "gloo":
            me.kept[name] = TorchFabric("gloo", dist.FileStore(str(me.folder / "store"), 3))
        else:
            slot = {"shm": 1 << 20, "shm-small": SMALL_SLOT_BYTES}[name]
            me.kept[name] = ShmFabric(me.folder, slot_bytes=slot)
    return me.kept[name]


def _wire(me: Rank, fabric: str, size: int) -> Wire:
    key = f"{fabric}/{size}"
    if key not in me.kept:
        me.kept[key] = _fabric(me, fabric).open(f"{fabric}-test-{size}", tuple(range(size)), me.rank)
    return me.kept[key]


def group(me: Rank, fabric: str, size: int) -> Group:
    return Group(me.rank, size, "tp", tuple(range(size)), wire=_wire(me, fabric, size))


def all_reduce(me: Rank, fabric: str, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = numbers(me.rank, shape, dtype)
    y = group(me, fabric, size).all_reduce(x)
    assert y.data_ptr() == x.data_ptr()
    return y


def all_reduce_of_a_transposed_view(me: Rank, fabric: str, size: int, shape: tuple[int, int]) -> Tensor:
    x = numbers(me.rank, shape, torch.float32).t()
    group(me, fabric, size).all_reduce(x)
    return x.contiguous()


def all_gather(me: Rank, fabric: str, size: int, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> Tensor:
    return group(me, fabric, size).all_gather(numbers(me.rank, shape, dtype), dim)


def reduce_scatter(me: Rank, fabric: str, size: int, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> Tensor:
    return group(me, fabric, size).reduce_scatter(numbers(me.rank, shape, dtype), dim)


def gather(me: Rank, fabric: str, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor] | None:
    return group(me, fabric, size).gather(numbers(me.rank, shape, dtype))


def broadcast(me: Rank, fabric: str, size: int, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> Tensor:
    return group(me, fabric, size).broadcast(numbers(me.rank, shape, dtype), src)


def parts_for(rank: int, counts: list[list[int]], width: int, dtype: torch.dtype) -> list[Tensor]:
    return [numbers(rank, (count, width), dtype, salt=dst + 1) for dst, count in enumerate(counts[rank])]


def all_to_all(
    me: Rank, fabric: str, size: int, counts: list[list[int]], width: int, dtype: torch.dtype
) -> list[Tensor]:
    return group(me, fabric, size).all_to_all(parts_for(me.rank, counts, width, dtype))


def exchange_in_a_ring(me: Rank, fabric: str, size: int, num_floats: int, num_messages: int) -> list[Tensor]:
    """Everybody sends to the next first, and receives from the one before afterwards."""
    wire = group(me, fabric, size)
    given = [numbers(me.rank, (num_floats,), torch.float32, salt=i) for i in range(num_messages)]
    sends = [wire.isend(x, (me.rank + 1) % size) for x in given]
    taken = [torch.empty(num_floats) for _ in range(num_messages)]
    receives = [wire.irecv(x, (me.rank - 1) % size) for x in taken]
    for pending in (*receives, *sends):
        pending.wait()
    return taken


def a_long_mixture(me: Rank, fabric: str, size: int, num_rounds: int) -> float:
    """Calls in which not everybody waits (broadcast, gather), between calls in which all do.

    Ranks drift apart.
    """
    g = group(me, fabric, size)
    total = 0.0
    for i in range(num_rounds):
        x = torch.full((7,), float(me.rank + i))
        total += float(g.broadcast(x, i % size)[0])
        gathered = g.gather(torch.full((3,), float(me.rank * i)))
        total += sum(float(part[0]) for part in gathered) if gathered else 0.0
        if i % 5 == me.rank:
            sum(range(2000))
        if i % 7 == 0:
            total += float(g.all_reduce(torch.full((5,), float(i)))[0])
        if i % 11 == 0:
            g.barrier()
    return total


def late_to_a_call(me: Rank, deadline_s: float, comes: bool) -> str:
    """Rank 1 may not come; what does rank 0 say?"""
    key = f"deadline-{deadline_s}-{comes}"
    fabric = ShmFabric(me.folder, patience=Patience(deadline_s=deadline_s))
    wire = fabric.open(key, (4, 9), me.rank)
    if me.rank == 1 and not comes:
        me.kept[key] = wire
        return ""
    try:
        wire.all_reduce(torch.ones(3))
    except PeerLost as error:
        return str(error)
    return "came"


def aborted_by_a_peer(me: Rank) -> str:
    wire = ShmFabric(me.folder).open("abort", (0, 1), me.rank)
    if me.rank == 1:
        wire.abort()
        return ""
    try:
        wire.all_reduce(torch.ones(3))
    except PeerLost as error:
        return str(error)
    return "came"


def files_left(me: Rank) -> list[str]:
    wire = ShmFabric(me.folder).open("unlinked", (0, 1, 2), me.rank)
    wire.barrier()
    return sorted(p.name for p in me.folder.glob("unlinked*"))


def recorded(me: Rank) -> tuple[np.ndarray, int]:
    """One of each call, with tags; the rows and how many are left afterwards."""
    door = Door()
    g = Group(me.rank, 2, "tp", (0, 1), index=5, wire=_wire(me, "shm", 2), door=door)
    door.layer, door.phase = 3, PREFILL
    x = torch.ones(4, 2)
    for call in (g.all_reduce, g.all_gather, g.reduce_scatter, g.gather):
        call(x)
    g.broadcast(x, 0)
    g.all_to_all([x, x])
    g.barrier()
    pending = g.isend(x, 1) if me.rank == 0 else g.irecv(x, 0)
    door.tag()
    pending.wait()
    pending.wait()
    rows = np.frombuffer(door.drain(), RING_DTYPE)
    door.recording = False
    g.barrier()
    return rows, len(door.drain())


def straggle(me: Rank, seconds: float) -> tuple[np.ndarray, int]:
    door = Door()
    g = Group(me.rank, 2, "tp", (0, 1), wire=_wire(me, "shm", 2), door=door)
    if me.rank == 1:
        door.delay_s, door.delay_layer = seconds, 1
    for layer in range(3):
        door.layer = layer
        g.all_reduce(torch.ones(8))
    return np.frombuffer(door.drain(), RING_DTYPE), 0


def switch_layouts(me: Rank, fabric: str, slugs: list[str], capacity: int) -> list[tuple[bool, int, float]]:
    """For each layout: whether this rank is in it, wires kept, and the sum over its replica's tp group of
    rank + 1.
    """
    wires = WireCache({fabric: lambda: _fabric(me, fabric)}, capacity)
    seen = []
    for epoch, slug in enumerate(slugs):
        layout = Layout.parse(slug)
        mesh = Mesh(layout, me.rank, door=Door(), wires=wires, fabric=fabric, epoch=epoch)
        mesh.warm()
        total = float(mesh.tp.all_reduce(torch.tensor([me.rank + 1.0]))) if mesh.active else 0.0
        seen.append((mesh.active, len(wires), total))
        # the engine configures all ranks, then waits for all: nobody is a layout ahead
        _wire(me, fabric, 3).barrier()
    wires.close()
    return seen


def every_call_over_nccl(me: Rank) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Two ranks, a GPU each: what every call gave, and what must come out."""
    torch.cuda.set_device(me.rank)
    fabric = TorchFabric("nccl", dist.FileStore(str(me.folder / "nccl"), 2))
    g = Group(me.rank, 2, "tp", (0, 1), wire=fabric.open("pair", (0, 1), me.rank))
    both = [numbers(rank, (4, 6), torch.float32) for rank in (0, 1)]
    counts = [[1, 3], [0, 2]]
    parts = [parts_for(rank, counts, 5, torch.float32) for rank in (0, 1)]

    def mine() -> Tensor:
        return both[me.rank].cuda()

    got = {
        "all_reduce": [g.all_reduce(mine())],
        "all_gather": [g.all_gather(mine(), 1)],
        "reduce_scatter": [g.reduce_scatter(mine(), 1)],
        "broadcast": [g.broadcast(mine(), 1)],
        "gather": g.gather(mine()) or [],
        "all_to_all": g.all_to_all([part.cuda() for part in parts[me.rank]]),
    }
    taken = torch.empty(4, 6, device="cuda")
    pending = g.isend(mine(), 1) if me.rank == 0 else g.irecv(taken, 0)
    pending.wait()
    g.barrier()
    got["recv"] = [taken] if me.rank == 1 else []
    want = {
        "all_reduce": [both[0] + both[1]],
        "all_gather": [torch.cat(both, 1)],
        "reduce_scatter": [(both[0] + both[1]).chunk(2, 1)[me.rank]],
        "broadcast": [both[1]],
        "gather": both if me.rank == 0 else [],
        "all_to_all": [parts[src][me.rank] for src in (0, 1)],
        "recv": [both[0]] if me.rank == 1 else [],
    }
    return {name: [x.cpu() for x in xs] for name, xs in got.items()}, want


def exchange_experts(
    me: Rank, fabric: str, placement: tuple[tuple[int, ...], ...], experts: list[list[int]], num_experts: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[int], int]:  # fmt: skip
    """Expert e multiplies by e + 1: (what came back, experts of the rows computed here, bytes sent)."""
    exchange = Exchange(group(me, fabric, 3), placement, num_experts, torch.device("cpu"))
    mine = torch.tensor(experts[me.rank], dtype=torch.int64)
    seen: list[int] = []
    sent = 0

    def compute(rows: Tensor, theirs: Tensor, sent_bytes: int) -> Tensor:
        nonlocal sent
        sent = sent_bytes
        seen.extend(theirs.tolist())
        assert set(seen) <= set(placement[me.rank])
        return rows * (theirs.to(dtype) + 1).unsqueeze(1)

    out = exchange(numbers(me.rank, (len(mine), 6), dtype), mine, compute)
    return out, seen, sent


def refuse_unknown_expert(me: Rank, placement: tuple[tuple[int, ...], ...], num_experts: int) -> None:
    """Found by the sender, before anything is sent, so no rank is left waiting."""
    exchange = Exchange(group(me, "shm", 3), placement, num_experts, torch.device("cpu"))
    exchange(torch.zeros(2, 6), torch.tensor([1, 7]), lambda rows, experts, sent: rows)


def _boundary(me: Rank, fabric: str, size: int) -> Boundary:
    g = Group(me.rank, size, "pp", tuple(range(size)), wire=_wire(me, fabric, size), door=Door())
    return Boundary(g, 1024, torch.float32, torch.device("cpu"))


def two_stages(me: Rank, fabric: str, num_tokens: int) -> float | list[float]:
    """Stage 0: seconds until two steps were sent. Stage 1, which comes late: what each step brought."""
    boundary = _boundary(me, fabric, 2)
    boundary.group.barrier()
    if me.rank == 1:
        time.sleep(0.5)
        received = [boundary.receive(num_tokens) for _ in range(2)]
        assert all(x is not None and bool((x == x[0, 0]).all()) for x in received)
        boundary.group.barrier()
        return [float(x[0, 0]) for x in received if x is not None]
    began = time.monotonic()
    for step in range(2):
        boundary.send(torch.full((num_tokens, 1024), float(step)))
    sent_s = time.monotonic() - began
    while boundary.group.door.sending:  # as a worker does that waits for its next message
        boundary.group.door.advance()
        time.sleep(200e-6)
    boundary.group.barrier()
    return sent_s


def three_stages(me: Rank, num_steps: int) -> list[float]:
    boundary, came = _boundary(me, "shm", 3), []
    for step in range(num_steps):
        hidden = boundary.receive(4)
        hidden = torch.full((4, 1024), 10.0 * step) if hidden is None else hidden + me.rank
        if boundary.is_last:
            came.append(float(hidden.mean()))
        else:
            boundary.send(hidden)
    boundary.group.barrier()
    return came
