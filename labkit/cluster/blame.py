"""Which rank went first: when one dies the others fail soon after, and the innocent must not be named.

Evidence comes in an order: a rank's last words (`Failed`), a connection that ends, torchrun's list of exit
codes. Last words count most, unless they only say that a peer was lost. Then come exit codes that nobody of
ours caused, then the first connection that ended, then the peer that a lost rank was waiting for.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.engine.messages import Failed

_PEER_LOST = re.compile(r"PeerLost: (?:rank (\d+): )?")


@dataclass(frozen=True)
class PoolFailure:
    """What ended the pool. rank: -1 when it was torchrun itself."""

    rank: int
    kind: str
    """raised, killed, exited or hung."""
    error: str
    """One line that names the rank."""
    traceback: str = ""
    """Of the rank that raised; else the end of its log."""
    exit_code: int | None = None
    """Negative: minus the signal."""


@dataclass
class Evidence:
    """What has been seen since the first sign of trouble."""

    last_words: list[Failed] = field(default_factory=list)
    """In the order of arrival."""
    lost: list[int] = field(default_factory=list)
    """Ranks whose connection ended, first to last."""
    exits: dict[int, int] = field(default_factory=dict)
    """Rank → exit code."""
    heard_out: set[int] = field(default_factory=set)
    """Ranks whose control connection was read to its end: an exit code may come before the last words were read."""
    launcher_exit: int | None = None
    """torchrun's own status; None while it lives."""
    knows_exits: bool = True
    """False where the ranks are children of somebody else's torchrun."""

    def is_conclusive(self) -> bool:
        """Waiting longer would tell nothing more."""
        explained = self.heard_out.intersection(self.ended_by_themselves())
        return bool(self.confessions() or explained) or self.launcher_exit is not None

    def confessions(self) -> list[Failed]:
        return [words for words in self.last_words if not _PEER_LOST.match(words.error)]

    def ended_by_themselves(self) -> list[int]:
        """Ranks whose exit code is known, without those that said why and those that torchrun ended."""
        innocent = {words.rank for words in self.last_words}
        return [r for r, code in self.exits.items() if code != -signal.SIGTERM and r not in innocent]


def who_went_first(evidence: Evidence) -> PoolFailure:
    if confessions := evidence.confessions():
        return _raised(confessions[0])
    if evidence.launcher_exit is not None and evidence.launcher_exit < 0 and not evidence.exits:
        return _launcher_killed(evidence.launcher_exit)
    innocent = {words.rank for words in evidence.last_words}
    by_themselves = evidence.ended_by_themselves()
    lost = [rank for rank in evidence.lost if rank not in innocent]
    first = [rank for rank in lost if rank in by_themselves] or by_themselves or lost
    if first:
        return _gone(first[0], evidence.exits.get(first[0], 0)) if evidence.knows_exits else _left(first[0])
    if evidence.last_words:
        return _waited_for(evidence.last_words[0])
    status = evidence.launcher_exit
    return PoolFailure(-1, "exited", f"torchrun ended with status {status}, and the ranks with it", exit_code=status)


def _raised(words: Failed) -> PoolFailure:
    return PoolFailure(words.rank, "raised", f"rank {words.rank} raised {words.error}", words.traceback)


def _gone(rank: int, code: int) -> PoolFailure:
    if code < 0:
        hint = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
        return PoolFailure(rank, "killed", f"rank {rank} was killed by {_signal(code)}{hint}", exit_code=code)
    return PoolFailure(rank, "exited", f"rank {rank} exited with status {code} while it was needed", exit_code=code)


def _left(rank: int) -> PoolFailure:
    return PoolFailure(rank, "exited", f"rank {rank} has gone: its connection ended; its node's torchrun knows why")


def _launcher_killed(code: int) -> PoolFailure:
    sentence = f"torchrun, which holds the ranks, was killed by {_signal(code)}"
    return PoolFailure(-1, "killed", sentence, exit_code=code)


def _waited_for(words: Failed) -> PoolFailure:
    """Nobody died: somebody did not come. The rank that was waited for is to blame, when it is known."""
    match = _PEER_LOST.match(words.error)
    missing = match.group(1) if match else None
    if missing is None:
        return _raised(words)
    rest = words.error[match.end() :] if match else words.error
    return PoolFailure(
        int(missing), "hung", f"rank {missing} {rest} (rank {words.rank} waited for it)", words.traceback
    )


def hung(ranks: Sequence[int], what: str, timeout_s: float) -> PoolFailure:
    """Nobody died and nobody said anything: `ranks` owe the answer to `what`."""
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    verb = "have" if len(ranks) > 1 else "has"
    return PoolFailure(ranks[0], "hung", f"{names} {verb} not answered {what} within {timeout_s:g} s")


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
