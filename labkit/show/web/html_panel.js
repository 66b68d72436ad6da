// A panel of words: a card with a title and whatever its spec builds. It looks and behaves to its page as a Panel does.

import { h } from "./dom.js";

export class HtmlPanel {
  /** @param spec {id, wide, wanted(frame), pick(frame), build(data, t, panel) → nodes, note(data, t)} */
  constructor(ctx, spec) {
    this.ctx = ctx;
    this.spec = spec;
    this.id = spec.id;
    this.title = h("h2", { id: `lk-title-${ctx.pageId}-${spec.id}` });
    this.note = h("span", { class: "lk-note" });
    this.stage = h("div", { class: "lk-stage" });
    this.element = h(
      "section",
      { class: `lk-panel lk-panel-${spec.id}${spec.wide ? " lk-wide" : ""}`, "aria-labelledby": this.title.id, "data-panel": spec.id },
      h("header", {}, this.title, this.note), this.stage);
    this.shown = "";
    this.data = null;
  }

  show(frame) {
    this.element.hidden = this.spec.wanted ? !this.spec.wanted(frame) : false;
    if (this.element.hidden) return;
    this.data = this.spec.pick(frame, this);
    this.draw();
  }

  resize() {}

  /** What had the keyboard keeps it, when it is there again by its id. */
  draw() {
    if (!this.data) return;
    const key = JSON.stringify([this.data, this.ctx.language(), this.extraKey ?? ""]);
    if (key === this.shown) return;
    this.shown = key;
    const { t } = this.ctx;
    const had = this.stage.contains(document.activeElement) ? document.activeElement.id : "";
    this.title.textContent = t(`${this.id}.title`);
    this.note.textContent = this.spec.note?.(this.data, t) ?? "";
    this.stage.replaceChildren(...this.spec.build(this.data, t, this));
    if (had) document.getElementById(had)?.focus();
  }
}
