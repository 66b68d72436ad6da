"""A rank's loop over a real socket, and what it says when it cannot be a rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.engine import messages
from labkit.engine.channel import Channel
from labkit.engine.messages import AllocateKV, Configured, Fault, Memory, Ready, Shutdown
from labkit.engine.worker import Launch, Worker
from labkit.parallel.mesh import MeshFactory
from tests.cluster.pool_harness import configure_message, step_message


class _Counter:
    """A runner that answers and keeps what it was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def configure(self, message: messages.Configure) -> Configured:
        return Configured(message.epoch, 0, 8, 64, Memory(), 0.0, 0.0)

    def allocate(self, message: AllocateKV) -> Ready:
        return Ready(message.epoch, 0, Memory(), 0.0)

    def step(self, message: messages.Step) -> tuple[messages.Sampled | None, int, int]:
        self.steps.append(message.step_id)
        return None, 0, 0


def _play(tmp_path: Path, *told: messages.EngineMessage) -> tuple[_Counter, MeshFactory, list[messages.RankMessage]]:
    """Tell a worker everything at once; what it did and said until it left."""
    ours, theirs = socket.socketpair()
    runner, meshes = _Counter(), MeshFactory(0, tmp_path)
    engine = Channel(ours)
    for message in told:
        engine.send(messages.encode(message))
    Worker(0, Channel(theirs), runner, meshes).run()
    theirs.close()
    said = []
    while (payload := engine.receive()) is not None:
        said.append(messages.decode_rank_message(payload))
    ours.close()
    return runner, meshes, said


def test_it_answers_in_order_until_it_is_told_to_leave(tmp_path: Path) -> None:
    told = (configure_message(4, "tp1"), AllocateKV(4, 8), step_message(4, 1, 0), Shutdown(), step_message(4, 2, 0))
    runner, _, said = _play(tmp_path, *told)
    assert [type(message).__name__ for message in said] == ["Configured", "Ready", "StepStats"]
    assert runner.steps == [1]


def test_steps_of_another_epoch_never_reach_the_runner(tmp_path: Path) -> None:
    told = (step_message(0, 1, 0), configure_message(1, "tp1"), step_message(0, 2, 0), step_message(1, 3, 0))
    assert _play(tmp_path, *told, Shutdown())[0].steps == [3]


def test_a_drill_of_delay_reaches_the_door(tmp_path: Path) -> None:
    _, meshes, _ = _play(tmp_path, Fault("delay", 0.25, 2), Shutdown())
    assert (meshes.door.delay_s, meshes.door.delay_layer) == (0.25, 2)


def test_the_recorder_is_muted_between_two_steps_and_comes_back(tmp_path: Path) -> None:
    _, meshes, _ = _play(tmp_path, Fault("mute"), Shutdown())
    assert not meshes.door.recording
    _, meshes, _ = _play(tmp_path, Fault("mute"), Fault("unmute"), Shutdown())
    assert meshes.door.recording


@pytest.mark.parametrize(("kind", "error"), [("raise", "told to raise"), ("sulk", "no fault 'sulk'")])
def test_other_drills_raise(tmp_path: Path, kind: str, error: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=error):
        _play(tmp_path, Fault(kind))


def test_more_ranks_than_gpus_is_a_sentence_before_nccl_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch = Launch(3, 3, "cuda", "unix:/nowhere", "", Path("/nowhere"))
    with pytest.raises(SystemExit, match="rank 3 has no GPU of its own: this machine has 1.*--device cpu"):
        launch.torch_device()


def test_a_worker_started_by_hand_says_who_starts_workers() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LABKIT_CONTROL")}
    got = subprocess.run(
        [sys.executable, "-m", "labkit.engine.worker"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert got.returncode == 1 and "Start it with `labkit serve`" in got.stderr
