"""The lab in Python: `lab = labkit.connect()`, `run = lab.run("tp2", "chat", rate=4, seconds=30)`.

Everything goes through the lab server, which owns the ranks, and the load driver, which is a process of its
own: this object holds neither and may be made and dropped freely.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from labkit.lab.plan import DEFAULT_OBJECTIVE, RunPlan, as_layout, plan_of
from labkit.lab.run import Run
from labkit.lab.running import OnUpdate, run_on_lab, run_on_server
from labkit.layout import AnyLayout
from labkit.load.driver import DriverProcess
from labkit.load.target import Target
from labkit.load.trial import find_model
from labkit.load.workload import Workload
from labkit.measure.metrics import Objective
from labkit.server.client import ServerClient, ServerError

if TYPE_CHECKING:
    from labkit.lab.compare import Comparison
    from labkit.lab.live import LiveSession
    from labkit.lab.profiling import Profile

_START_TIMEOUT_S = 120.0


def connect(url: str | None = None, token: str | None = None, *, start: bool = True, **serve: Any) -> Lab:
    """The lab server of this machine (or at `url`), started detached when there is none and `start` is True.

    `serve`: options of `labkit serve` for a server that is started here (model, layout, ranks, …). Raises
    ServerError when there is none and none could be started.
    """
    from labkit.server.discovery import connect as find_or_start

    return Lab(find_or_start(url, token, start=start, **serve))


class Lab:
    """One lab server, seen from a notebook, a page or a shell. Use as a context manager, or `close` it."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self._driver = DriverProcess()

    @property
    def url(self) -> str:
        return self.client.url

    def state(self) -> dict[str, Any]:
        """What the server says of itself: state, model, layout, memory, who holds the ranks …"""
        return self.client.state()

    def layouts(self) -> list[dict[str, Any]]:
        """Every layout of the server's ranks: {layout, name, legal, reason, num_ranks, oversubscribed}."""
        return list(self.state()["layouts"])

    def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Until the ranks are up. Raises ServerError with the server's own reason when they will not be."""
        until = time.monotonic() + timeout_s
        while (status := self.client.health()) != "ready":
            if status == "failed":
                raise ServerError(
                    self.state().get("message") or "The lab server's ranks could not be started."
                )
            if time.monotonic() > until:
                raise ServerError(f"The lab server at {self.url} is still {status} after {timeout_s:g} s.")
            time.sleep(0.1)

    def switch(self, layout: AnyLayout | str = "", **settings: Any) -> dict[str, Any]:
        """Another layout, other settings, or both, with nothing else running: {ready_s, first_token_s, …}."""
        return dict(self.client.switch(as_layout(layout).slug if layout else "", **settings))

    def run(
        self,
        layout: AnyLayout | str | None = None,
        workload: str | Workload = "chat",
        rate: float | None = None,
        seconds: float | None = None,
        *,
        on_update: OnUpdate | None = None,
        **more: Any,
    ) -> Run:
        """Switch to `layout` (None: as it is), send the load, and measure it.

        Waits in line while somebody else holds the ranks. Open loop at `rate` requests/s for `seconds` (30
        unless told) or `num_requests`; closed loop with `concurrency`. `on_update` gets a dict four times a
        second. Ctrl-C ends the run early and keeps what was measured. `more`: the other fields of RunPlan
        (objective, seed, warmup_s, settings, length_scale, trace, …).
        """
        return self.run_plan(plan_of(layout, workload, rate, seconds, **more), on_update)

    def run_plan(self, plan: RunPlan, on_update: OnUpdate | None = None) -> Run:
        self.wait_ready()
        return run_on_lab(self.client, self._driver, plan, on_update)

    def compare(
        self,
        layouts: Sequence[AnyLayout | str],
        workload: str | Workload = "chat",
        rate: float | None = None,
        seconds: float | None = None,
        *,
        rounds: int = 1,
        on_update: OnUpdate | None = None,
        **more: Any,
    ) -> Comparison:
        """The same schedule on each layout, `rounds` times, the order turned about.

        See `labkit.lab.compare`.
        """
        return self.compare_plan(layouts, plan_of(None, workload, rate, seconds, **more), rounds, on_update)

    def compare_plan(
        self,
        layouts: Sequence[AnyLayout | str],
        plan: RunPlan,
        rounds: int = 1,
        on_update: OnUpdate | None = None,
    ) -> Comparison:
        from labkit.lab.compare import compare

        return compare(self, layouts, plan, rounds, on_update)

    def profile(
        self,
        layout: AnyLayout | str | None = None,
        workload: str | Workload = "chat",
        rate: float | None = None,
        seconds: float | None = 30.0,
        *,
        steps: int = 20,
        ranks: Sequence[int] = (0,),
        skip: int = 5,
        on_update: OnUpdate | None = None,
        **more: Any,
    ) -> Profile:
        """torch.profiler on `ranks`, over `steps` of their steps after `skip`, in a run of its own.

        The load ends when the profiles have come, after `seconds` at the latest. `more` as of `run`. Raises
        ValueError when no step was profiled.
        """
        from labkit.lab.profiling import profile

        return profile(self, layout, workload, rate, seconds, steps=steps, ranks=ranks, skip=skip,
                       on_update=on_update, **more)  # fmt: skip

    def live(self, client: str = "", objective: Objective = DEFAULT_OBJECTIVE) -> LiveSession:
        """A load that goes on while layout and rate are changed, with figures of the last seconds.

        For pages.
        """
        from labkit.lab.live import LiveSession

        return LiveSession(self.client, client_name=client, objective=objective)

    def close(self) -> None:
        self._driver.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Lab({self.url})"


def run_against(
    url: str,
    model: str = "",
    workload: str | Workload = "chat",
    rate: float | None = None,
    seconds: float | None = None,
    *,
    token: str = "",
    endpoint: str = "completions",
    prompt_mode: str = "ids",
    vocab_size: int = 2048,
    max_context: int | None = None,
    on_update: OnUpdate | None = None,
    **more: Any,
) -> Run:
    """The same measurement on any OpenAI-compatible server (vLLM, SGLang, …): no lease, no steps, no memory.

    prompt_mode: ids (drawn below `vocab_size`) or text. `more`: the other fields of RunPlan. Raises
    ServerUnusable with the server's words when it cannot be measured.
    """
    plan = plan_of(None, workload, rate, seconds, **more)
    target = Target(url=url, token=token, model=model, endpoint=endpoint, prompt_mode=prompt_mode)
    if not model:
        target = msgspec.structs.replace(target, model=_asked(find_model(target)))
    with DriverProcess() as driver:
        return run_on_server(target, driver, plan, vocab_size, max_context, on_update)


def _asked(answer: Coroutine[Any, Any, str]) -> str:
    """On a thread of its own: a notebook's own loop runs already, and two do not go on one thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, answer).result()
