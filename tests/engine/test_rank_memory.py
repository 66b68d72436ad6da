"""What an allocator holds besides weights and KV: its books read right, and on a GPU against a real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from thread_ranks import ThreadRanks
from tiny_models import make_checkpoint

from labkit.engine import memory
from labkit.engine.messages import AllocateKV, Configure
from labkit.engine.runner import Runner
from labkit.measure.memory import BESIDE
from labkit.parallel.mesh import single_rank_mesh

MIB = 1 << 20


def configure(**fields: int) -> Configure:
    values = {"memory_bytes": 40 * MIB, "block_size": 16, "max_batched_tokens": 100, "max_num_seqs": 64} | fields
    return Configure(epoch=1, layout="tp1", model="lab-5m", seed=0, dtype="float32", threads=1, fabric="shm",
                     record=True, graphs=False, **values)  # fmt: skip


def test_the_allocator_s_books_are_read_part_by_part() -> None:
    stats = {"allocated_bytes.all.current": 90, "allocated_bytes.all.peak": 130, "reserved_bytes.all.current": 160}
    segments = [
        {"total_size": 120, "allocated_size": 70, "segment_pool_id": (0, 0)},
        {"total_size": 40, "allocated_size": 20, "segment_pool_id": (0, 1)},
    ]
    found = memory.allocator_parts(stats, segments, standing=60)
    assert found == {"activations": 40, "workspace": 10, "graphs": 40, "slack": 50}


def test_a_cpu_says_that_it_cannot_tell() -> None:
    rank = Runner(0, lambda message: single_rank_mesh(), torch.device("cpu"))
    rank.configure(configure())
    ready = rank.allocate(AllocateKV(1, 8))
    assert ready.memory.beside == dict.fromkeys(BESIDE)


@pytest.mark.parametrize(("tokens", "seqs", "lengths"), [(100, 64, [16] * 6 + [4]), (512, 3, [16] * 3), (16, 4, [16])])
def test_a_full_step_is_one_that_a_rank_can_run(tokens: int, seqs: int, lengths: list[int]) -> None:
    message = configure(max_batched_tokens=tokens, max_num_seqs=seqs)
    rank = Runner(0, lambda message: single_rank_mesh(), torch.device("cpu"))
    rank.configure(message)
    rank.allocate(AllocateKV(1, 8))
    step = memory.full_step(message, rank._model.shape.spare_block, 16)  # type: ignore[union-attr]
    assert np.frombuffer(step.query_lens, "<i4").tolist() == lengths
    sampled = rank.step(step)[0]
    assert sampled is not None and len(sampled.token_ids) == len(lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_tells_the_peak_of_a_full_step_and_its_parts_add_up_to_what_is_reserved(
    tmp_path: Path, graphs: bool
) -> None:
    ranks = ThreadRanks(make_checkpoint(tmp_path, "mistral"), graphs=graphs, device="cuda")
    found = ranks.ready[0].memory
    assert all(found.beside[name] is not None for name in BESIDE)
    assert found.beside["activations"] > 0
    stands = found.weights + found.kv + sum(found.beside[name] for name in ("workspace", "graphs", "slack"))
    assert stands == pytest.approx(torch.cuda.memory_reserved(), rel=0.05)
