// The answer: the layout that is looked at, what it is predicted to do, and whether that is what was asked for.

import { glyph, layoutName } from "./chooser.js";
import { h } from "./dom.js";
import { WordCard } from "./card.js";
import { spoken } from "./sentence.js";
import { count, digits, milliseconds, percent } from "./text.js";

export function answerPanel(ctx) {
  return new WordCard(ctx, {
    id: "answer",
    wide: true,
    pick: (frame) => pickAnswer(frame, ctx),
    build: (data, t) => answerParts(data, t, ctx),
    note: ({ planning }, t) => (planning ? t("planner.planning") : ""),
  });
}

export function chosenOf(plan) {
  return plan.chosen?.layout ?? (typeof plan.chosen === "string" ? plan.chosen : "") ?? "";
}

function pickAnswer(frame, ctx) {
  const plan = ctx.plan();
  return {
    card: { ...ctx.card(), commands: null }, chosen: chosenOf(plan), settings: plan.chosen?.settings ?? {}, infeasible: plan.infeasible,
    planned: plan.n != null, planning: frame.planning,
  };
}

function answerParts({ card, chosen, settings, infeasible, planned }, t, ctx) {
  const { candidate } = card;
  if (!candidate) return [h("p", { class: "lk-empty" }, t("planner.nothing"))];
  const isAnswer = chosen === candidate.layout;
  const back = !isAnswer && chosen ? h("button", { type: "button", class: "lk-offer", onclick: () => ctx.select("") }, t("answer.back", { name: layoutName(chosen) })) : null;
  const says = t(isAnswer ? "answer.smallest" : chosen ? "answer.look" : planned ? "answer.none" : "answer.first");
  const changed = isAnswer ? Object.entries(settings).map(([name, value]) => `${name} ${value}`).join(", ") : "";
  return [
    h("div", { class: "lk-answer-head" }, glyph(candidate.layout), h("b", { class: "lk-answer-name" }, layoutName(candidate.layout)),
      h("small", {}, t(candidate.num_gpus === 1 ? "answer.gpu" : "answer.gpus", { n: candidate.num_gpus })),
      h("span", { class: `lk-verdict lk-verdict-${verdictOf(candidate)}` }, verdictText(candidate, t)),
      h("small", { class: "lk-muted" }, says), back),
    changed ? h("p", {}, t("answer.with", { settings: changed })) : null,
    planned && !chosen && infeasible?.sentence ? h("p", { class: "lk-reason" }, spoken("b", {}, infeasible.sentence, t)) : null,
    candidate.reason ? spoken("p", { class: "lk-reason" }, candidate.reason, t) : null,
    candidate.predictions ? h("dl", { class: "lk-tiles" }, answerTiles(card, t)) : null,
    candidate.predictions ? h("p", { class: "lk-source" }, h("span", { class: "lk-badge", "data-provenance": "predicted" }, `◇ ${t("badge.fabric.predicted")}`), " ",
      spoken("span", {}, candidate.predictions.source, t)) : null,
  ].filter(Boolean);
}

/** does, queues, misses, big (does not fit), illegal */
export function verdictOf(candidate) {
  if (candidate.does) return "does";
  if (!candidate.legal) return "illegal";
  if (!candidate.fits) return "big";
  return candidate.queues || candidate.fault === "overload" ? "queues" : "misses";
}

const FAULTS = { ttft: "TTFT", tpot: "TPOT" };
const MARKS = { does: "✓", queues: "◐", misses: "✕", big: "✕", illegal: "–" };

export function verdictText(candidate, t) {
  const verdict = verdictOf(candidate);
  return `${MARKS[verdict]} ${t(`verdict.${verdict}`, { what: wishName(candidate.fault, t) })}`;
}

export function wishName(metric, t) {
  return FAULTS[metric] ?? t(`fault.${metric}`);
}

export function withBand(value, band, show) {
  return value == null ? "∞" : `${show(value)} ± ${percent(band)}`;
}

function answerTiles({ candidate, percentile = "p95" }, t) {
  const { predictions, outcomes = [] } = candidate;
  const limit = (metric) => outcomes.find((outcome) => outcome.metric === metric);
  const latency = (metric, name) => {
    const value = predictions[`${metric}_ms`][percentile];
    const [shown, band] = value == null ? [t("answer.endless"), ""] : [milliseconds(value), `± ${percent(predictions[`band_${metric}`])}`];
    return answerTile(`${name} ${percentile}`, shown, band, answerLimit(limit(metric), t));
  };
  const held = predictions.concurrency == null ? "–" : count(predictions.concurrency);
  return [
    latency("ttft", "TTFT"),
    latency("tpot", "TPOT"),
    answerTile(t("answer.tokens"), digits(predictions.tokens_per_s), t("answer.per_gpu", { n: digits(candidate.tokens_per_gpu) })),
    answerTile(t("answer.in_flight"), held, t("answer.most", { n: count(candidate.most_requests) })),
    candidate.cost_per_million == null ? null : answerTile(t("answer.cost"), `$ ${digits(candidate.cost_per_million)}`, t("answer.million")),
  ].filter(Boolean);
}

function answerLimit(outcome, t) {
  if (!outcome) return "";
  const mark = outcome.met ? "✓" : "✕";
  return `${mark} ${t(outcome.sure ? "answer.limit" : "answer.unsure", { limit: milliseconds(outcome.limit) })}`;
}

function answerTile(name, value, beside, below = "") {
  return h("div", { class: "lk-tile" }, h("dt", {}, name), h("dd", {}, h("b", {}, value), " ", h("small", {}, beside), below ? h("div", { class: "lk-tile-below" }, below) : null));
}
