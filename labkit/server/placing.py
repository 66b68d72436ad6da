"""Where the ranks of a server stand: on this machine, on nodes made on it, or on nodes that join.

The options are checked here, with the sentence for what does not fit; the invitation to join is printed as commands
that can be pasted, since nobody remembers torchrun's flags.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cluster.namespaces import has_netem
from labkit.cluster.nodes import Link, Nodes, why_not
from labkit.cluster.starters import Join
from labkit.cluster.topology import Machine, default_num_ranks
from labkit.paths import runtime_dir

if TYPE_CHECKING:
    from labkit.server.options import ServeOptions


@dataclass(frozen=True)
class Placing:
    """Neither nodes nor join: one machine's ranks under one torchrun."""

    nodes: Nodes | None = None
    join: Join | None = None

    def describe(self) -> dict[str, Any]:
        """`topology` of the state; which rank stands where is beside it, told by the ranks."""
        nodes = self.nodes
        link = nodes.link if nodes else Link()
        return {
            "kind": "nodes made on this machine" if nodes else "nodes that joined" if self.join else "one machine",
            "num_nodes": nodes.num_nodes if nodes else None if self.join else 1,
            "ranks_per_node": nodes.ranks_per_node if nodes else None,
            "link": str(link) if nodes else None,
            "link_bits_per_s": link.rate_bits_per_s or None,
            "link_delay_ms": link.delay_ms if nodes else None,
        }


def place(options: ServeOptions, machine: Machine) -> Placing:
    """Raises ValueError with a sentence."""
    if options.nodes and options.join_ranks:
        raise ValueError("--nodes makes nodes on this machine and --join-ranks waits for real ones: give one of them.")
    if not options.nodes and (options.link or options.link_delay_ms or options.ranks_per_node):
        raise ValueError(
            "--link, --link-delay-ms and --ranks-per-node shape nodes made on this machine: "
            "say how many of them with --nodes 2."
        )
    if options.join_ranks:
        return Placing(join=_join(options))
    return Placing(nodes=_nodes(options, machine)) if options.nodes else Placing()


def _nodes(options: ServeOptions, machine: Machine) -> Nodes:
    default = max(1, default_num_ranks(machine) // max(1, options.nodes))
    link = Link.parse(options.link, options.link_delay_ms)
    nodes = Nodes(options.nodes, options.ranks_per_node or default, link)
    if options.ranks and options.ranks != nodes.num_ranks:
        raise ValueError(
            f"--ranks is {options.ranks}, and {nodes.num_nodes} nodes of {nodes.ranks_per_node} ranks are "
            f"{nodes.num_ranks}: leave --ranks away."
        )
    if reason := why_not():
        raise ValueError(reason)
    if link.delay_ms and not has_netem():
        raise ValueError(
            "--link-delay-ms needs netem, which this kernel does not have (modprobe sch_netem, where it is a module): "
            "leave it away, and the link has its rate and no delay of its own."
        )
    return nodes


def _join(options: ServeOptions) -> Join:
    if options.join_ranks < 1:
        raise ValueError(f"--join-ranks is {options.join_ranks}; say how many ranks, over all nodes, will join.")
    if options.ranks and options.ranks != options.join_ranks:
        raise ValueError(f"--ranks is {options.ranks} and --join-ranks {options.join_ranks}: leave --ranks away.")
    if not 0 <= options.control_port <= 65535:
        raise ValueError(f"--control-port is {options.control_port}; it can be 0 (any free one) to 65535.")
    port = options.control_port or _free_port(options.control_host)
    token_file = Path(options.control_token_file) if options.control_token_file else runtime_dir() / "join-token"
    return Join(options.control_host, port, token_file)


def _free_port(host: str) -> int:
    """It must stay the same while the pool restarts, so it is chosen once."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def invitation(join: Join, num_ranks: int, device: str) -> list[str]:
    """What to run on each node."""
    host = socket.gethostname() if join.host in ("0.0.0.0", "::", "") else join.host
    return [
        f"waiting for {num_ranks} ranks at {host}:{join.port}; on each node run (docs/nodes.md has Slurm's form):",
        f"  LABKIT_CONTROL=tcp:{host}:{join.port} LABKIT_TOKEN_FILE={join.token_file} LABKIT_DEVICE={device} \\",
        "  torchrun --nnodes=NODES --nproc-per-node=RANKS_PER_NODE --max-restarts=3 --rdzv-backend=c10d \\",
        "  --rdzv-endpoint=FIRST_NODE:29400 --rdzv-id=labkit -m labkit.engine.worker",
        f"  where NODES x RANKS_PER_NODE = {num_ranks}, and the file holds the same secret on every node",
    ]
