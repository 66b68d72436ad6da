// A panel: a card with a legend, one SVG drawn at its real width in px, and the same figures as a table.
//
// Drawing 1:1 (no viewBox) keeps 12 px text 12 px on a phone.

import { Card } from "./card.js";
import { h, s } from "./dom.js";

export class Panel extends Card {
  /** @param spec  of a Card, and {legend(data, t), empty(data, t), paint(panel, svg, data, width) → height, below(data, t, panel), table(data, t), describe(data, t)} */
  constructor(ctx, spec) {
    super(ctx, spec);
    this.legend = h("div", { class: "lk-legend" });
    this.svg = s("svg", { role: "img" });
    this.below = h("div", { class: "lk-below" });
    this.summary = h("summary");
    this.tableBox = h("div", { class: "lk-table", tabindex: 0, role: "group" });
    this.details = h("details", { class: "lk-details", ontoggle: () => this.refill() }, this.summary, this.tableBox);
    this.stage.append(this.svg);
    this.stage.before(this.legend);
    this.stage.after(this.below, this.details);
  }

  resize(width) {
    if (width === this.width) return;
    this.width = width;
    this.draw();
  }

  get hasRoom() {
    return this.width >= 40;
  }

  fill(t) {
    this.summary.textContent = t("table.show");
    this.tableBox.setAttribute("aria-label", t("table.of", { title: t(`${this.id}.title`) }));
    this.legend.replaceChildren(...(this.spec.legend?.(this.data, t) ?? []));
    this.below.replaceChildren(...(this.spec.below?.(this.data, t, this) ?? []));
    this.paint();
    this.refill();
  }

  paint() {
    const { t } = this.ctx;
    this.svg.replaceChildren();
    const empty = this.spec.empty?.(this.data, t);
    this.svg.style.display = empty ? "none" : "";
    this.stage.querySelector(".lk-empty")?.remove();
    if (empty) this.stage.prepend(h("p", { class: "lk-empty" }, empty));
    const height = empty ? 0 : this.spec.paint(this, this.svg, this.data, this.width);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", Math.ceil(height));
    this.svg.setAttribute("aria-label", this.spec.describe(this.data, t));
  }

  /** The table is filled only while it is open. */
  refill() {
    if (!this.details.open || !this.data) return;
    this.tableBox.replaceChildren(makeTable(this.spec.table(this.data, this.ctx.t)));
  }
}

/** {head: [text…], rows: [[text…]…]} as a table whose first column heads its rows. */
export function makeTable({ head, rows }) {
  const headRow = h("tr", {}, head.map((text) => (text === "" ? h("td") : h("th", { scope: "col" }, text))));
  const body = rows.map(([first, ...rest]) =>
    h("tr", {}, h("th", { scope: "row" }, first), rest.map((text) => h("td", {}, text))),
  );
  return h("table", {}, h("thead", {}, headRow), h("tbody", {}, body));
}

/** One entry of a legend: a swatch (a class of the style sheet) and its word. */
export function key(kind, text, extra = "") {
  return h("span", { class: "lk-key" }, h("i", { class: `lk-swatch ${kind}`, "aria-hidden": "true" }), text, extra);
}

/** What every panel says of the pinned layout or stored run, and its own figures of it; null when nothing is pinned. */
export function pinOf(pin, figures = {}) {
  if (!pin) return null;
  return { name: pin.name, at: pin.at, stored: Boolean(pin.stored), recorder: pin.recorder ?? "", ...figures };
}

/** The pinned layout's entry: hollow diamond, dashed; a line style that no current figure has. `lacks`: it was not recorded. */
export function pinKey(pin, t) {
  if (!pin) return null;
  const text = t(pin.lacks && pin.stored ? "pin.lacks" : pin.stored ? "pin.stored" : "pin.key", pin);
  return h("span", { class: "lk-key lk-pin-key" }, h("i", { class: "lk-diamond", "aria-hidden": "true" }, "◇"), text);
}

export function diamond(x, y, few = false, size = 6) {
  const d = `M${x} ${y - size}l${size} ${size}-${size} ${size}-${size}-${size}z`;
  return s("path", { d, class: few ? "lk-diamond-mark lk-few" : "lk-diamond-mark" });
}
