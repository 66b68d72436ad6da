// The list of stored runs: of our engine, of engines that were started for a run, and result files that were read in.
// One of them can be pinned beside the current figures. The list is read when it is opened, and searched here.

import { h, uniqueId } from "./dom.js";
import { digits } from "./text.js";

const COLUMNS = ["name", "engine", "model", "workload", "load", "measured", "n"];

export class StoredPicker {
  /** @param ctx {t, language, stored, send}; `onChoose(runId)` when a visitor has chosen, "" to unpin */
  constructor(ctx, onChoose) {
    this.ctx = ctx;
    this.onChoose = onChoose;
    this.pinned = "";
    this.key = "";
    this.summary = h("summary");
    this.search = h("input", { type: "search", id: uniqueId("search"), oninput: () => this.draw() });
    this.label = h("label", { for: this.search.id });
    this.told = h("p", { class: "lk-empty", role: "status" });
    this.head = h("thead");
    this.body = h("tbody");
    this.box = h("div", { class: "lk-stored-list", tabindex: 0, role: "group" }, h("table", {}, this.head, this.body));
    this.element = h(
      "details", { class: "lk-details lk-stored", ontoggle: () => this.toggled() },
      this.summary, h("div", { class: "lk-field" }, this.label, this.search), this.told, this.box);
  }

  toggled() {
    if (!this.element.open) return;
    this.ctx.send({ type: "look_up" });
    this.draw();
  }

  show(frame) {
    this.pinned = frame.beside?.run_id ?? "";
    const key = JSON.stringify([this.pinned, this.ctx.language()]);
    if (key === this.key && this.shown === this.ctx.stored()) return;
    this.key = key;
    this.draw();
  }

  draw() {
    const { t } = this.ctx;
    const all = this.ctx.stored();
    this.shown = all;
    this.summary.textContent = t("stored.title");
    this.label.textContent = t("stored.search");
    this.box.setAttribute("aria-label", t("stored.title"));
    if (!this.element.open) return;
    const found = all.filter((run) => this.matches(run));
    this.told.textContent = all.length === 0 ? t("stored.none") : t("stored.found", { n: found.length, all: all.length });
    this.box.hidden = found.length === 0;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.run : "";
    this.head.replaceChildren(h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, t(`stored.${name}`)))));
    this.body.replaceChildren(...found.map((run) => this.row(run, t)));
    if (focused) this.body.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  /** Every word that was typed has to stand somewhere in the line. */
  matches(run) {
    const line = Object.values(run).join(" ").toLowerCase();
    return this.search.value.toLowerCase().split(/\s+/).every((word) => line.includes(word));
  }

  row(run, t) {
    const isPinned = run.run_id === this.pinned;
    const button = h("button", {
      type: "button", "data-run": run.run_id, "aria-pressed": String(isPinned), title: t(isPinned ? "stored.unpin" : "stored.pin"),
      onclick: () => this.onChoose(isPinned ? "" : run.run_id),
    }, isPinned ? "◇ " : "", run.name);
    const cells = [run.engine || t("stored.unknown"), run.model || t("stored.unknown"), run.workload, loadText(run, t), run.started_at.slice(0, 16).replace("T", " "), run.n];
    return h("tr", {}, h("th", { scope: "row" }, button), cells.map((text) => h("td", {}, text)));
  }
}

function loadText({ rate, concurrency }, t) {
  if (concurrency) return t("stored.in_flight", { n: concurrency });
  return rate ? `${digits(rate)}/s` : t("stored.unknown");
}
