"""A workload says what is asked, not how fast the machine is: kinds of requests, their lengths, and how they
arrive.

It is a frozen value read from a small TOML file (the project's own lie in data/workloads/). A workload is one
or more weighted parts; a part may share prefixes between its requests, which is the only case in which
prompts repeat. What is drawn from it, and when, is the schedule's business (schedule.py).
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import msgspec

from labkit.load.lengths import Lengths
from labkit.paths import data_dir, read_text

PROCESSES = ("poisson", "gamma", "constant", "burst")


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests arrive in an open loop. `burst` sends all at once and has no rate."""

    process: str = "poisson"
    rate: float = 1.0
    """Requests per second, used when the run names none."""
    burstiness: float = 1.0
    """Shape b of the gaps ~ Gamma(b, 1/(b*rate)); the gaps' coefficient of variation is 1/sqrt(b)."""

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise ValueError(f"arrival process {self.process!r} is not known; choose one of {', '.join(PROCESSES)}.")
        if not (0 < self.rate < math.inf and 0 < self.burstiness < math.inf):
            raise ValueError(f"rate and burstiness must be above 0; got {self.rate} and {self.burstiness}.")


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts of a part that begin alike: each request picks one of `num_prefixes`, by Zipf popularity."""

    num_prefixes: int
    prefix_tokens: int
    zipf: float = 0.0
    """Exponent of the popularity; 0: all prefixes alike."""

    def __post_init__(self) -> None:
        if self.num_prefixes < 1 or self.prefix_tokens < 1 or self.zipf < 0:
            raise ValueError(
                f"sharing needs num_prefixes >= 1, prefix_tokens >= 1 and zipf >= 0; "
                f"got {self.num_prefixes}, {self.prefix_tokens}, {self.zipf}."
            )


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of request. `prompt_tokens` counts what is unique; a shared prefix comes on top."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    name: str = "all"
    weight: float = 1.0
    sharing: Sharing | None = None
    token_ids: tuple[int, ...] = ()
    """Prompts are made of these ids alone; empty: of the whole vocabulary. For routing that is skewed on purpose."""

    def __post_init__(self) -> None:
        if any(token < 0 for token in self.token_ids) or len(self.token_ids) == 1:
            raise ValueError(
                f"part {self.name!r}: token_ids takes two ids or more, none below 0; got {self.token_ids}."
            )


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked of a server. `num_requests` > 0 makes it a fixed set."""

    name: str
    title: str
    parts: tuple[Part, ...]
    scale: str = ""
    """How its lengths relate to the traffic that it stands for."""
    arrival: Arrival = Arrival()
    num_requests: int = 0
    generator: str = "labkit"
    """`small-engines`: prompts and lengths drawn as the published 256-prompt set draws them."""
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"workload {self.name!r} has no [[parts]]; give at least one.")
        if not all(0 < part.weight < math.inf for part in self.parts):
            raise ValueError(f"workload {self.name!r}: every part's weight must be above 0.")
        if self.generator not in ("labkit", "small-engines"):
            raise ValueError(f"generator {self.generator!r} is not known; choose labkit or small-engines.")

    def scaled(self, factor: float) -> Workload:
        """The same workload with every length, shared prefixes too, multiplied by `factor`."""
        if factor == 1.0:
            return self
        if self.generator == "small-engines":
            raise ValueError(f"{self.name} is a published set: its lengths are what it is, so it cannot be scaled.")
        return msgspec.structs.replace(self, parts=tuple(_scaled_part(part, factor) for part in self.parts))


def _scaled_part(part: Part, factor: float) -> Part:
    sharing = part.sharing
    if sharing is not None:
        prefix_tokens = max(1, round(sharing.prefix_tokens * factor))
        sharing = msgspec.structs.replace(sharing, prefix_tokens=prefix_tokens)
    return msgspec.structs.replace(
        part,
        prompt_tokens=part.prompt_tokens.scaled(factor),
        output_tokens=part.output_tokens.scaled(factor),
        sharing=sharing,
    )


def workloads_dir() -> Path:
    return data_dir() / "workloads"


def list_workloads() -> list[str]:
    """Names of the workloads that the project ships, sorted."""
    return sorted(path.stem for path in workloads_dir().glob("*.toml"))


def load_workload(name_or_path: str | Path) -> Workload:
    """A shipped workload by name, or any TOML file by path.

    Raises FileNotFoundError when there is neither, ValueError when the file says something that is not
    understood.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = workloads_dir() / f"{name_or_path}.toml"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no workload {str(name_or_path)!r}; choose one of {', '.join(list_workloads())}, "
            f"or give the path of a .toml file."
        )
    try:
        return msgspec.convert(tomllib.loads(read_text(path, "workload")), Workload)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
