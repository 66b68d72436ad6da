"""Measure what steps cost here: each layout is made to run a designed load, and its steps are read off the record.

The lab server is one of its own, in folders of its own that go with it, so that nothing is left behind and nobody's
runs are mixed with these. The client is the one that measures everything else; the steps are the engine's own record.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from labkit.lab.calibrate_load import Phase, phases
from labkit.lab.calibrate_quiet import Others
from labkit.lab.plan import new_run_id
from labkit.layout import Layout
from labkit.load.driver import DriverProcess
from labkit.load.spec import RunSpec
from labkit.load.target import Target
from labkit.measure.records import RequestRecord, StepRecord
from labkit.server.client import ServerClient, ServerError

OnProgress = Callable[[str, float], None]
"""(what is being measured, share of the whole that is done)"""
_SETTLE_S = 0.4
_START_S = 120.0
_PARTS = 2
"""Of a layout's designed load, in turns: so it is measured at more times."""


@dataclass
class Measured:
    """What the designed load of one layout left: its steps, and the requests as the client saw them."""

    layout: Layout
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    lone: list[RequestRecord] = field(default_factory=list)
    """Of those, the ones that had the server to themselves."""
    took_s: float = 0.0

    def add(self, other: Measured) -> None:
        """Another round of the same."""
        self.steps += other.steps
        self.requests += other.requests
        self.lone += other.lone
        self.took_s += other.took_s


@contextlib.contextmanager
def private_server(**serve: Any) -> Iterator[tuple[ServerClient, int]]:
    """A lab server that nobody else finds, ready, and its process; ended, with its folders, however the block ends."""
    from labkit.server.discovery import start_detached

    folder = Path(tempfile.mkdtemp(prefix="labkit-calibrate-"))
    client: ServerClient | None = None
    try:
        env = {}
        for name in ("LABKIT_RUNTIME", "LABKIT_HOME"):
            (folder / name.lower()).mkdir(mode=0o700)
            env[name] = str(folder / name.lower())
        found = start_detached(serve, {**env, "LABKIT_LINGER_S": "60"}, folder / "server.log")
        client = found.client()
        _wait_ready(client)
        yield client, found.pid
    finally:
        if client is not None:
            _end(client)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_ready(client: ServerClient) -> None:
    until = time.monotonic() + _START_S
    while (status := client.health()) != "ready":
        if status == "failed" or time.monotonic() > until:
            why = client.state().get("message") or f"they are {status} after {_START_S:g} s"
            raise ServerError(f"The ranks could not be started: {why}")
        time.sleep(0.1)


def _end(client: ServerClient) -> None:
    """Asked to end, and waited for: its folders go next."""
    with contextlib.suppress(ServerError):
        client.shutdown()
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        try:
            client.health()
        except ServerError:
            return
        time.sleep(0.05)


def measure_layout(
    client: ServerClient,
    driver: DriverProcess,
    layout: Layout,
    *,
    effort: float = 1.0,
    turn: int = 0,
    on_progress: OnProgress | None = None,
) -> Measured:
    """Switch to `layout` and run the part of its designed load that has its `turn`. Raises ServerError, DriverError."""
    found, began = Measured(layout), time.monotonic()
    run_id = new_run_id(f"calibrate-{layout.slug}")
    lock = threading.Lock()

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "steps":
            with lock:
                found.steps += msgspec.convert(event["steps"], list[StepRecord])

    with (
        client.lease(run_id, purpose=f"a calibration of {layout}", layout=layout.slug, settings={}) as lease,
        client.events(on_event, ("steps",), run_id=run_id),
    ):
        state = client.state()
        work = list(enumerate(phases(state["max_model_len"], layout.dp, effort)))[turn % _PARTS :: _PARTS]
        for done, (at, phase) in enumerate(work):
            if on_progress is not None:
                on_progress(f"{layout}: {phase.name}", done / len(work))
            spec = _spec(client, state, run_id, phase, seed=1000 * turn + at)
            records = driver.run(spec, timeout_s=300.0).records
            found.requests += records
            found.lone += records if phase.lone else []
            lease.check()
        time.sleep(_SETTLE_S)  # steps are told in batches of a tenth of a second
    found.steps.sort(key=lambda step: step.start_ns)
    found.took_s = time.monotonic() - began
    return found


def _spec(client: ServerClient, state: dict[str, Any], run_id: str, phase: Phase, seed: int) -> RunSpec:
    return RunSpec(
        target=Target(url=client.url, token=client.token, model=state["model"], labkit=True),
        run_id=run_id,
        workload=phase.workload,
        num_requests=phase.num_requests,
        concurrency=phase.concurrency,
        seed=seed,
        vocab_size=state["vocab_size"],
        max_context=state["max_model_len"],
    )


def measure_layouts(
    layouts: Sequence[Layout],
    *,
    rounds: int = 2,
    effort: float = 1.0,
    on_progress: OnProgress | None = None,
    **serve: Any,
) -> tuple[list[Measured], dict[str, Any]]:
    """The layouts in turn, `rounds` times, on one server of warm ranks, so that a slow minute is no layout's own: half
    of the loads at a time, there and back again.

    And what the server says of itself, with `others` beside it: the share of the cores that others had meanwhile.
    """
    found = [Measured(layout) for layout in layouts]
    with private_server(**serve) as (client, pid), DriverProcess() as driver:
        driver.warm()
        meter = Others([pid, driver.pid or os.getpid(), os.getpid()])
        turns = [(turn, each) for turn in range(_PARTS * rounds)
                 for each in (reversed(found) if turn // _PARTS % 2 else found)]  # fmt: skip
        for at, (turn, measured) in enumerate(turns):
            report = _within(on_progress, at, len(turns))
            measured.add(measure_layout(client, driver, measured.layout, effort=effort, turn=turn, on_progress=report))
        return found, {**client.state(), "others": meter.share()}


def _within(on_progress: OnProgress | None, at: int, total: int) -> OnProgress | None:
    if on_progress is None:
        return None
    return lambda what, share: on_progress(what, (at + share) / total)
