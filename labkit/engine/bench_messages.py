"""What the engine process asks its ranks to measure beside steps (collectives, links, devices), and their answers."""

from __future__ import annotations

from labkit.engine.wire_form import Message


class Bench(Message):
    """Repeat one collective of the layout's groups of one axis, and say how long each took. Answered by `Benched`."""

    epoch: int
    axis: str
    op: str
    """One of `labkit.measure.collectives.OPS`."""
    num_bytes: int
    """Of the whole buffer: what all_gather gives, what reduce_scatter takes; else of each rank's."""
    in_place: bool
    dtype: str
    num_warmup: int
    num_rounds: int
    check: bool


class BenchLink(Message):
    """Repeat one operation among some ranks of the pool, over a wire of their own, whatever the layout.

    Answered by `Benched` from every rank of the pool.
    """

    epoch: int
    serial: int
    """Counts upwards over the pool's life: it names the wire."""
    ranks: list[int]
    """Who takes part, in the order of their places; the others answer at once, with no times."""
    fabric: str
    """shm, gloo or nccl; what reaches all of the ranks."""
    op: str
    """One of `labkit.measure.collectives.OPS`, or its PINGPONG: there and back, timed by the first rank."""
    num_bytes: int
    in_place: bool
    dtype: str
    num_warmup: int
    num_rounds: int
    check: bool
    threads: int = 1
    """Of each rank: whether those at work have cores of their own decides how they wait."""


class BenchDevice(Message):
    """Repeat one piece of work on the rank's own device, and say how long each took. Answered by `DeviceBenched`."""

    epoch: int
    what: str
    """One of `labkit.measure.device.WORK`."""
    dtype: str
    size: int
    """copy: bytes of the buffer; matmul: rows and columns of the matrices; 0: a buffer that suits the device."""
    ranks: list[int]
    """Who works, each round begun together; the others answer at once, with no times."""
    num_warmup: int
    num_rounds: int
    check: bool


class Benched(Message):
    epoch: int
    rank: int
    times_ns: list[int]
    """Of each round, on this rank; empty on a rank that has no part in it."""
    num_wrong: int
    """Elements of the result that are not what they must be."""
    group: int = 0
    """Which of the axis's groups."""


class DeviceBenched(Message):
    epoch: int
    rank: int
    times_ns: list[int]
    num_wrong: int
    size: int
    """As `BenchDevice.size`, chosen where that was 0."""
    cache_bytes: int
    """The device's last cache; 0 where the system does not tell."""


AnyBench = Bench | BenchLink | BenchDevice
AnyBenched = Benched | DeviceBenched
