"""One collective, over and over, through the same door that the model's layers use: how long, and is it right.

Each rank gives numbers that tell rank and place apart, small whole ones, so that a sum in floating point is exact and
any element that is not what it must be is counted. A round begins when the ranks have met; its time on a rank ends
when the rank has its result (on CUDA: when the device has).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.engine.bench_messages import Bench, BenchDevice, Benched, BenchLink, DeviceBenched
from labkit.measure.collectives import BOTH_PLACES, OPS, PINGPONG
from labkit.parallel.bench_device import bench_device
from labkit.parallel.comm import Group
from labkit.parallel.mesh import Mesh, MeshFactory
from labkit.parallel.rounds import timed_rounds

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PERIOD = 5
"""Values repeat after so many places: up to 8 ranks' sum of them is exact in every dtype."""
_Run = Callable[[], Tensor | None]


def bench(
    message: Bench | BenchDevice, rank: int, mesh: Mesh, device: torch.device
) -> Benched | DeviceBenched:
    """A collective, or this rank's device alone."""
    if isinstance(message, BenchDevice):
        return bench_device(message, rank, mesh.tp if mesh.active else None, device)
    return _collective(message, rank, mesh, device)


def bench_link(message: BenchLink, mesh_factory: MeshFactory) -> Benched:
    """This rank's part in a measurement among `message.ranks`; none ends it. Its wire is its own."""
    rank, name = mesh_factory.rank, f"beside-{message.serial}"
    group = mesh_factory.between(message.ranks, message.fabric, name, message.threads) if message.ranks else None
    if group is None:
        if not message.ranks:
            mesh_factory.drop_beside()
        return Benched(message.epoch, rank, [], 0)
    if message.op == PINGPONG:
        times, num_wrong = _ping_pong(message, group, mesh_factory.device)
    else:
        times, num_wrong = _repeat(message, group, mesh_factory.device)
    return Benched(message.epoch, rank, times, num_wrong)


def _collective(message: Bench, rank: int, mesh: Mesh, device: torch.device) -> Benched:
    """This rank's part. A rank outside the layout, and one whose group has one member, answers with no times."""
    group = mesh.group(message.axis) if mesh.active else None
    if group is None or group.size == 1:
        return Benched(message.epoch, rank, [], 0)
    door, recording = group.door, group.door.recording
    door.recording = False
    try:
        times, num_wrong = _repeat(message, group, device)
    finally:
        door.recording = recording
    return Benched(message.epoch, rank, times, num_wrong, group.group_id & 0xFFFF)


def _repeat(message: Bench | BenchLink, group: Group, device: torch.device) -> tuple[list[int], int]:
    """Times of the rounds, and how many elements of a result were wrong; no times on a rank that only looks on."""
    if message.op == "sendrecv" and group.rank > 1:
        return [], 0
    given = _given(message, group, device)
    run = _runs(message, group, given)
    num_wrong = _num_wrong(run(), message, group) if message.check else 0
    return _rounds(run, given, message, group, device), num_wrong


def _ping_pong(message: BenchLink, group: Group, device: torch.device) -> tuple[list[int], int]:
    """There and back between two ranks. Each gives its own numbers; times are the first rank's, of both ways."""
    count, dtype = _count(message, group), _DTYPES[message.dtype]
    given, other = _values(group.rank, count, dtype, device), 1 - group.rank
    taken = torch.zeros_like(given)

    def there_and_back() -> None:
        if group.rank == 0:
            sent = group.isend(given, 1)
            group.irecv(taken, 1).wait()
        else:
            group.irecv(taken, 0).wait()
            sent = group.isend(given, 0)
        sent.wait()

    there_and_back()
    num_wrong = int((taken != _values(other, count, dtype, device)).sum()) if message.check else 0
    times = timed_rounds(there_and_back, lambda: None, message.num_warmup, message.num_rounds, device)
    return (times if group.rank == 0 else []), num_wrong


