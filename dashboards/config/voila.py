"""Settings of the Voila server that shows the dashboards; found by JUPYTER_CONFIG_PATH (see `labkit/site.py`).

Voila starts a kernel for whoever asks, keeps it when the page has gone, and buffers without bound for browsers that
never come back. So: a cap on visitors with a page that says so, a cookie without which the page's farewell is refused,
culling of kernels whose browser crashed (the page's kernel falls silent by itself), and no buffering.
"""

import os

from tornado import web

MAX_VISITORS = int(os.environ.get("LABKIT_MAX_VISITORS", "12"))
"""Each visitor is a kernel of some 80 MB."""


def admit(request_handler, notebook, cwd):
    """Called before a kernel is started: refuse beyond the cap, and set the cookie that the farewell needs.

    The page reports that it closes by a POST which Jupyter accepts only with the `_xsrf` cookie, and nothing else on
    this page sets it; reading `xsrf_token` does.
    """
    if len(request_handler.kernel_manager.list_kernel_ids()) >= MAX_VISITORS:
        request_handler.set_header("Retry-After", "30")
        raise web.HTTPError(503, f"full: {MAX_VISITORS}", reason="The lab is full")
    request_handler.xsrf_token  # noqa: B018


# Kernels inherit these. They do no linear algebra, and one heap a thread costs a visitor 10 MB for nothing.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

c = get_config()  # noqa: F821
c.Voila.token = os.environ.get("LABKIT_VOILA_TOKEN", "")
c.VoilaConfiguration.prelaunch_hook = admit
c.VoilaConfiguration.template = "labkit"
c.VoilaConfiguration.allow_template_override = "NO"
c.VoilaConfiguration.show_tracebacks = False
c.VoilaConfiguration.extension_allowlist = [
    "@jupyter-widgets/jupyterlab-manager",
    "@voila-dashboards/widgets-manager8",
    "anywidget",
]
c.MappingKernelManager.cull_interval = int(os.environ.get("LABKIT_CULL_EVERY_S", "10"))
c.MappingKernelManager.cull_idle_timeout = int(os.environ.get("LABKIT_CULL_AFTER_S", "60"))
c.MappingKernelManager.cull_connected = True
c.MappingKernelManager.buffer_offline_messages = False
