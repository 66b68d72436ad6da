// Percentiles of the layout that is looked at: predicted, each with its error band, against the wish.

import { label, s, widest } from "./dom.js";
import { key, Panel } from "./panel.js";
import { linear, StickyEnd, ticks } from "./scale.js";
import { milliseconds, percent } from "./text.js";

const PERCENTILE_NAMES = ["p50", "p95", "p99"];
const ROW_PX = 26;
const GAP_PX = 40;

export function percentilesPanel(ctx) {
  const ends = { ttft: new StickyEnd(), tpot: new StickyEnd() };
  return new Panel(ctx, {
    id: "percentiles",
    pick: () => percentilesData(ctx.card()),
    empty: (data, t) => (data.rows.length ? "" : t("planner.no_figures")),
    legend: (_, t) => predictedLegend(t),
    paint: (panel, svg, data, width) => paintRows(svg, data.rows, width, ends),
    table: (data, t) => rowsTable(data.rows, t),
    describe: (data, t) => `${t("percentiles.title")}. ${data.rows.map((row) => `${row.name} ${milliseconds(row.predicted)}`).join(", ")}`,
    note: (data) => data.layout,
  });
}

/** measuredBand: what the whiskers are, where there are measured figures beside. */
export function predictedLegend(t, measuredBand = "") {
  return [key("lk-predicted-swatch", t("percentiles.predicted")), key("lk-band-swatch", t(measuredBand || "percentiles.band")),
    measuredBand ? key("lk-measured-swatch", t("percentiles.measured")) : key("lk-limit-swatch", t("percentiles.limit"))];
}

function percentilesData({ candidate }) {
  const predictions = candidate?.predictions;
  if (!predictions) return { rows: [], layout: "" };
  const limits = Object.fromEntries((candidate.outcomes ?? []).map((outcome) => [outcome.metric, outcome.limit]));
  const rows = ["ttft", "tpot"].flatMap((metric) => PERCENTILE_NAMES.map((name) => ({
    metric, name: `${metric.toUpperCase()} ${name}`, predicted: predictions[`${metric}_ms`][name] ?? null,
    band: predictions[`band_${metric}`], limit: limits[metric] ?? null, measured: null,
  })));
  return { rows, layout: candidate.name };
}

/** Rows {metric, name, predicted, band or low and high, limit, measured, n}; a metric has a scale of its own. Returns the height. */
export function paintRows(svg, rows, width, ends) {
  const left = widest(rows.map((row) => row.name), 12) + 14;
  const right = widest(rows.flatMap((row) => [predictedText(row), measuredText(row)]), 13, 600) + 16;
  let y = 8;
  for (const metric of ["ttft", "tpot"]) {
    const mine = rows.filter((row) => row.metric === metric);
    if (!mine.length) continue;
    const largest = Math.max(...mine.flatMap((row) => [boundsOf(row)[1], row.measured ?? 0, row.limit ?? 0]));
    const end = ends[metric].for(largest || 1);
    const at = linear(end, left, width - right);
    const bottom = y + mine.reduce((sum, row) => sum + rowHeight(row), 0);
    svg.append(...rowsAxis(end, at, y, bottom, width));
    const { limit } = mine[0];
    for (const row of mine) {
      svg.append(...percentileMarks(row, y, at, left, width));
      y += rowHeight(row);
    }
    if (limit != null) svg.append(s("path", { d: `M${at(limit)} ${bottom - mine.reduce((sum, row) => sum + rowHeight(row), 0) - 4}V${bottom}`, class: "lk-objective" }));
    y = bottom + GAP_PX;
  }
  return y - GAP_PX + 22;
}

function rowHeight(row) {
  return row.measured == null || row.predicted == null ? ROW_PX : ROW_PX * 2 - 6;
}

function rowsAxis(end, at, top, bottom, width) {
  return ticks(end, width < 460 ? 2 : 4).flatMap((value) => [
    s("path", { d: `M${at(value)} ${top - 4}V${bottom}`, class: "lk-grid" }),
    label(at(value), bottom + 15, milliseconds(value), { anchor: "middle", kind: "lk-muted lk-small" }),
  ]);
}

/** Predicted: pale and dashed, with a whisker as long as its known error. Measured: solid, below. */
function percentileMarks(row, y, at, left, width) {
  const name = label(0, y + 16, row.name, { kind: "lk-muted" });
  if (row.predicted == null && row.measured == null) return [name, label(width, y + 16, "∞", { anchor: "end", kind: "lk-value" })];
  const predicted = row.predicted == null ? [] : predictedMarks(row, y, at, left, width);
  const measured = row.measured == null ? [] : measuredMarks(row, y + (predicted.length ? 18 : 0), at, left, width);
  return [name, ...predicted, ...measured];
}

function predictedMarks(row, y, at, left, width) {
  const [low, high] = boundsOf(row).map(at);
  return [
    s("rect", { x: left, y: y + 4, width: Math.max(1, at(row.predicted) - left), height: 16, class: "lk-predicted" }),
    s("path", { d: `M${low} ${y + 12}H${high}M${low} ${y + 8}v8M${high} ${y + 8}v8`, class: "lk-whisker" }),
    label(width, y + 17, predictedText(row), { anchor: "end", kind: "lk-value" }),
  ];
}

function measuredMarks(row, y, at, left, width) {
  return [
    s("rect", { x: left, y: y + 4, width: Math.max(1, at(row.measured) - left), height: 16, class: "lk-measured" }),
    label(width, y + 17, measuredText(row), { anchor: "end", kind: "lk-value" }),
  ];
}

/** Lowest and highest that the known error allows: as they were simulated, or by a relative band. */
function boundsOf({ predicted, band, low, high }) {
  return low != null ? [low, high] : [(predicted ?? 0) * (1 - (band ?? 0)), (predicted ?? 0) * (1 + (band ?? 0))];
}

function predictedText({ predicted, band }) {
  if (predicted == null) return "";
  return band == null ? milliseconds(predicted) : `${milliseconds(predicted)} ± ${percent(band)}`;
}

function measuredText({ measured }) {
  return measured == null ? "" : milliseconds(measured);
}

function boundsText(row) {
  if (row.low != null) return boundsOf(row).map(milliseconds).join(" – ");
  return row.band == null ? "–" : `± ${percent(row.band)}`;
}

export function rowsTable(rows, t) {
  const head = ["", t("percentiles.predicted"), t("percentiles.band"), t("percentiles.limit"), t("percentiles.measured"), "n"];
  return { head, rows: rows.map((row) => [row.name, row.predicted == null && row.measured == null ? "∞" : milliseconds(row.predicted), boundsText(row), milliseconds(row.limit), milliseconds(row.measured), row.n == null ? "–" : String(row.n)]) };
}
