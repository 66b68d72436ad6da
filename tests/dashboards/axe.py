"""axe-core on the page that is open: WCAG 2.2 A and AA, and its own best practices."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from playwright.sync_api import Page

_RUN = """async () => {
  const rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
  const { violations } = await axe.run(document, { runOnly: rules });
  return violations.map(({ id, nodes }) =>
    [id, nodes.length, nodes[0].html.slice(0, 160), nodes[0].failureSummary.slice(0, 200)]);
}"""


def audit(page: Page) -> list[list[object]]:
    """Violations: rule, how many, an example, and what to do. Skips the test where axe-core is not installed."""
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core is not installed (pip install axe-playwright-python)")
    page.add_script_tag(path=str(Path(spec.origin).parent / "axe.min.js"))
    return page.evaluate(_RUN)
