"""One rank: it waits on a socket for plans, runs them, and answers. Started by torchrun, one process a rank.

While idle it is blocked in `recv`, never inside a collective. It has two connections to the engine process:
control, and a lifeline that ends when the engine does; then the rank exits at once, whatever it is in the
middle of. Ctrl-C is the owner's business and ignored here. An error becomes the rank's last words
(`Failed`) and exit status 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import torch

from labkit.engine import messages
from labkit.engine.bench_messages import AnyBench, AnyBenched, Bench, BenchDevice, BenchLink
from labkit.engine.channel import Channel
from labkit.engine.launch import Launch
from labkit.engine.messages import (
    AllocateKV,
    Configure,
    Fault,
    MoveKV,
    Ping,
    Profile,
    RankMessage,
    Sampled,
    Shutdown,
    Step,
)
from labkit.engine.profiling import StepProfiler
from labkit.parallel.bench import bench_link
from labkit.parallel.mesh import MeshFactory


class RankRunner(Protocol):
    """What a rank does with a message; `labkit.engine.runner.Runner` is the real one."""

    def configure(self, message: Configure) -> messages.Configured: ...

    def allocate(self, message: AllocateKV) -> messages.Ready: ...

    def step(self, message: Step) -> tuple[Sampled | None, int, int]: ...

    def move(self, message: MoveKV) -> None: ...

    def moved(self) -> list[messages.Moved]: ...

    def bench(self, message: Bench | BenchDevice) -> AnyBenched: ...


_NAP_S = 200e-6
"""Between two looks at sends that the receiver has no room for yet, and at KV on its way."""

MakeRunner = Callable[[int, MeshFactory, torch.device], RankRunner]


class Worker:
    """The loop of a rank: one message in, one or two out."""

    def __init__(self, rank: int, channel: Channel, runner: RankRunner, mesh_factory: MeshFactory,
                 profiler: StepProfiler | None = None) -> None:  # fmt: skip
        self._rank = rank
        self._channel = channel
        self._runner = runner
        self._mesh_factory, self._door = mesh_factory, mesh_factory.door
        self._profiler = profiler or StepProfiler(rank, torch.device("cpu"))
        self._epoch = -1
        self._num_moves = 0
        """KV under way to or from this rank, beside its steps."""

    def run(self) -> None:
        """Until the engine says `Shutdown` or closes the connection."""
        while (payload := self._next()) is not None:
            arrived_ns = time.monotonic_ns()
            message = messages.decode_engine_message(payload)
            if isinstance(message, Step):
                self._step(message, arrived_ns)
            elif isinstance(message, MoveKV):
                self._move(message)
            elif isinstance(message, Profile):
                self._profile(message)
            elif isinstance(message, Ping):
                pong = messages.Pong(message.sent_ns, arrived_ns, time.monotonic_ns())
                self._channel.send(messages.encode(pong))
            elif isinstance(message, Shutdown):
                return
            else:
                self._obey(message)

    def _next(self) -> bytes | None:
        """The next message; until it comes, sends under way are moved along, and KV that has landed is told."""
        self._tell_moved()
        while (self._door.sending or self._num_moves) and not self._channel.ready(_NAP_S):
            self._door.advance()
            self._tell_moved()
        return self._channel.receive()

    def _move(self, message: MoveKV) -> None:
        if message.epoch == self._epoch:
            self._runner.move(message)
            self._num_moves += 1

    def _tell_moved(self) -> None:
        if self._num_moves:
            for moved in self._runner.moved():
                self._num_moves -= 1
                self._channel.send(messages.encode(moved))

    def _step(self, message: Step, arrived_ns: int) -> None:
        if message.epoch != self._epoch:
            return
        self._profiler.before()
        sampled, _, end_ns = self._runner.step(message)
        if sampled is not None:
            sampled.start_ns = arrived_ns
            self._channel.send(messages.encode(sampled))
        ring = self._door.drain()
        stats = messages.StepStats(
            message.epoch, message.step_id, self._rank, arrived_ns, end_ns, ring, self._door.drain_experts()
        )
        self._channel.send(messages.encode(stats))
        self._tell_profiled(self._profiler.after(message.step_id, arrived_ns, end_ns, ring))

    def _profile(self, message: Profile) -> None:
        if message.num_steps:
            self._profiler.begin(message)
        else:
            self._tell_profiled(self._profiler.end())

    def _tell_profiled(self, profiled: messages.Profiled | None) -> None:
        if profiled is not None:
            self._channel.send(messages.encode(profiled))

    def _obey(self, message: Configure | AllocateKV | AnyBench | Fault) -> None:
        if isinstance(message, Fault):
            self._suffer(message)
            return
        if isinstance(message, Configure):
            torch.set_num_threads(message.threads)
            answer: RankMessage = self._runner.configure(message)
            self._epoch = message.epoch
        elif isinstance(message, BenchLink):
            answer = bench_link(message, self._mesh_factory)
        elif isinstance(message, Bench | BenchDevice):
            answer = self._runner.bench(message)
        else:
            answer = self._runner.allocate(message)
        self._door.drain()  # warming up is no step's traffic
        self._door.drain_experts()
        self._channel.send(messages.encode(answer))

    def _suffer(self, fault: Fault) -> None:
        if fault.kind == "raise":
            raise RuntimeError(f"rank {self._rank} was told to raise, as a drill")
        if fault.kind == "exit":
            os._exit(0)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "hang":
            threading.Event().wait()
        if fault.kind in ("mute", "unmute"):
            self._door.recording = fault.kind == "unmute"
            return
        if fault.kind != "delay":
            raise ValueError(f"no fault {fault.kind!r}; there are raise, exit, kill, hang, delay, mute and unmute")
        self._door.delay_s, self._door.delay_layer = fault.seconds, fault.layer


def serve(make_runner: MakeRunner) -> int:
    """Be a rank until told otherwise; the exit status. make_runner(rank, mesh_factory, device)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = Launch.read(dict(os.environ))
    _die_with_parent(launch)
    channel = Channel(launch.dial())
    device = launch.torch_device()
    channel.send(messages.encode(launch.hello(lifeline=False)))
    launch.watch_owner()
    mesh_factory = MeshFactory(launch.rank, launch.shm_folder, device.type, node_is_a_machine=launch.joins)
    try:
        Worker(launch.rank, channel, make_runner(launch.rank, mesh_factory, device), mesh_factory,
               StepProfiler(launch.rank, device)).run()  # fmt: skip
    except BaseException as error:
        _last_words(channel, launch.rank, error)
        mesh_factory.wires.abort()
        return 1
    mesh_factory.close()
    return 0


def _die_with_parent(launch: Launch) -> None:
    """Linux: SIGKILL when torchrun goes.

    The lifeline covers the engine's end; this one covers the launcher's.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
        if os.getppid() == 1 and not launch.joins:  # in a container torchrun itself may be process 1
            raise SystemExit("torchrun went away before this rank had started")


def _last_words(channel: Channel, rank: int, error: BaseException) -> None:
    """Tell the engine, and the log, what went wrong; the engine may be gone already."""
    text = traceback.format_exc()
    print(text, file=sys.stderr, flush=True)
    sentence = f"{type(error).__name__}: {error}".splitlines()[0]
    with contextlib.suppress(OSError):
        channel.send(messages.encode(messages.Failed(rank, sentence, text)))


def main() -> int:
    from labkit.engine.runner import Runner

    return serve(Runner)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # no teardown of torch at exit: a peer may be gone, and a hang here would hide the reason
