"""What aiconfigurator predicts of single configurations: run by the Python that has it (see beside_peers.py).

`PYTHON peer_aiconfigurator.py` reads {"rows": [keyword arguments of its cli_estimate …]} from stdin and prints as the
last line of stdout: ms, the version of its data, and the seconds that each took. All else is left as it sets it.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import time


def main() -> None:
    from aiconfigurator.cli.api import cli_estimate

    logging.disable(logging.WARNING)
    found = []
    for row in json.load(sys.stdin)["rows"]:
        began = time.process_time()
        try:
            answer = cli_estimate(**row)
            figures = {"ttft_ms": float(answer.ttft), "tpot_ms": float(answer.tpot), "data": answer.backend_version}
        except Exception as error:  # whatever a peer raises is its answer
            figures = {"refused": f"{type(error).__name__}: {error}"[:200]}
        found.append({**figures, "seconds": time.process_time() - began})
    print("\n" + json.dumps({"version": importlib.metadata.version("aiconfigurator"), "rows": found}))


if __name__ == "__main__":
    main()
