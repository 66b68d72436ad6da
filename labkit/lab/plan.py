"""What a run is asked to be, as one value: a layout, a load, a length, an objective. Checked before
anything starts.

The load lasts `warmup_s` plus `seconds`: what is asked for is what is measured. The seed fixes arrivals and
lengths; the token ids differ from run to run, so that no run profits from the prefix cache of another.
"""

from __future__ import annotations

import datetime
import math
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.layout import AnyLayout, read_layout
from labkit.load.spec import RunSpec, TraceWindow
from labkit.load.target import Target
from labkit.load.workload import Workload, load_workload
from labkit.measure.metrics import Objective

DEFAULT_OBJECTIVE = Objective(ttft_ms=400, tpot_ms=50)
DEFAULT_SECONDS = 30.0
MOST_PROFILED_STEPS = 1000
_ABOVE_ZERO = {
    "rate": " requests/s", "seconds": " s", "num_requests": "", "length_scale": "", "time_scale": "",
}  # fmt: skip
_WARMUP_SHARE, _LONGEST_WARMUP_S = 0.2, 2.0


@dataclass(frozen=True)
class ProfilePlan:
    """Which ranks are profiled, and which of their steps. Such a run's latencies are no figures."""

    ranks: tuple[int, ...] = (0,)
    steps: int = 20
    skip: int = 5
    """Steps before the profiled ones."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks is {list(self.ranks)}; name one rank or more, each once, counted from 0.")
        if not 1 <= self.steps <= MOST_PROFILED_STEPS or self.skip < 0:
            raise ValueError(
                f"{self.steps} steps after {self.skip} are to be profiled; it must be 1 to {MOST_PROFILED_STEPS}, "
                f"after 0 or more."
            )


@dataclass(frozen=True)
class RunPlan:
    """One run. Without `num_requests` it is `seconds` long; `rate` is the workload's own unless given."""

    layout: AnyLayout | None = None
    """None: the layout that the server has, or a foreign server's."""
    workload: str | Workload = "chat"
    rate: float | None = None
    seconds: float | None = None
    num_requests: int | None = None
    concurrency: int = 0
    """Above 0: closed loop with that many requests in flight, and no rate."""
    objective: Objective = DEFAULT_OBJECTIVE
    seed: int = 0
    warmup_s: float | None = None
    """None: a fifth of `seconds`, at most 2; nothing for a number of requests."""
    settings: dict[str, Any] = field(default_factory=dict)
    """EngineSettings to change: router, admission, memory_per_rank, fabric …"""
    length_scale: float = 1.0
    trace: str = ""
    """A public trace's path, replayed instead of the workload."""
    time_scale: float = 1.0
    profile: ProfilePlan | None = None

    def __post_init__(self) -> None:
        if not self.trace and isinstance(self.workload, str):
            load_workload(self.workload)  # an unknown one is refused before anything is started
        self._check_numbers()
        if self.concurrency and self.rate:
            raise ValueError(
                f"A closed loop of {self.concurrency} sends when an answer has come, so it has no rate "
                f"({self.rate:g} was given): choose one of the two."
            )
        if self.warmup_s is not None and not 0 <= self.warmup_s < 3600:
            raise ValueError(
                f"The warm-up is {self.warmup_s:g} s; it must be 0 or more, and less than an hour."
            )

    def _check_numbers(self) -> None:
        for name, unit in _ABOVE_ZERO.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0{unit}. Leave it out for the default.")
        if self.concurrency < 0:
            raise ValueError(f"concurrency is {self.concurrency}; it must be 1 or more, or 0: an open loop.")

    @property
    def measured_s(self) -> float | None:
        """Length of the measured part; None when the number of requests ends the run."""
        return self.seconds or (None if self.num_requests or self.trace else DEFAULT_SECONDS)

    @property
    def effective_warmup_s(self) -> float:
        if self.warmup_s is not None:
            return self.warmup_s
        return min(_LONGEST_WARMUP_S, (self.measured_s or 0.0) * _WARMUP_SHARE)

    @property
    def expected_s(self) -> float:
        """What is told to whoever waits for the ranks: a guess where the number of requests ends the run."""
        if self.measured_s:
            return self.measured_s + self.effective_warmup_s + 2.0
        return (self.num_requests or 0) / self.rate if self.rate else 60.0

    @property
    def workload_name(self) -> str:
        if self.trace:
            return Path(self.trace).name
        return self.workload if isinstance(self.workload, str) else self.workload.name

    @property
    def burstiness(self) -> float | None:
        """Shape of the gaps' gamma distribution, 1 for Poisson; None where they are not drawn from one."""
        if self.trace or self.concurrency:
            return None
        arrival = (load_workload(self.workload) if isinstance(self.workload, str) else self.workload).arrival
        return {"poisson": 1.0, "gamma": arrival.burstiness}.get(arrival.process)

    @property
    def shares_prefixes(self) -> bool:
        """Repeated prompts are this load's subject, not an accident."""
        if self.trace:
            return True
        workload = load_workload(self.workload) if isinstance(self.workload, str) else self.workload
        return any(part.sharing is not None for part in workload.parts)

    def spec(self, target: Target, run_id: str, vocab_size: int, max_context: int | None) -> RunSpec:
        """The same as the load driver takes it."""
        warmup_s, seconds = self.effective_warmup_s, self.measured_s
        trace = (
            TraceWindow(path=self.trace, seconds=self.seconds, time_scale=self.time_scale)
            if self.trace
            else None
        )
        return RunSpec(
            target=target,
            run_id=run_id,
            workload=self.workload,
            trace=trace,
            rate=self.rate,
            seconds=None if trace or seconds is None else warmup_s + seconds,
            num_requests=self.num_requests,
            concurrency=self.concurrency,
            seed=self.seed,
            vocab_size=vocab_size,
            max_context=max_context,
            length_scale=self.length_scale,
            warmup_s=warmup_s,
        )


def plan_of(
    layout: AnyLayout | str | None = None,
    workload: str | Workload = "chat",
    rate: float | None = None,
    seconds: float | None = None,
    *,
    objective: Objective | str = DEFAULT_OBJECTIVE,
    **more: Any,
) -> RunPlan:
    """A plan from what people write.

    Layouts and objectives as text. Raises ValueError or FileNotFoundError.
    """
    return RunPlan(
        layout=as_layout(layout) if layout else None,
        workload=workload,
        rate=rate,
        seconds=seconds,
        objective=Objective.parse(objective) if isinstance(objective, str) else objective,
        **more,
    )


def as_layout(layout: AnyLayout | str) -> AnyLayout:
    """Text as `tp2` or `prefill:tp2,decode:tp1`. Raises LayoutError."""
    return read_layout(layout) if isinstance(layout, str) else layout


def new_run_id(layout: str) -> str:
    """Sorts by time, says what it was, and is nobody else's."""
    now = datetime.datetime.now(datetime.UTC)
    safe = layout.replace("+", ".").replace("=", "").replace(",", ".").replace(":", "-") or "server"
    return f"{now:%Y%m%d-%H%M%S}-{safe}-{secrets.token_hex(3)}"


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
