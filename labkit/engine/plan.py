"""One step of one replica, as the scheduler decided it: whose tokens, how many, and who gets a token back.

The plan refers to its requests and copies nothing of them, so `to_message` is called before the next
`schedule`. Chunks of prompts stand first, decodes after them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from labkit.engine.messages import SampleSpec, Step
from labkit.engine.request import Request


@dataclass(slots=True, eq=False)
class StepPlan:
    prefills: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """New tokens of each of `prefills`."""
    ends: list[int] = field(default_factory=list)
    """Tokens of each of `prefills` whose KV is there after this step."""
    sampled: list[Request] = field(default_factory=list)
    """Who gets a token: the prefills whose last chunk this is, then the decodes."""
    decodes: list[Request] = field(default_factory=list)

    def add_chunk(self, request: Request, num_tokens: int) -> None:
        """The request's next `num_tokens`; its `num_computed` counts them already."""
        self.prefills.append(request)
        self.chunks.append(num_tokens)
        self.ends.append(request.num_computed)
        if request.num_computed == request.num_tokens:
            self.sampled.append(request)

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes)

    @property
    def requests(self) -> list[Request]:
        return self.prefills + self.decodes

    @property
    def num_prefill_seqs(self) -> int:
        return len(self.prefills)

    @property
    def num_decode_seqs(self) -> int:
        return len(self.decodes)

    @property
    def prefill_tokens(self) -> int:
        return sum(self.chunks)

    @property
    def query_lens(self) -> list[int]:
        return self.chunks + [1] * len(self.decodes)

    @property
    def context_lens(self) -> list[int]:
        """Tokens of each sequence in the KV cache when the step begins. Read before the next `schedule`."""
        prefills = [end - chunk for end, chunk in zip(self.ends, self.chunks, strict=True)]
        return prefills + [request.num_computed - 1 for request in self.decodes]

    def to_message(self, epoch: int, step_id: int) -> Step:
        """The step for a rank (the same for every rank of the replica)."""
        return Step(
            epoch=epoch,
            step_id=step_id,
            token_ids=self._token_ids(),
            query_lens=array("i", self.query_lens).tobytes(),
            context_lens=array("i", self.context_lens).tobytes(),
            block_tables=b"".join([request.blocks for request in self.requests]),
            sample=self._sample_specs(),
            num_prefill_seqs=len(self.prefills),
        )

    def _token_ids(self) -> bytes:
        token_ids = array("i")
        for request, chunk, end in zip(self.prefills, self.chunks, self.ends, strict=True):
            token_ids.extend(request.tokens(end - chunk, end))
        token_ids.extend([request.output[-1] for request in self.decodes])
        return token_ids.tobytes()

    def _sample_specs(self) -> list[SampleSpec]:
        ending = [i for i, end in enumerate(self.ends) if end == self.prefills[i].num_tokens]
        rows = ending + list(range(len(self.prefills), len(self.prefills) + len(self.decodes)))
        return [_sample_spec(row, request) for row, request in zip(rows, self.sampled, strict=True)]


def _sample_spec(row: int, request: Request) -> SampleSpec:
    params = request.params
    logprobs = -1 if params.logprobs is None else params.logprobs
    position = len(request.output)
    return SampleSpec(row, params.temperature, params.top_p, params.top_k, request.seed, position, logprobs)
