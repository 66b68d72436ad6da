"""Shared memory when things go wrong.

Who does not come is named, nothing stays behind, a full /dev/shm is a sentence.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.parallel import shm_block
from labkit.parallel.shm_block import Patience, usable_cores
from tests.parallel import on_ranks
from tests.parallel.team import Team


def test_a_rank_that_does_not_come_is_named_after_the_deadline(team: Team) -> None:
    said, _ = team.run(on_ranks.late_to_a_call, 0.2, False, ranks=(0, 1))
    assert said.startswith("rank 9: did not come to a call within 0.2 s")


def test_within_the_deadline_nothing_is_raised(team: Team) -> None:
    assert team.run(on_ranks.late_to_a_call, 20.0, True, ranks=(0, 1)) == ["came", "came"]


def test_a_rank_that_aborts_frees_those_who_wait_for_it(team: Team) -> None:
    said, _ = team.run(on_ranks.aborted_by_a_peer, ranks=(0, 1))
    assert said.startswith("rank 1: left the group")


def test_the_file_is_unlinked_once_all_have_mapped_it(team: Team) -> None:
    assert team.run(on_ranks.files_left)[0] == []


def test_spinning_only_where_every_thread_has_a_core() -> None:
    patience = Patience()
    patience.suit(usable_cores() + 1)
    assert patience.num_spins == 0
    patience.suit(usable_cores())
    assert patience.num_spins > 0


def test_a_full_shared_memory_is_a_sentence_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(RuntimeError, match=r"4\.0 MiB.*--shm-size.*--fabric gloo"):
        shm_block.Block(tmp_path / "full", 0, 2, 8 << 20, 4 << 20)
    assert list(tmp_path.iterdir()) == []


def test_the_fence_of_other_processors_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_block.platform, "machine", lambda: "aarch64")
    fence = shm_block._make_fence()
    assert fence is not None
    fence()


def test_collectives_are_right_with_a_fence_too(tmp_path: Path) -> None:
    """Two threads of one process play two ranks, as on a processor that needs the fence."""
    code = f"""
import platform, threading
platform.machine = lambda: "aarch64"
from pathlib import Path
import torch
from labkit.parallel import shm_block
from labkit.parallel.fabric_shm import ShmFabric
assert shm_block.fence is not None
def play(rank):
    wire = ShmFabric(Path({str(tmp_path)!r})).open("w", (0, 1), rank)
    for i in range(20):
        x = torch.full((9,), float(rank + i)); wire.all_reduce(x)
        assert x.tolist() == [2.0 * i + 1] * 9, x
    done.append(rank)
done = []
threads = [threading.Thread(target=play, args=(r,)) for r in (0, 1)]
[t.start() for t in threads]; [t.join() for t in threads]
assert sorted(done) == [0, 1]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
