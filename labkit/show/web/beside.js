// The current figures against what is pinned: each percentile's difference with its interval, and whatever else than
// the layout differs. An interval that holds 0 is drawn hollow: that comparison cannot tell.

import { fitted, h, label, s, widest } from "./dom.js";
import { Panel, makeTable, pinKey, pinOf } from "./panel.js";
import { roundUp } from "./scale.js";
import { digits, milliseconds } from "./text.js";

const DIFFERENCE_ROW = 26;
const SEPARATION = 10;
const MOST = 4; // times the pinned value: what is further off is drawn at the edge

export function besidePanel(ctx) {
  return new Panel(ctx, {
    id: "beside",
    wide: true,
    wanted: (frame, pin) => Boolean(pin),
    pick: (frame, pin) => ({
      ...(frame.beside ?? { differences: [], conditions: [], remarks: [] }), run: null, memory: null, why: null, pinned: pinOf(pin),
    }),
    legend: (data, t) => [pinKey(data.pinned, t), h("span", {}, t("beside.interval"))],
    empty: (data, t) => (data.differences.length ? "" : t("beside.empty")),
    paint: paintDifferences,
    below: belowDifferences,
    describe: (data, t) => `${t("beside.title")}: ${data.differences.map((row) => `${rowName(row)} ${changeText(row)} ${t(`beside.${row.verdict.replace(" ", "_")}`)}`).join("; ")}`,
    table: differenceTable,
  });
}

function rowName(row) {
  return `${row.figure.slice(0, 4).toUpperCase()} p${row.percentile}`;
}

