"""Every test session has a lab of its own: its own runtime folder, its own store, and no server left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_SESSION = Path(tempfile.mkdtemp(prefix="labkit-test-"))
for _name in ("RUNTIME", "HOME"):
    (_SESSION / _name.lower()).mkdir(mode=0o700)
    os.environ[f"LABKIT_{_name}"] = str(_SESSION / _name.lower())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests run wherever GPUs are; elsewhere they say what they lack."""
    wanted = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
    if not wanted:
        return
    import torch

    num_gpus = torch.cuda.device_count()
    for item in wanted:
        needs = 2 if item.get_closest_marker("multi_gpu") else 1
        if num_gpus < needs:
            item.add_marker(pytest.mark.skip(reason=f"needs {needs} CUDA device(s), this machine has {num_gpus}"))


def pytest_sessionfinish() -> None:
    if (_SESSION / "runtime" / "labkit" / "server.json").exists():
        subprocess.run([sys.executable, "-m", "labkit.cli", "stop"], capture_output=True, timeout=60)
    shutil.rmtree(_SESSION, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Public data beside the checkout (traces, profiles); tests that need it skip, with the reason, where it is not."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no public data beside the checkout ({folder.name}/ is not there)")
    return folder
