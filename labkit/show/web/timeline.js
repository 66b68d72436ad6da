// The last minute: throughput in its three units, goodput, and requests in flight. Small multiples on one time axis,
// with a mark where the layout changed; each number is printed large beside its line.

import { fitted, h, label, s, textWidth, widest } from "./dom.js";
import { Panel, key, pinKey, pinOf } from "./panel.js";
import { linear, roundUp } from "./scale.js";
import { digits, percent } from "./text.js";

const SPAN_S = 60;
const TILES = [
  { id: "requests", series: "requests_per_s", kind: "lk-line-a" },
  { id: "goodput", series: "goodput_per_s", kind: "lk-line-b" },
  { id: "input", series: "input_tokens_per_s", kind: "lk-line-c" },
  { id: "output", series: "output_tokens_per_s", kind: "lk-line-d" },
];

export function throughputPanel(ctx) {
  return new Panel(ctx, {
    id: "throughput",
    pick: pickThroughput,
    note: (data, t) => goodputNote(data, t),
    legend: (data, t) => [h("span", {}, t("throughput.smooth")), data.steady == null ? null : key("lk-steady", t("steady.part")), pinKey(data.pinned, t)].filter(Boolean),
    paint: paintThroughput,
    describe: (data, t) => `${t("throughput.title")}: ${TILES.map((tile) => `${t(`throughput.${tile.id}`)} ${digits(data.now[tile.id])}`).join(", ")}`,
    table: throughputTable,
  });
}

function figuresOf(run) {
  return {
    requests: run?.requests_per_s ?? null,
    goodput: run?.goodput.per_s ?? null,
    input: run?.input_tokens_per_s ?? null,
    output: run?.output_tokens_per_s ?? null,
  };
}

function pickThroughput(frame, pin) {
  return {
    series: frame.series,
    now: figuresOf(frame.run),
    goodput: frame.run?.goodput ?? {},
    pinned: pinOf(pin, figuresOf(pin?.run)),
    steady: frame.steady?.steady ? frame.steady.age_s : null,
  };
}

function goodputNote({ goodput }, t) {
  if (goodput.attainment == null) return "";
  return t("throughput.attainment", {
    share: percent(goodput.attainment), low: percent(goodput.low), high: percent(goodput.high),
  });
}

function paintThroughput(panel, svg, data, width) {
  const { t } = panel.ctx;
  const gap = 24;
  const tileWidth = (width - gap) / 2;
  const tileHeight = 104;
  TILES.forEach((tile, i) => {
    const x = (i % 2) * (tileWidth + gap);
    const y = Math.floor(i / 2) * (tileHeight + 8);
    svg.append(...paintTile(tile, data, { x, y, width: tileWidth, height: tileHeight }, t));
  });
  const bottom = 2 * (tileHeight + 8);
  [0, tileWidth + gap].forEach((x) => {
    svg.append(...steadyMark(data.steady, { x0: x, x1: x + tileWidth, y0: bottom - 6 }));
    svg.append(...timeAxis(x, tileWidth, bottom, data.series.marks, t));
  });
  return bottom + 22;
}

function paintTile(tile, data, box, t) {
  const values = data.series[tile.series];
  const pinned = data.pinned?.[tile.id];
  const top = roundUp(Math.max(...values.filter((v) => v != null), pinned ?? 0, 1e-9) * 1.05);
  const plot = { x0: box.x, x1: box.x + box.width, y0: box.y + box.height, y1: box.y + 48 };
  const topText = values.some((v) => v != null) ? t("throughput.top", { value: digits(top) }) : "";
  const number = digits(data.now[tile.id]);
  const unit = t(`throughput.${tile.id}.unit`);
  const pinText = data.pinned ? `◇ ${digits(pinned)}` : "";
  const marks = [
    label(box.x, box.y + 12, fitted(t(`throughput.${tile.id}`), box.width - textWidth(topText) - 6), { kind: "lk-muted" }),
    label(plot.x1, box.y + 12, topText, { anchor: "end", kind: "lk-muted" }),
    label(box.x, box.y + 36, number, { kind: "lk-big" }),
  ];
  const unitX = box.x + textWidth(number, 22, 600) + 8;
  const room = box.width - (unitX - box.x) - (pinText ? textWidth(pinText) + 10 : 0);
  if (room > textWidth(unit)) marks.push(label(unitX, box.y + 36, unit, { kind: "lk-muted" }));
  if (pinText) marks.push(label(plot.x1, box.y + 36, pinText, { anchor: "end", kind: "lk-muted" }));
  marks.push(...sparkline(data.series, values, top, plot, tile.kind, pinned));
  return marks;
}

