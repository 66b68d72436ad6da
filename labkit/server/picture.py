"""What the state shows beyond the engine's own words: the choice of layouts, who holds what, and where all this runs.

All of it follows from the layout and the model by arithmetic, so it is computed once a layout and kept.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import platform
import socket
from typing import TYPE_CHECKING, Any

from labkit.cluster.topology import usable_cores
from labkit.layout import (
    AnyLayout,
    Deployment,
    Layout,
    candidate_layouts,
    check_layout,
    choice_table,
    deployment_choices,
    holdings,
    legal_layouts,
    pools_of,
)
from labkit.measure.records import Environment, MemoryRecord
from labkit.model.spec import DTYPE_BYTES

if TYPE_CHECKING:
    from labkit.engine.settings import EngineSettings
    from labkit.model.spec import ModelSpec


class Picture:
    """Of one pool of ranks and one model."""

    def __init__(
        self, spec: ModelSpec, num_ranks: int, threads_per_rank: int, device: str, backend: str,
        topology: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.num_ranks = num_ranks
        self._spec = spec
        self._threads = threads_per_rank
        self._device = device
        self._backend = backend
        self._topology = topology or {"kind": "one machine", "num_nodes": 1}
        self._num_cores = usable_cores()
        self._started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._layouts: list[dict[str, Any]] | None = None
        self._ownership = functools.lru_cache(maxsize=32)(self._ownership_of)

    def of(self, engine: dict[str, Any], settings: EngineSettings | None) -> dict[str, Any]:
        """The engine's state with everything that goes beside it; its own keys win."""
        picture: dict[str, Any] = {
            "num_ranks": self.num_ranks,
            "num_cores": self._num_cores,
            "threads_per_rank": self._threads,
            "backend": self._backend,
            "device": self._device,
            "layouts": self.layouts(),
            "topology": self.topology(engine),
        }
        if settings is not None:
            picture |= self._of_settings(engine, settings)
        return picture | engine

    def _of_settings(self, engine: dict[str, Any], settings: EngineSettings) -> dict[str, Any]:
        layout = settings.layout
        return {
            "layout": layout.slug,
            "layout_name": str(layout),
            "fabric": settings.fabric,
            "dtype": settings.dtype,
            "memory_per_rank": settings.memory_per_rank,
            "ownership": self._ownership(layout, settings.dtype),
            "environment": self.environment(engine, settings),
        }

    def layouts(self) -> list[dict[str, Any]]:
        """The legal ones, then those that one would try next and that are not, and why not; then pools with roles."""
        if self._layouts is None:
            legal = [(layout, "") for layout in legal_layouts(self._spec, self.num_ranks, engine=True)]
            tried = filter(_is_likely, candidate_layouts(2 * self.num_ranks))
            answers = (check_layout(layout, self._spec, self.num_ranks, engine=True) for layout in tried)
            refused = [(answer.layout, str(answer)) for answer in answers if not answer]
            self._layouts = [self._layout_entry(layout, reason) for layout, reason in [*legal, *refused]]
            pools = deployment_choices(self._spec, self.num_ranks, engine=True)
            self._layouts += [self._layout_entry(deployment, "") for deployment in pools]
        return self._layouts

    @functools.cached_property
    def choices(self) -> dict[str, Any]:
        """What a chooser of single axes needs (`choice_table`), and beyond how many ranks cores are shared."""
        most = self._num_cores // self._threads if self._device == "cpu" else None
        return choice_table(self._spec, self.num_ranks) | {"ranks_with_own_cores": most}

    def _layout_entry(self, layout: AnyLayout, reason: str) -> dict[str, Any]:
        threads = layout.world_size * self._threads
        return {
            "layout": layout.slug,
            "name": str(layout),
            "legal": not reason,
            "reason": reason,
            "num_ranks": layout.world_size,
            "oversubscribed": self._device == "cpu" and threads > self._num_cores,
            "pools": isinstance(layout, Deployment),
        }

    # ---- who holds what

    def _ownership_of(self, layout: AnyLayout, dtype: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        num_before = 0
        for pool in pools_of(layout):
            found += [
                {
                    "rank": pool.first_rank + rank,
                    "replica": num_before + pool.layout.replica_of(rank),
                    "parts": self._parts(layout, pool.first_rank + rank, dtype),
                }
                for rank in range(pool.layout.world_size)
            ]
            num_before += pool.layout.dp
        return found

    def _parts(self, layout: AnyLayout, rank: int, dtype: str) -> list[dict[str, Any]]:
        """The KV cache's share too; its bytes are the rank's `memory.kv`, known once the blocks are allocated."""
        found = holdings(layout, self._spec, rank, DTYPE_BYTES[dtype], kv_bytes=0)
        return [dataclasses.asdict(held) for held in found]

    # ---- where

    def environment(self, engine: dict[str, Any], settings: EngineSettings) -> Environment:
        return Environment(
            host=socket.gethostname(),
            backend=self._device,
            fabric=self._fabric_text(engine, settings.fabric),
            device=str(engine.get("device") or platform.processor() or platform.machine()),
            num_cores=self._num_cores,
            num_ranks=settings.layout.world_size,
            threads_per_rank=self._threads,
            dtype=settings.dtype,
            versions={"python": platform.python_version(), **engine.get("versions", {})},
            seed=settings.seed,
            started_at=self._started_at,
            clocks=list(engine.get("clocks", [])),
        )

    def topology(self, engine: dict[str, Any]) -> dict[str, Any]:
        """How many nodes, of how many ranks, and the link between them; of nodes that joined, as the ranks say."""
        told = engine.get("nodes", [])
        sizes = {len(node["ranks"]) for node in told}
        counted = {"num_nodes": len(told), "ranks_per_node": sizes.pop() if len(sizes) == 1 else None} if told else {}
        return self._topology | {name: value for name, value in counted.items() if not self._topology.get(name)}

    def _fabric_text(self, engine: dict[str, Any], inside: str) -> str:
        """As a figure's reader must know it: `shm`, or `shm; gloo across 2 nodes (200mbit)`."""
        across = sorted({group["fabric"] for group in engine.get("groups", []) if group["spans_nodes"]})
        if not across:
            return inside
        topology = self.topology(engine)
        link = f" ({topology['link']})" if topology.get("link") else ""
        return f"{inside}; {', '.join(across)} across {topology['num_nodes']} nodes{link}"

    @staticmethod
    def memory(engine: dict[str, Any]) -> list[MemoryRecord]:
        return list(engine.get("memory", []))


def _is_likely(layout: Layout) -> bool:
    """One axis of data, pipeline or tensor parallelism, and the products of data and tensor.

    Every refused product of six axes would be hundreds; `labkit layouts` lists them all.
    """
    split = {axis for axis in ("dp", "pp", "pcp", "tp", "dcp", "ep") if getattr(layout, axis) > 1}
    return split in ({"dp"}, {"pp"}, {"tp"}, {"dp", "tp"})
