"""Tokens to the owners of their experts and back, on three ranks: whatever the sizes, each row is served once."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import on_ranks
from tests.parallel.team import RankRaised, Team

PLAIN = ((0, 1), (2, 3), (4,))
COPIED = ((0, 2, 4), (1, 2, 3), (2,))
EXPERTS = [[0, 0, 1, 2, 4, 4], [], [2, 2, 2, 2, 3]]
"""By rank, in the order of experts; the second rank has no token and takes part."""


@pytest.mark.parametrize("placement", [PLAIN, COPIED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fabric", ["shm", "gloo"])
def test_each_row_comes_back_from_its_own_expert(team: Team, fabric: str, dtype: torch.dtype, placement) -> None:
    answers = team.run(on_ranks.exchange_experts, fabric, placement, EXPERTS, 5, dtype)
    for rank, (out, _, _) in enumerate(answers):
        rows = on_ranks.numbers(rank, (len(EXPERTS[rank]), 6), dtype)
        assert torch.equal(out, rows * (torch.tensor(EXPERTS[rank], dtype=dtype) + 1).unsqueeze(1))


def test_rows_are_computed_once_by_an_owner_and_copies_take_turns(team: Team) -> None:
    plain = team.run(on_ranks.exchange_experts, "shm", PLAIN, EXPERTS, 5, torch.float32)
    assert [served for _, served, _ in plain] == [[0, 0, 1], [2] * 5 + [3], [4, 4]]
    copied = team.run(on_ranks.exchange_experts, "shm", COPIED, EXPERTS, 5, torch.float32)
    of_two = [served.count(2) for _, served, _ in copied]
    assert sum(of_two) == 5 and min(of_two) >= 1, "five tokens of one expert with three copies"


def test_bytes_sent_are_rows_with_their_label_there_and_outputs_back(team: Team) -> None:
    answers = team.run(on_ranks.exchange_experts, "shm", PLAIN, EXPERTS, 5, torch.float32)
    there, back = (6 + 1) * 4, 6 * 4
    assert [sent for _, _, sent in answers] == [3 * there, 6 * back, 5 * there + 2 * back]


def test_an_expert_that_no_rank_owns_is_named(team: Team) -> None:
    with pytest.raises(RankRaised, match="routed to expert 7, which no rank owns"):
        team.run(on_ranks.refuse_unknown_expert, PLAIN, 5)
    with pytest.raises(RankRaised, match="no rank owns expert 4"):
        team.run(on_ranks.exchange_experts, "shm", ((0, 1), (2, 3), (3,)), EXPERTS, 5, torch.float32)
