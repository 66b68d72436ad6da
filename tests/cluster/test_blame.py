"""Who went first, from the signs in the order in which they may come."""

from __future__ import annotations

import pytest

from labkit.cluster.blame import Evidence, hung, who_went_first
from labkit.engine.messages import Failed
from labkit.parallel.comm import PeerLost

_BUG = Failed(1, "ValueError: negative block", "Traceback … negative block")


def _peer_lost(rank: int, missing: int) -> Failed:
    error = PeerLost(missing, "did not come to a call within 60 s")
    return Failed(rank, f"{type(error).__name__}: {error}", "Traceback … PeerLost")


def test_a_rank_that_raised_is_named_with_its_traceback() -> None:
    failure = who_went_first(Evidence([_BUG], lost=[0, 1], exits={1: 1}))
    assert (failure.rank, failure.kind, failure.traceback) == (1, "raised", _BUG.traceback)
    assert failure.error == "rank 1 raised ValueError: negative block"


def test_a_peer_that_notices_first_is_not_blamed_for_a_later_confession() -> None:
    assert who_went_first(Evidence([_peer_lost(0, -1), _BUG], lost=[0])).rank == 1


def test_of_two_that_raised_the_one_that_spoke_first_is_named() -> None:
    later = Failed(0, "RuntimeError: the connection was reset", "Traceback … reset")
    assert who_went_first(Evidence([_BUG, later], lost=[0, 1], exits={0: 1, 1: 1})).rank == 1


def test_several_silent_ranks_are_all_named_with_the_bound() -> None:
    failure = hung([2, 3], "a step", 75.0)
    assert (failure.rank, failure.kind) == (2, "hung")
    assert failure.error == "ranks 2, 3 have not answered a step within 75 s"


@pytest.mark.parametrize("lost", [[2], [0, 2], [2, 0]], ids=str)
def test_a_killed_rank_is_named_though_its_peer_spoke_and_ended_first(lost: list[int]) -> None:
    failure = who_went_first(Evidence([_peer_lost(0, -1)], lost, exits={2: -9, 0: 1}))
    assert (failure.rank, failure.kind, failure.exit_code) == (2, "killed", -9)
    assert "SIGKILL" in failure.error


def test_ranks_that_torchrun_ended_are_not_blamed() -> None:
    assert who_went_first(Evidence(lost=[0, 1], exits={0: -15, 1: -11})).rank == 1


def test_exit_codes_decide_when_connections_end_in_another_order() -> None:
    failure = who_went_first(Evidence(lost=[0, 1], exits={1: 7}))
    assert (failure.rank, failure.kind, failure.exit_code) == (1, "exited", 7)


def test_a_connection_that_ends_without_any_exit_code_is_an_early_exit() -> None:
    """torchrun takes status 0 for success and says nothing."""
    failure = who_went_first(Evidence([_peer_lost(0, 1)], lost=[1, 0]))
    assert (failure.rank, failure.kind, failure.exit_code) == (1, "exited", 0)


def test_a_rank_that_hangs_is_named_by_those_who_waited() -> None:
    failure = who_went_first(Evidence([_peer_lost(0, 3)], lost=[0], exits={0: 1}))
    assert (failure.rank, failure.kind) == (3, "hung")
    assert failure.error == "rank 3 did not come to a call within 60 s (rank 0 waited for it)"


def test_a_lost_peer_without_a_name_blames_who_says_so_for_lack_of_better() -> None:
    failure = who_went_first(Evidence([_peer_lost(0, -1)], lost=[0], exits={0: 1}))
    assert (failure.rank, failure.kind) == (0, "raised")


def test_the_launcher_killed_is_nobodys_fault() -> None:
    failure = who_went_first(Evidence(lost=[0, 1], launcher_exit=-9))
    assert (failure.rank, failure.kind) == (-1, "killed") and "torchrun" in failure.error


def test_the_launcher_ending_by_itself_says_with_which_status() -> None:
    assert "status 2" in who_went_first(Evidence(launcher_exit=2)).error


def test_a_signal_without_a_name_is_still_a_sentence() -> None:
    assert "signal 99" in who_went_first(Evidence(lost=[0], exits={0: -99})).error


def test_waiting_ends_when_nothing_more_can_be_learnt() -> None:
    assert Evidence([_BUG]).is_conclusive()
    assert Evidence(lost=[0], exits={0: -9}, heard_out={0}).is_conclusive()
    assert Evidence(launcher_exit=0).is_conclusive()
    assert not Evidence([_peer_lost(0, 1)], lost=[0]).is_conclusive()
    assert not Evidence([_peer_lost(0, 1)], lost=[1, 0], exits={0: 1}).is_conclusive()
    assert not Evidence(lost=[1, 0], exits={0: -15}).is_conclusive()


def test_an_exit_code_waits_for_the_last_words_that_are_still_unread() -> None:
    evidence = Evidence(lost=[1], exits={1: 1})
    assert not evidence.is_conclusive()
    evidence.last_words.append(_BUG)
    evidence.heard_out.add(1)
    assert evidence.is_conclusive()
    assert who_went_first(evidence).kind == "raised"


def test_a_rank_of_somebody_elses_torchrun_is_named_without_an_exit_code_made_up() -> None:
    failure = who_went_first(Evidence(lost=[2, 0], knows_exits=False))
    assert (failure.rank, failure.kind, failure.exit_code) == (2, "exited", None)
    assert "its node's torchrun knows why" in failure.error
