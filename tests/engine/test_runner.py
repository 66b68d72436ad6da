"""What a rank promises: budgets in numbers, old weights gone before new ones, steps of other epochs dropped."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from thread_ranks import ThreadRanks, ints, make_step, serve
from tiny_models import make_checkpoint, prompts

from labkit.engine import memory
from labkit.engine.messages import AllocateKV, Configure, SampleSpec, Step
from labkit.engine.runner import Runner
from labkit.layout import kv_bytes_per_token, rank_memory
from labkit.model.spec import load_spec
from labkit.parallel.mesh import Mesh, single_rank_mesh

MODEL = "lab-5m"
MIB = 1 << 20


def runner() -> Runner:
    return Runner(0, lambda message: single_rank_mesh(), torch.device("cpu"))


def configure(layout: str = "tp1", memory_bytes: int = 40 * MIB, model: str = MODEL, epoch: int = 1) -> Configure:
    return Configure(epoch, layout, model, 0, "float32", memory_bytes, 16, 512, 64, 1, "shm", True, False)


def test_budget_is_weights_and_kv_and_what_is_free() -> None:
    rank = runner()
    configured = rank.configure(configure())
    spec = load_spec(MODEL)
    block = 16 * kv_bytes_per_token(rank._model.layout, spec, 0, 4)  # type: ignore[union-attr]
    weights = sum(configured.memory.weights_by_part.values())
    assert configured.kv_block_bytes == block
    assert configured.num_blocks == (40 * MIB - weights) // block - 1
    ready = rank.allocate(AllocateKV(1, configured.num_blocks))
    assert ready.memory.weights == weights
    assert ready.memory.kv == (configured.num_blocks + 1) * block
    assert ready.memory.weights + ready.memory.kv + ready.memory.free == 40 * MIB


def test_weights_by_part_are_what_the_layout_says_they_are() -> None:
    for layout in ("tp1", "tp2", "tp4"):
        ranks = ThreadRanks(MODEL, layout, memory_bytes=40 * MIB)
        for number, configured in enumerate(ranks.configured):
            found = dict(configured.memory.weights_by_part)
            head = found.pop("head")  # laid out apart from the embedding it is tied to
            assert found == rank_memory(ranks.layout, load_spec(MODEL), number, 4)
            assert head == found["embedding"]


def test_weights_beyond_the_budget_are_refused_with_the_arithmetic_before_they_are_loaded() -> None:
    rank = runner()
    answer = rank.configure(configure(memory_bytes=10 * MIB))
    assert answer.num_blocks == -1
    assert "10.0 MiB" in answer.error and "too much" in answer.error and "--memory-per-rank" in answer.error
    needed = rank_memory(rank_layout(), load_spec(MODEL), 0, 4)
    assert answer.memory.weights == sum(needed.values())


def rank_layout() -> object:
    from labkit.layout import Layout

    return Layout()


def test_a_budget_without_room_for_a_block_is_refused() -> None:
    weights = runner().configure(configure()).memory.weights
    answer = runner().configure(configure(memory_bytes=weights + 1000))
    assert answer.num_blocks == -1 and "KV blocks" in answer.error


def test_after_a_refusal_the_next_layout_works() -> None:
    rank = runner()
    assert rank.configure(configure(memory_bytes=10 * MIB)).error
    assert not rank.configure(configure()).error


def test_a_layout_that_the_model_forbids_is_refused_with_its_sentence() -> None:
    answer = Runner(0, lambda m: None, torch.device("cpu")).configure(configure("tp3"))  # type: ignore[arg-type, return-value]
    assert "not allowed" in answer.error and answer.num_blocks == -1


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    answer = runner().configure(configure(model=str(folder)))
    assert "no tensor model.layers.1.mlp.up_proj.weight" in answer.error


def test_a_switch_frees_the_old_weights_first() -> None:
    rank = runner()
    rank.configure(configure())
    rank.allocate(AllocateKV(1, 8))
    old = weakref.ref(rank._model.decoder)  # type: ignore[union-attr]
    seen: list[bool] = []
    rank.mesh_factory = lambda message: (seen.append(old() is None), single_rank_mesh())[1]
    gc.disable()
    try:
        rank.configure(configure(epoch=2))
    finally:
        gc.enable()
    assert seen == [True], "reference counts alone must free a model: no garbage collection at a switch"


def test_a_rank_outside_the_layout_idles() -> None:
    rank = Runner(1, lambda m: Mesh(rank_layout(), 1, door=single_rank_mesh().door), torch.device("cpu"))  # type: ignore[arg-type]
    answer = rank.configure(configure())
    assert (answer.num_blocks, answer.error, answer.memory.weights) == (0, "", 0)


def decode_step(epoch: int) -> Step:
    step = make_step([([5], 0, [0])], [SampleSpec(0)], 0)
    step.epoch = epoch
    return step


def test_a_step_of_another_epoch_is_dropped() -> None:
    rank = runner()
    rank.configure(configure(epoch=3))
    rank.allocate(AllocateKV(3, 8))
    assert rank.step(decode_step(2))[0] is None
    assert rank.step(decode_step(3))[0] is not None


def test_instants_of_a_step_are_in_order_on_the_monotonic_clock() -> None:
    rank = runner()
    rank.configure(configure())
    rank.allocate(AllocateKV(1, 8))
    before = time.monotonic_ns()
    sampled, start_ns, end_ns = rank.step(decode_step(1))
    assert before <= start_ns < end_ns <= time.monotonic_ns()
    assert sampled is not None and (sampled.start_ns, sampled.end_ns) == (start_ns, end_ns)


def test_a_chunk_that_ends_no_prompt_yields_no_token() -> None:
    for layout in ("tp1", "tp2"):
        ranks = ThreadRanks(MODEL, layout, memory_bytes=40 * MIB)
        assert ranks.step(make_step([([5, 6, 7], 0, [0])], [], 1)).token_ids == []


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    rank = runner()
    rank.configure(configure())
    rank.allocate(AllocateKV(1, 8))
    step = make_step([([5, 6], 0, [0])], [SampleSpec(0)], 1)
    step.query_lens = ints([3])
    with pytest.raises(ValueError, match="2 token ids for 3 queries"):
        rank.step(step)


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp"])
def test_delay_reaches_each_sum_of_its_layer(layout: str) -> None:
    ranks = ThreadRanks(MODEL, layout, memory_bytes=40 * MIB)
    step = make_step([([5], 0, [0])], [SampleSpec(0)], 0)
    ranks.step(step)
    ranks.runners[1].delay = (0.05, 2)
    began = time.perf_counter()
    ranks.step(step)
    assert time.perf_counter() - began >= 0.1, "a layer has two reductions"


def test_stepping_before_a_layout_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="must be configured"):
        runner().allocate(AllocateKV(1, 8))


def test_blocks_used_before_by_others_do_not_leak_into_a_sequence() -> None:
    ranks = ThreadRanks(MODEL, memory_bytes=40 * MIB)
    first = serve(ranks, prompts([30]), 5)[0].tokens
    serve(ranks, prompts([90, 80], seed=9), 20)
    assert serve(ranks, prompts([30]), 5)[0].tokens == first


def test_without_a_budget_a_cpu_rank_takes_a_quarter_of_the_ram_and_at_most_one_gib_beside_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    for ram, num_ranks, budget in ((64 << 30, 2, 1 << 30), (4 << 30, 2, 512 * MIB), (4 << 30, 1, 1 << 30)):
        machine = SimpleNamespace(total=ram)
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda machine=machine: machine)
        assert memory.default_budget(cpu, num_ranks, 0) == budget
        assert memory.default_budget(cpu, num_ranks, 5) == budget + (5 if budget == 1 << 30 and ram > 4 << 30 else 0)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=256 * MIB))
    answer = runner().configure(configure(memory_bytes=0))
    weights = sum(answer.memory.weights_by_part.values())
    assert answer.num_blocks == (64 * MIB - weights) // answer.kv_block_bytes - 1


def test_no_more_kv_is_allocated_than_a_full_step_can_use_at_the_end_of_the_context() -> None:
    message = configure(memory_bytes=400 * MIB)
    message.max_num_seqs, message.block_size = 2, 16
    answer = runner().configure(message)
    assert answer.num_blocks == 2 * load_spec(MODEL).max_positions // 16
    assert answer.num_blocks * answer.kv_block_bytes < 300 * MIB  # there was room for more


def test_every_sequence_of_a_full_step_has_a_last_block_of_its_own() -> None:
    assert memory.most_blocks(3, 33, 16) == 9
