"""Pools of replicas by role: which of them may take a new request, and which a request that has been prefilled.

A deployment's pools stand on disjoint ranks and know nothing of each other. A long prompt goes to the pool for long
prompts where there is one, everything else to those that begin requests; who is chosen among them is the router's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.admission import check_fits
from labkit.engine.replica import Replica
from labkit.engine.request import Request
from labkit.engine.router import Router
from labkit.layout import Layout


@dataclass(frozen=True, eq=False)
class ReplicaPool:
    role: str
    layout: Layout
    ranks: range
    replicas: tuple[Replica, ...]

    def describe(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "layout": self.layout.slug,
            "layout_name": str(self.layout),
            "ranks": list(self.ranks),
        }


class Pools:
    """long_from: a prompt of so many tokens or more is long."""

    def __init__(self, pools: Sequence[ReplicaPool] = (), policy: str = "least-work", long_from: int = 0) -> None:
        self.pools, self.policy, self.long_from = tuple(pools), policy, long_from
        self.replicas = [replica for pool in self.pools for replica in pool.replicas]
        self._begin, self._take_over = Router(policy), Router()
        self._by_role = {pool.role: pool.replicas for pool in self.pools}

    def begin(self, request: Request) -> tuple[Replica, str]:
        """The replica that a new request goes to, and why. Raises RequestRefused when none can ever hold it."""
        prompt = request.prompt if self._begin.needs_prefix else ()
        candidates, why = self._candidates(len(request.prompt))
        for pool in self.decoding[:1]:
            check_fits(request, pool.scheduler.pool.num_blocks, pool.scheduler.pool.block_size)
        replica, reason = self._choose(self._begin, candidates, len(request.prompt), prompt)
        return replica, why + reason

    def take_over(self, request: Request) -> tuple[Replica, str]:
        """The replica that decodes a request that has been prefilled, and why."""
        return self._choose(self._take_over, self.decoding, 1, ())

    @property
    def decoding(self) -> tuple[Replica, ...]:
        """Those that decode for others."""
        return self._by_role.get("decode", ())

    def companions(self, replica: Replica) -> tuple[Replica, ...]:
        """All replicas of its pool where they share experts, and so step together; else none."""
        pool = self.pools[replica.pool]
        return pool.replicas if pool.layout.attention_dp else ()

    def _candidates(self, num_prompt_tokens: int) -> tuple[Sequence[Replica], str]:
        long = self._by_role.get("long", ())
        if long and num_prompt_tokens >= self.long_from:
            return long, f"{num_prompt_tokens} tokens, long from {self.long_from} on; "
        begins = [replica for role in ("any", "prefill") for replica in self._by_role.get(role, ())]
        return begins, f"under {self.long_from} tokens; " if long else ""

    @staticmethod
    def _choose(
        router: Router, candidates: Sequence[Replica], num_tokens: int, prompt: tuple[int, ...]
    ) -> tuple[Replica, str]:
        index, reason = router.choose(num_tokens, [replica.view(prompt) for replica in candidates])
        return candidates[index], reason
