"""Which token ids does a model send to the same experts? The ids that the workload `skewed-experts` repeats.

A prompt that repeats one id is routed alike at every position, so one step over many such prompts tells, id by
id, how many of its choices fall on the first `--share` of the experts: those that plain placement gives to the
first rank of two. Prints the ids with the most, and then what prompts mixed from them do: the tokens of each
expert, and how much more than an even share the busiest of two ranks would get.

    python -m benchmarks.alike_ids --model lab-moe-8x
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
import torch

from labkit.engine.messages import AllocateKV, Configure, SampleSpec, Step
from labkit.engine.runner import Runner
from labkit.layout import imbalance, plain_placement
from labkit.measure.experts import merge_experts
from labkit.model.spec import ModelSpec, load_spec
from labkit.parallel.mesh import Mesh, single_rank_mesh

BLOCK_SIZE, REPEATS = 16, 4


class Routing:
    """One rank that says how prompts are routed."""

    def __init__(self, model: str) -> None:
        self.spec: ModelSpec = load_spec(model)
        assert self.spec.moe is not None
        self.num_experts = self.spec.moe.num_experts
        self.mesh: Mesh = single_rank_mesh()
        self.runner = Runner(0, lambda message: self.mesh, torch.device("cpu"))
        budget = 1 << 30
        self.runner.configure(
            Configure(1, "tp1", model, 0, "float32", budget, BLOCK_SIZE, 512, 64, 1, "shm", True, False)
        )
        self.runner.allocate(AllocateKV(1, 64))
        self.mesh.door.drain_experts()

    def tokens(self, prompt: Sequence[int]) -> dict[int, np.ndarray]:
        """Layer → tokens of each expert, for one prompt of at most 64 blocks."""
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        fields = (prompt, [len(prompt)], [0], range(num_blocks))
        ids, lengths, contexts, blocks = (np.asarray(field, "<i4").tobytes() for field in fields)
        self.runner.step(Step(1, 1, ids, lengths, contexts, blocks, [SampleSpec(0)], 1))
        step = merge_experts({0: self.mesh.door.drain_experts()}, [0], self.num_experts)
        assert step is not None
        return step.tokens


def share_of_first(tokens: dict[int, np.ndarray], num_first: int) -> float:
    return float(np.mean([counts[:num_first].sum() / counts.sum() for counts in tokens.values()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-moe-8x")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5)
    asked = parser.parse_args()
    routing = Routing(asked.model)
    num_first, vocab = round(routing.num_experts * asked.share), routing.spec.vocab_size
    ids = range(vocab // 32, vocab - vocab // 32)
    shares = {token: share_of_first(routing.tokens([token] * REPEATS), num_first) for token in ids}
    alike = sorted(ids, key=lambda token: (-shares[token], token))[: asked.count]
    rng = np.random.default_rng(0)
    mixed = {"alike": rng.choice(alike, 400), "any": rng.integers(ids.start, ids.stop, 400)}
    told = {name: routing.tokens(prompt.tolist()) for name, prompt in mixed.items()}
    plain = plain_placement(routing.num_experts, 2)
    print(json.dumps({
        "ids": alike,
        "share": [round(shares[token], 3) for token in alike],
        "tokens": {name: [counts.tolist() for counts in tokens.values()] for name, tokens in told.items()},
        "busiest_of_two": {
            name: [round(imbalance(plain, counts.tolist()), 2) for counts in tokens.values()]
            for name, tokens in told.items()
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
