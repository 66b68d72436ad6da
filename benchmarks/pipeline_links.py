"""TP2 against PP2 in TTFT, by prompt length, inside a node and across a slow link. The link needs root and iproute2.

    python benchmarks/pipeline_links.py [--tokens 512,1024,2048] [--requests 5] [--link 100mbit] [--json]

Two ranks, one prompt at a time, over shared memory, over TCP on loopback without a limit (gloo), and across two nodes
joined by a link of that rate. TP2 sums 2·layers + 1 times the prompt's hidden states, PP2 sends them once; so a link of
r bits/s gives each a least time, which is printed beside what was measured. `transfer` is the recorder's: the share of
the ranks' time in prefill steps. With --json the last line is JSON. Under five minutes with the defaults.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from labkit.cluster.nodes import Link, why_not
from labkit.lab import Lab, Run
from labkit.teach import lesson03
from labkit.teach.beside import own_lab
from labkit.teach.readings import message_us, messages
from labkit.teach.reference import ReferenceCase

LAYOUTS = ("tp2", "pp2")
COLUMNS = ("path", "layout", "prompt", "n", "ttft_p50_ms", "ttft_least_ms", "link_at_least_ms", "transfer")
COLUMNS += ("ttft_transfer_ms", "decode_message_bytes", "decode_message_us", "tpot_p50_ms")


def measure(lab: Lab, path: str, fabric: str, link: Link, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each layout and length on this server."""
    case, rows = ReferenceCase(), []
    for layout in LAYOUTS:
        for tokens in options.tokens:
            run = lab.run(
                layout, lesson03.prompts_of(tokens), concurrency=1, num_requests=options.requests,
                settings=case.settings(fabric=fabric),
            )  # fmt: skip
            rate = link.rate_bits_per_s
            least = lesson03.link_ms(case, layout, tokens, rate) if rate else None
            rows.append({"path": path, "layout": layout, "prompt": tokens, **figures(run, least)})
            print("  ".join(f"{name} {rows[-1][name]}" for name in COLUMNS), flush=True)
    return rows


def figures(run: Run, least_ms: float | None) -> dict[str, Any]:
    done = [record for record in run.records if record.status == "completed"]
    return {
        "n": len(done),
        "ttft_p50_ms": round(run.summary["ttft_ms"]["p50"], 1),
        "ttft_least_ms": round(min(record.first_ns - record.scheduled_ns for record in done) / 1e6, 1),
        "link_at_least_ms": None if least_ms is None else round(least_ms, 1),
        "transfer": round(lesson03.transfer_share(run), 3),
        "ttft_transfer_ms": round(run.summary["ttft_parts_ms"]["transfer"], 1),
        "decode_message_bytes": round(messages(run, "decode")[0].bytes_each),
        "decode_message_us": round(message_us(run)),
        "tpot_p50_ms": round(run.summary["tpot_ms"]["p50"], 1),
    }


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TTFT of TP2 ÷ TTFT of PP2, for each path and length: above 1, the pipeline answers sooner."""
    found = {(row["path"], row["prompt"], row["layout"]): row["ttft_p50_ms"] for row in rows}
    return [
        {"path": path, "prompt": tokens, "tp2_over_pp2": round(ms / found[path, tokens, "pp2"], 2)}
        for (path, tokens, layout), ms in found.items()
        if layout == "tp2"
    ]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default=[512, 1024, 2048])
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    link, no_link = Link.parse(options.link), Link()
    with own_lab(model="lab-30m", ranks=2) as lab:
        rows = measure(lab, "shm", "shm", no_link, options) + measure(lab, "gloo", "gloo", no_link, options)
    if reason := why_not():
        print(f"No link: {reason}")
    else:
        with own_lab(model="lab-30m", nodes=2, ranks_per_node=1, link=options.link) as lab:
            rows += measure(lab, f"link {link}", "shm", link, options)
    ratios = compare(rows)
    for row in ratios:
        print(f"{row['path']:14} {row['prompt']:5} tokens: TTFT of TP2 ÷ PP2 = {row['tp2_over_pp2']}")
    if options.json:
        print(json.dumps({"pipeline_links": rows, "ratios": ratios}))


if __name__ == "__main__":
    main()
