// The layout that is looked at, run small on the machine at hand: what was predicted of that run and what it measured.

import { layoutName, ranksOf } from "./chooser.js";
import { h } from "./dom.js";
import { key, Panel } from "./panel.js";
import { paintRows, predictedLegend, rowsTable } from "./planner_percentiles.js";
import { StickyEnd } from "./scale.js";
import { digits, milliseconds, percent } from "./text.js";

export function trialPanel(ctx) {
  const ends = { ttft: new StickyEnd(), tpot: new StickyEnd() };
  return new Panel(ctx, {
    id: "trial",
    pick: (frame) => ({ trial: frame.trial, here: frame.here, layout: ctx.card().candidate?.layout ?? "" }),
    empty: ({ trial }, t) => (trialRows(trial).length ? "" : trialEmpty(trial, t)),
    legend: ({ trial }, t) => (trial ? (trial.calibrated ? predictedLegend(t, "trial.band") : [key("lk-measured-swatch", t("percentiles.measured"))]) : []),
    paint: (panel, svg, { trial }, width) => paintRows(svg, trialRows(trial), width, ends),
    below: (data, t) => trialBelow(data, t, ctx),
    table: ({ trial }, t) => rowsTable(trialRows(trial), t),
    describe: ({ trial }, t) => `${t("trial.title")}. ${trialRows(trial).map((row) => trialOff(row, t)).join("; ")}`,
    note: ({ trial }, t) => (trial ? t("ladder.n", { n: trial.n }) : ""),
  });
}

function trialRows(trial) {
  return (trial?.rows ?? []).filter((row) => row.measured != null);
}

function trialEmpty(trial, t) {
  if (!trial) return t("trial.none");
  if (trial.role === "queued") return t("trial.queued", { position: trial.position });
  return t(trial.role === "switching" ? "trial.switching" : "trial.running", { n: trial.n });
}

function trialOff({ name, predicted, low, high, measured }, t) {
  if (predicted == null) return `${name} ${milliseconds(measured)}`;
  const off = `${measured >= predicted ? "+" : "−"}${percent(Math.abs(measured / predicted - 1))}`;
  return t("trial.off", { name, predicted: milliseconds(predicted), low: milliseconds(low), high: milliseconds(high), measured: milliseconds(measured), off });
}

function trialBelow({ trial, here, layout }, t, ctx) {
  const refusal = trialRefusal(here, layout, t);
  const runs = trial?.role && trial.role !== "watching";
  const button = h("button", { type: "button", id: `${ctx.pageId}-trial`, class: runs ? "" : "lk-primary", disabled: !runs && Boolean(refusal), onclick: () => ctx.send(runs ? { type: "stop" } : { type: "trial", layout }) },
    runs ? t("trial.stop") : `${t("trial.button")}: ${layoutName(layout || "tp1")}`);
  const what = trial ? h("p", { class: "lk-muted" }, t("trial.what", { model: trial.model, layout: layoutName(trial.layout), workload: trial.workload, rate: digits(trial.rate) })) : null;
  const uncalibrated = trial && !trial.calibrated ? h("p", { class: "lk-muted" }, t("trial.uncalibrated")) : null;
  const rows = trialRows(trial).filter((row) => row.predicted != null);
  const off = rows.length ? h("ul", { class: "lk-offs" }, rows.map((row) => h("li", {}, trialOff(row, t)))) : null;
  const calibrated = trial?.calibrated ? h("p", { class: "lk-muted" }, t("trial.calibrated", { at: trial.calibrated_at.slice(0, 16).replace("T", " ") }), " ",
    h("span", { lang: "en" }, (trial.notes ?? []).join(" "))) : null;
  return [what, off, calibrated, uncalibrated, refusal && !runs ? h("p", { class: "lk-muted" }, refusal) : null, h("div", { class: "lk-buttons" }, button)].filter(Boolean);
}

/** Why the layout cannot run here; empty where it can. The server's own table decides. */
function trialRefusal(here, layout, t) {
  if (!here) return t("trial.absent");
  if (!layout || here.legal.includes(layout)) return "";
  const n = ranksOf(layout);
  const reason = n > here.num_ranks ? t("trial.many", { n, there: here.num_ranks }) : t("trial.illegal");
  return t("trial.cannot", { layout: layoutName(layout), reason });
}
