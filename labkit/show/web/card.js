// A card of a page: a title, a note beside it, and a stage for what it shows. It is drawn again only when what it shows,
// its width or the language has changed.

import { h } from "./dom.js";

export class Card {
  /**
   * @param ctx   {t, language, pageId}: shared by all cards of a page
   * @param spec  {id, wide, wanted(frame, pin), pick(frame, pin, card) → data, note(data, t)}
   */
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
      h("header", {}, this.title, this.note),
      this.stage,
    );
    this.width = 0;
    this.shown = "";
    this.data = null;
  }

  /** `wanted` says whether the layout has what the card shows; without it the card is always there. */
  show(frame, pin) {
    this.element.hidden = this.spec.wanted ? !this.spec.wanted(frame, pin) : false;
    if (this.element.hidden) return;
    this.data = this.spec.pick(frame, pin, this);
    this.draw();
  }

  resize() {}

  get hasRoom() {
    return true;
  }

  /** What had the keyboard keeps it, when it is there again by its id. */
  draw() {
    if (!this.data || !this.hasRoom) return;
    const key = JSON.stringify([this.data, this.width, this.ctx.language(), this.extraKey ?? ""]);
    if (key === this.shown) return;
    this.shown = key;
    const { t } = this.ctx;
    const had = this.element.contains(document.activeElement) ? document.activeElement.id : "";
    this.title.textContent = t(`${this.id}.title`);
    this.note.textContent = this.spec.note?.(this.data, t) ?? "";
    this.fill(t);
    if (had) document.getElementById(had)?.focus();
  }
}

/** A card of words and controls: whatever `spec.build(data, t, card)` returns, anew each time. */
export class WordCard extends Card {
  fill(t) {
    this.stage.replaceChildren(...this.spec.build(this.data, t, this));
  }
}
