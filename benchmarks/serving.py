"""What benchmarks of our own server share: a lab of their own, with its own folders, ended with them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import labkit
from labkit.lab import Lab
from labkit.load.lengths import Lengths
from labkit.load.workload import Part, Workload

PAIR = Workload(
    name="pair",
    title="128 tokens in, 64 out",
    parts=(Part(Lengths("constant", tokens=128), Lengths("constant", tokens=64)),),
)


@contextlib.contextmanager
def own_lab(**serve: Any) -> Iterator[Lab]:
    """A lab server with these options that nobody else finds; ready when the block begins."""
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as name:
        for variable in ("LABKIT_RUNTIME", "LABKIT_HOME"):
            folder = Path(name) / variable.lower()
            folder.mkdir(mode=0o700)
            os.environ[variable] = str(folder)
        with labkit.connect(**serve) as lab:
            try:
                lab.wait_ready()
                yield lab
            finally:
                lab.client.shutdown()
