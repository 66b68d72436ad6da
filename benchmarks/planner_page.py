"""How soon the figures of the page Planner follow a slider, and how soon all layouts do.

Opens the page in a real browser over Voila as `labkit lab` starts it, moves the slider of the request rate one notch at
a time, and takes the time from the input event to the drawing of the new percentiles: once with the page at rest, and
once while all layouts are being looked at for the move before. The last line is JSON. Aim: 95 of 100 within 300 ms.

    python benchmarks/planner_page.py [--moves 40] [--model llama-3.1-70b] [--gpus 8]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
from typing import Any

from page import kernels
from playwright.sync_api import Page, sync_playwright

from labkit.site import free_port, start_voila

AIM_MS = 300.0
AT_REST_MS, WHILE_PLANNING_MS = 60_000, 600
MOVE = """(step) => new Promise((resolve) => {
  const range = document.querySelector("input[data-input=rate]");
  const root = document.querySelector(".lk");
  const before = Number(root.dataset.card);
  const begun = performance.now();
  const done = () => Number(root.dataset.card) > before;
  const look = () => done() ? resolve(performance.now() - begun) : requestAnimationFrame(look);
  range.value = Number(range.value) + step;
  range.dispatchEvent(new Event("input", { bubbles: true }));
  look();
})"""
PLANNED = """() => { const r = document.querySelector(".lk");
  return r.dataset.plan !== "" && !r.classList.contains("lk-plan-old"); }"""


def moves(page: Page, number: int, rest: bool) -> list[float]:
    """Milliseconds of each move. rest: wait until all layouts are known before the next."""
    found = []
    for index in range(number):
        found.append(page.evaluate(MOVE, 1 if index % 2 else -1))
        if rest:
            page.wait_for_function(PLANNED, timeout=AT_REST_MS)
        else:
            page.wait_for_timeout(WHILE_PLANNING_MS)  # the planning has begun by then, and is not over
    return found


def measure(model: str, gpus: str, number: int) -> dict[str, Any]:
    voila = start_voila(free_port(), token := secrets.token_urlsafe(16))
    url = voila.url.partition("?")[0] + f"voila/render/planner.ipynb?token={token}"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            page.goto(url, wait_until="commit")
            page.wait_for_selector(".lk[data-card]:not([data-card=''])", timeout=120_000)
            page.get_by_label("Model", exact=True).select_option(model)
            page.get_by_label("GPUs, all nodes").select_option(gpus)
            page.wait_for_function(PLANNED, timeout=AT_REST_MS)
            rest, busy = moves(page, number // 4, True), moves(page, number, False)
            kernel_mb = kernels(voila)[-1].memory_info().rss / 1e6
            browser.close()
            return {"at rest": summary(rest), "while planning": summary(busy), "kernel_mb": round(kernel_mb, 1)}
    finally:
        voila.process.terminate()
        voila.process.wait(20)


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    within = sum(value <= AIM_MS for value in times) / len(times)
    return {"n": len(times), "p50_ms": round(statistics.median(times), 1), "worst_ms": round(ordered[-1], 1),
            "within_300_ms": round(within, 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=40)
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--gpus", default="8")
    asked = parser.parse_args()
    found = measure(asked.model, asked.gpus, asked.moves)
    rows = {name: row for name, row in found.items() if isinstance(row, dict)}
    load = f"load of this machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{asked.model} on {asked.gpus} GPUs; {load}")
    print("moves           n   p50 ms  worst ms  within 300 ms")
    for name, row in rows.items():
        print(f"{name:14}{row['n']:3.0f}{row['p50_ms']:9.1f}{row['worst_ms']:10.1f}{row['within_300_ms']:15.0%}")
    met = all(row["within_300_ms"] >= 0.95 for row in rows.values())
    print(f"memory of the visitor's kernel: {found['kernel_mb']} MB")
    print(json.dumps({"benchmark": "planner_page", **found, "aim_met": met}))


if __name__ == "__main__":
    main()
