"""How a visitor is called in front of others."""

from __future__ import annotations

import os


def user_name() -> str:
    """JupyterHub's user, else the system's, else the process."""
    return os.environ.get("JUPYTERHUB_USER") or os.environ.get("USER") or f"process {os.getpid()}"
