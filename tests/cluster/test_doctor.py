"""What the doctor finds on machines that are not this one, and whether each finding says how to mend it."""

from __future__ import annotations

import importlib.metadata
import socket
from dataclasses import replace
from typing import Any

import pytest

from labkit.cluster import doctor
from labkit.cluster.launcher import loopback_interface
from labkit.cluster.topology import Gpu, Machine, default_num_ranks, default_threads, look_at_machine

GIB = 2**30
LAPTOP = Machine("laptop", 16, 32 * GIB, 20 * GIB, 8 * GIB, (), "NVML did not start")


def findings(machine: Machine) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(machine)}


def no_address(_: str) -> str:
    raise socket.gaierror(-2, "Name or service not known")


def test_a_container_with_64_mib_of_shared_memory_is_told_with_the_remedy() -> None:
    found = findings(replace(LAPTOP, shm_bytes=64 * 2**20))["shared memory"]
    assert found.level == doctor.FAIL and "64 MiB" in found.found and "--shm-size" in found.remedy
    assert findings(LAPTOP)["shared memory"].level == doctor.OK
    assert "runtime folder" in findings(replace(LAPTOP, shm_bytes=None))["shared memory"].found


def test_a_hostname_that_does_not_resolve_is_said_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", no_address)
    found = findings(LAPTOP)["loopback"]
    assert found.level == doctor.OK and "does not resolve (not needed on one machine" in found.found


def test_a_machine_whose_loopback_is_down_is_told_how_to_bring_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(self: socket.socket, address: Any) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(doctor.socket, "socket", type("Down", (socket.socket,), {"bind": down}))
    found = findings(LAPTOP)["loopback"]
    assert found.level == doctor.FAIL and "Cannot assign" in found.found and "ip link" in found.remedy


def test_old_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "voila":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.1.0+cpu"}.get(name, "99.0")

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = findings(LAPTOP)["packages"]
    assert found.level == doctor.FAIL and "torch 2.1.0+cpu is older than 2.11" in found.found
    assert "voila is missing" in found.found and "make setup" in found.remedy


def test_one_core_and_gpus_are_told() -> None:
    assert findings(replace(LAPTOP, num_cores=1))["cores"].level == doctor.WARN
    assert "H100 (80 GiB)" in findings(replace(LAPTOP, gpus=(Gpu(0, "H100", 80 * GIB),)))["gpus"].found
    assert "NVML did not start" in findings(LAPTOP)["gpus"].found


def test_this_machine_can_be_looked_at() -> None:
    machine = look_at_machine()
    assert machine.num_cores >= 1 and machine.memory_bytes >= machine.available_bytes > 0
    assert len(findings(machine)) == len(doctor.CHECKS)


@pytest.mark.parametrize(("num_cores", "num_ranks", "threads"), [(16, 4, 4), (14, 4, 3), (2, 4, 1), (16, 1, 16)])
def test_ranks_never_have_more_threads_than_cores_together(num_cores: int, num_ranks: int, threads: int) -> None:
    assert default_threads(num_cores, num_ranks) == threads


def test_there_is_one_rank_a_gpu_and_four_where_memory_allows() -> None:
    gpus = tuple(Gpu(index, "H100", 80 * GIB) for index in range(3))
    assert default_num_ranks(replace(LAPTOP, gpus=gpus)) == 3
    assert default_num_ranks(LAPTOP) == 4
    assert default_num_ranks(replace(LAPTOP, available_bytes=3 * GIB)) == 2


def test_the_ranks_of_one_machine_meet_on_loopback() -> None:
    import psutil

    addresses = {address.address for address in psutil.net_if_addrs()[loopback_interface()]}
    assert "127.0.0.1" in addresses
