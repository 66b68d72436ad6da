"""Ranks as threads of one process, joined by wires that really add: parity of layouts without a launcher.

`ThreadRanks` runs one `Runner` a thread, as a pool's workers would; `serve` is the smallest engine that can
drive them: it gives out blocks, mixes prompt chunks with decodes, and keeps what every step sampled.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.engine.messages import AllocateKV, Configure, Configured, Sampled, SampleSpec, Step
from labkit.engine.plan import StepPlan
from labkit.engine.runner import Runner
from labkit.layout import Layout
from labkit.parallel.comm import Door, Group, Pending, Wire
from labkit.parallel.mesh import Mesh

Sample = tuple[int, Any]


class Hub:
    """Where the members of one group meet: each leaves a tensor, and nobody goes on before all have read."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.places: list[Tensor | None] = [None] * size
        self.parts: list[list[Tensor]] = [[]] * size
        self.edges: defaultdict[tuple[int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.places[rank] = x.clone()
        self.barrier.wait()
        found = [place for place in self.places if place is not None]
        self.barrier.wait()
        return found

    def exchange_parts(self, rank: int, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        self.parts[rank] = [part.clone() for part in parts]
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        return found


class ThreadWire(Wire):
    def __init__(self, hub: Hub, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks, rank)
        self.hub = hub

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self.hub.exchange(self.rank, x)).sum(0))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.hub.exchange(self.rank, x), dim)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        parts = self.hub.exchange(self.rank, x)
        return parts if self.rank == 0 else None

    def broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self.hub.exchange(self.rank, x)[src])

    def barrier(self) -> None:
        self.hub.barrier.wait()

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return torch.stack(self.hub.exchange(self.rank, x)).sum(0).chunk(self.size, dim)[self.rank]

    def all_to_all(self, parts: Any) -> Any:
        return [theirs[self.rank] for theirs in self.hub.exchange_parts(self.rank, parts)]

    def isend(self, x: Tensor, dst: int) -> Pending:
        self.hub.edges[self.rank, dst].put(x.clone())
        return Taken(None, None)

    def irecv(self, x: Tensor, src: int) -> Pending:
        return Taken(self.hub.edges[src, self.rank], x)

    def is_stale(self) -> bool:
        return False

    def abort(self) -> None:
        self.hub.barrier.abort()

    def close(self) -> None: ...


class Taken:
    """A receive: `wait` takes the next tensor of its edge. A send is over when it is made."""

    def __init__(self, edge: SimpleQueue[Tensor] | None, x: Tensor | None) -> None:
        self.edge, self.x = edge, x

    def wait(self) -> None:
        if self.edge is not None and self.x is not None:
            self.x.copy_(self.edge.get(timeout=30))

    def advance(self) -> bool:
        return True


class ThreadWires:
    """Stands where a mesh expects its cache of wires."""

    def __init__(self) -> None:
        self._hubs: dict[tuple[int, ...], Hub] = {}
        self._lock = threading.Lock()

    def get(self, fabric: str, ranks: tuple[int, ...], rank: int, name: str) -> tuple[Wire, bool]:
        with self._lock:
            hub = self._hubs.setdefault(ranks, Hub(len(ranks)))
        return ThreadWire(hub, ranks, ranks.index(rank)), False

    def trim(self, keep: int) -> None: ...


def thread_groups(size: int) -> list[Group]:
    """A tp group seen from each of its members."""
    hub, ranks = Hub(size), tuple(range(size))
    wires = [ThreadWire(hub, ranks, r) if size > 1 else None for r in ranks]
    return [Group(r, size, "tp", ranks, wire=wires[r], door=Door()) for r in ranks]


