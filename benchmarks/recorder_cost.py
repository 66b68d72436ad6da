"""What recording every collective costs: TPOT with the recorder on against off, turn about, on one server.

Closed loop of one client (a short step is where the cost shows most). Each round measures on, off or off, on; the ratio
is taken within the round. Prints the rounds, and one JSON line last.

    python benchmarks/recorder_cost.py [--model lab-30m] [--layout tp2] [--rounds 10]
"""

from __future__ import annotations

import argparse
import json
import statistics

from serving import PAIR, own_lab

from labkit.lab import Lab
from labkit.layout import Layout

AIM_PERCENT = 2.0


def tpot_ms(lab: Lab, layout: str, record: bool, num_requests: int) -> float:
    run = lab.run(layout, PAIR, num_requests=num_requests, concurrency=1, settings={"record": record})
    return run.summary["tpot_ms"]["p50"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=8)
    args = parser.parse_args()
    ranks, pairs = Layout.parse(args.layout).world_size, []
    with own_lab(model=args.model, ranks=ranks, memory_per_rank="1GiB") as lab:
        tpot_ms(lab, args.layout, True, args.requests)  # not counted
        for index in range(args.rounds):
            order = (True, False) if index % 2 == 0 else (False, True)
            seen = {record: tpot_ms(lab, args.layout, record, args.requests) for record in order}
            pairs.append((seen[True], seen[False]))
            print(f"round {index + 1}: on {seen[True]:.3f} ms, off {seen[False]:.3f} ms")
    costs = sorted(100 * (on / off - 1) for on, off in pairs)
    cost = statistics.median(costs)
    print(f"on against off, TPOT of {args.layout}: {cost:+.2f} % (median of {len(costs)}; aim {AIM_PERCENT} %)")
    row = {"cost_percent": cost, "quartiles_percent": statistics.quantiles(costs), "aim_percent": AIM_PERCENT}
    print(json.dumps({"benchmark": "recorder_cost", "model": args.model, "layout": args.layout, **row}))


if __name__ == "__main__":
    main()
