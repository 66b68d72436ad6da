"""The planner's memory of labkit's own engine against a rank of it that really loaded a model."""

from __future__ import annotations

import pytest

from labkit.layout import Layout
from labkit.model.spec import load_spec
from labkit.plan.memory import memory_plan
from labkit.plan.work import EngineSettings

torch = pytest.importorskip("torch")
MIB = 1 << 20


@pytest.mark.parametrize("model", ["lab-5m", "lab-moe-8x"])
def test_a_rank_that_loaded_the_model_has_the_blocks_that_were_planned(model: str) -> None:
    from labkit.engine.messages import Configure
    from labkit.engine.runner import Runner
    from labkit.parallel.mesh import single_rank_mesh

    budget = 48 * MIB
    message = Configure(epoch=1, layout="tp1", model=model, seed=0, dtype="float32", threads=1, fabric="shm",
                        record=True, graphs=False, memory_bytes=budget, block_size=16, max_batched_tokens=128,
                        max_num_seqs=8)  # fmt: skip
    answer = Runner(0, lambda told: single_rank_mesh(), torch.device("cpu")).configure(message)
    settings = EngineSettings(policy="labkit", block_size=16, max_num_batched_tokens=128, max_num_seqs=8)
    plan = memory_plan(Layout(), load_spec(model), budget, settings)
    assert plan.kv_blocks == answer.num_blocks
    assert sum(answer.memory.weights_by_part.values()) == pytest.approx(plan.ranks[0].weight_bytes, rel=0.001)
