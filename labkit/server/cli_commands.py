"""Shell commands of the lab server: serve, switch, status, stop."""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from labkit.server.client import ServerClient

_Server = Annotated[str, typer.Option("--server", help="A server's URL; by default the one of this user.")]


def register(app: typer.Typer) -> None:
    for command in (serve, switch, status, stop):
        app.command()(command)


def serve(
    model: Annotated[str, typer.Option(help="A name under data/models, a folder, or a config.json.")] = "lab-30m",
    layout: Annotated[str, typer.Option(help="How to split it: tp1, tp2, dp2, dp2xtp2 …")] = "tp1",
    ranks: Annotated[int, typer.Option(help="Ranks in the pool; 0: what suits the machine.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of each rank; 0: the cores shared out.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default what is there.")] = "",
    host: Annotated[str, typer.Option(help="Where to listen; more than loopback needs LABKIT_TOKEN.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 0,
    allow_host: Annotated[list[str], typer.Option(help="Another name in the Host header; may be repeated.")] = [],  # noqa: B006
    memory_per_rank: Annotated[str, typer.Option(help="Weights plus KV, say 256MiB; 0: 1GiB beside weights.")] = "0",
    fabric: Annotated[str, typer.Option(help="shm, gloo or nccl.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "",
    router: Annotated[str, typer.Option(help="least-work, round-robin or prefix.")] = "least-work",
    admission: Annotated[str, typer.Option(help="labkit (reserves) or vllm (preempts).")] = "labkit",
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 512,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in a step.")] = 64,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    max_model_len: Annotated[int, typer.Option(help="Prompt plus answer; 0: the model's own limit.")] = 0,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the KV of shared prefixes.")] = True,
    record: Annotated[bool, typer.Option(help="Record collectives.")] = True,
    graphs: Annotated[bool | None, typer.Option(help="CUDA graphs for decode steps; by default on GPUs.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    step_timeout: Annotated[float, typer.Option(help="Seconds until a silent rank counts as hung.")] = 75.0,
    nodes: Annotated[int, typer.Option(help="Make so many nodes on this machine (Linux, root).")] = 0,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on each node; 0: what suits the machine.")] = 0,
    link: Annotated[str, typer.Option(help="Rate of each node's link: 200mbit, 1gbit; by default unshaped.")] = "",
    link_delay_ms: Annotated[float, typer.Option(help="Added to packets that leave a node (needs netem).")] = 0.0,
    join_ranks: Annotated[int, typer.Option(help="Wait for so many ranks of real nodes (docs/nodes.md).")] = 0,
    control_host: Annotated[str, typer.Option(help="Where joining ranks reach this server.")] = "0.0.0.0",
    control_port: Annotated[int, typer.Option(help="And at which port; 0: any free one.")] = 0,
    control_token_file: Annotated[str, typer.Option(help="Holds the secret that joining ranks must know.")] = "",
) -> None:
    """Serve a model on warm ranks. The first line is {"url": …, "token": …}; LABKIT_TOKEN sets the token."""
    given = dict(locals())
    from labkit.server.options import ServeOptions, make_plan

    given["allow_hosts"] = tuple(given.pop("allow_host"))
    try:
        plan = make_plan(ServeOptions(**given))
    except (ValueError, OSError) as error:
        raise _refusal(error) from error
    from labkit.server.serve import serve as run

    try:
        run(plan)
    except OSError as error:
        raise _refusal(error) from error


def switch(
    layout: Annotated[str, typer.Argument(help="tp1, tp2, dp2, dp2xtp2 …")],
    setting: Annotated[list[str], typer.Option("--set", help="NAME=VALUE of another setting; may be repeated.")] = [],  # noqa: B006
    server: _Server = "",
) -> None:
    """Switch the layout; prints {"ready_s": …, "first_token_s": …}, both from the command to the event."""
    from labkit.server.client import ServerError

    try:
        client = _client(server)
        client.state()
        typer.echo(json.dumps(_timed_switch(client, layout, _settings(setting))))
    except (ServerError, ValueError) as error:
        raise _refusal(error) from error


def _timed_switch(client: ServerClient, layout: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The first token is a real request's, of 128 prompt tokens, seen by this client."""
    prompt = [secrets.randbelow(256) for _ in range(128)]
    begin_s = time.perf_counter()
    report = client.switch(layout, probe=False, **settings)
    for _ in client.stream(prompt, max_tokens=1, temperature=0, ignore_eos=True):
        break
    first_token_s = time.perf_counter() - begin_s
    ready_s = round(report["ready_s"], 4)
    return {"layout": report["layout"], "ready_s": ready_s, "first_token_s": round(first_token_s, 4)}


def _settings(words: list[str]) -> dict[str, Any]:
    """NAME=VALUE, the value read as JSON where it is JSON (64, true), else as text."""
    settings = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word} has no value: write NAME=VALUE, such as router=prefix.")
        try:
            settings[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            settings[name.replace("-", "_")] = text
    return settings


def status(server: _Server = "", as_json: Annotated[bool, typer.Option("--json", help="All of it.")] = False) -> None:
    """What runs, as which layout, and who holds the ranks."""
    from labkit.server.client import ServerError

    try:
        client = _client(server)
        state = client.state()
    except ServerError as error:
        raise _refusal(error) from error
    typer.echo(json.dumps(state) if as_json else _summary(client.url, state))


def _summary(url: str, state: dict[str, Any]) -> str:
    holder = state["holder"]
    ranks = f"{state['num_ranks']} ranks of {state['threads_per_rank']} threads"
    held = f"{holder['client']}, for {holder['purpose']}, {holder['since_s']:.0f} s" if holder else "nobody"
    lines = [
        ("server", url),
        ("state", state["state"] + (f": {state['message']}" if state.get("message") else "")),
        ("model", state["model"]),
        ("layout", f"{state.get('layout_name', '-')} on {ranks}"),
        *_topology_lines(state.get("topology", {})),
        ("held by", held),
        ("waiting", str(len(state["queue"]))),
        ("in flight", str(state["requests_in_flight"])),
    ]
    return "\n".join(f"{name:<10} {value}" for name, value in lines)


def _topology_lines(topology: dict[str, Any]) -> list[tuple[str, str]]:
    if topology.get("kind", "one machine") == "one machine":
        return []
    made = f"{topology['num_nodes']} of {topology['ranks_per_node']} ranks, link {topology['link']}"
    return [("nodes", made if topology["link"] else topology["kind"])]


def stop(server: _Server = "") -> None:
    """End the server and its ranks."""
    from labkit.server.client import ServerError

    try:
        client = _client(server)
        client.shutdown()
        _await_end(client)
    except ServerError as error:
        raise _refusal(error) from error
    typer.echo(f"ended {client.url}")


def _await_end(client: ServerClient, timeout_s: float = 30.0) -> None:
    from labkit.server.client import ServerError

    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        try:
            client.health()
        except ServerError:
            return
        time.sleep(0.05)
    raise ServerError(f"The server at {client.url} is still there after {timeout_s:.0f} s.")


def _client(server: str) -> ServerClient:
    from labkit.server.client import ServerClient
    from labkit.server.discovery import connect

    if server:
        return ServerClient(server, os.environ.get("LABKIT_TOKEN", ""))
    return connect(start=False)


def _refusal(error: Exception) -> typer.Exit:
    typer.echo(f"labkit: {error}", err=True)
    return typer.Exit(2)
