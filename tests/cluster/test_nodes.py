"""Nodes on one machine: what may be asked for, what is made, and that nothing of it stays, however its owner ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from labkit.cluster import nodes as nodes_module
from labkit.cluster.namespaces import Wiring, existing, has_netem, inside
from labkit.cluster.nodes import Link, NodeKeeper, Nodes, NodesUnavailable, why_not
from tests.cluster.made_nodes import needs_nodes, of_owner, wait_gone

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "bits"), [("200mbit", 200_000_000), ("1gbit", 10**9), ("1.5Gbit", 1_500_000_000), ("500 kbit", 500_000)]
)
def test_a_rate_is_read_in_bits(text: str, bits: int) -> None:
    assert Link.parse(text).rate_bits_per_s == bits


def test_a_link_is_shown_as_it_is_asked_for() -> None:
    assert [str(Link.parse(text)) for text in ("200mbit", "1.5gbit", "")] == ["200mbit", "1.5gbit", "unshaped"]
    assert str(Link.parse("100mbit", delay_ms=0.5)) == "100mbit, 0.5 ms"


@pytest.mark.parametrize("text", ["200", "fast", "200mbps", "-3mbit", "10kbit", "900gbit"])
def test_a_rate_that_cannot_be_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=f"--link is '{text}'.*(200mbit|100kbit)"):
        Link.parse(text)


@pytest.mark.parametrize("delay_ms", [-1.0, 1e6, float("nan")])
def test_a_delay_that_cannot_be_is_refused(delay_ms: float) -> None:
    with pytest.raises(ValueError, match="--link-delay-ms"):
        Link.parse("1gbit", delay_ms)


@pytest.mark.parametrize(("num_nodes", "ranks"), [(1, 2), (17, 1), (2, 0)])
def test_nodes_that_cannot_be_are_refused(num_nodes: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="--nodes takes 2 to 16"):
        Nodes(num_nodes, ranks)


@pytest.mark.parametrize(
    ("change", "lack"),
    [
        (("sys.platform", "darwin"), "this is darwin"),
        (("os.geteuid", lambda: 1000), "needs root: start it with sudo"),
        (("shutil.which", lambda name: None), "ip and tc cannot be found"),
    ],
)
def test_without_root_or_tools_one_sentence_says_so_and_what_else_can_be_done(
    change: tuple[str, object], lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("sys.platform", "linux"), ("os.geteuid", lambda: 0), ("shutil.which", lambda n: n), change):
        monkeypatch.setattr(f"{nodes_module.__name__}.{name}", value)
    reason = why_not()
    assert lack in reason and "--join-ranks" in reason and "--fabric gloo" in reason
    with pytest.raises(NodesUnavailable, match="--fabric gloo"):
        asyncio.run(NodeKeeper(Nodes(2, 1)).start())


def test_delay_goes_below_the_rate_and_only_on_the_way_out_of_a_node() -> None:
    commands = Wiring("x", 2, 10**8, 2.0).commands()
    delays = [command for command in commands if "netem" in command]
    assert [command.split()[2] for command in delays] == ["x-n0", "x-n1"]
    assert all("root handle 1: netem delay 2ms" in command for command in delays)
    assert sum("parent 1: handle 10: tbf rate 100000000bit" in command for command in commands) == 2
    assert not any("tc " in command for command in Wiring("x", 2, 0, 0.0).commands())


def test_addresses_sort_as_text_in_the_order_of_the_nodes() -> None:
    addresses = [Wiring.address(index) for index in range(16)]
    assert sorted(addresses) == addresses


def _interfaces() -> set[str]:
    return set(psutil.net_if_addrs())


@needs_nodes
def test_nodes_reach_each_other_are_not_seen_outside_and_go() -> None:
    before = _interfaces()

    async def play() -> None:
        keeper = NodeKeeper(Nodes(3, 1, Link.parse("1gbit")))
        await keeper.start()
        try:
            assert len(of_owner(os.getpid())) == 4, "three nodes and the switch"
            assert _interfaces() == before
            assert await asyncio.to_thread(_talk, keeper.wiring, 0, 2) == b"hello"
        finally:
            await keeper.end()
        assert of_owner(os.getpid()) == []

    asyncio.run(play())
    assert _interfaces() == before


_LISTEN = """
import socket
server = socket.create_server(("", 7777))
print("listening", flush=True)
print(server.accept()[0].recv(5).decode(), end="", flush=True)
"""
_SPEAK = "import socket, sys; socket.create_connection((sys.argv[1], 7777), 5).sendall(b'hello')"


def _talk(wiring: Wiring, src: int, dst: int) -> bytes:
    """What node dst hears from node src."""
    listen = [*inside(wiring.node(dst)), sys.executable, "-c", _LISTEN]
    with subprocess.Popen(listen, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        speak = [*inside(wiring.node(src)), sys.executable, "-c", _SPEAK, wiring.address(dst)]
        subprocess.run(speak, check=True, timeout=10)
        return server.stdout.read()


_OWNER = """
import asyncio, sys
from labkit.cluster.nodes import Link, NodeKeeper, Nodes

async def play():
    keeper = NodeKeeper(Nodes(2, 1, Link.parse("100mbit")))
    await keeper.start()
    print(keeper._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(play())
"""


def _start_owner() -> tuple[subprocess.Popen[str], int]:
    """A process that has made nodes, and its keeper's id."""
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    assert len(of_owner(owner.pid)) == 3
    return owner, keeper


@needs_nodes
def test_a_killed_owner_leaves_no_namespace() -> None:
    owner, _ = _start_owner()
    owner.kill()
    owner.wait()
    wait_gone(owner.pid)


@needs_nodes
def test_what_a_killed_owner_and_a_killed_keeper_leave_is_swept_at_the_next_start() -> None:
    other, _ = _start_owner()
    owner, keeper = _start_owner()
    os.kill(keeper, signal.SIGKILL)
    owner.kill()
    owner.wait()
    psutil.wait_procs([psutil.Process(keeper)] if psutil.pid_exists(keeper) else [], timeout=5)
    assert len(of_owner(owner.pid)) == 3, "nobody was left to remove them"
    _make_and_end()
    assert of_owner(owner.pid) == []
    assert len(of_owner(other.pid)) == 3, "those of a living owner stay"
    other.kill()
    other.wait()
    wait_gone(other.pid)


def _make_and_end(link: Link | None = None) -> None:
    async def play() -> None:
        keeper = NodeKeeper(Nodes(2, 1, link or Link()))
        try:
            await keeper.start()
        finally:
            await keeper.end()

    asyncio.run(play())


@needs_nodes
def test_a_delay_is_had_or_the_kernel_is_said_to_lack_it() -> None:
    slow = Link.parse("100mbit", delay_ms=1.0)
    if has_netem():
        _make_and_end(slow)
    else:
        with pytest.raises(NodesUnavailable, match="netem.*leave --link-delay-ms away"):
            _make_and_end(slow)
    assert not [name for name in existing() if name.startswith(f"labkit-{os.getpid()}-")]
