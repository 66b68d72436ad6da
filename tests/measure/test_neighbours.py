"""Others' share of the cores: all that was busy, less what measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from labkit.measure import neighbours
from labkit.measure.neighbours import Neighbours


class Clockwork:
    """A machine whose counters a test turns: seconds passed, all cores' busy seconds, each process's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.busy_s, self.own_s = 100.0, 1000.0, {None: 5.0, 7: 20.0}
        monkeypatch.setattr(neighbours.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(neighbours.psutil, "cpu_times", self._machine)
        monkeypatch.setattr(neighbours.psutil, "Process", self._process)

    def _machine(self) -> Any:
        class Times(tuple):
            idle, iowait, guest = 500.0, 30.0, 10.0

        return Times((self.busy_s + 10.0, 500.0, 30.0))  # guest time stands in user, too

    def _process(self, pid: int | None) -> Any:
        if pid not in self.own_s:
            raise neighbours.psutil.NoSuchProcess(pid or 0)
        return SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=self.own_s[pid], system=1.0))


def test_what_others_took(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Clockwork(monkeypatch)
    counting = Neighbours([7, 8])
    machine.now_s, machine.busy_s = 110.0, 1015.0
    machine.own_s = {None: 6.0, 7: 26.0}
    assert counting.busy_cores() == pytest.approx((15 - 7) / 10), "rank 8 has gone and takes nothing"
    machine.busy_s = 1001.0
    assert counting.busy_cores() == 0.0


def test_on_this_machine_it_is_a_number_of_cores() -> None:
    counting = Neighbours()
    assert 0 <= counting.busy_cores() < 10_000
