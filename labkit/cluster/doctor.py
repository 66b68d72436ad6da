"""`labkit doctor`: look before the launch, and say what was found, what is wrong with it and how to mend it.

Each check is one function that returns a Finding. A check that cannot be made says so; it never passes by default.
"""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labkit import paths
from labkit.cluster.namespaces import has_netem
from labkit.cluster.nodes import why_not
from labkit.cluster.topology import Machine, look_at_machine

OK, WARN, FAIL = "ok", "warn", "fail"
_GIB = 2**30
_SHM_NEEDED_BYTES = 64 * 2**20
_ONE_CORE = "With one core every split is slower than no split; bytes and tokens stay right."
_SMALL_SHM = "Containers get 64 MiB by default; a rank that maps more dies of a bus error: docker run --shm-size=1g."
_PYTHON_FLOOR = (3, 11)
_FLOORS = {"torch": (2, 11), "jupyter_server": (2, 21, 1), "voila": (0, 5, 13), "msgspec": (0, 19)}


@dataclass(frozen=True)
class Finding:
    name: str
    level: str
    found: str
    remedy: str = ""


def check_python(_: Machine) -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _PYTHON_FLOOR:
        return Finding("python", FAIL, found, "Use Python 3.11 or newer.")
    return Finding("python", OK, found)


def check_packages(_: Machine) -> Finding:
    versions, short = {}, []
    for name, floor in _FLOORS.items():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            short.append(f"{name} is missing")
            continue
        if _as_tuple(versions[name]) < floor:
            short.append(f"{name} {versions[name]} is older than {'.'.join(map(str, floor))}")
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if short:
        return Finding("packages", FAIL, "; ".join(short), "Run `make setup`.")
    return Finding("packages", OK, found)


def _as_tuple(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_cores(machine: Machine) -> Finding:
    found = f"{machine.num_cores} usable cores, {machine.available_bytes / _GIB:.1f} GiB of memory available"
    if machine.num_cores < 2:
        return Finding("cores", WARN, found, _ONE_CORE)
    return Finding("cores", OK, found)


def check_gpus(machine: Machine) -> Finding:
    if machine.gpus:
        names = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.memory_bytes / _GIB:.0f} GiB)" for gpu in machine.gpus)
        return Finding("gpus", OK, names)
    return Finding("gpus", OK, f"none; ranks run on CPU cores over shared memory or gloo ({machine.gpu_note})")


def check_shared_memory(machine: Machine) -> Finding:
    if machine.shm_bytes is None:
        return Finding("shared memory", OK, "no /dev/shm here: ranks map files of the runtime folder instead")
    found = f"{machine.shm_bytes / 2**20:.0f} MiB free in /dev/shm"
    if machine.shm_bytes <= _SHM_NEEDED_BYTES:
        return Finding("shared memory", FAIL, found, _SMALL_SHM)
    return Finding("shared memory", OK, found)


def check_loopback(_: Machine) -> Finding:
    """One machine's ranks meet on loopback, so a VPN or a hostname without an address does no harm; is it there?"""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        found = f"127.0.0.1 cannot be bound: {error}"
        return Finding("loopback", FAIL, found, "Bring the interface up: ip link set lo up.")
    return Finding("loopback", OK, f"127.0.0.1 works; {_hostname_found()}")


def _hostname_found() -> str:
    name = socket.gethostname()
    try:
        return f"{name} resolves to {socket.gethostbyname(name)} (not needed on one machine)"
    except OSError:
        return f"{name} does not resolve (not needed on one machine; several nodes need it)"


def check_nodes(_: Machine) -> Finding:
    """Not having it is no fault: it is for several nodes made on one machine (`labkit serve --nodes 2`)."""
    if reason := why_not():
        return Finding("nodes", OK, f"cannot be made here: {reason}")
    delay = "with delay" if has_netem() else "without delay, since this kernel has no netem"
    return Finding("nodes", OK, f"can be made here (--nodes 2 --link 200mbit), {delay}")


def check_folders(_: Machine) -> Finding:
    try:
        return Finding("folders", OK, f"runtime {paths.runtime_dir()}, runs {paths.home_dir()}")
    except OSError as error:
        return Finding("folders", FAIL, str(error), "Set LABKIT_RUNTIME and LABKIT_HOME to folders of your own.")


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_python,
    check_packages,
    check_cores,
    check_gpus,
    check_shared_memory,
    check_loopback,
    check_nodes,
    check_folders,
)


def examine(machine: Machine | None = None) -> Iterator[Finding]:
    machine = machine or look_at_machine()
    for check in CHECKS:
        yield check(machine)
