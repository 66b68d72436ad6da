"""What a collective costs on a link: a latency floor and bytes over bandwidth, by topology, group and node crossing.

t = latency + wire bytes ÷ bandwidth (the α–β model; Thakur, Rabenseifner, Gropp 2005), where wire bytes are what one
rank sends with ring algorithms among n ranks. The slowest link that the group needs decides: a ring over both sockets
of a host goes once each way between them, and no part of it is faster than that. A group of one is free.
Inside a node, engines have a kernel of their own for small all-reduces, without the launch of a library's: its latency
is the engine's (`small_latency_s`), fitted in data/fitted.
"""

from __future__ import annotations

from labkit.plan.hardware import Hardware, Link

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "isend")


def wire_bytes(operation: str, num_bytes: float, degree: int) -> float:
    """Bytes that the busiest rank sends or receives; `num_bytes` as in `labkit.layout.traffic.Crossing.bytes_each`."""
    if operation == "isend":
        return num_bytes
    if operation in ("all_gather", "gather"):
        return num_bytes * (degree - 1)
    if operation in ("reduce_scatter", "all_to_all"):
        return num_bytes * (degree - 1) / degree
    if operation == "all_reduce":
        return 2 * num_bytes * (degree - 1) / degree
    raise ValueError(f"{operation!r} is no collective: choose one of {', '.join(OPERATIONS)}.")


def link_bandwidth(link: Link, operation: str, degree: int, ranks_per_node: int = 1) -> float:
    """Bytes a second of one rank of a group. On a mesh a group of n uses n − 1 of the links; between nodes each card
    serves one ring, and a node has at most `lanes` of them. Between sockets a ring has the whole way; of an all-to-all
    every rank of a side sends over it what is for the other side: n/2 · n/2 ÷ n of a rank's bytes, not (n − 1) ÷ n."""
    if link.shared and operation == "all_to_all":
        return link.bandwidth.value * (degree - 1) / (degree // 2 * -(-degree // 2))
    if link.mesh_links:
        return link.bandwidth.value * min(1.0, (degree - 1) / link.mesh_links)
    return link.bandwidth.value * min(max(1, ranks_per_node), link.lanes)


def seconds_on(
    link: Link, operation: str, num_bytes: float, degree: int, *, ranks_per_node: int = 1,
    small_latency_s: float | None = None,
) -> float:  # fmt: skip
    """One operation among `degree` ranks joined by `link`."""
    if degree <= 1 or num_bytes <= 0:
        return 0.0
    if operation == "isend":
        return link.message_latency_s.value + num_bytes / link.message_bandwidth.value
    latency = link.latency_s.value
    if small_latency_s is not None and link.kind in ("nvlink", "nvlink-pairs", "xgmi"):
        latency = min(latency, small_latency_s)
    bandwidth = link_bandwidth(link, operation, degree, ranks_per_node)
    return latency + wire_bytes(operation, num_bytes, degree) / bandwidth


def collective_seconds(
    hardware: Hardware, operation: str, num_bytes: float, ranks: tuple[int, ...], small_latency_s: float | None = None
) -> float:
    """One operation of a group of global ranks, which stand on the GPUs in order."""
    if len(ranks) <= 1:
        return 0.0
    link = hardware.link(ranks)
    node = min(ranks) // hardware.gpus_per_node
    ranks_per_node = sum(rank // hardware.gpus_per_node == node for rank in ranks)
    return seconds_on(
        link, operation, num_bytes, len(ranks), ranks_per_node=ranks_per_node, small_latency_s=small_latency_s
    )
