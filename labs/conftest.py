"""`pytest --nbval-lax labs` runs the lessons as the tests do: quick, with a lab server and a store of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SESSION = Path(tempfile.mkdtemp(prefix="labkit-labs-"))
for _name in ("RUNTIME", "HOME"):
    (_SESSION / _name.lower()).mkdir(mode=0o700)
    os.environ[f"LABKIT_{_name}"] = str(_SESSION / _name.lower())
os.environ["LABKIT_QUICK"] = "1"


def pytest_sessionfinish() -> None:
    if (_SESSION / "runtime" / "labkit" / "server.json").exists():
        subprocess.run([sys.executable, "-m", "labkit.cli", "stop"], capture_output=True, timeout=60)
    shutil.rmtree(_SESSION, ignore_errors=True)