function sparkline(series, values, top, plot, kind, pinned) {
  const x = timeScale(plot);
  const y = (value) => plot.y0 - (plot.y0 - plot.y1) * (value / top);
  const marks = [s("line", { x1: plot.x0, x2: plot.x1, y1: plot.y0, y2: plot.y0, class: "lk-rule" })];
  marks.push(...switchLines(series.marks, x, plot));
  if (pinned != null) marks.push(s("line", { x1: plot.x0, x2: plot.x1, y1: y(pinned), y2: y(pinned), class: "lk-pin-line" }));
  for (const run of stretches(series.age_s, values)) {
    const line = run.map(([age, value]) => `${x(age).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
    const [first, last] = [x(run[0][0]), x(run[run.length - 1][0])];
    marks.push(s("path", { d: `M${first} ${plot.y0}L${line}L${last} ${plot.y0}z`, class: `lk-area ${kind}` }));
    marks.push(s("path", { d: `M${line}`, class: `lk-line ${kind}` }));
  }
  return marks;
}

function timeScale(plot) {
  const x = linear(SPAN_S, plot.x0, plot.x1);
  return (age) => x(SPAN_S - age);
}

/** Unbroken runs of measured points; a bin without a measurement leaves a gap. */
function stretches(ages, values) {
  const runs = [];
  let current = null;
  values.forEach((value, i) => {
    if (value == null || ages[i] > SPAN_S) current = null;
    else if (current) current.push([ages[i], value]);
    else runs.push((current = [[ages[i], value]]));
  });
  return runs;
}

function switchLines(marks, x, plot) {
  return marks
    .filter((mark) => mark.age_s <= SPAN_S)
    .map((mark) => s("line", { x1: x(mark.age_s), x2: x(mark.age_s), y1: plot.y1, y2: plot.y0, class: "lk-switch-line" }));
}

/** The steady part of the last minute: a bar below the line, from its begin to now. */
function steadyMark(age, plot) {
  if (age == null) return [];
  const x = timeScale(plot);
  const from = x(Math.min(age, SPAN_S));
  return [s("rect", { x: from, y: plot.y0 + 2, width: Math.max(1, plot.x1 - from), height: 3, rx: 1.5, class: "lk-steady" })];
}

/** "60 s ago … now" below the plots, and between them the layouts' names where there is room. */
function timeAxis(x0, width, y, marks, t) {
  const ago = t("time.ago", { s: SPAN_S });
  const now = t("time.now");
  const x = timeScale({ x0, x1: x0 + width });
  const taken = [[x0, x0 + textWidth(ago) + 8], [x0 + width - textWidth(now) - 8, x0 + width]];
  const texts = [
    label(x0, y + 14, ago, { kind: "lk-muted" }),
    label(x0 + width, y + 14, now, { anchor: "end", kind: "lk-muted" }),
  ];
  for (const mark of [...marks].reverse()) {
    const half = textWidth(mark.label) / 2 + 4;
    const middle = x(mark.age_s);
    if (mark.age_s > SPAN_S || taken.some(([from, to]) => middle + half > from && middle - half < to)) continue;
    taken.push([middle - half, middle + half]);
    texts.push(label(middle, y + 14, mark.label, { anchor: "middle", kind: "lk-muted" }));
  }
  return texts;
}

function throughputTable(data, t) {
  const head = ["", t("table.now"), t("table.unit"), ...(data.pinned ? [`◇ ${data.pinned.name}`] : [])];
  const rows = TILES.map((tile) => [
    t(`throughput.${tile.id}`), digits(data.now[tile.id]), t(`throughput.${tile.id}.unit`),
    ...(data.pinned ? [digits(data.pinned[tile.id])] : []),
  ]);
  return { head, rows };
}

// ---- requests in flight -------------------------------------------------------------------------------------------

export function inflightPanel(ctx) {
  return new Panel(ctx, {
    id: "inflight",
    pick: (frame) => ({ series: frame.series, replicas: frame.lab?.replicas ?? [], steady: frame.steady ?? null }),
    legend: (data, t) => [key("lk-running", t("inflight.running")), key("lk-waiting", t("inflight.waiting")), steadyKey(data.steady, t)].filter(Boolean),
    paint: paintInflight,
    describe: (data, t) => `${t("inflight.title")}: ${data.replicas.map((r, i) => replicaText(r, i, t)).join("; ")}`,
    table: inflightTable,
  });
}

function paintInflight(panel, svg, data, width) {
  const { t } = panel.ctx;
  const plot = { x0: 30, x1: width, y1: 12, y0: 118 };
  const sums = data.series.running.map((value, i) => (value ?? 0) + (data.series.waiting[i] ?? 0));
  const top = Math.max(4, roundUp(Math.max(0, ...sums)));
  const x = timeScale(plot);
  const y = (value) => plot.y0 - (plot.y0 - plot.y1) * (value / top);
  svg.append(...countAxis(top, y, plot), ...switchLines(data.series.marks, x, plot));
  svg.append(...stack(data.series, x, y));
  svg.append(...steadyMark(data.steady?.steady ? data.steady.age_s : null, plot));
  svg.append(...timeAxis(plot.x0, plot.x1 - plot.x0, plot.y0 + 4, data.series.marks, t));
  return paintReplicas(svg, data.replicas, plot.y0 + 34, width, t);
}

function steadyKey(steady, t) {
  if (!steady) return null;
  if (steady.steady) return key("lk-steady", t("steady.since", { s: Math.round(steady.age_s) }));
  const text = steady.steady == null ? t("steady.unknown") : `▲ ${t(`steady.${steady.why}`)}`;
  return h("span", { class: steady.steady == null ? "lk-key" : "lk-key lk-remark-warning", title: steady.sentence }, text);
}

function countAxis(top, y, plot) {
  return [0, top / 2, top].flatMap((value) => [
    s("line", { x1: plot.x0, x2: plot.x1, y1: y(value), y2: y(value), class: value ? "lk-grid" : "lk-rule" }),
    label(plot.x0 - 6, y(value) + 4, Math.round(value * 10) / 10, { anchor: "end", kind: "lk-muted" }),
  ]);
}

function stack(series, x, y) {
  const running = stretches(series.age_s, series.running);
  const totals = series.running.map((value, i) => (value == null ? null : value + (series.waiting[i] ?? 0)));
  const above = stretches(series.age_s, totals);
  return running.flatMap((run, i) => [
    s("path", { d: band(above[i], run, x, y), class: "lk-waiting" }),
    s("path", { d: band(run, run.map(([age]) => [age, 0]), x, y), class: "lk-running" }),
  ]);
}

function band(upper, lower, x, y) {
  const points = [...upper, ...[...lower].reverse()];
  return `M${points.map(([age, value]) => `${x(age).toFixed(1)} ${y(value).toFixed(1)}`).join("L")}z`;
}

function replicaText(replica, index, t) {
  return `${t("inflight.replica", { i: index })}: ${t("inflight.counts", { running: replica.running, waiting: replica.waiting })}`;
}

/** A bar a replica: what it runs, then what waits; all on one scale, so that an uneven routing shows. */
function paintReplicas(svg, replicas, top, width, t) {
  const names = replicas.map((_, i) => t("inflight.replica", { i }));
  const counts = replicas.map((r) => t("inflight.counts", { running: r.running, waiting: r.waiting }));
  const x0 = widest(names) + 14;
  const x1 = width - widest(counts) - 14;
  const x = linear(Math.max(4, ...replicas.map((r) => r.running + r.waiting)), x0, x1);
  replicas.forEach((replica, i) => {
    const y = top + i * 22;
    const both = replica.running + replica.waiting;
    svg.append(
      label(0, y + 12, names[i]),
      s("rect", { x: x0, y: y + 3, width: x1 - x0, height: 10, rx: 2, class: "lk-track" }),
      s("rect", { x: x0, y: y + 3, width: x(both) - x0, height: 10, rx: 2, class: "lk-waiting" }),
      s("rect", { x: x0, y: y + 3, width: x(replica.running) - x0, height: 10, rx: 2, class: "lk-running" }),
      label(width - 2, y + 12, counts[i], { anchor: "end", kind: "lk-muted" }),
    );
  });
  return top + replicas.length * 22;
}

function inflightTable(data, t) {
  const head = ["", t("inflight.running"), t("inflight.waiting")];
  const rows = data.replicas.map((r, i) => [t("inflight.replica", { i }), r.running, r.waiting]);
  return { head, rows };
}
