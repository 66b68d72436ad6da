"""Devices and links as numbers with a provenance: `load_hardware("8xh200")` is what a layout runs on.

A device is a TOML file under data/hardware (or one of your own): memory, dense rates, link rates of one GPU in one
direction, each with unit, origin and source. What a collective really reaches stands beside it in links.toml, fitted by
`labkit.plan.fit_collectives`; where nothing was measured, the datasheet's rate times the share that was reached on the
devices that were; what joins a host's two CPU sockets stands in hosts.toml. The machine at hand is the file that
`labkit calibrate` leaves, asked for as "here".
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.paths import data_dir, home_dir, read_text

ORIGINS = ("datasheet", "fitted", "measured")
HOPPER_MATMUL = 821.2e12 / 989.4e12
"""Of its datasheet's bfloat16 rate, what an H100 SXM reaches in the sweep that gave the others' `matmul`. Engines'
efficiencies are shares of the datasheet as fitted on Hopper, whose clock falls under full matrices."""
SERVERS = {"nvswitch": "nvlink", "pairs": "nvlink", "pcie": "", "xgmi": "xgmi"}
"""How the GPUs of a node are joined → the kind of the fast link."""
SHARED_FILES = ("links.toml", "hosts.toml")
"""Under data/hardware, and no device."""
_NAME = re.compile(r"(?:(\d{1,9})\s*[x×]\s*)?([a-z][a-z0-9-]{0,39})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number and where it is from."""

    value: float
    unit: str
    origin: str
    source: str
    residual: float | None = None
    """Mean absolute relative error of the fit that gave it; None for a datasheet."""

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f"origin is {self.origin!r}; a parameter is one of {', '.join(ORIGINS)}.")


@dataclass(frozen=True)
class Device:
    """One GPU (or one rank of a machine without)."""

    name: str
    title: str
    memory_bytes: int
    memory_bandwidth: Parameter
    """Bytes a second, of the datasheet: how much of it a kernel reaches is the engine's, in data/fitted."""
    rates: dict[str, Parameter] = field(hash=False)
    """Dense FLOP/s by format: bfloat16, float8, float4."""
    price_per_hour: float | None = None
    matmul: Parameter | None = None
    """bfloat16 FLOP/s of the best large product in a published sweep; None: not in it."""

    @property
    def sustained(self) -> float:
        """How much more of its datasheet's rate the device holds in large products than Hopper does, whose power ends
        before its clock does; 1 where it is not known. A GeForce runs above the clock that its datasheet counts."""
        return self.matmul.value / self.rate(16).value / HOPPER_MATMUL if self.matmul else 1.0

    def rate(self, bits: int) -> Parameter:
        """The rate of matrices kept in `bits`: of the narrowest format that the device computes in and that holds
        them, so float8 weights on an A100 run at its bfloat16 rate."""
        for name, width in (("float4", 4), ("float8", 8), ("bfloat16", 16), ("float32", 32)):
            if width >= bits and name in self.rates:
                return self.rates[name]
        return self.rates["bfloat16" if "bfloat16" in self.rates else "float32"]


@dataclass(frozen=True)
class Link:
    """A way between GPUs. `latency_s` and `bandwidth` are those of collectives: a launch, and bytes a second of one GPU
    in one direction as a ring moves them; `message_*` the same of point-to-point messages."""

    kind: str
    latency_s: Parameter
    bandwidth: Parameter
    message_latency_s: Parameter
    message_bandwidth: Parameter
    mesh_links: int = 0
    """Full mesh of so many links a GPU: a group of n uses n − 1 of them. 0: a switch."""
    lanes: int = 1
    """Between nodes: how many GPUs of a node have a network card of their own."""
    shared: bool = False
    """One way for all ranks of a side, as between the sockets of a host."""


