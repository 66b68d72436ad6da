// The controls of the page Fabric: measure, stop, and what the last measurement was.

import { h } from "./dom.js";
import { fabricName } from "./measures.js";
import { seconds } from "./text.js";

const OTHERS_BUSY = 0.25; // as labkit.measure.neighbours has it

export class FabricControls {
  constructor(ctx) {
    this.ctx = ctx;
    this.isAsked = false;
    this.measureButton = h("button", { type: "button", class: "lk-primary", onclick: () => this.measureOrStop() });
    this.pauseButton = h("button", { type: "button", onclick: () => ctx.onPause() });
    this.bar = h("progress", { max: 1, value: 0 });
    this.doing = h("span", { class: "lk-doing" });
    this.progress = h("div", { class: "lk-progress" }, this.bar, this.doing);
    this.last = h("p", { class: "lk-last" });
    this.remarks = h("div", { class: "lk-measure-remarks" });
    this.element = h("div", { class: "lk-controls lk-fabric-controls" },
      h("div", { class: "lk-load-row" }, h("div", { class: "lk-last-box" }, this.last, this.remarks), this.progress,
        h("div", { class: "lk-buttons" }, this.measureButton, this.pauseButton)));
  }

  /** `isAsked` bridges the moment between the click and the first word of progress. */
  measureOrStop() {
    const stops = this.frame?.progress?.is_yours;
    this.isAsked = !stops;
    this.askedAt = performance.now();
    this.ctx.send({ type: stops ? "stop" : "measure" });
    this.show(this.frame, this.shown);
  }

  show(frame, shown) {
    this.frame = frame;
    this.shown = shown;
    const { t } = this.ctx;
    const { progress } = frame;
    if (progress || frame.notice || performance.now() - this.askedAt > 3000) this.isAsked = false;
    const able = frame.link === "connected" && frame.lab?.state === "ready" && (!frame.lab.holder || progress?.is_yours);
    putText(this.measureButton, t(progress?.is_yours ? "measure.stop" : "measure.button"));
    this.measureButton.disabled = !able || this.isAsked || (progress != null && !progress.is_yours);
    this.measureButton.classList.toggle("lk-primary", !progress);
    putText(this.pauseButton, t(shown.paused ? "controls.resume" : "controls.pause"));
    this.pauseButton.setAttribute("aria-pressed", String(shown.paused));
    this.drawProgress(progress, t);
    this.drawLast(frame, t);
  }

  drawProgress(progress, t) {
    this.progress.hidden = !progress && !this.isAsked;
    this.bar.setAttribute("aria-label", t("measure.progress"));
    this.bar.value = progress ? progress.done / Math.max(1, progress.total) : 0;
    putText(this.doing, progress ? doingText(progress, t) : t("measure.begun"));
  }

  drawLast(frame, t) {
    const { measured } = this.ctx.measured();
    const values = measured && { at: frame.measured_at, layout: measured.layout_name, took: seconds(measured.took_s) };
    putText(this.last, measured ? t("measure.last", values) : t("measure.none"));
    const remarks = remarksOf(frame, measured, t);
    const key = JSON.stringify(remarks);
    if (key === this.remarksKey) return;
    this.remarksKey = key;
    this.remarks.replaceChildren(...remarks.map(([severity, text]) =>
      h("p", { class: `lk-remark lk-remark-${severity}` }, h("span", { "aria-hidden": "true" }, severity === "note" ? "✓ " : "▲ "), text)));
  }
}

function putText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function doingText({ done, total, what }, t) {
  const at = t("measure.at", { done, total });
  if (what.kind === "curve") return `${at} · ${t("measure.curve", { op: what.op, fabric: fabricName(what.fabric, false, t), n: what.ranks })}`;
  return `${at} · ${t("measure.pairs")}`;
}

function remarksOf(frame, measured, t) {
  const holder = frame.progress ? null : frame.lab?.holder;
  const held = holder ? [["warning", t("measure.held", { client: holder.client })]] : [];
  if (!measured) return held;
  const num = measured.pairs.length + measured.rows.length;
  const remarks = [...held, measured.wrong ? ["error", t("measure.wrong", { n: measured.wrong })] : ["note", t("measure.right", { n: num })]];
  const most = Math.max(2, ...measured.rows.map((row) => row.ranks));
  if (measured.backend === "gloo" && most * measured.threads_per_rank > measured.num_cores) {
    remarks.push(["warning", t("measure.crowded", { n: most, cores: measured.num_cores })]);
  }
  if (measured.others_busy_cores > OTHERS_BUSY) {
    remarks.push(["warning", t("measure.busy", { n: measured.others_busy_cores.toFixed(1), cores: measured.num_cores })]);
  }
  if (frame.lab && measured.layout !== frame.lab.layout) {
    remarks.push(["warning", t("measure.other_layout", { layout: measured.layout_name, now: frame.lab.layout_name })]);
  }
  return remarks;
}
