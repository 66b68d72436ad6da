// The stages of a pipeline, step by step: a row a stage, a bar a step, and in each bar idle, compute, collectives.

import { h, label, s, widest } from "./dom.js";
import { Panel, key } from "./panel.js";
import { linear, ticks } from "./scale.js";
import { milliseconds, percent } from "./text.js";

const STAGE_ROW = 30;
const KINDS = ["idle", "compute", "transfer"];
const MAX_ROWS = 8;

export function ganttPanel(ctx) {
  return new Panel(ctx, {
    id: "gantt",
    wide: true,
    wanted: (frame) => /(?:^|[x:])pp\d/.test(frame.lab?.layout ?? ""),
    pick: (frame) => frame.gantt ?? { span_ms: 0, rows: [] },
    note: (data, t) => (data.rows.length ? t("gantt.note", { span: milliseconds(data.span_ms), n: data.rows[0].bars.length }) + clocks(data, t) : ""),
    legend: (_, t) => [...KINDS.map((kind) => key(`lk-share-${kind}`, t(`gantt.${kind}`))), h("span", {}, t("gantt.schematic"))],
    empty: (data, t) => (data.rows.length ? "" : t("gantt.empty")),
    paint: paintGantt,
    describe: (data, t) => `${t("gantt.title")}: ${data.rows.map((row) => `${stageName(row, data, t)} ${t("share.compute")} ${percent(busyShare(row, data))}`).join("; ")}`,
    table: ganttTable,
  });
}

function stageName(row, data, t) {
  const stage = t("gantt.stage", { stage: row.stage });
  return data.rows.some((other) => other.replica !== row.replica) ? `${t("inflight.replica", { i: row.replica })} · ${stage}` : stage;
}

function stageRanks(row, t) {
  const name = row.ranks.length > 1 ? `${row.ranks[0]}–${row.ranks.at(-1)}` : row.ranks[0];
  return t(row.ranks.length > 1 ? "gantt.ranks" : "rank", { rank: name });
}

function sumOf(row, i) {
  return row.bars.reduce((sum, bar) => sum + bar[i], 0);
}

function busyShare(row, data) {
  return data.span_ms ? Math.min(1, sumOf(row, 2) / data.span_ms) : 0;
}

function paintGantt(panel, svg, data, width) {
  const { t } = panel.ctx;
  const rows = data.rows.slice(0, MAX_ROWS);
  const names = rows.map((row) => stageName(row, data, t));
  const x0 = Math.max(widest(names), widest(rows.map((row) => stageRanks(row, t)), 11)) + 12;
  const x1 = width - widest([t("gantt.busy", { share: percent(1) })]) - 10;
  const x = linear(data.span_ms, x0, x1);
  const bottom = rows.length * STAGE_ROW;
  for (const tick of ticks(data.span_ms, Math.max(2, Math.floor((x1 - x0) / 110)))) {
    svg.append(s("line", { x1: x(tick), x2: x(tick), y1: 0, y2: bottom + 2, class: "lk-grid" }));
    if (x(tick) < x1 - 24 || tick === 0) {
      svg.append(label(x(tick), bottom + 16, tick === 0 ? "0" : `${Math.round(tick * 10) / 10} ms`, { anchor: tick ? "middle" : "start", kind: "lk-muted" }));
    }
  }
  rows.forEach((row, i) => svg.append(...stageRow(row, data, i * STAGE_ROW, x, { x0, x1, width, name: names[i] }, t)));
  return bottom + 22;
}

function stageRow(row, data, y, x, { x0, x1, width, name }, t) {
  const marks = [
    label(0, y + 12, name),
    label(0, y + 25, stageRanks(row, t), { kind: "lk-muted lk-small" }),
    s("rect", { x: x0, y: y + 4, width: x1 - x0, height: 19, rx: 2, class: "lk-track" }),
    label(width - 2, y + 18, t("gantt.busy", { share: percent(busyShare(row, data)) }), { anchor: "end", kind: "lk-muted" }),
  ];
  for (const [start, ...parts] of row.bars) {
    let from = start;
    parts.forEach((length, i) => {
      if (length > 0) {
        marks.push(s("rect", {
          x: x(from).toFixed(1), y: y + 4, width: Math.max(0.4, x(from + length) - x(from)).toFixed(1), height: 19, class: `lk-gantt lk-share-${KINDS[i]}`,
        }));
      }
      from += length;
    });
  }
  return marks;
}

/** Stages on several hosts are placed by clocks that agree only so far. */
function clocks(data, t) {
  return data.clock_ms ? `; ${t("gantt.clock", { ms: milliseconds(data.clock_ms) })}` : "";
}

function ganttTable(data, t) {
  const head = ["", ...KINDS.map((kind) => t(`gantt.${kind}`)), t("gantt.steps")];
  const rows = data.rows.map((row) => [
    `${stageName(row, data, t)}, ${stageRanks(row, t)}`, ...KINDS.map((_, i) => milliseconds(sumOf(row, i + 1))), row.bars.length,
  ]);
  return { head, rows };
}
