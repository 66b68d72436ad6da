"""The page's module on a bare HTML page with a stand-in for the widget's model: for tests of the drawing alone.

A kernel and Voila take seconds; width, theme and language make twelve pages. What the whole chain does is tested on
the whole chain, in test_layouts_voila.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
from playwright.sync_api import Page

from labkit.show.bundle import bundle
from labkit.show.i18n import LANGUAGES, catalogues

SHOW = Path(__file__).parents[2] / "labkit" / "show"
LIGHT = {"--jp-layout-color0": "#ffffff", "--jp-ui-font-color0": "rgba(0,0,0,.95)"}
DARK = {"--jp-layout-color0": "#111111", "--jp-ui-font-color0": "#ffffff"}
WIDTHS = (pytest.param(390, marks=pytest.mark.slow), 800, 1440)
"""Of the window, in px."""

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>stage</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root{{{variables}}} body{{margin:0;background:var(--jp-layout-color0)}} {css}</style></head>
<body data-jp-theme-light="{light}"><div id="here"></div>
<script type="module">
{module_as_const}
const handlers = {{}};
window.sent = [];
window.traits = {{text: {text}, languages: {languages}, ...{traits}}};
const model = {{
  get: (name) => window.traits[name],
  on: (event, handler) => (handlers[event] ??= []).push(handler), off: (event) => {{ delete handlers[event]; }},
  send: (m) => window.sent.push(m),
}};
window.receive = (m) => (handlers["msg:custom"] ?? []).forEach((handler) => handler(m));
window.choose_from = (table) => {{
  window.traits.choices = table;
  (handlers["change:choices"] ?? []).forEach((handler) => handler());
}};
window.stop = page.render({{model, el: document.getElementById("here")}});
window.staged = true;
</script></body></html>"""


def html(theme: str, entry: str, traits: dict[str, Any]) -> str:
    """entry: the page's own module under web/; traits: of its model, beside text and languages."""
    module = bundle(SHOW / "web" / entry).replace("export default", "const page =")
    variables = LIGHT if theme == "light" else DARK
    own_style = SHOW / entry.replace(".js", ".css")
    styles = dict.fromkeys([SHOW / "live.css", own_style])
    return _PAGE.format(
        variables=";".join(f"{name}:{value}" for name, value in variables.items()),
        css="".join(path.read_text(encoding="utf-8") for path in styles),
        light=str(theme == "light").lower(),
        module_as_const=module,
        traits=json.dumps(traits, ensure_ascii=False),
        text=json.dumps(catalogues(), ensure_ascii=False),
        languages=json.dumps(LANGUAGES, ensure_ascii=False),
    )


def open_stage(page: Page, theme: str = "light", choices: dict[str, Any] | None = None) -> None:
    """The page Layouts."""
    table = synthetic.choices() if choices is None else choices
    page.set_content(html(theme, "live.js", {"choices": table, "stored": synthetic.stored()}))
    page.wait_for_function("window.staged")


def open_fabric(page: Page, theme: str, measured: dict[str, Any]) -> None:
    page.set_content(html(theme, "fabric.js", {"measured": measured}))
    page.wait_for_function("window.staged")


def show(page: Page, message: dict[str, Any]) -> None:
    """Hand over a frame and wait until it was drawn (acknowledged)."""
    page.evaluate("m => window.receive(m)", message)
    page.wait_for_function("seq => window.sent.some(m => m.type === 'ack' && m.seq === seq)", arg=message["seq"])


def open_planner(page: Page, theme: str, plan: dict[str, Any], card: dict[str, Any], options: dict[str, Any]) -> None:
    traits = {"plan": plan, "card": card, "options": options}
    page.set_content(html(theme, "planner.js", traits))
    page.wait_for_function("window.staged")
