"""Stage boundaries over real wires: nothing blocks a sender, nothing is lost, nothing changes order."""

from __future__ import annotations

import pytest
import torch

from labkit.parallel.mesh import single_rank_mesh
from labkit.parallel.pipeline import Boundary
from tests.parallel import on_ranks
from tests.parallel.team import Team


@pytest.mark.parametrize("fabric", ["shm", "gloo"])
@pytest.mark.parametrize("num_tokens", [1, 3000])
def test_a_stage_goes_on_while_the_next_one_is_busy(team: Team, fabric: str, num_tokens: int) -> None:
    """Stage 1 sleeps half a second before it receives; 3,000 tokens are 12 MiB, far more than the queue holds."""
    sent_s, received = team.run(on_ranks.two_stages, fabric, num_tokens, ranks=(0, 1))
    assert sent_s < 0.3, "the sender was held up"
    assert received == [0.0, 1.0]


def test_hidden_states_pass_three_stages_in_order(team: Team) -> None:
    """Stages 1 and 2 add their numbers; six steps, at most three on their way."""
    results = team.run(on_ranks.three_stages, 6)
    assert results[:2] == [[], []]
    assert results[2] == [10.0 * step + 1 + 2 for step in range(6)]


def test_the_only_stage_is_first_and_last_and_crosses_nothing() -> None:
    mesh = single_rank_mesh()
    boundary = Boundary(mesh.pp, 8, torch.float32, torch.device("cpu"))
    assert boundary.is_first and boundary.is_last and boundary.receive(5) is None
    assert mesh.door.drain() == b""
