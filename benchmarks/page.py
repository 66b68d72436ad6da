"""What a visitor of the page Layouts waits for, and what a visitor costs.

Opens the page a few times in a real browser over Voila as `labkit lab` starts it, and prints, for each visit, the
seconds until the first figures are drawn, the memory of the visitor's kernel, the frames a second that it draws, and
how soon the kernel has gone after the page was closed. No lab server is needed: the page itself is measured; with one
running, its figures are drawn too. The last line is JSON. Aims: usable after 4 s, 80 MB a visitor.

    python benchmarks/page.py [--visits 5]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shutil
import statistics
import time
from typing import Any

import psutil
from playwright.sync_api import Browser, sync_playwright

from labkit.site import Part, free_port, start_voila

USABLE_AIM_S, KERNEL_AIM_MB = 4.0, 80.0
WATCH_S = 3.0


def kernels(voila: Part) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(voila.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ipykernel_launcher" in " ".join(child.cmdline()):
                found.append(child)
    return found


def visit(browser: Browser, voila: Part, url: str) -> dict[str, float]:
    """One visit, with an empty browser cache."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    begin = time.monotonic()
    page.goto(url, wait_until="commit")
    page.wait_for_selector(".lk[data-seq]", timeout=120_000)
    usable_s = time.monotonic() - begin
    drawn = int(page.get_attribute(".lk", "data-seq") or 0)
    kernel = kernels(voila)[-1]
    kernel.cpu_percent()
    time.sleep(WATCH_S)
    result = {
        "usable_s": usable_s,
        "kernel_mb": kernel.memory_info().rss / 1e6,
        "kernel_cores": kernel.cpu_percent() / 100,
        "frames_per_s": (int(page.get_attribute(".lk", "data-seq") or 0) - drawn) / WATCH_S,
    }
    page.close(run_before_unload=True)
    left = time.monotonic()
    while kernel.is_running() and time.monotonic() - left < 30:
        time.sleep(0.05)
    context.close()
    return {**result, "gone_s": time.monotonic() - left}


def measure(num_visits: int) -> list[dict[str, float]]:
    token = secrets.token_urlsafe(16)
    voila = start_voila(free_port(), token)
    url = voila.url.partition("?")[0] + f"voila/render/layouts.ipynb?token={token}"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            visits = [visit(browser, voila, url) for _ in range(num_visits)]
            browser.close()
            return visits
    finally:
        voila.process.terminate()
        voila.process.wait(20)


def summarize(visits: list[dict[str, float]]) -> dict[str, Any]:
    medians = {name: round(statistics.median(v[name] for v in visits), 2) for name in visits[0]}
    worst = {f"worst_{name}": round(max(v[name] for v in visits), 2) for name in ("usable_s", "kernel_mb")}
    aims = {"usable": medians["usable_s"] <= USABLE_AIM_S, "kernel": worst["worst_kernel_mb"] <= KERNEL_AIM_MB}
    return {"benchmark": "page", "visits": len(visits), **medians, **worst, "aims_met": aims}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visits", type=int, default=5)
    visits = measure(parser.parse_args().visits)
    print("visit  usable s  kernel MB  frames/s  kernel cores  gone after s")
    for i, row in enumerate(visits, 1):
        print(
            f"{i:5}  {row['usable_s']:8.2f}  {row['kernel_mb']:9.1f}  {row['frames_per_s']:8.1f}  "
            f"{row['kernel_cores']:12.3f}  {row['gone_s']:12.2f}"
        )
    print(json.dumps(summarize(visits)))


if __name__ == "__main__":
    main()
