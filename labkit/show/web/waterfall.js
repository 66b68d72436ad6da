// Where the time to the first token goes: the mean TTFT as a cascade of its parts, each from its own instants.

import { label, s, widest } from "./dom.js";
import { Panel, pinKey, pinOf } from "./panel.js";
import { StickyEnd, linear } from "./scale.js";
import { milliseconds, percent } from "./text.js";

const PARTS = ["lateness", "network", "queue", "compute", "wait", "transfer", "handoff", "delivery", "unaccounted"];
const PART_ROW = 25;
const CASCADE_TOP = 8;

export function waterfallPanel(ctx) {
  const panel = new Panel(ctx, {
    id: "waterfall",
    pick: pickParts,
    note: (data, t) => (data.n ? t("waterfall.note", { n: data.n }) : ""),
    legend: (data, t) => [pinKey(data.pinned ?? data.lacks, t)].filter(Boolean),
    empty: (data, t) => (data.parts ? "" : t(data.running ? "waterfall.waiting" : "waterfall.empty")),
    paint: paintWaterfall,
    describe: (data, t) => `${t("waterfall.title")}: ${rowsOf(data).map((p) => `${t(`part.${p}`)} ${milliseconds(data.parts?.[p])}`).join(", ")}`,
    table: waterfallTable,
  });
  panel.end = new StickyEnd();
  return panel;
}

function partsOf(run) {
  const parts = run?.ttft_parts_ms;
  return parts && PARTS.some((part) => parts[part] != null) ? parts : null;
}

function pickParts(frame, pin) {
  const parts = pin ? partsOf(pin.run) : null;
  return {
    parts: partsOf(frame.run), n: frame.run?.ttft_ms.n ?? 0, running: frame.role === "running",
    pinned: parts ? pinOf(pin, { parts }) : null, lacks: parts ? null : pinOf(pin, { lacks: true }),
  };
}

// Only pools for prefill and decode hand KV over: without them there is no such row.
function rowsOf(data) {
  const handsOver = [data.parts, data.pinned?.parts].some((parts) => parts?.handoff > 0);
  return handsOver ? PARTS : PARTS.filter((part) => part !== "handoff");
}

function total(parts) {
  return PARTS.reduce((sum, part) => sum + (parts[part] ?? 0), 0);
}

function paintWaterfall(panel, svg, data, width) {
  const { t } = panel.ctx;
  const whole = total(data.parts);
  const end = panel.end.for(Math.max(whole, 1));
  const cols = waterfallColumns(data, width, t, whole);
  const x = linear(end, cols.x0, cols.x1);
  let before = 0;
  const rows = rowsOf(data);
  rows.forEach((part, i) => {
    const value = data.parts[part] ?? 0;
    const y = CASCADE_TOP + i * PART_ROW;
    svg.append(...step(part, y, x(before), x(before + value), cols, t));
    svg.append(...figures(data, part, i, y, cols));
    before += value;
  });
  svg.append(...totalRow(data, whole, CASCADE_TOP + rows.length * PART_ROW + 6, x, cols, t));
  return CASCADE_TOP + (rows.length + 1) * PART_ROW + 10;
}

function waterfallColumns(data, width, t, whole) {
  const rows = rowsOf(data);
  const left = widest([...rows.map((part) => t(`part.${part}`)), t("waterfall.total")]) + 12;
  const now = rows.map((part) => milliseconds(data.parts[part]));
  const share = rows.map((part) => percent((data.parts[part] ?? 0) / (whole || 1)));
  const pinned = data.pinned ? rows.map((part) => `◇ ${milliseconds(data.pinned.parts[part])}`) : [];
  const shareWidth = width > 420 ? 46 : 0;
  const pinWidth = data.pinned ? widest([...pinned, `◇ ${milliseconds(total(data.pinned.parts))}`]) + 14 : 0;
  const nowWidth = widest([...now, milliseconds(whole)], 13, 600) + 10;
  const nowRight = width - shareWidth - pinWidth - 2;
  return { x0: left, x1: nowRight - nowWidth - 8, nowRight, shareRight: shareWidth ? width - pinWidth - 2 : 0, pinRight: width - 2, now, share, pinned };
}

function step(part, y, from, to, cols, t) {
  return [
    label(0, y + 13, t(`part.${part}`), { title: t(`part.${part}.what`) }),
    s("line", { x1: cols.x0, x2: cols.x1, y1: y + 9, y2: y + 9, class: "lk-grid" }),
    s("rect", { x: from, y: y + 2, width: Math.max(1.5, to - from), height: 14, rx: 2, class: `lk-part-${part}` }),
    s("line", { x1: to, x2: to, y1: y + 16, y2: y + PART_ROW + 2, class: "lk-riser" }),
  ];
}

function figures(data, part, i, y, cols) {
  const marks = [label(cols.nowRight, y + 13, cols.now[i], { anchor: "end", kind: "lk-value" })];
  if (cols.shareRight) marks.push(label(cols.shareRight, y + 13, cols.share[i], { anchor: "end", kind: "lk-muted" }));
  if (data.pinned) marks.push(label(cols.pinRight, y + 13, cols.pinned[i], { anchor: "end", kind: "lk-muted" }));
  return marks;
}

function totalRow(data, whole, y, x, cols, t) {
  const marks = [
    s("line", { x1: 0, x2: cols.pinRight, y1: y - 2, y2: y - 2, class: "lk-rule" }),
    label(0, y + 14, t("waterfall.total"), { kind: "lk-value" }),
    s("rect", { x: cols.x0, y: y + 4, width: Math.max(2, x(whole) - cols.x0), height: 12, rx: 2, class: "lk-total" }),
    label(cols.nowRight, y + 14, milliseconds(whole), { anchor: "end", kind: "lk-value" }),
  ];
  if (data.pinned) {
    marks.push(label(cols.pinRight, y + 14, `◇ ${milliseconds(total(data.pinned.parts))}`, { anchor: "end", kind: "lk-muted" }));
  }
  return marks;
}

function waterfallTable(data, t) {
  const head = ["", t("table.mean_ms"), t("table.what"), ...(data.pinned ? [`◇ ${data.pinned.name}`] : [])];
  const rows = rowsOf(data).map((part) => [
    t(`part.${part}`),
    milliseconds(data.parts?.[part]),
    t(`part.${part}.what`),
    ...(data.pinned ? [milliseconds(data.pinned.parts[part])] : []),
  ]);
  return { head, rows };
}
