// Every layout of these GPUs: whether it fits, whether it queues, what it is predicted to do, and why it was not chosen.

import { glyph, layoutName } from "./chooser.js";
import { h, uniqueId } from "./dom.js";
import { WordCard } from "./card.js";
import { chosenOf, verdictOf, verdictText, withBand } from "./planner_answer.js";
import { spoken } from "./sentence.js";
import { count, digits, milliseconds } from "./text.js";

const MOST_ROWS = 40;
const FILTERS = { does: ["does"], fits: ["does", "queues", "misses"], refused: ["big", "illegal"], all: null };
const VERDICT_RANK = { does: 0, misses: 1, queues: 2, big: 3, illegal: 4 };

export function layoutsPanel(ctx) {
  const panel = new WordCard(ctx, {
    id: "layouts_table",
    wide: true,
    pick: () => ({ layouts: ctx.plan().layouts ?? [], chosen: chosenOf(ctx.plan()), percentile: ctx.plan().objective?.percentile ?? "p95", selected: ctx.card().candidate?.layout ?? "" }),
    build: (data, t, self) => tableParts(data, t, self, ctx),
    note: (data, t) => (data.layouts.length ? t("layouts_table.note", { n: count(data.layouts.length), does: data.layouts.filter((candidate) => candidate.does).length }) : ""),
  });
  panel.filter = "fits";
  panel.name = uniqueId("filter");
  return panel;
}

function tableParts(data, t, panel, ctx) {
  if (!data.layouts.length) return [h("p", { class: "lk-empty" }, t("planner.planning"))];
  const kinds = FILTERS[panel.filter];
  const all = data.layouts.filter((candidate) => !kinds || kinds.includes(verdictOf(candidate))).sort(tableOrder(data));
  const rows = panel.whole ? all : all.filter(({ layout }, i) => i < MOST_ROWS || layout === data.selected);
  const more = all.length > rows.length ? h("button", { type: "button", class: "lk-offer", onclick: () => redrawTable(panel, { whole: true }) }, t("layouts_table.more", { n: all.length - rows.length })) : null;
  const price = all.some((candidate) => candidate.cost_per_million != null);
  const head = [t("layouts_table.layout"), t("layouts_table.gpus"), t("layouts_table.verdict"), t("layouts_table.holds"), `TTFT ${data.percentile}`, `TPOT ${data.percentile}`, t("front.per_gpu"), ...(price ? [t("answer.million")] : []), t("layouts_table.why")];
  const table = h("table", { class: "lk-layouts-table" },
    h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map((candidate) => tableRow(candidate, data, t, ctx, price))));
  return [tableFilters(panel, data, t), h("div", { class: "lk-table", tabindex: 0, role: "group", "aria-label": t("layouts_table.title") }, table), more].filter(Boolean);
}

/** The answer, then what does, on fewest GPUs first. */
function tableOrder({ percentile, chosen }) {
  const ttft = (candidate) => candidate.predictions?.ttft_ms?.[percentile] ?? Infinity;
  const first = ({ layout }) => (layout === chosen ? 0 : 1);
  return (a, b) => first(a) - first(b) || VERDICT_RANK[verdictOf(a)] - VERDICT_RANK[verdictOf(b)] || a.num_gpus - b.num_gpus || ttft(a) - ttft(b);
}

function tableFilters(panel, data, t) {
  const number = (kinds) => data.layouts.filter((candidate) => !kinds || kinds.includes(verdictOf(candidate))).length;
  const labels = Object.entries(FILTERS).map(([name, kinds]) => h("label", { class: "lk-segment" },
    h("input", { type: "radio", name: panel.name, id: `${panel.name}-${name}`, value: name, checked: panel.filter === name, onchange: () => redrawTable(panel, { filter: name, whole: false }) }),
    h("span", {}, `${t(`layouts_table.${name}`)} ${number(kinds)}`)));
  return h("div", { class: "lk-segments lk-filters", role: "radiogroup", "aria-label": t("layouts_table.show") }, labels);
}

function redrawTable(panel, change) {
  Object.assign(panel, change);
  panel.extraKey = `${panel.filter} ${panel.whole}`;
  panel.draw();
}

function tableRow(candidate, data, t, ctx, price) {
  const { layout, predictions } = candidate;
  const figure = (metric) => (predictions ? withBand(predictions[`${metric}_ms`][data.percentile], predictions[`band_${metric}`], milliseconds) : "–");
  return h("tr", { class: layout === data.selected ? "lk-row-selected" : "", "data-layout": layout },
    h("th", { scope: "row" }, h("button", { type: "button", class: "lk-row-button", id: `${ctx.pageId}-row-${layout}`, "aria-pressed": String(layout === data.selected), onclick: () => ctx.select(layout) }, glyph(layout), layoutName(layout))),
    h("td", {}, String(candidate.num_gpus)),
    h("td", { class: `lk-verdict-cell lk-verdict-${verdictOf(candidate)}` }, verdictText(candidate, t)),
    h("td", {}, candidate.fits ? count(candidate.most_requests) : "–"),
    h("td", {}, figure("ttft")), h("td", {}, figure("tpot")), h("td", {}, predictions ? digits(candidate.tokens_per_gpu) : "–"),
    price ? h("td", {}, candidate.cost_per_million == null ? "–" : `$ ${digits(candidate.cost_per_million)}`) : null,
    layout === data.chosen ? h("td", { class: "lk-why-cell" }, h("b", {}, t("answer.smallest"))) : spoken("td", { class: "lk-why-cell" }, candidate.reason, t));
}
