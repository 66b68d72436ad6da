"""What may be said about nodes on the command line, and the sentence when it does not fit. No root is needed here."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.cluster.nodes import Link, Nodes
from labkit.cluster.starters import Join
from labkit.cluster.topology import look_at_machine
from labkit.server import placing
from labkit.server.options import ServeOptions, make_plan
from labkit.server.placing import Placing, invitation, place


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "why_not", lambda: "")
    monkeypatch.setattr(placing, "has_netem", lambda: False)


def _place(**options: Any) -> Placing:
    return place(ServeOptions(**options), look_at_machine())


def test_nodes_and_their_link() -> None:
    plan = make_plan(ServeOptions(model="lab-5m", nodes=2, ranks_per_node=2, link="200mbit", layout="dp2xtp2"))
    assert plan.placing.nodes == Nodes(2, 2, Link(200_000_000)) and plan.num_ranks == 4
    told = plan.placing.describe()
    assert (told["num_nodes"], told["ranks_per_node"]) == (2, 2)
    assert (told["link"], told["link_bits_per_s"], told["link_delay_ms"]) == ("200mbit", 200_000_000, 0.0)


def test_one_machine_is_the_default() -> None:
    assert _place() == Placing() and Placing().describe()["kind"] == "one machine"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"link": "200mbit"}, "say how many of them with --nodes 2"),
        ({"ranks_per_node": 2}, "say how many of them with --nodes 2"),
        ({"nodes": 2, "link": "fast"}, "--link is 'fast'"),
        ({"nodes": 1}, "--nodes takes 2 to 16"),
        ({"nodes": 2, "ranks_per_node": 2, "ranks": 3}, "leave --ranks away"),
        ({"nodes": 2, "join_ranks": 4}, "give one of them"),
        ({"nodes": 2, "link_delay_ms": 1.0}, "needs netem"),
        ({"join_ranks": -1}, "how many ranks"),
        ({"join_ranks": 2, "ranks": 4}, "leave --ranks away"),
        ({"join_ranks": 2, "control_port": 70000}, "65535"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _place(**options)


def test_without_root_the_sentence_comes_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "why_not", lambda: "needs root; or --fabric gloo.")
    with pytest.raises(ValueError, match="needs root"):
        _place(nodes=2)


def test_the_invitation_names_address_secret_and_count(tmp_path: Any) -> None:
    join = Join("10.0.0.1", 7000, tmp_path / "secret")
    text = "\n".join(invitation(join, 8, "cuda"))
    assert "LABKIT_CONTROL=tcp:10.0.0.1:7000" in text and str(join.token_file) in text
    assert "LABKIT_DEVICE=cuda" in text and "NODES x RANKS_PER_NODE = 8" in text


def test_the_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path: Any) -> None:
    join = Join("127.0.0.1", 7000, tmp_path / "secret")
    token = join.token()
    assert len(token) == 64 and join.token() == token
    assert join.token_file.stat().st_mode & 0o777 == 0o600
