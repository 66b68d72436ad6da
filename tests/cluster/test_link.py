"""Sockets between engine and ranks: frames whole and in pieces, strangers, and paths too long for a socket."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from labkit.cluster.link import RankLink, frame, listen
from labkit.engine import messages
from labkit.engine.channel import Channel, dial, hold_lifeline
from labkit.engine.messages import Failed, Hello, RankMessage, Shutdown

_TOKEN = "secret"


class _Owner:
    def __init__(self) -> None:
        self.links: list[RankLink] = []
        self.said: asyncio.Queue[tuple[int, RankMessage]] = asyncio.Queue()
        self.gone: asyncio.Queue[int] = asyncio.Queue()
        self.came: asyncio.Queue[Hello] = asyncio.Queue()

    def joined(self, link: RankLink, hello: Hello) -> None:
        self.links.append(link)
        self.came.put_nowait(hello)

    def received(self, rank: int, message: RankMessage) -> None:
        self.said.put_nowait((rank, message))

    def lost(self, link: RankLink) -> None:
        self.gone.put_nowait(link.rank)


def _hello(token: str = _TOKEN, rank: int = 3) -> bytes:
    return messages.encode(Hello(token, rank, 1, "host", False))


def _with_server(folder: Path, scene: Callable[[_Owner, str], Awaitable[Any]]) -> None:
    async def play() -> None:
        owner = _Owner()
        server, address = await listen([folder], _TOKEN, owner)
        try:
            await asyncio.wait_for(scene(owner, address), 10)
        finally:
            server.close()
            for link in owner.links:
                link.close()

    asyncio.run(play())


def test_messages_go_both_ways_and_the_end_is_noticed(tmp_path: Path) -> None:
    async def scene(owner: _Owner, address: str) -> None:
        channel = Channel(await asyncio.to_thread(dial, address))
        channel.send(_hello())
        assert (await owner.came.get()).rank == 3
        await asyncio.to_thread(channel.send, messages.encode(Failed(3, "x" * 300_000, "")))
        rank, message = await owner.said.get()
        assert rank == 3 and isinstance(message, Failed) and len(message.error) == 300_000
        owner.links[0].write(frame(Shutdown()))
        assert messages.decode_engine_message(await asyncio.to_thread(channel.receive)) == Shutdown()
        channel.close()
        assert await owner.gone.get() == 3

    _with_server(tmp_path, scene)


def test_frames_cut_anywhere_and_joined_are_the_same_messages(tmp_path: Path) -> None:
    async def scene(owner: _Owner, address: str) -> None:
        sock = await asyncio.to_thread(dial, address)
        payloads = [_hello(), *(messages.encode(Failed(3, str(i), "")) for i in range(5))]
        stream = b"".join(struct.pack("<I", len(p)) + p for p in payloads)
        for at in range(0, len(stream), 7):
            sock.sendall(stream[at : at + 7])
            await asyncio.sleep(0)
        got = [(await owner.said.get())[1] for _ in range(5)]
        assert [message.error for message in got if isinstance(message, Failed)] == list("01234")
        sock.close()

    _with_server(tmp_path, scene)


@pytest.mark.parametrize(
    "payload",
    [_hello(token="guess"), messages.encode(Failed(0, "", "")), b"GET / HTTP/1.1", b""],
    ids=["wrong secret", "no hello", "not msgpack", "empty"],
)
def test_a_stranger_is_closed_and_never_becomes_a_rank(tmp_path: Path, payload: bytes) -> None:
    async def scene(owner: _Owner, address: str) -> None:
        channel = Channel(await asyncio.to_thread(dial, address))
        channel.send(payload)
        assert await asyncio.to_thread(channel.receive) is None
        assert owner.came.empty() and owner.said.empty() and owner.gone.empty()

    _with_server(tmp_path, scene)


def test_last_words_are_heard_although_the_owner_writes_to_the_dead_before_it_reads(tmp_path: Path) -> None:
    """A busy owner: the rank has spoken and ended before the next frame to it is written, which the system refuses."""

    async def scene(owner: _Owner, address: str) -> None:
        channel = Channel(await asyncio.to_thread(dial, address))
        channel.send(_hello())
        await owner.came.get()
        channel.send(messages.encode(Failed(3, "RuntimeError: last words", "")))
        channel.close()
        owner.links[0].write(frame(Shutdown()))
        assert await owner.gone.get() == 3
        _, message = owner.said.get_nowait()
        assert isinstance(message, Failed) and message.error == "RuntimeError: last words"

    _with_server(tmp_path, scene)


def test_a_huge_first_frame_is_not_waited_for(tmp_path: Path) -> None:
    async def scene(owner: _Owner, address: str) -> None:
        sock = await asyncio.to_thread(dial, address)
        sock.sendall(struct.pack("<I", 1 << 30))
        assert await asyncio.to_thread(sock.recv, 1) == b""

    _with_server(tmp_path, scene)


def test_a_path_too_long_for_a_socket_becomes_a_loopback_port(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()

    async def scene(owner: _Owner, address: str) -> None:
        assert address.startswith("tcp:127.0.0.1:")
        channel = Channel(await asyncio.to_thread(dial, address))
        channel.send(_hello(rank=1))
        assert (await owner.came.get()).rank == 1
        channel.close()

    _with_server(folder, scene)


def test_the_lifeline_ends_when_the_other_end_does(tmp_path: Path) -> None:
    async def scene(owner: _Owner, address: str) -> None:
        sock = await asyncio.to_thread(dial, address)
        Channel(sock).send(_hello())
        await owner.came.get()
        ended = threading.Event()
        threading.Thread(target=hold_lifeline, args=(sock, ended.set), daemon=True).start()
        assert not ended.wait(0.05)
        owner.links[0].close()
        assert await asyncio.to_thread(ended.wait, 5)

    _with_server(tmp_path, scene)


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unix:/path or tcp:host:port"):
        dial("http://localhost")
