"""Replicas that share experts step together: none can compute its tokens without the others' experts.

A round is one step of each of them; who has nothing to do takes part with an empty plan, which its ranks answer
like any other. So every rank enters every exchange, in one order, and no rank ever waits for a replica that
sleeps. A round is planned when the one before is back (with pipeline stages: when one of those on their way is).
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.plan import StepPlan
from labkit.engine.replica import Flight, Replica
from labkit.measure.recorder import MergedStep, merge_together


def next_round(replicas: Sequence[Replica]) -> list[StepPlan]:
    """A plan for every replica, empty ones among them; [] when nobody has work or the ranks have enough."""
    if any(replica.num_in_flight >= replica.scheduler.config.max_in_flight for replica in replicas):
        return []
    plans = [replica.scheduler.schedule() for replica in replicas]
    return [plan or StepPlan() for plan in plans] if any(plans) else []


def merge_round(flights: Sequence[Flight], shared_clock: bool) -> list[MergedStep]:
    """The figures of steps that belong together, matched over all their ranks: for each flight its own."""
    pieces = [[flight.pieces[rank] for rank in flight.replica.ranks] for flight in flights]
    step_ids = [flight.step_id for flight in flights]
    return merge_together(pieces, shared_clock=shared_clock, epoch=flights[0].epoch, step_ids=step_ids)
