"""What joins the running lab's ranks, measured on them when nobody's request runs: pairs, and the layout's collectives.

A measurement holds the ranks like a run, so that whoever comes waits in line; it is refused, with a sentence, while
others hold them or a request runs, and gives way to a request that comes. Its progress is an event; its result is kept
with date, machine and layout, and told beside the messages of the layout that stands.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.cluster.topology import cores_of, look_at_machine, numa_nodes
from labkit.engine.measuring import EngineBusy, Measuring, refuse_if_busy
from labkit.engine.places import nodes_of
from labkit.engine.stream import EngineDown
from labkit.measure.link_bench import CURVE_OPS, CurveGroup, LinkBench, curve_fits, curve_groups
from labkit.measure.neighbours import Neighbours
from labkit.measure.pairs import pairs_of
from labkit.measure.step_messages import layout_messages
from labkit.model.spec import DTYPE_BYTES
from labkit.paths import home_dir
from labkit.server.errors import ApiError
from labkit.server.fabric_store import FabricStore
from labkit.server.session import RanksHeld, Ticket

if TYPE_CHECKING:
    from labkit.server.service import Service

EXPECTED_S = 15.0
OnLine = Callable[[dict[str, Any]], None]


class Stopped(RuntimeError):
    """Whoever asked has gone, or asked to stop."""


class FabricBench:
    """One measurement at a time; `progress` is None while there is none."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.progress: dict[str, Any] | None = None
        self._stopping = False
        self._machine: dict[str, Any] | None = None

    # ---- what is told

    def told(self) -> dict[str, Any]:
        """The last measurement here (None: none yet), the messages of the layout that stands, and the machine."""
        engine = self._service.engine
        measured = self._store().find(self._place())
        state = engine.state()
        fits = measured["fits"] if measured else []
        messages = layout_messages(
            engine.settings.layout, self._service.model.spec, DTYPE_BYTES[engine.settings.dtype], fits,
            state.get("groups", []),
        )  # fmt: skip
        return {
            "measured": measured,
            "messages": messages,
            "machine": self._look(),
            "cores_of_ranks": {rank: cores_of(pid) for rank, pid in self._local_pids().items()},
            "progress": self.progress,
        }

    def _look(self) -> dict[str, Any]:
        if self._machine is None:
            found = dataclasses.asdict(look_at_machine())
            self._machine = {**found, "numa_nodes": {str(node): cores for node, cores in numa_nodes().items()}}
        return self._machine

    def _local_pids(self) -> dict[int, int]:
        """Ranks of other machines have process ids that mean nothing here."""
        pool = self._service.engine.pool
        return {} if getattr(pool.config, "join", None) is not None else dict(pool.pids)

    def _place(self) -> dict[str, Any]:
        state = self._service.state()
        topology = state["topology"]
        return {
            "host": socket.gethostname(),
            "backend": state["backend"],
            "num_ranks": state["num_ranks"],
            "num_nodes": topology.get("num_nodes"),
            "link": topology.get("link"),
            "layout": state["layout"],
        }

    @staticmethod
    def _store() -> FabricStore:
        return FabricStore(home_dir() / "fabric")

    # ---- a measurement

    def begin(self, client: str) -> Ticket:
        """Take the ranks for it. Give the ticket to `run`, whatever happens. Raises ApiError 409 or 503."""
        engine, session = self._service.engine, self._service.session
        if self._service.state_of_health() != "ready":
            raise ApiError(503, f"The ranks are {self._service.state_of_health()}: measure when they are ready.")
        if self._service.state()["num_ranks"] < 2:
            raise ApiError(409, "One rank has nobody to send to: start the lab server with --ranks 2 or more.")
        ticket = Ticket(client, "measuring what joins the ranks", expected_s=EXPECTED_S)
        try:
            refuse_if_busy(int(engine.state().get("requests_in_flight", 0)))
            session.take(ticket)
        except (RanksHeld, EngineBusy) as error:
            raise ApiError(409, str(error)) from error
        self._stopping = False
        return ticket

    def stop(self) -> None:
        """After the question under way."""
        self._stopping = True

    async def run(self, ticket: Ticket) -> dict[str, Any]:
        """The result, kept. Raises ApiError 409 (gave way, stopped) or 503 (the ranks went)."""
        error = "the measurement did not end"
        try:
            found = await self._measure()
            error = ""
            return found
        except (EngineBusy, Stopped) as gave_way:
            error = str(gave_way)
            raise ApiError(409, error) from gave_way
        except EngineDown as down:
            error = str(down)
            raise ApiError(503, error) from down
        finally:
            self.progress = None
            self._service.session.leave(ticket)
            self._publish(error=error)

    async def _measure(self) -> dict[str, Any]:
        engine, began = self._service.engine, time.monotonic()
        place, neighbours = self._place(), Neighbours(self._local_pids().values())
        async with engine.measuring() as ranks:
            state, settings, nodes = engine.state(), engine.settings, nodes_of(engine.pool.hellos)
            device = "cuda" if engine.pool.config.device == "cuda" else "cpu"
            bench = LinkBench(
                ranks.ask, device=device, dtype=settings.dtype, threads=engine.pool.config.threads,
                epoch=ranks.epoch, serial=Measuring.serial,
            )  # fmt: skip
            groups = curve_groups(state["groups"], place["num_ranks"], settings.fabric, nodes)
            steps = _Steps(self, len(pairs_of(place["num_ranks"])) + len(groups) * len(CURVE_OPS))
            try:
                pairs, rows = await self._ask_all(bench, steps, groups, place["num_ranks"], settings.fabric, nodes)
            finally:
                if engine.pool.state == "ready":
                    await asyncio.shield(bench.end())
        found = {
            **place,
            "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "took_s": time.monotonic() - began,
            "layout_name": str(settings.layout),
            "model": self._service.model.name,
            "dtype": settings.dtype,
            "num_cores": self._service.state()["num_cores"],
            "threads_per_rank": engine.pool.config.threads,
            "others_busy_cores": neighbours.busy_cores(),
            "nodes": nodes,
            "wrong": sum(each["wrong"] for each in [*pairs, *rows]),
            "pairs": pairs,
            "rows": rows,
            "fits": curve_fits(rows),
        }
        self._store().keep(found)
        return found

    async def _ask_all(
        self, bench: LinkBench, steps: _Steps, groups: list[CurveGroup], num_ranks: int, fabric: str, nodes: list[int]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        steps.at({"kind": "pairs"})
        pairs = await bench.pairs(num_ranks, fabric, nodes, lambda each: steps.at({"kind": "pairs", **each}, 1))
        rows = []
        for group in groups:
            for op in CURVE_OPS:
                steps.at({"kind": "curve", "op": op, "fabric": group.fabric, "ranks": len(group.ranks)})
                rows += await bench.curve(group, op, on_row=lambda each: steps.check())
                steps.done += 1
        return pairs, rows

    def _publish(self, **more: Any) -> None:
        self._service.hub.publish({"event": "bench", "progress": self.progress, **more})


class _Steps:
    """How far it is: told as it goes, and where it may be stopped."""

    def __init__(self, bench: FabricBench, total: int) -> None:
        self._bench, self._total, self.done = bench, total, 0

    def check(self) -> None:
        if self._bench._stopping:
            raise Stopped("The measurement was stopped; nothing of it is kept.")

    def at(self, what: dict[str, Any], num_done: int = 0) -> None:
        self.check()
        self.done += num_done
        self._bench.progress = {"done": self.done, "total": self._total, "what": what}
        self._bench._publish()
