"""A pool over two nodes made here: who stands where, what carries a group, what crosses, and that all of it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.cluster.nodes import Link, Nodes
from labkit.cluster.pool import PoolError
from labkit.engine.messages import Sampled, SampleSpec, Step
from labkit.engine.places import describe_places
from labkit.layout import Layout
from tests.cluster.made_nodes import bytes_sent, needs_nodes, of_owner
from tests.cluster.pool_harness import Harness, int32, shm_folders, step_message, still_alive

pytestmark = [needs_nodes, pytest.mark.engine]
_ROOT = Path(__file__).parents[2]
_NUM_TOKENS = 1 << 16
_BYTES = 4 * _NUM_TOKENS


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    of_other_tests = shm_folders(os.getpid())
    harness = Harness(tmp_path_factory.mktemp("pool"), num_ranks=4, nodes=Nodes(2, 2, Link.parse("1gbit")))
    harness.start()
    yield harness
    harness.close()
    assert of_owner(os.getpid()) == [] and shm_folders(os.getpid()) == of_other_tests


def test_ranks_stand_on_the_nodes_in_order_and_share_a_clock(four: Harness) -> None:
    assert [four.pool.hellos[rank].node for rank in range(4)] == [0, 0, 1, 1]
    told = describe_places(four.pool.hellos, "cpu", Layout.parse("dp2xtp2"), "shm")
    assert [node["ranks"] for node in told["nodes"]] == [[0, 1], [2, 3]]
    assert told["clock"] == "shared", "one machine, whatever its networks"


def _sum_of_many(harness: Harness, epoch: int, layout: str) -> tuple[list[int], int]:
    """What the sampling rank says of a step that all-reduces _BYTES, and the bytes that crossed the link meanwhile."""
    harness.configure(epoch, layout)
    node = next(name for name in of_owner(os.getpid()) if name.endswith("-n0"))
    before = bytes_sent(node)
    step = Step(epoch, 0, int32(*[3] * _NUM_TOKENS), int32(_NUM_TOKENS), int32(0), int32(0), [SampleSpec(0)], 1)
    answers = harness.ask(step, 5)
    sampled = next(message for _, message in answers if isinstance(message, Sampled))
    return sampled.token_ids, bytes_sent(node) - before


def test_a_group_within_a_node_leaves_the_link_alone_and_one_across_uses_it(four: Harness) -> None:
    tokens, crossed = _sum_of_many(four, 1, "dp2xtp2")
    assert tokens == [6] and crossed < _BYTES / 8, "rendezvous heartbeats only"
    tokens, crossed = _sum_of_many(four, 2, "tp4")
    assert tokens == [12] and crossed >= _BYTES, "every sum needs the other node's half"


@pytest.mark.slow
def test_a_rank_killed_on_the_second_node_is_named_and_the_pool_comes_back(four: Harness) -> None:
    four.configure(3, "tp4")
    before = of_owner(os.getpid())
    pids = [*four.pool.pids.values()]
    four.pool.send(0, step_message(3, 0, token=1))
    began = time.monotonic()
    os.kill(four.pool.pids[3], signal.SIGKILL)
    failure = four.failure(5.0)
    assert (failure.rank, failure.kind, failure.exit_code) == (3, "killed", -signal.SIGKILL)
    while still_alive(pids) or set(before) & set(of_owner(os.getpid())):
        assert time.monotonic() - began < 5.0, f"left: {still_alive(pids)}, {of_owner(os.getpid())}"
        four.rest(0.05)
    four.do(four.pool.restart())
    assert _sum_of_many(four, 4, "tp4")[0] == [12]


_OWNER = """
import os, sys
from pathlib import Path
from labkit.cluster.nodes import Link, Nodes
from tests.cluster.pool_harness import Harness, family, step_message
harness = Harness(Path(sys.argv[1]), num_ranks=2, nodes=Nodes(2, 1, Link.parse("100mbit")))
harness.start()
harness.configure(0, "tp2")
harness.pool.send(0, step_message(0, 0, token=1))
harness.rest(0.2)
print(*family(os.getpid()), flush=True)
harness.rest(60)
"""


def test_a_killed_owner_leaves_no_namespace_process_or_shared_memory(tmp_path: Path) -> None:
    """In the middle of an all-reduce across the link."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(still_alive(pids)) == 5, "the keeper, two torchruns and a rank of each"
    assert len(of_owner(owner.pid)) == 3 and len(shm_folders(owner.pid)) == 1
    owner.kill()
    owner.wait()
    began = time.monotonic()
    while still_alive(pids) or shm_folders(owner.pid) or of_owner(owner.pid):
        assert time.monotonic() - began < 5.0, (still_alive(pids), shm_folders(owner.pid), of_owner(owner.pid))
        time.sleep(0.05)


def test_ranks_that_cannot_start_say_why_from_their_own_nodes_log(tmp_path: Path) -> None:
    before = of_owner(os.getpid())
    harness = Harness(tmp_path, module="tests.cluster.no_such_worker", nodes=Nodes(2, 1))
    with pytest.raises(PoolError, match=r"(?s)rank [01] exited with status 1.*No module named.*no_such_worker"):
        harness.start()
    assert of_owner(os.getpid()) == before
    harness.close()
