"""Network namespaces joined by shaped links: `python -m labkit.cluster.namespaces WIRING` makes them and keeps them.

Every node is a namespace with one interface, `link0`; the other ends are ports of a bridge in one more namespace, so
that nothing at all appears in the machine's own network. A token bucket (`tc tbf`) at both ends of each link gives a
node the same rate in and out, as a network card has. The process holds them until its stdin ends, however its owner
went; then it ends what runs in them and removes them. Names tell the owner, so those of dead owners are swept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PREFIX = "labkit-"
INTERFACE = "link0"
_FOLDER = Path("/run/netns")
_BURST_S = 0.0005
"""What may pass at once after a silence, in seconds of the rate: a few packets, as a card's own buffer holds."""
_FAST_BURST_S, _FAST_BITS_PER_S = 0.001, 5 * 10**8
"""On fast links the bucket must hold a packet of 64 KiB whole: tbf would cut it up on the processor."""
_MIN_BURST_BYTES = 2 * 1514
_QUEUE_S = 0.05
_CLOCK_STEP_S = 5.0
"""A process's start is told by the wall clock, which may be corrected meanwhile."""
_MIN_QUEUE_BYTES = 256 << 10


@dataclass(frozen=True)
class Wiring:
    """What to make. Addresses sort as text in the order of the nodes: torchrun numbers nodes by that order."""

    name: str
    num_nodes: int
    rate_bits_per_s: int
    """0: unshaped."""
    delay_ms: float

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def node(self, index: int) -> str:
        return f"{self.name}-n{index}"

    def namespaces(self) -> list[str]:
        return [*map(self.node, range(self.num_nodes)), self.switch]

    @staticmethod
    def address(index: int) -> str:
        return f"10.77.0.{101 + index}"

    def commands(self) -> list[str]:
        """In order, for a shell without quoting."""
        switch = self.switch
        made = [
            f"ip netns add {switch}",
            f"ip -n {switch} link add br0 type bridge",
            f"ip -n {switch} link set br0 up",
        ]
        for index in range(self.num_nodes):
            made += self._node_commands(index)
        return made

    def _node_commands(self, index: int) -> list[str]:
        node, switch, port = self.node(index), self.switch, f"port{index}"
        return [
            f"ip netns add {node}",
            f"ip -n {node} link set lo up",
            f"ip -n {node} link add {INTERFACE} type veth peer name {port} netns {switch}",
            f"ip -n {node} link set {INTERFACE} addrgenmode none",
            f"ip -n {node} address add {self.address(index)}/24 dev {INTERFACE}",
            f"ip -n {switch} link set {port} master br0 addrgenmode none up",
            f"ip -n {node} link set {INTERFACE} up",
            *self._shaping(node, INTERFACE, self.delay_ms),
            *self._shaping(switch, port, 0.0),
        ]

    def _shaping(self, namespace: str, interface: str, delay_ms: float) -> list[str]:
        """tbf alone at the root, or below netem, which delays first."""
        add = f"tc -n {namespace} qdisc add dev {interface}"
        delay = [f"{add} root handle 1: netem delay {delay_ms:g}ms limit 100000"] if delay_ms else []
        if not self.rate_bits_per_s:
            return delay
        bytes_per_s = self.rate_bits_per_s / 8
        burst_s = _FAST_BURST_S if self.rate_bits_per_s >= _FAST_BITS_PER_S else _BURST_S
        burst = max(_MIN_BURST_BYTES, round(bytes_per_s * burst_s))
        limit = max(_MIN_QUEUE_BYTES, round(bytes_per_s * _QUEUE_S))
        where = "parent 1: handle 10:" if delay_ms else "root"
        return [*delay, f"{add} {where} tbf rate {self.rate_bits_per_s}bit burst {burst} limit {limit}"]


class CommandFailed(RuntimeError):
    """One of the commands; the message is the command and what it said."""


def make(wiring: Wiring) -> None:
    """All or nothing. Raises CommandFailed."""
    try:
        for command in wiring.commands():
            _run(command)
    except BaseException:
        destroy(wiring.namespaces())
        raise


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise CommandFailed(f"`{command}` said: {said}{_hint(command)}")


def _hint(command: str) -> str:
    if "netem" in command:
        return " (this kernel has no netem, which adds delay: leave --link-delay-ms away, or load sch_netem)"
    return ""


def destroy(names: Iterable[str]) -> None:
    """End what runs in the namespaces and remove them, with their interfaces. Those that are gone are no error."""
    there = [name for name in names if (_FOLDER / name).exists()]
    for name in there:
        for pid in pids_in(name):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    for name in there:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def pids_in(name: str) -> list[int]:
    said = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    return [int(word) for word in said.split()]


def existing() -> list[str]:
    """Ours, of every owner."""
    return sorted(path.name for path in _FOLDER.glob(f"{PREFIX}*"))


def sweep() -> None:
    """Remove what dead owners left behind, which takes a SIGKILL of owner and keeper both."""
    destroy([name for name in existing() if not _owner_lives(name)])


def owned_name(what: str) -> str:
    """A name that tells this process, so that whoever sweeps knows whether it lives."""
    me = psutil.Process()
    return f"{PREFIX}{me.pid}-{int(me.create_time())}-{what}"


def _owner_lives(name: str) -> bool:
    """Names are labkit-PID-STARTED-…; what looks otherwise is not ours to remove."""
    pid, _, rest = name.removeprefix(PREFIX).partition("-")
    started = rest.partition("-")[0]
    if not (pid.isdigit() and started.isdigit()):
        return True
    try:
        return abs(psutil.Process(int(pid)).create_time() - int(started)) < _CLOCK_STEP_S
    except psutil.NoSuchProcess:
        return False


def inside(namespace: str) -> tuple[str, ...]:
    """What goes before a command that is to run there; the process stays the same one."""
    return ("ip", "netns", "exec", namespace)


def has_netem() -> bool:
    """Whether this kernel can delay packets: tried in a namespace made for it."""
    probe = owned_name("probe")
    try:
        _run(f"ip netns add {probe}")
        _run(f"tc -n {probe} qdisc add dev lo root netem delay 1ms")
    except (CommandFailed, OSError):
        return False
    finally:
        destroy([probe])
    return True


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    wiring = Wiring(**json.loads(arguments[0]))
    sweep()
    try:
        make(wiring)
    except (CommandFailed, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    try:
        print(json.dumps({"ready": wiring.namespaces()}), flush=True)
        while os.read(0, 4096):
            pass
    finally:
        destroy(wiring.namespaces())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
