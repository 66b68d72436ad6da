"""Where one pipeline stage ends and the next begins: hidden states go from rank to rank there, and nowhere else.

A stage's ranks stand in line with those of its neighbours: each sends to the one with its own place in tp and
pcp. A send never blocks, so a stage goes on with its next step while the stage behind it is still busy with
this one; its buffer is kept until it is known to have been received. A receive waits, and that wait is the
bubble.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from labkit.parallel.comm import Group
from labkit.parallel.wire import Pending


class Boundary:
    """Both ends of one rank's stage. `group`: its pp group, in which a rank's place is its stage.

    Hidden states are [tokens, hidden_size]; a step without tokens crosses nothing.
    """

    def __init__(self, group: Group, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group, self.hidden_size, self.dtype, self.device = group, hidden_size, dtype, device
        self._kept: deque[tuple[Pending, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        return self.group.rank == 0

    @property
    def is_last(self) -> bool:
        return self.group.rank == self.group.size - 1

    def receive(self, num_tokens: int) -> Tensor | None:
        """What the stage before made of the step's tokens; None on the first stage."""
        if self.is_first:
            return None
        hidden = torch.empty(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        if num_tokens:
            self.group.irecv(hidden, self.group.rank - 1).wait()
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Give the next stage its hidden states and go on.

        At most pp steps are in flight, and the engine sends a step only when the one pp before it has come
        back: so what was sent pp sends ago has been received, and waiting for it costs nothing.
        """
        if not len(hidden):
            return
        if len(self._kept) >= self.group.size:
            self._kept.popleft()[0].wait()
        pending = self.group.isend(hidden, self.group.rank + 1)
        self._kept.append((pending, hidden))
        if not pending.advance():
            self.group.door.sending.append(pending)
