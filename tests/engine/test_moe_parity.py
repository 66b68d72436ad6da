"""Mixtures of experts give what transformers gives: cut by tp, on ranks of their own, shared by replicas.

Replicas that share experts step together, so one of them is also served alone here, beside a replica that
sleeps, and both at once with different requests.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from test_parity import LENGTHS, NUM_NEW
from thread_ranks import Served, ThreadRanks, on_threads, serve
from tiny_models import MOE_FAMILIES, SMALL, assert_same, continuation, make_checkpoint, prompts

from labkit.engine.messages import Sampled, Step
from labkit.layout import Layout, check_layout, place_experts, rank_memory
from labkit.measure.experts import ExpertStep, merge_experts
from labkit.model.export import export_checkpoint
from labkit.model.spec import load_spec

VOCAB = SMALL["vocab_size"]
ONE_REPLICA = ["tp1", "tp2", "tp4", "tp2xep2", "tp4xep4"]
REPLICAS = ["dp2xep2", "dp3xep3", "dp2xtp2xep4", "dp2xtp2xep2", "dp4xep4", "dp2xtp2"]

COMBINED = ["pp2", "pp2xtp2xep2", "dp2xpp2xep2", "dp2xpp2xtp2xep4", "pcp2xep2", "pcp2xtp2xep4", "dp2xpcp2xep4",
            "pcp2xdcp2xep2", "tp4xdcp2xep4"]  # fmt: skip
"""Experts inside pipeline stages, and beside positions that are shared out."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder, family) for family in MOE_FAMILIES}


class Rounds:
    """Lets each replica be served by a thread of its own: a round starts when all that have work brought a step."""

    def __init__(self, ranks: ThreadRanks, replicas: set[int]) -> None:
        self.ranks, self.replicas = ranks, replicas
        self.block_size, self.num_blocks = ranks.block_size, ranks.num_blocks
        self.turn, self.steps = threading.Condition(), dict[int, Step]()
        self.answers = dict[int, Sampled]()

    def step(self, step: Step, replica: int = 0) -> Sampled:
        with self.turn:
            self.steps[replica] = step
            self._run_if_complete()
            assert self.turn.wait_for(lambda: replica in self.answers, timeout=30)
            return self.answers.pop(replica)

    def leave(self, replica: int) -> None:
        with self.turn:
            self.replicas.remove(replica)
            self._run_if_complete()

    def _run_if_complete(self) -> None:
        if self.steps and set(self.steps) == self.replicas:
            self.answers.update(self.ranks.step_together(self.steps))
            self.steps = {}
            self.turn.notify_all()


def serve_together(ranks: ThreadRanks, asked: dict[int, list[list[int]]], num_new: int) -> list[Served]:
    rounds = Rounds(ranks, set(asked))

    def one(replica: int) -> list[Served]:
        try:
            return serve(rounds, asked[replica], num_new, budget=20, replica=replica, logprobs=VOCAB)  # type: ignore[arg-type]
        finally:
            rounds.leave(replica)

    return [seq for served in on_threads([lambda r=r: one(r) for r in asked]) for seq in served]


def test_the_engine_runs_moe_families_and_ep() -> None:
    spec = load_spec("lab-moe-8x")
    assert all(check_layout(Layout.parse(slug), spec, engine=True) for slug in ONE_REPLICA + REPLICAS[:3])


