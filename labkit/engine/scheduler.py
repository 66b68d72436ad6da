"""Continuous batching: which sequences take part in the next step, and how many tokens of each.

A step is a budget of tokens. Decodes take theirs first, so none waits for a prompt; chunks of prompts share
what is left. `running` and `waiting` are in order of arrival, always: when blocks run out, the latest
arrival gives up its own and is computed again later. No clock, no tensor, no rank: the engine gives these
steps to ranks, a simulator to a model of cost.
"""

from __future__ import annotations

from collections import deque

from labkit.engine.admission import check_fits, check_request
from labkit.engine.blocks import BlockPool, IntegrityError
from labkit.engine.ledger import Kept, Ledger
from labkit.engine.plan import StepPlan
from labkit.engine.request import FinishReason, Phase, Request
from labkit.engine.router import ReplicaView
from labkit.engine.scheduler_config import ADMISSIONS, SchedulerConfig

__all__ = ["ADMISSIONS", "Scheduler", "SchedulerConfig"]
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE  # looking a member up in its enum is a quarter of a decode's cost


class Scheduler:
    """One replica's. `add`, then `schedule` and `complete` in turn; `abort` at any time."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config, self.pool = config, pool
        self.ledger = Ledger(pool, config.admission == "labkit", config.prefills_only)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.leaving: list[Request] = []
        """Aborted while a step carried them: their blocks live until it returns."""
        self.handed: list[Request] = []
        """Have left for another pool with the last step; whoever takes them there empties the list."""
        self.kept: dict[str, Kept] = {}
        """By request, the blocks of those that left, until they are let go."""
        self.admitted: list[Request] = []
        """Have got their blocks for KV that comes from another pool; whoever sends it empties the list."""
        self.num_in_flight = 0
        self.num_preemptions = 0

    # ---- one step -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or as many steps on their way as may be."""
        if self.num_in_flight >= self.config.max_in_flight or not (self.running or self.waiting):
            return None
        plan, num_preemptions = StepPlan(), self.num_preemptions
        self._add_decodes(plan)
        budget = self._add_chunks(plan, self.config.max_num_batched_tokens - len(plan.decodes))
        if self.num_preemptions == num_preemptions:  # who just gave up blocks must not take them back at once
            self._admit(plan, budget)
        if not plan:
            return None
        plan.sampled += plan.decodes
        self.num_in_flight += 1
        self.ledger.load_tokens -= len(plan.decodes)
        return plan

    def _add_decodes(self, plan: StepPlan) -> None:
        # With several steps on their way each takes an even share, for a sequence decodes in one of them.
        share = -(-len(self.running) // self.config.max_in_flight)
        size, decodes = self.pool.block_size, plan.decodes
        for request in self.running:
            if request.phase is DECODE and not request.in_flight:
                if request.num_computed == len(request.blocks) * size and not self._make_room(request, 1):
                    continue
                request.num_computed += 1
                request.in_flight = 1
                decodes.append(request)
                if len(decodes) == share:
                    break

    def _add_chunks(self, plan: StepPlan, budget: int) -> int:
        for request in self.running:
            if budget and request.phase is PREFILL:
                budget -= self._add_chunk(plan, request, budget)
        return budget

    def _add_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        chunk = min(budget, request.num_tokens - request.num_computed)
        if not chunk or not self._make_room(request, chunk):
            return 0
        self.ledger.advance(request, chunk)
        request.in_flight += 1
        plan.add_chunk(request, chunk)
        return chunk

    @property
    def _num_seats(self) -> int:
        """How many more may run."""
        return self.config.max_num_seqs - len(self.running)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while self.waiting and self._num_seats > 0:
            if self.waiting[0].arriving:
                if not self._admit_arriving(self.waiting[0]):
                    return
                continue
            if not budget or not self.ledger.claim(self.waiting[0]):
                return
            request = self.waiting.popleft()
            request.phase = PREFILL  # also when it comes back with an answer begun and a prefix found
            self.running.append(request)
            budget -= self._add_chunk(plan, request, budget)

    def _admit_arriving(self, request: Request) -> bool:
        """It takes no part in a step before its KV has landed, and no room is taken from it meanwhile."""
        if not self.ledger.claim_arriving(request):
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.phase, request.in_flight = Phase.HANDOFF, 1
        self.admitted.append(request)
        return True

    def _make_room(self, wanting: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` more, the latest arrivals' if need be; False: not in this step.

        The latest of all waits with what it has until blocks come back; with policy `vllm` it gives up its own, as
        vLLM's does, and is computed again.
        """
        while not self.ledger.take(wanting, num_tokens):
            latest = next((r for r in reversed(self.running) if r is wanting or not r.in_flight), wanting)
            if latest is not wanting:
                self._preempt(latest)
                continue
            if not self.ledger.reserving and not wanting.in_flight:
                self._preempt(wanting)
            return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.ledger.release(request)
        request.phase = Phase.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1

    def complete(self, plan: StepPlan, token_ids: list[int]) -> list[Request]:
        """Take a step's answer, one token for each of `plan.sampled`; returns who finished with it."""
        self.num_in_flight -= 1
        for request in plan.decodes:
            request.in_flight = 0
        for request, end in zip(plan.prefills, plan.ends, strict=True):
            request.in_flight -= 1
            self.ledger.publish(request, end)
        finished = []
        for request, token in zip(plan.sampled, token_ids, strict=True):
            if request.aborted:
                continue
            request.phase = DECODE
            request.output.append(token)
            if token in request.stop_ids or len(request.output) >= request.params.max_tokens:
                finished.append(request)
            elif self.config.prefills_only:
                self._hand_over(request)
        for request in finished:
            self.running.remove(request)
            self._finish(request, _why(request))
        if self.leaving:
            self._let_go()
        return finished

    # ---- from pool to pool ----------------------------------------------------------------------------

    def _hand_over(self, request: Request) -> None:
        self.running.remove(request)
        del self.requests[request.id]
        self.kept[request.id] = self.ledger.keep(request)
        request.phase = Phase.WAITING
        self.handed.append(request)

    def let_go(self, request_id: str) -> None:
        """What was kept of a request that left has been read, or nobody will read it."""
        kept = self.kept.pop(request_id, None)
        if kept is not None:
            self.pool.release(kept.blocks)

    def adopt(self, request: Request) -> None:
        """Queue a request whose `arriving` tokens another pool has computed."""
        self.requests[request.id] = request
        self.waiting.append(request)
        self.ledger.enter(request)

    def landed(self, request: Request) -> None:
        """All that was on the way to an admitted request is in its blocks."""
        self.ledger.advance(request, request.arriving - request.num_computed)
        request.in_flight, request.arriving = 0, 0
        if request.aborted:
            self._let_go()
            return
        self.ledger.publish(request, request.num_computed)
        request.phase = DECODE

    # ---- coming and going -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused for one that can never be served."""
        check_request(request, self.config.max_context)
        check_fits(request, self.pool.num_blocks, self.pool.block_size, self._answer_here)
        if request.id in self.requests:
            raise ValueError(f"Request {request.id} is here already: ids must differ.")
        eos_ids = frozenset() if request.params.ignore_eos else self.config.eos_ids
        stop_ids = request.params.stop_token_ids
        request.stop_ids = eos_ids.union(stop_ids) if stop_ids else eos_ids
        request.phase = Phase.WAITING
        self.requests[request.id] = request
        self.waiting.append(request)
        self.ledger.enter(request)

    @property
    def _answer_here(self) -> int | None:
        """Tokens of an answer that are computed here, where that is not all of them."""
        return 1 if self.config.prefills_only else None

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End a request now, whoever asks; None when it has ended already."""
        request = self.requests.get(request_id)
        if request is None or request.aborted:
            return None
        (self.waiting if request.phase is Phase.WAITING else self.running).remove(request)
        if request.in_flight:
            request.aborted, request.finish_reason = True, reason
            self.leaving.append(request)
        else:
            self._finish(request, reason)
        return request

    def drain(self) -> list[Request]:
        """Everybody, in order of arrival, to be computed elsewhere; nothing is in flight."""
        everybody = self.running + list(self.waiting)
        for request in everybody:
            self.ledger.leave(request, answered=False)
            request.arriving = 0
        self.running, self.waiting, self.requests = [], deque(), {}
        return everybody

    def _let_go(self) -> None:
        for request in [request for request in self.leaving if not request.in_flight]:
            self.leaving.remove(request)
            self._finish(request, request.finish_reason or FinishReason.ABORT)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        del self.requests[request.id]
        self.ledger.leave(request, answered=reason in (FinishReason.STOP, FinishReason.LENGTH))
        request.phase, request.finish_reason = Phase.FINISHED, reason

    # ---- what others may know -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def load_tokens(self) -> int:
        """Tokens still to compute for everybody here."""
        return self.ledger.load_tokens

    def view(self, prompt: tuple[int, ...] = (), us_per_token: float = 0.0) -> ReplicaView:
        """What a router may know; with a prompt, also how many of its tokens the cache here holds."""
        size = self.pool.block_size
        num_cached = len(self.pool.match(prompt, (len(prompt) - 1) // size)) * size if prompt else 0
        free_tokens = max(0, self.pool.num_free - self.ledger.num_reserved) * size
        return ReplicaView(self.load_tokens, free_tokens, num_cached, us_per_token)

    def check_integrity(self) -> None:
        """Every block in one place, every request in one queue, every sum true. It walks everything."""
        self.ledger.check_integrity(self.requests.values(), self.kept.values())
        queued = [*self.running, *self.waiting, *self.leaving]
        if len(queued) != len(self.requests) or set(queued) != set(self.requests.values()):
            raise IntegrityError("a request is in two queues, or in none")


def _why(request: Request) -> FinishReason:
    return FinishReason.STOP if request.output[-1] in request.stop_ids else FinishReason.LENGTH
