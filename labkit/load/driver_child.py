"""The driver's own process: reads commands from stdin, runs the load, writes records to stdout, and dies with
its parent.

Commands and events are JSON lines, one tagged struct each. Records go out in batches of a twentieth of a
second, so that neither side is woken for each. When stdin closes, as it does however the parent ends, the
process is gone at once; it also looks every two seconds whether its parent is still the one that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from labkit.load.client import LoadRun
from labkit.load.quiet import favour_process
from labkit.load.report import LoadReport
from labkit.load.spec import RunSpec, schedule_of
from labkit.measure.records import RequestRecord

BATCH_S = 0.05
PROGRESS_S = 0.25
_PARENT_CHECK_S = 2.0


class Start(msgspec.Struct, tag="start"):
    spec: RunSpec


class SetRate(msgspec.Struct, tag="set_rate"):
    rate: float


class Stop(msgspec.Struct, tag="stop"):
    """Nothing more is sent, and what is under way is cancelled."""


class Quit(msgspec.Struct, tag="quit"):
    pass


class Started(msgspec.Struct, tag="started"):
    """The schedule begins at `start_ns`."""

    run_id: str
    start_ns: int


class Records(msgspec.Struct, tag="records"):
    records: list[RequestRecord]


class Progress(msgspec.Struct, tag="progress"):
    """Counts so far: in_flight, sent, and one per status."""

    counts: dict[str, int]


class Ended(msgspec.Struct, tag="ended"):
    """The run is over; its records have all gone before."""

    report: LoadReport


class Failed(msgspec.Struct, tag="failed"):
    """The run could not begin, or broke; or a command was refused (`fatal` false)."""

    error: str
    fatal: bool = True


Command = Start | SetRate | Stop | Quit
Event = Started | Records | Progress | Ended | Failed


class Child:
    """One at a time, any number of runs after each other."""

    def __init__(self, out: asyncio.WriteTransport) -> None:
        self._out = out
        self._encode = msgspec.json.Encoder().encode
        self._batch: list[RequestRecord] = []
        self._run: LoadRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def say(self, event: Event) -> None:
        self._out.write(self._encode(event) + b"\n")

    def obey(self, line: bytes) -> None:
        """Runs one command; a bad one is answered with a sentence."""
        try:
            command = msgspec.json.decode(line, type=Command)
        except msgspec.MsgspecError as error:
            self.say(Failed(f"the driver did not understand a command: {error}", fatal=False))
            return
        if isinstance(command, Start):
            self._begin(command.spec)
        elif isinstance(command, SetRate):
            self._set_rate(command.rate)
        elif isinstance(command, Stop):
            self._stop.set()
        else:
            leave()

    def _set_rate(self, rate: float) -> None:
        try:
            if self._run is None:
                raise ValueError("no run is under way whose rate could change.")
            self._run.set_rate(rate)
        except ValueError as error:
            self.say(Failed(str(error), fatal=False))

    def _begin(self, spec: RunSpec) -> None:
        if self._task is not None and not self._task.done():
            self.say(Failed("a run is already under way in this driver; stop it first.", fatal=False))
            return
        self._stop = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._drive(spec, self._stop))

    async def _drive(self, spec: RunSpec, stop: asyncio.Event) -> None:
        ticker = asyncio.get_running_loop().create_task(self._tick())
        try:
            report = await self._load(spec, stop)
        except Exception as error:  # whatever it was, the parent must hear of it
            self._flush()
            self.say(Failed(str(error) or type(error).__name__))
        else:
            self._flush()
            self.say(Ended(report))
        finally:
            ticker.cancel()
            self._run = None

    async def _load(self, spec: RunSpec, stop: asyncio.Event) -> LoadReport:
        self._run = LoadRun(
            spec.target,
            schedule_of(spec),
            on_record=self._batch.append,
            run_id=spec.run_id,
            stop=stop,
            warmup_s=spec.warmup_s,
            num_warmup=spec.num_warmup,
            drain_s=spec.drain_s,
            keep_records=False,
            on_start=lambda start_ns: self.say(Started(spec.run_id, start_ns)),
        )
        return await self._run.run()

    async def _tick(self) -> None:
        said: dict[str, int] = {}
        for turn in range(sys.maxsize):
            await asyncio.sleep(BATCH_S)
            self._flush()
            counts = self._run.progress() if self._run is not None else said
            if turn % round(PROGRESS_S / BATCH_S) == 0 and counts != said:
                said = counts
                self.say(Progress(counts))

    def _flush(self) -> None:
        if self._batch:
            self.say(Records(self._batch.copy()))
            self._batch.clear()


class _Lines(asyncio.Protocol):
    """Cuts stdin into lines; its end is the end of the process."""

    def __init__(self, child: Child) -> None:
        self._child, self._rest = child, b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._child.obey(line)

    def connection_lost(self, exc: Exception | None) -> None:
        leave()


def leave() -> None:
    """At once: the kernel closes the sockets, and the server sees its requests go away."""
    os._exit(0)


async def serve() -> None:
    """Until stdin closes, or the parent is gone."""
    favour_process()
    loop = asyncio.get_running_loop()
    out_fd = os.dup(1)
    os.dup2(2, 1)  # a stray print must not end up between the events
    out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(out_fd, "wb", 0))
    child = Child(out)
    await loop.connect_read_pipe(lambda: _Lines(child), os.fdopen(0, "rb", 0, closefd=False))
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_CHECK_S)
    leave()


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