@pytest.mark.parametrize("layout", ONE_REPLICA)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_cut_or_owned_give_the_tokens_and_logits_of_transformers(
    checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    ranks = ThreadRanks(checkpoints[family], layout)
    assert_same(checkpoints[family], serve(ranks, prompts(LENGTHS), NUM_NEW, logprobs=VOCAB))


@pytest.mark.parametrize("layout", ["tp2xep2", "dp2xep2"])
def test_chunks_of_prompts_share_steps_with_decodes(checkpoints: dict[str, Path], layout: str) -> None:
    folder = checkpoints["qwen2-moe-shared"]
    seqs = serve(ThreadRanks(folder, layout), prompts([30, 3, 21]), NUM_NEW, budget=7, logprobs=VOCAB)
    assert_same(folder, seqs)


@pytest.mark.parametrize("layout", REPLICAS)
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe-shared"])
def test_a_replica_is_served_while_the_others_sleep(
    checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    ranks = ThreadRanks(checkpoints[family], layout)
    asked = prompts([12, 3])
    assert_same(checkpoints[family], serve(ranks, asked, NUM_NEW, replica=1, logprobs=VOCAB))


@pytest.mark.parametrize("layout", ["dp2xep2", "dp2xtp2xep4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe-dense-layer"])
def test_replicas_with_requests_of_their_own_share_experts(
    checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    ranks = ThreadRanks(checkpoints[family], layout)
    seqs = serve_together(ranks, {0: prompts([33, 1, 9]), 1: prompts([2], seed=4)}, NUM_NEW)
    assert len(seqs) == 4
    assert_same(checkpoints[family], seqs)


@pytest.mark.parametrize("layout", COMBINED)
def test_experts_go_together_with_every_other_axis(checkpoints: dict[str, Path], layout: str) -> None:
    folder = checkpoints["qwen2-moe-shared"]
    ranks = ThreadRanks(folder, layout)
    assert_same(folder, serve(ranks, prompts(LENGTHS), NUM_NEW, logprobs=VOCAB))
    if ranks.layout.attention_dp:
        assert_same(folder, serve_together(ranks, {0: prompts([33, 1, 9]), 1: prompts([2], seed=4)}, NUM_NEW))


def test_an_empty_step_answers_nothing_and_frees_the_replica(checkpoints: dict[str, Path]) -> None:
    ranks = ThreadRanks(checkpoints["mixtral"], "dp2xep2")
    answers = ranks.step_together({})
    assert [answers[replica].token_ids for replica in (0, 1)] == [[], []]


def test_padded_decode_steps_give_what_plain_ones_give(checkpoints: dict[str, Path]) -> None:
    for layout in ("tp1", "tp2"):
        ranks = ThreadRanks(checkpoints["mixtral"], layout, graphs=True)
        asked = prompts([1, 17, 26, 8, 33])
        assert_same(checkpoints["mixtral"], serve(ranks, asked, NUM_NEW, logprobs=VOCAB))


def test_bf16_routes_in_float32_and_stays_within_a_tolerance(checkpoints: dict[str, Path]) -> None:
    folder, prompt = checkpoints["qwen3-moe-unnormalised"], prompts([9])[0]
    exact = serve(ThreadRanks(folder), [prompt], 1, logprobs=VOCAB)[0].logprobs[0]
    for layout in ("tp1", "tp2xep2"):
        rough = serve(ThreadRanks(folder, layout, dtype="bfloat16"), [prompt], 1, logprobs=VOCAB)[0]
        gaps = [abs(rough.logprobs[0][token] - exact[token]) for token in range(VOCAB)]
        assert 1e-5 < max(gaps) < 0.5


def test_exported_random_weights_are_what_the_ranks_make_up(tmp_path: Path) -> None:
    folder, prompt = export_checkpoint("lab-moe-8x", tmp_path / "exported"), prompts([11])[0]
    for layout in ("tp2", "tp2xep2"):
        served = serve(ThreadRanks("lab-moe-8x", layout, memory_bytes=64 << 20), [prompt], 4)[0]
        assert served.tokens == continuation(folder, prompt, 4)[0]


# ---- what a rank holds


def expert_bytes(folder: Path | str, layout: str) -> list[int]:
    ranks = ThreadRanks(folder, layout, memory_bytes=64 << 20)
    found = [configured.memory.weights_by_part["experts"] for configured in ranks.configured]
    spec, plan = load_spec(folder), Layout.parse(layout)
    assert found == [rank_memory(plan, spec, rank, 4)["experts"] for rank in range(plan.world_size)]
    return found


def test_ep_halves_the_expert_bytes_of_replicas_and_equals_those_of_tp() -> None:
    (whole, _), shared = expert_bytes("lab-moe-8x", "dp2"), expert_bytes("lab-moe-8x", "dp2xep2")
    assert shared == [whole // 2] * 2
    assert expert_bytes("lab-moe-8x", "tp2") == shared == expert_bytes("lab-moe-8x", "tp2xep2")


def test_uneven_ownership_holds_every_expert_once(checkpoints: dict[str, Path]) -> None:
    five = expert_bytes(checkpoints["qwen2-moe-shared"], "tp2xep2")
    assert five[0] * 2 == five[1] * 3


# ---- placement


@pytest.mark.parametrize("num_copies", [0, 3])
@pytest.mark.parametrize("layout", ["tp2xep2", "dp2xep2", "dp2xtp2xep4"])
def test_experts_placed_by_load_give_the_same_text(
    checkpoints: dict[str, Path], layout: str, num_copies: int
) -> None:
    folder = checkpoints["qwen3-moe-dense-layer"]
    placement = place_experts([5, 90, 2, 40, 1, 7], Layout.parse(layout).ep, num_copies)
    placements = [[list(held) for held in placement], [], [[0, 4], [1, 2, 3, 5]] if "ep2" in layout else []]
    ranks = ThreadRanks(folder, layout, placements=placements)
    assert_same(folder, serve(ranks, prompts(LENGTHS), NUM_NEW, logprobs=VOCAB))


def test_a_placement_without_an_owner_for_an_expert_is_refused_by_its_number(
    checkpoints: dict[str, Path],
) -> None:
    with pytest.raises(AssertionError, match="no rank owns expert 3"):
        ThreadRanks(checkpoints["mixtral"], "tp2xep2", placements=[[[0, 1, 2], [4, 5, 6, 7]]])


# ---- what is recorded


def experts_of_step(ranks: ThreadRanks, num_experts: int) -> ExpertStep | None:
    pieces = {rank: runner._configured().mesh.door.drain_experts() for rank, runner in enumerate(ranks.runners)}
    return merge_experts(pieces, range(len(ranks.runners)), num_experts)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2xep2", "dp2xep2", "dp2xtp2xep4"])
def test_a_step_tells_each_experts_tokens_once_and_what_was_sent(
    checkpoints: dict[str, Path], layout: str
) -> None:
    """Two layers, top 2: twelve tokens make 24 rows a layer wherever they are computed."""
    ranks = ThreadRanks(checkpoints["mixtral"], layout)
    experts_of_step(ranks, 8)
    serve(ranks, prompts([12]), 1)
    step = experts_of_step(ranks, 8)
    assert step is not None and step.num_dropped == 0
    assert {layer: int(tokens.sum()) for layer, tokens in step.tokens.items()} == {0: 24, 1: 24}
    copies = ranks.layout.tp if ranks.layout.ep == 1 else 1
    assert sum(step.rows) == 48 * copies and all(time_ns > 0 for time_ns in step.time_ns)
    crossed = sum(step.sent_bytes)
    row, hidden = 4, SMALL["hidden_size"]
    assert crossed == 0 if ranks.layout.ep == 1 else crossed % (row * (2 * hidden + 1)) == 0 < crossed


@pytest.mark.parametrize("layout", ["pcp2", "pcp2xep2", "pcp2xtp2xep4+ring"])
def test_a_decode_that_every_pcp_rank_computes_is_told_once(checkpoints: dict[str, Path], layout: str) -> None:
    """Twelve tokens of a prompt, shared out, then two decodes, on both pcp ranks."""
    ranks = ThreadRanks(checkpoints["mixtral"], layout)
    experts_of_step(ranks, 8)
    serve(ranks, prompts([12]), 3)
    step = experts_of_step(ranks, 8)
    assert step is not None
    assert {layer: int(tokens.sum()) for layer, tokens in step.tokens.items()} == {0: 28, 1: 28}
    assert sum(step.rows) == 2 * 2 * (12 + 2 * 2)


# ---- capacity


def test_capacity_drops_the_latest_rows_counts_them_and_changes_the_text(checkpoints: dict[str, Path]) -> None:
    folder, prompt = checkpoints["mixtral"], prompts([40])[0]
    ranks = ThreadRanks(folder, "tp2xep2", expert_capacity=0.5)
    experts_of_step(ranks, 8)
    served = serve(ranks, [prompt], NUM_NEW)[0]
    step = experts_of_step(ranks, 8)
    assert step is not None and step.num_dropped > 0
    assert served.tokens != continuation(folder, prompt, NUM_NEW)[0]


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2xep2", "dp2xep2"])
def test_capacity_enough_for_all_pads_and_changes_nothing(checkpoints: dict[str, Path], layout: str) -> None:
    folder = checkpoints["mixtral"]
    ranks = ThreadRanks(folder, layout, expert_capacity=8.0)
    experts_of_step(ranks, 8)
    assert_same(folder, serve(ranks, prompts([12, 3]), NUM_NEW, logprobs=VOCAB))
    step = experts_of_step(ranks, 8)
    assert step is not None and step.num_dropped == 0
    assert sum(step.rows) >= 3 * sum(step.tokens_by_expert), "padding is computed too"


def test_weights_of_a_token_sum_to_one_where_the_config_normalises_them(checkpoints: dict[str, Path]) -> None:
    x = torch.randn(50, SMALL["hidden_size"])
    for family, normalised in (("qwen3-moe-dense-layer", True), ("qwen3-moe-unnormalised", False)):
        decoder = ThreadRanks(checkpoints[family]).runners[0]._configured().decoder
        router = next(layer.mlp.router for layer in decoder.layers if hasattr(layer.mlp, "router"))
        weights, _ = router(x)
        assert weights.dtype == torch.float32
        assert bool((weights.sum(-1) - 1).abs().max() < 1e-5) is normalised