def on_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs the calls at once, one a thread, and gives their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class ThreadRanks:
    """The ranks of one layout of one model, configured and ready for steps."""

    def __init__(
        self,
        model: Path | str,
        layout: str = "tp1",
        *,
        memory_bytes: int = 8 << 20,
        block_size: int = 8,
        graphs: bool = False,
        dtype: str = "float32",
        seed: int = 0,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        """options: further fields of `Configure`."""
        self.layout, self.block_size = Layout.parse(layout), block_size
        wires: Any = ThreadWires()
        self.runners = [
            Runner(
                rank,
                lambda m, rank=rank: Mesh(self.layout, rank, door=Door(), wires=wires),
                torch.device(device),
            )
            for rank in range(self.layout.world_size)
        ]
        configure = Configure(
            1, layout, str(model), seed, dtype, memory_bytes, block_size, 512, 64, 1, "shm", True, graphs, **options
        )
        self.configured: list[Configured] = on_threads([lambda r=r: r.configure(configure) for r in self.runners])
        assert not any(c.error for c in self.configured), self.configured[0].error
        self.num_blocks = min(c.num_blocks for c in self.configured)
        self.ready = on_threads([lambda r=r: r.allocate(AllocateKV(1, self.num_blocks)) for r in self.runners])

    def step(self, step: Step, replica: int = 0) -> Sampled:
        return self.step_together({replica: step})[replica]

    def step_together(self, steps: dict[int, Step]) -> dict[int, Sampled]:
        """Steps of several replicas at once; where replicas share experts, the others take part with none."""
        if self.layout.attention_dp:
            idle = StepPlan().to_message(1, 1)
            steps = {replica: steps.get(replica, idle) for replica in range(self.layout.dp)}
        ranks = [(rank, replica) for replica in steps for rank in self.layout.replica_ranks(replica)]
        results = on_threads([lambda r=self.runners[rank], s=steps[of]: r.step(s) for rank, of in ranks])
        answers = {}
        for replica in steps:
            sampled = {rank: got[0] for (rank, of), got in zip(ranks, results, strict=True) if of == replica and got[0]}
            assert list(sampled) == [self.layout.sampling_rank(replica)], "one rank of a replica samples"
            answers.update(dict.fromkeys([replica], *sampled.values()))
        return answers


def ints(values: Any) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def make_step(seqs: Sequence[tuple[Sequence[int], int, Sequence[int]]], sample: list[SampleSpec],
              num_prefills: int, step_id: int = 1) -> Step:  # fmt: skip
    """seqs: (new tokens, tokens already cached, blocks) of each sequence, prompt chunks first."""
    tokens = [token for new, _, _ in seqs for token in new]
    lengths, contexts = [len(new) for new, _, _ in seqs], [context for _, context, _ in seqs]
    blocks = [block for _, _, table in seqs for block in table]
    return Step(1, step_id, ints(tokens), ints(lengths), ints(contexts), ints(blocks), sample, num_prefills)


@dataclass
class Served:
    """One prompt on its way: `computed` tokens are cached, `samples` is what came out."""

    prompt: list[int]
    blocks: list[int]
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)

    def table(self, num_tokens: int, block_size: int) -> list[int]:
        return self.blocks[: -(-(self.computed + num_tokens) // block_size)]


def serve(
    ranks: ThreadRanks,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    *,
    budget: int = 512,
    replica: int = 0,
    shared: int = 0,
    logprobs: int = -1,
    params: dict[str, Any] | None = None,
) -> list[Served]:
    """Greedy (or by `params`) continuations, `budget` tokens a step, decodes first, prompts in order.

    shared: blocks that every prompt but the first takes over from the first, which is computed before them.
    """
    size, free = ranks.block_size, iter(np.random.default_rng(0).permutation(ranks.num_blocks).tolist())
    seqs = []
    for prompt in prompts:
        own = -(-(len(prompt) + num_new) // size) - (shared if seqs else 0)
        taken = seqs[0].blocks[:shared] if seqs else []
        seqs.append(Served(list(prompt), taken + [next(free) for _ in range(own)], len(taken) * size))
    order = [[0], list(range(len(seqs)))] if shared else [list(range(len(seqs)))]
    for wanted in order:
        while any(len(seqs[i].tokens) < num_new for i in wanted):
            _one_step(ranks, [seqs[i] for i in wanted], num_new, budget, replica, logprobs, params or {})
    return seqs


def _one_step(ranks: ThreadRanks, seqs: list[Served], num_new: int, budget: int, replica: int, logprobs: int,
              params: dict[str, Any]) -> None:  # fmt: skip
    decodes = [s for s in seqs if s.tokens and len(s.tokens) < num_new]
    left, chunks = budget - len(decodes), []
    for s in seqs:
        take = min(left, len(s.prompt) - s.computed)
        if not s.tokens and take > 0:
            chunks.append((s, take))
            left -= take
    rows = [(s.prompt[s.computed : s.computed + n], s.computed, s.table(n, ranks.block_size)) for s, n in chunks]
    rows += [([s.tokens[-1]], s.computed, s.table(1, ranks.block_size)) for s in decodes]
    ends = [(i, s) for i, (s, n) in enumerate(chunks) if s.computed + n == len(s.prompt)]
    ends += [(len(chunks) + i, s) for i, s in enumerate(decodes)]
    specs = [SampleSpec(i, position=len(s.tokens), logprobs=logprobs, **params) for i, s in ends]
    sampled = ranks.step(make_step(rows, specs, len(chunks)), replica)
    for s, n in [*chunks, *((s, 1) for s in decodes)]:
        s.computed += n
    for at, (_, s) in enumerate(ends):
        s.tokens.append(sampled.token_ids[at])
        if sampled.logprobs is not None:
            s.logprobs.append(dict(sampled.logprobs[at][1]))