def _values(rank: int, count: int, dtype: torch.dtype, device: torch.device, first: int = 0) -> Tensor:
    places = torch.arange(first, first + count, device=device) % _PERIOD
    return ((places + 1) * (rank + 1)).to(dtype)


def _count(message: Bench | BenchLink, group: Group) -> int:
    """Elements of the whole buffer; a multiple of the ranks where it is shared out."""
    count = max(1, message.num_bytes // _DTYPES[message.dtype].itemsize)
    shared = message.op in ("all_gather", "reduce_scatter", "all_to_all")
    return -(-count // group.size) * group.size if shared else count


def _given(message: Bench | BenchLink, group: Group, device: torch.device) -> Tensor:
    """What this rank puts in; `all_gather` gives a share of the whole."""
    count = _count(message, group)
    return _values(group.rank, count // group.size if message.op == "all_gather" else count,
                   _DTYPES[message.dtype], device)  # fmt: skip


def _runs(message: Bench | BenchLink, group: Group, given: Tensor) -> _Run:
    """The call that is measured; its result, None on a rank that gets none. Raises ValueError."""
    op = message.op
    if op not in OPS:
        raise ValueError(f"{op!r} is no collective that is measured here; there are {', '.join(OPS)}.")
    out = given if message.in_place and op in BOTH_PLACES else torch.empty_like(given)

    def filled() -> Tensor:
        return out if out is given else out.copy_(given)

    def all_to_all() -> Tensor:
        return torch.cat(group.all_to_all(given.chunk(group.size)))

    calls: dict[str, _Run] = {
        "all_reduce": lambda: group.all_reduce(filled()),
        "broadcast": lambda: group.broadcast(filled(), 0),
        "all_gather": lambda: group.all_gather(given),
        "reduce_scatter": lambda: group.reduce_scatter(given),
        "all_to_all": all_to_all,
        "sendrecv": lambda: _pass_on(group, given, out, *((None, 0) if group.rank else (1, None))),
        "ring": lambda: _pass_on(group, given, out, (group.rank + 1) % group.size, (group.rank - 1) % group.size),
    }  # fmt: skip
    return calls[op]


def _pass_on(group: Group, given: Tensor, out: Tensor, to: int | None, from_: int | None) -> Tensor | None:
    sent = None if to is None else group.isend(given, to)
    if from_ is not None:
        group.irecv(out, from_).wait()
    if sent is not None:
        sent.wait()
    return None if from_ is None else out


def _num_wrong(result: Tensor | None, message: Bench | BenchLink, group: Group) -> int:
    if result is None:
        return 0
    expected = _expected(message, group, result.device)
    if result.shape != expected.shape:
        return max(result.numel(), expected.numel())
    return int((result != expected).sum())


def _expected(message: Bench | BenchLink, group: Group, device: torch.device) -> Tensor:
    op, size, me = message.op, group.size, group.rank
    count, dtype = _count(message, group), _DTYPES[message.dtype]
    share = count // size
    if op == "all_reduce":
        return sum(_values(rank, count, dtype, device) for rank in range(size))  # type: ignore[return-value]
    if op == "all_gather":
        return torch.cat([_values(rank, share, dtype, device) for rank in range(size)])
    if op == "reduce_scatter":
        mine = [_values(rank, share, dtype, device, me * share) for rank in range(size)]
        return sum(mine)  # type: ignore[return-value]
    if op == "all_to_all":
        return torch.cat([_values(rank, share, dtype, device, me * share) for rank in range(size)])
    giver = {"broadcast": 0, "sendrecv": 0, "ring": (me - 1) % size}[op]
    return _values(giver, count, dtype, device)


def _rounds(run: _Run, given: Tensor, message: Bench | BenchLink, group: Group, device: torch.device) -> list[int]:
    start = given.clone()

    def meet() -> None:
        given.copy_(start)  # a sum in place must not grow from round to round
        if message.op != "sendrecv":
            group.barrier()

    return timed_rounds(run, meet, message.num_warmup, message.num_rounds, device)