function signed(value) {
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${milliseconds(Math.abs(value))}`;
}

function changeText(row) {
  return row.difference_ms == null ? "–" : signed(row.difference_ms);
}

function intervalText(row, t) {
  return row.low_ms == null ? "" : t("beside.from_to", { low: signed(row.low_ms), high: signed(row.high_ms) });
}

/** As a share of the pinned value, so that TTFT and TPOT stand on one axis. */
function share(row, value) {
  return Math.max(-MOST, Math.min(MOST, value / row.then_ms));
}

function paintDifferences(panel, svg, data, width) {
  const { t } = panel.ctx;
  const rows = data.differences;
  const known = rows.filter((row) => row.low_ms != null && row.then_ms > 0);
  const end = roundUp(Math.max(0.1, ...known.flatMap((row) => [Math.abs(share(row, row.low_ms)), Math.abs(share(row, row.high_ms))])));
  const changes = rows.map(changeText);
  const isNarrow = width < 420; // a phone has the verdict from the mark (hollow: cannot tell) and from the table
  const verdicts = rows.map((row) => isNarrow ? "" : t(`beside.${row.verdict.replace(" ", "_")}`));
  const intervals = width > 620 ? rows.map((row) => intervalText(row, t)) : rows.map(() => "");
  const x0 = widest(rows.map(rowName), 13) + 14;
  const right = { verdict: width - 2, interval: isNarrow ? width - 2 : width - widest(verdicts) - 16 };
  right.change = right.interval - (width > 620 ? widest(intervals) + 14 : 0);
  const plot = { x0, x1: right.change - widest(changes, 13, 600) - 14 };
  const x = (value) => plot.x0 + ((value + end) / (2 * end)) * (plot.x1 - plot.x0);
  const tops = rowTops(rows);
  const bottom = tops.at(-1) + DIFFERENCE_ROW;
  svg.append(...shareAxis(end, x, bottom, plot, t, data));
  rows.forEach((row, i) => {
    const y = tops[i] + DIFFERENCE_ROW / 2;
    const title = row.few ? t("beside.few", { rung: `p${row.percentile}`, n: Math.min(row.n, row.n_then) }) : "";
    svg.append(
      label(0, y + 4, rowName(row), { kind: row.few ? "lk-rung lk-muted" : "lk-rung", title }),
      ...(row.low_ms == null || !(row.then_ms > 0) ? [] : intervalMarks(row, x, y)),
      label(right.change, y + 4.5, changes[i], { anchor: "end", kind: row.few ? "lk-value lk-muted" : "lk-value", title }),
      label(right.interval, y + 4, intervals[i], { anchor: "end", kind: "lk-muted" }),
      label(right.verdict, y + 4, verdicts[i], { anchor: "end", kind: "lk-muted" }),
    );
  });
  return bottom + 40;
}

/** TPOT's rows stand apart from TTFT's. */
function rowTops(rows) {
  let top = 4;
  return rows.map((row, i) => {
    if (i && row.figure !== rows[i - 1].figure) top += SEPARATION;
    const mine = top;
    top += DIFFERENCE_ROW;
    return mine;
  });
}

function intervalMarks(row, x, y) {
  const kind = `lk-diff lk-diff-${row.verdict === "cannot tell" ? "unsure" : row.verdict}${row.few ? " lk-few" : ""}`;
  const [low, middle, high] = [row.low_ms, row.difference_ms, row.high_ms].map((value) => x(share(row, value)));
  return [
    s("line", { x1: low, x2: high, y1: y, y2: y, class: kind }),
    s("line", { x1: low, x2: low, y1: y - 5, y2: y + 5, class: kind }),
    s("line", { x1: high, x2: high, y1: y - 5, y2: y + 5, class: kind }),
    s("circle", { cx: middle, cy: y, r: 5, class: `${kind} lk-diff-mark` }),
  ];
}

function shareAxis(end, x, bottom, plot, t, data) {
  const narrow = plot.x1 - plot.x0 < 180; // two words stand there, and three would meet
  const marks = [-end, 0, end].flatMap((value) => [
    s("line", { x1: x(value), x2: x(value), y1: 0, y2: bottom + 2, class: value ? "lk-grid" : "lk-rule" }),
    narrow && value === 0 ? null : label(x(value), bottom + 16, shareTick(value), { anchor: value < 0 ? "start" : value > 0 ? "end" : "middle", kind: "lk-muted" }),
  ]).filter(Boolean);
  const text = fitted(t("beside.axis", { name: data.pinned?.name ?? "" }), 2 * Math.min(plot.x0, plot.x1) + plot.x1 - plot.x0);
  return [...marks, label((plot.x0 + plot.x1) / 2, bottom + 34, text, { anchor: "middle", kind: "lk-muted" })];
}

function shareTick(value) {
  return value === 0 ? "0" : `${value > 0 ? "+" : "−"}${digits(Math.abs(value) * 100)} %`;
}

/** Circumstances of both sides, what was not recorded, and what the pinned run says against itself. */
function belowDifferences(data, t) {
  if (!data.conditions.length) return [];
  const differing = data.conditions.filter(({ name, same }) => same === false && name !== "layout");
  const unknown = data.conditions.filter(({ same, there }) => same == null && !there);
  const names = (rows) => rows.map(({ name }) => t(`condition.${name}`)).join(", ");
  const lines = [
    differing.length ? h("p", { class: "lk-remark-warning" }, `▲ ${t("beside.differs", { names: names(differing) })}`) : h("p", {}, `✓ ${t("beside.equal")}`),
    unknown.length ? h("p", {}, t("beside.unknown", { names: names(unknown), recorder: data.recorder })) : null,
    data.missing.length ? h("p", {}, t("beside.missing", { names: data.missing.map((name) => t(`missing.${name}`)).join(", "), recorder: data.recorder })) : null,
    ...data.remarks.map((sentence) => h("p", { lang: "en" }, sentence)),
  ];
  return [...lines.filter(Boolean), h("div", { class: "lk-table lk-conditions", tabindex: 0, role: "group", "aria-label": t("beside.conditions") }, makeTable(conditionTable(data, t)))];
}

function conditionTable(data, t) {
  const notRecorded = t("beside.not_recorded", { recorder: data.recorder });
  return {
    head: ["", t("table.now"), `◇ ${data.pinned?.name ?? ""}`, ""],
    rows: data.conditions.map(({ name, here, there, same }) => [
      t(`condition.${name}`), here || "–", there || notRecorded, same == null ? "" : same ? `✓ ${t("beside.same")}` : `▲ ${t("beside.different")}`,
    ]),
  };
}

function differenceTable(data, t) {
  const head = ["", t("beside.change"), t("beside.interval_head"), t("beside.verdict"), `◇ ${data.pinned?.name ?? ""}`, t("beside.n_now"), t("beside.n_then")];
  const rows = data.differences.map((row) => [
    rowName(row), changeText(row), intervalText(row, t), t(`beside.${row.verdict.replace(" ", "_")}`), milliseconds(row.then_ms), row.n, row.n_then,
  ]);
  return { head, rows };
}
