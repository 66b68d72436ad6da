"""Which replica gets a request, and why: the answer is a number and a sentence that the page can show.

Load is tokens of work, not requests: one prompt of 10,000 tokens outweighs three of 50. Ties rotate, so
that an idle replica is never forgotten. Everything is arithmetic over what the schedulers say of
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

POLICIES = ("least-work", "round-robin", "prefix")


@dataclass(frozen=True, slots=True)
class ReplicaView:
    load_tokens: int
    """Tokens still to compute for everybody there."""
    free_tokens: int
    """KV tokens that are neither held nor promised."""
    cached_tokens: int = 0
    """Tokens of this request's prompt that the prefix cache there holds."""
    us_per_token: float = 0.0
    """Measured; 0: not yet known. It turns work into delay."""


class Router:
    def __init__(self, policy: str = "least-work") -> None:
        if policy not in POLICIES:
            raise ValueError(f"Router policy {policy!r} is unknown: choose one of {', '.join(POLICIES)}.")
        self.policy = policy
        self._next = 0

    @property
    def needs_prefix(self) -> bool:
        """Whether views must say what is cached (looking it up takes time)."""
        return self.policy == "prefix"

    def choose(self, num_prompt_tokens: int, replicas: Sequence[ReplicaView]) -> tuple[int, str]:
        """Index of a replica, and the reason."""
        if len(replicas) == 1:
            return 0, "the only replica"
        order = [(self._next + i) % len(replicas) for i in range(len(replicas))]
        if self.policy == "round-robin":
            chosen, reason = order[0], "round-robin: its turn"
        elif self.policy == "least-work":
            chosen = min(order, key=lambda i: replicas[i].load_tokens)
            reason = _least_work_reason(chosen, replicas)
        else:
            chosen = min(order, key=lambda i: delay_tokens(num_prompt_tokens, replicas[i]))
            reason = _prefix_reason(num_prompt_tokens, replicas[chosen])
        self._next = (chosen + 1) % len(replicas)
        return chosen, reason


def delay_tokens(num_prompt_tokens: int, view: ReplicaView) -> int:
    """Work until this request's first token: ahead of it, of its own prompt, and to free room."""
    to_compute = max(1, num_prompt_tokens - view.cached_tokens)
    return view.load_tokens + to_compute + max(0, to_compute - view.free_tokens)


def _least_work_reason(chosen: int, replicas: Sequence[ReplicaView]) -> str:
    least = replicas[chosen].load_tokens
    others = [view.load_tokens for i, view in enumerate(replicas) if i != chosen]
    if min(others) == least:
        return f"least work: {least} tokens, a tie, its turn"
    return f"least work: {least} tokens, the next has {min(others)}"


def _prefix_reason(num_prompt_tokens: int, view: ReplicaView) -> str:
    delay = delay_tokens(num_prompt_tokens, view)
    in_time = f" (about {delay * view.us_per_token / 1000:.0f} ms)" if view.us_per_token else ""
    return (
        f"prefix: least delay, {delay} tokens{in_time}: {view.load_tokens} ahead, "
        f"{view.cached_tokens} of {num_prompt_tokens} cached, KV room for {view.free_tokens}"
    )