@dataclass(frozen=True)
class Hardware:
    """GPUs and what joins them; ranks stand on them in order."""

    device: Device
    num_gpus: int
    num_nodes: int
    fast_group: int
    """How many neighbours the fast link joins: 8 behind an NVSwitch, 2 in pairs, 1 where there is only PCIe."""
    fast: Link | None
    inside: Link
    """Inside a node, beyond a fast group."""
    across: Link | None
    name: str = ""
    sockets: Link | None = None
    """Inside a node, from the GPUs of one CPU socket to those of the other; None: they hang under one."""
    socket_group: int = 0
    """How many neighbours hang under a socket."""

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link that a group of ranks needs."""
        first, last = min(ranks), max(ranks)
        if first // self.gpus_per_node != last // self.gpus_per_node and self.across:
            return self.across
        if self.fast and first // self.fast_group == last // self.fast_group:
            return self.fast
        return self.sockets if self.sockets and self.between_sockets(ranks) else self.inside

    def between_sockets(self, ranks: tuple[int, ...]) -> bool:
        """Whether ranks of one node hang under both of its sockets."""
        if self.sockets is None:
            return False
        first, last = (rank % self.gpus_per_node // self.socket_group for rank in (min(ranks), max(ranks)))
        return first != last


def hardware_dir() -> Path:
    return data_dir() / "hardware"


def list_devices() -> list[str]:
    """Names of the devices under data/hardware, sorted."""
    return sorted(path.stem for path in hardware_dir().glob("*.toml") if path.name not in SHARED_FILES)


def load_hardware(text: str, nodes: int = 1, link: str = "") -> Hardware:
    """Read `8xh200`, `4xa100-pairs`, `2xrtx4090`, `here`, or `[N x] the path of a TOML file`.

    `text` counts the GPUs of all nodes together. `link` (or a suffix of the name) says how a node's GPUs are joined:
    nvswitch, pairs, pcie, xgmi; by default as that device is usually sold. Raises ValueError with a sentence.
    """
    number, name = _read_name(text.strip())
    file, suffix = _find(name)
    try:
        return _load(file, number, nodes, link or suffix, text.strip())
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"{file} cannot be read as hardware ({type(error).__name__}: {error}): write it as data/hardware/h100.toml."
        ) from error


def _load(file: Path, number: int, nodes: int, server: str, name: str) -> Hardware:
    table = _read(file, file.stat().st_mtime_ns)
    num_gpus = number if number >= 0 else int(table["device"].get("gpus", 1)) * nodes
    if num_gpus < 1 or nodes < 1:
        raise ValueError(f"{num_gpus} GPUs on {nodes} nodes: give at least 1 of each, such as 8xh200 on 1 node.")
    if num_gpus % nodes:
        raise ValueError(f"{num_gpus} GPUs cannot stand on {nodes} nodes evenly: give a multiple of {nodes}.")
    server = server or table["device"].get("server", "pcie")
    if server not in SERVERS:
        raise ValueError(f"{server!r} is no way to join GPUs: choose one of {', '.join(SERVERS)}.")
    return _assemble(table, num_gpus, nodes, server, name)


def _read_name(text: str) -> tuple[int, str]:
    """Number (−1: not said) and name."""
    head, times, rest = text.partition("x")
    if times and head.strip().isdigit() and (rest.strip().endswith(".toml") or "/" in rest):
        return int(head), rest.strip()
    if text.endswith(".toml") or "/" in text:
        return -1, text
    found = _NAME.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:40]!r} names no GPUs: write 8xh200, 4xa100-pairs, or the path of a TOML file.")
    return int(found[1] or -1), found[2].lower()


def _find(name: str) -> tuple[Path, str]:
    """The file of a device, and how its suffix says that GPUs are joined ('' without one)."""
    if name.endswith(".toml") or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"There is no hardware file {name}.")
        return path, ""
    if name == "here":
        path = home_dir() / "hardware" / "here.toml"
        if not path.is_file():
            raise ValueError("This machine is not calibrated: run `labkit calibrate` first, then ask for `here`.")
        return path, ""
    head, _, suffix = name.rpartition("-")
    for device, server in ((name, ""), (head, suffix)):
        if device in list_devices() and (not server or server in SERVERS):
            return hardware_dir() / f"{device}.toml", server
    raise ValueError(
        f"There is no GPU {name!r}: choose one of {', '.join(list_devices())}, with -{', -'.join(SERVERS)} behind it "
        "for how a server joins them, or give the path of a TOML file."
    )


@lru_cache(maxsize=64)
def _read(file: Path, mtime_ns: int) -> dict[str, Any]:
    try:
        table = tomllib.loads(read_text(file, "hardware file"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not valid TOML: {error}.") from None
    needed = {"memory_bytes", "memory_bandwidth", "rates"}
    if file.name not in SHARED_FILES and not needed <= set(table.get("device", {})):
        raise ValueError(f"{file} needs a table [device] with memory_bytes, memory_bandwidth and rates.")
    return table


def _parameter(given: Any, sources: dict[str, str]) -> Parameter:
    if not isinstance(given, dict) or not {"value", "unit", "origin"} <= set(given):
        raise ValueError(f"{given!r} is no parameter: give value, unit, origin and source.")
    value = given["value"]
    if not isinstance(value, int | float) or not (0 < value < math.inf or (value == 0 and given["unit"] == "s")):
        raise ValueError(f"{value!r} {given['unit']} is no value for a device or link: give a number above 0.")
    source = str(given.get("source", ""))
    residual = given.get("residual")
    return Parameter(
        float(given["value"]), given["unit"], given["origin"], sources.get(source, source),
        None if residual is None else float(residual),
    )  # fmt: skip


def _assemble(table: dict[str, Any], num_gpus: int, nodes: int, server: str, name: str) -> Hardware:
    sources, raw = table.get("sources", {}), table["device"]
    price = raw.get("price_per_hour")
    device = Device(
        str(raw.get("name", name)), str(raw.get("title", name)), int(_parameter(raw["memory_bytes"], sources).value),
        _parameter(raw["memory_bandwidth"], sources),
        {kind: _parameter(given, sources) for kind, given in raw["rates"].items()},
        None if price is None else _price(price),
        _parameter(raw["matmul"], sources) if "matmul" in raw else None,
    )  # fmt: skip
    fast_kind, fast_group = SERVERS[server], 1
    fast = None
    if fast_kind:
        fast = _link(table, fast_kind, sources)
        fast_group = 2 if server == "pairs" else int(raw.get("gpus_per_node", 8))
        fast = Link("nvlink-pairs", *_values(fast)) if server == "pairs" else fast
    inside = _link(table, str(raw.get("inside", "pcie")), sources)
    across = _link(table, "network", sources) if nodes > 1 else None
    sockets, socket_group = _between_sockets(str(raw.get("host", "")), inside, num_gpus // nodes)
    return Hardware(device, num_gpus, nodes, fast_group, fast, inside, across, name, sockets, socket_group)


def _between_sockets(host: str, inside: Link, num_gpus: int) -> tuple[Link | None, int]:
    """What a ring gets between the sockets of such a host, and how many of a node's GPUs hang under one. Whose CPUs
    they are is not known: the geometric mean of the makers', its residual the distance to either."""
    file = hardware_dir() / "hosts.toml"
    hosts = _read(file, file.stat().st_mtime_ns)
    if not host:
        return None, num_gpus
    if host not in hosts or host == "sources":
        known = ", ".join(name for name in hosts if name != "sources")
        raise ValueError(f"host {host!r} is unknown: choose one of {known}, or leave it out where there is one socket.")
    about = hosts[host]
    group = max(int(about["gpus_per_socket"]), -(-num_gpus // int(about["sockets"])))
    if num_gpus <= group:
        return None, num_gpus
    makers = [_parameter(given, hosts["sources"]) for given in about["between_sockets"].values()]
    mean = math.exp(sum(math.log(each.value) for each in makers) / len(makers))
    residual = max(abs(each.value / mean - 1) for each in makers)
    between = Parameter(mean, "B/s", makers[0].origin, makers[0].source, residual)
    bandwidth, message = (min(here, between, key=lambda each: each.value)
                          for here in (inside.bandwidth, inside.message_bandwidth))  # fmt: skip
    return Link("pcie-sockets", inside.latency_s, bandwidth, inside.message_latency_s, message, shared=True), group


def _price(given: Any) -> float:
    if not isinstance(given, int | float) or not 0 < given < math.inf:
        raise ValueError(f"price_per_hour is {given!r}: $ per GPU and hour, above 0, or left out.")
    return float(given)


def _values(link: Link) -> tuple[Any, ...]:
    fields = (link.latency_s, link.bandwidth, link.message_latency_s, link.message_bandwidth)
    return (*fields, link.mesh_links, link.lanes)


def _link(table: dict[str, Any], kind: str, sources: dict[str, str]) -> Link:
    """As the file gives it whole, else as fitted for its generation, else the datasheet times what others reached."""
    links = table.get("links", {})
    own = links.get(kind, {})
    if "latency_s" in own:
        return _whole(kind, own, sources)
    file = hardware_dir() / "links.toml"
    fitted = _read(file, file.stat().st_mtime_ns)
    known = fitted.get(str(table["device"].get("links_like", "")), {}).get(kind)
    if known:
        return _whole(kind, known, fitted["sources"])
    usual = fitted["usual"].get("pcie" if kind == "pcie" else "network" if kind == "network" else "nvlink")
    if not own and kind != "network":
        raise ValueError(f"{table['device'].get('name')} has no link of the kind {kind}: give [links] {kind} = a rate.")
    sheet = float(own.get("value", fitted["usual"]["network"]["datasheet"]))
    shared = 1.0 if kind != "pcie" or table["device"].get("peer_access", True) else 0.5
    given = dict(usual)
    for what in ("bandwidth", "message_bandwidth"):
        given[what] = {**usual["share"], "value": usual["share"]["value"] * sheet * shared, "unit": "B/s"}
    return _whole(kind, given, fitted["sources"], int(links.get("mesh_links", 0)) if kind == "xgmi" else 0)


def _whole(kind: str, given: dict[str, Any], sources: dict[str, str], mesh_links: int = 0) -> Link:
    latency, bandwidth = (_parameter(given[what], sources) for what in ("latency_s", "bandwidth"))
    message_latency = _parameter(given["message_latency_s"], sources) if "message_latency_s" in given else latency
    message_bandwidth = _parameter(given["message_bandwidth"], sources) if "message_bandwidth" in given else bandwidth
    lanes = int(given.get("lanes", 1))
    return Link(kind, latency, bandwidth, message_latency, message_bandwidth, mesh_links, lanes)
