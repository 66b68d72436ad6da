"""A switch of layout inside living ranks against a cold start, each to the first token of a 128-token prompt.

Cold: from `labkit serve` to the token. Warm: from the request to switch to the token, seen by a client, over HTTP.
Prints a table and one JSON line last.

    python benchmarks/switch.py [--model lab-30m] [--ranks 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time

from serving import own_lab

from labkit.cluster.topology import usable_cores
from labkit.layout import legal_layouts
from labkit.model.spec import load_spec
from labkit.server.client import ServerClient

PROMPT_TOKENS = 128
AIM_S = 0.5


def first_token(client: ServerClient, vocab_size: int) -> None:
    prompt = [secrets.randbelow(vocab_size) for _ in range(PROMPT_TOKENS)]
    for _ in client.stream(prompt, max_tokens=1, temperature=0, ignore_eos=True):
        return


def timed_switch(client: ServerClient, layout: str, vocab_size: int) -> tuple[float, float]:
    """(seconds until ready, seconds until the first token), both from the request to switch."""
    begin = time.perf_counter()
    client.switch(layout, probe=False)
    ready_s = time.perf_counter() - begin
    first_token(client, vocab_size)
    return ready_s, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    spec = load_spec(args.model)
    layouts = [layout.slug for layout in legal_layouts(spec, args.ranks, engine=True)]
    times: dict[str, list[tuple[float, float]]] = {layout: [] for layout in layouts}
    begin = time.perf_counter()
    with own_lab(model=args.model, ranks=args.ranks, memory_per_rank="1GiB") as lab:
        first_token(lab.client, spec.vocab_size)
        cold_s = time.perf_counter() - begin
        for _ in range(args.rounds):
            for layout in layouts:
                times[layout].append(timed_switch(lab.client, layout, spec.vocab_size))
    rows = [
        {
            "to": layout,
            "ready_s": statistics.median(ready for ready, _ in seen),
            "first_token_s": statistics.median(first for _, first in seen),
            "first_token_range_s": [min(first for _, first in seen), max(first for _, first in seen)],
        }
        for layout, seen in times.items()
    ]
    print(f"{args.model}, {args.ranks} ranks, {usable_cores()} cores: to the first token of {PROMPT_TOKENS} tokens")
    print(f"cold start {cold_s:6.2f} s")
    for row in rows:
        low, high = row["first_token_range_s"]
        print(
            f"switch to {row['to']:<8} {row['first_token_s']:5.2f} s ({low:.2f}-{high:.2f}), ready after "
            f"{row['ready_s']:.2f} s; cold / warm = {cold_s / row['first_token_s']:.0f}; aim {AIM_S} s"
        )
    result = {"benchmark": "switch", "model": args.model, "cold_start_s": cold_s, "aim_s": AIM_S, "rows": rows}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
