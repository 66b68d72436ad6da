"""Paged keys and values: the rank's memory cut into blocks of a few positions, handed out by the engine by
number.

Head comes before block in memory, so that gathering a sequence's blocks (whole, one copy for keys and values
together) leaves each head's positions one after another, ready for the product with no transpose. The last
block belongs to nobody: rows that pad a batch write there. Memory is zero at first, since what a mask hides
is still multiplied by 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank: keys and values of every layer and KV head it holds."""
    return 2 * num_layers * num_kv_heads * head_dim * block_size * dtype.itemsize


class KVCache:
    """`num_blocks` blocks for requests and one to spare, for `num_layers` layers of `num_kv_heads` heads."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.num_kv_heads = num_blocks, num_kv_heads
        self.block_size, self.head_dim = block_size, head_dim
        shape = (num_layers, 2 * num_kv_heads, num_blocks + 1, block_size * head_dim)
        self.memory = _zeros(shape, dtype, device)
        self._by_block = list(self.memory.unbind(0))
        self._by_slot = [m.view(2 * num_kv_heads, -1, head_dim) for m in self._by_block]

    @property
    def spare_block(self) -> int:
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def by_token(self) -> Tensor:
        """The same memory as [layers, 2 (keys, values), kv_heads, slots, head_dim].

        slot = block · block_size + offset.
        """
        return self.memory.view(len(self.memory), 2, self.num_kv_heads, -1, self.head_dim)

    def write(self, layer: int, keys_values: Tensor, slots: Tensor) -> None:
        """Stores [tokens, 2 · kv_heads, head_dim] (keys before values) at `slots` = block · block_size +
        offset.
        """
        self._by_slot[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def gather(self, layer: int, blocks: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [kv_heads, num_seqs, positions, head_dim], of `blocks` [num_seqs · width]."""
        both = self._by_block[layer].index_select(1, blocks)
        both = both.view(2, self.num_kv_heads, num_seqs, -1, self.head_dim)
        return both[0], both[1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU pages come zeroed from the system when first touched: a large cache costs nothing until it is
    used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
