"""Steps on their way, and what becomes of them: when all ranks have told a step's figures, they are merged and told on.

Figures come after the tokens and off the critical path. Steps of replicas that share experts are merged together, for
their ranks met in the same exchanges.
"""

from __future__ import annotations

from labkit.engine.accounts import Accounts
from labkit.engine.expert_load import ExpertLoad
from labkit.engine.lockstep import merge_round
from labkit.engine.messages import Sampled, StepStats
from labkit.engine.replica import Flight
from labkit.engine.reporter import Reporter
from labkit.measure.experts import ExpertStep, merge_experts


class Flights:
    """shared_clock: the ranks' instants are of one clock."""

    def __init__(self, accounts: Accounts, reporter: Reporter, shared_clock: bool) -> None:
        self.by_step: dict[int, Flight] = {}
        """Steps whose figures are not merged, by step id, oldest first."""
        self.shared_clock = shared_clock
        self.expert_load: ExpertLoad | None = None
        self._accounts, self._reporter = accounts, reporter

    def find(self, message: Sampled | StepStats) -> Flight | None:
        """The step of a message; None for one that belonged to an earlier layout."""
        flight = self.by_step.get(message.step_id)
        return flight if flight is not None and flight.epoch == message.epoch else None

    def add(self, flight: Flight) -> None:
        self.by_step[flight.step_id] = flight
        self._accounts.sent(flight)

    def stats(self, message: StepStats) -> None:
        flight = self.find(message)
        if flight is not None:
            flight.pieces[message.rank] = (message.rank, message.start_ns, message.end_ns, message.ring)
            if message.experts:
                flight.experts[message.rank] = message.experts
            self.merge_if_whole(flight)

    def merge_if_whole(self, flight: Flight) -> None:
        if not all(each.is_whole for each in flight.round):
            return
        for each, merged in zip(flight.round, merge_round(flight.round, self.shared_clock), strict=True):
            del self.by_step[each.step_id]
            self._accounts.merged(each, merged)
            self._reporter.step(each, merged, self._experts_of(each))

    def _experts_of(self, flight: Flight) -> ExpertStep | None:
        load = self.expert_load
        if load is None:
            return None
        step = merge_experts(flight.experts, flight.replica.ranks, load.num_experts)
        if step is not None:
            load.add(step)
        return step
