"""A run whose client was killed is told from one that runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from labkit.lab.client_process import KILLED, status_of, this_client


def row(status: str = "running", **client: Any) -> dict[str, Any]:
    mine = this_client()["client"]
    return {"status": status, "environment": {"client": mine | client}}


def test_a_run_of_a_living_client_runs() -> None:
    assert status_of(row()) == "running"


def test_a_run_whose_client_has_gone_was_killed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert status_of(row(pid=gone.pid)) == KILLED


def test_another_process_with_the_same_number_is_not_the_client() -> None:
    assert status_of(row(born=this_client()["client"]["born"] - 60)) == KILLED


def test_what_is_over_elsewhere_or_older_than_this_note_stays_as_it_is_stored() -> None:
    assert status_of(row("finished", born=0.0)) == "finished"
    assert status_of(row(host="another", born=0.0)) == "running"
    assert status_of({"status": "running", "environment": None}) == "running"
