"""How long prompts and answers are: a length distribution is a value, drawn by the generator that the
schedule owns.

Four shapes cover what the workloads need: `constant`, `uniform` (both ends included), `lognormal` (by median
and sigma, which is how published length statistics are usually given) and `choice` (listed lengths with
weights). Every draw is clipped to [min_tokens, max_tokens]. Units: tokens.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

SHAPES = ("constant", "uniform", "lognormal", "choice")
_NEEDS = {
    "constant": ("tokens",),
    "uniform": ("min_tokens", "max_tokens"),
    "lognormal": ("median_tokens", "sigma"),
    "choice": ("choices",),
}
UNBOUNDED_TOKENS = 1 << 30
MOST_SIGMA = 10.0
"""Of published lengths it is 0.3 to 2; at 10 one in six is 22,000 times the median."""


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution of lengths in tokens. Raises ValueError when the shape and its numbers do not fit."""

    shape: str
    tokens: int = 0
    median_tokens: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm (lognormal only)."""
    min_tokens: int = 1
    max_tokens: int = UNBOUNDED_TOKENS
    choices: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"length shape {self.shape!r} is not known; choose one of {', '.join(SHAPES)}.")
        for name in _NEEDS[self.shape]:
            if not getattr(self, name):
                raise ValueError(f"a {self.shape} length needs `{name}` above 0; got {getattr(self, name)!r}.")
        self._check_bounds()

    def _check_bounds(self) -> None:
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"lengths need 1 <= min_tokens <= max_tokens; got {self.min_tokens} and {self.max_tokens}."
            )
        if self.weights and len(self.weights) != len(self.choices):
            raise ValueError(f"{len(self.choices)} choices need as many weights; got {len(self.weights)}.")
        if self.weights and not (min(self.weights) >= 0 and 0 < sum(self.weights) < math.inf):
            raise ValueError(f"the weights of choices are 0 or more, and one of them is more; got {self.weights}.")
        if not (0 <= self.median_tokens <= UNBOUNDED_TOKENS and 0 <= self.sigma <= MOST_SIGMA):
            raise ValueError(
                f"a lognormal length has a median of tokens above 0 and a sigma up to {MOST_SIGMA:g}; "
                f"got {self.median_tokens:g} and {self.sigma:g}."
            )

    def draw(self, rng: np.random.Generator) -> int:
        """One length in tokens; takes from `rng` the same number of values for every draw of one shape."""
        return int(min(max(round(self._raw(rng)), self.min_tokens), self.max_tokens))

    def _raw(self, rng: np.random.Generator) -> float:
        if self.shape == "constant":
            return self.tokens
        if self.shape == "uniform":
            return float(rng.integers(self.min_tokens, self.max_tokens, endpoint=True))
        if self.shape == "lognormal":
            return float(rng.lognormal(math.log(self.median_tokens), self.sigma))
        return float(rng.choice(self.choices, p=self._probabilities()))

    def _probabilities(self) -> list[float] | None:
        total = sum(self.weights)
        return [weight / total for weight in self.weights] if self.weights else None

    def scaled(self, factor: float) -> Lengths:
        """The same shape with every length multiplied by `factor` (at least 1 token)."""
        if not 0 < factor < math.inf:
            raise ValueError(f"the length scale must be above 0; got {factor}.")

        def times(tokens: float) -> int:
            return max(1, round(min(tokens * factor, UNBOUNDED_TOKENS)))

        return msgspec.structs.replace(
            self,
            tokens=times(self.tokens) if self.tokens else 0,
            median_tokens=min(self.median_tokens * factor, UNBOUNDED_TOKENS),
            min_tokens=times(self.min_tokens),
            max_tokens=times(self.max_tokens),
            choices=tuple(times(choice) for choice in self.choices),
        )
