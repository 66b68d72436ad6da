// What crosses between ranks: how large and how often, on logarithmic axes, one mark an axis and phase. Marks of layouts
// that were seen before stay, hollow, so that the strategies can be compared; lines join equal bytes a second.

import { h, label, s, textWidth, widest } from "./dom.js";
import { layoutName } from "./chooser.js";
import { Panel } from "./panel.js";
import { bytes, count, digits } from "./text.js";

const CROSSING_AXES = ["tp", "pcp", "pp", "dp", "dcp", "ep", "world", "handoff"];
const SHAPES = { prefill: "triangle", decode: "circle", mixed: "square" };
const CROSSING_HEIGHT = 300;
const MAX_SEEN = 8;
const BYTE_STEP = 5; // a grid line every 2^5
const MARK = 6;

export function crossingsPanel(ctx) {
  const seen = new Map();
  return new Panel(ctx, {
    id: "crossings",
    wanted: (frame) => remember(seen, frame),
    pick: (frame) => ({ layout: frame.lab?.layout ?? "", marks: marksOf(seen, frame.lab?.layout), running: frame.role === "running" }),
    note: (_, t) => t("crossings.note"),
    legend: crossingsLegend,
    empty: (data, t) => (data.marks.length ? "" : t(data.running ? "crossings.waiting" : "crossings.empty")),
    paint: paintCrossings,
    describe: (data, t) => `${t("crossings.title")}: ${data.marks.map((mark) => markText(mark, t)).join("; ")}`,
    table: crossingsTable,
  });
}

/** The newest figures of every layout while it had requests: what stands when a load has ended is kept as it was. */
function remember(seen, frame) {
  const layout = frame.lab?.layout;
  const isBusy = frame.role === "running" || (frame.role === "watching" && frame.series.running.at(-1) > 0);
  const stands = layout === seen.standing; // for two frames: the first may still carry what crossed before the switch
  seen.standing = layout;
  if (layout && stands && isBusy && frame.crossings.length) {
    seen.delete(layout);
    seen.set(layout, frame.crossings);
    if (seen.size > MAX_SEEN) seen.delete(seen.keys().next().value);
  }
  return seen.size > 0 || (frame.lab?.memory ?? []).filter((rank) => rank.weights).length > 1;
}

/** Flat, those of the present layout last (on top). */
function marksOf(seen, current) {
  const order = [...seen.keys()].sort((a, b) => (a === current) - (b === current));
  return order.flatMap((layout) => seen.get(layout).map((mark) => ({ ...mark, layout, current: layout === current })));
}

function markText(mark, t) {
  return `${layoutName(mark.layout)} ${axisName(mark.axis, t)} ${t(`phase.${mark.phase}`)}: ${bytes(mark.bytes)} × ${digits(mark.per_s)}/s`;
}

function crossingsLegend(data, t) {
  const axes = CROSSING_AXES.filter((axis) => data.marks.some((mark) => mark.axis === axis));
  const phases = Object.keys(SHAPES).filter((phase) => data.marks.some((mark) => mark.phase === phase));
  const sample = (kind, mark) => s("svg", { width: 14, height: 14, "aria-hidden": "true", class: kind }, mark);
  const entry = (picture, text) => h("span", { class: "lk-key" }, picture, text);
  return [
    ...axes.map((axis) => entry(sample("", shape("square", 7, 7, `lk-axis-${axis}`)), axisName(axis, t))),
    ...phases.map((phase) => entry(sample("", shape(SHAPES[phase], 7, 7, "lk-axis-any")), t(`phase.${phase}`))),
    data.marks.some((mark) => !mark.current) ? entry(sample("", shape("circle", 7, 7, "lk-axis-any lk-hollow")), t("crossings.earlier")) : null,
  ].filter(Boolean);
}

/** Axes in capitals, as everywhere; between pools it is no axis that crosses. */
function axisName(axis, t) {
  return axis === "handoff" ? t("part.handoff") : axis.toUpperCase();
}

function shape(kind, x, y, className) {
  const r = MARK;
  if (kind === "circle") return s("circle", { cx: x, cy: y, r: r - 0.5, class: className });
  if (kind === "square") return s("rect", { x: x - r + 1, y: y - r + 1, width: 2 * r - 2, height: 2 * r - 2, class: className });
  return s("path", { d: `M${x} ${y - r}l${r} ${2 * r - 1.5}h${-2 * r}z`, class: className });
}

/** Whole decades and powers of two around the marks. */
function rangesOf(marks) {
  const tens = marks.map((mark) => Math.log10(mark.per_s));
  const twos = marks.map((mark) => Math.log2(mark.bytes));
  const x = [Math.floor(Math.min(...tens) - 0.05), Math.ceil(Math.max(...tens) + 0.05)];
  const y = [BYTE_STEP * Math.floor((Math.min(...twos) - 0.3) / BYTE_STEP), BYTE_STEP * Math.ceil((Math.max(...twos) + 0.3) / BYTE_STEP)];
  return { x: x[1] - x[0] < 2 ? [x[0], x[0] + 2] : x, y: y[1] - y[0] < 2 * BYTE_STEP ? [y[0] - BYTE_STEP, y[1]] : y };
}

function paintCrossings(panel, svg, data, width) {
  const { t } = panel.ctx;
  const { x: [left, right], y: [low, high] } = rangesOf(data.marks);
  const sizes = [];
  for (let power = low; power <= high; power += BYTE_STEP) sizes.push(power);
  const plot = { x0: widest(sizes.map((power) => bytes(2 ** power))) + 10, x1: width - 8, y1: 28, y0: CROSSING_HEIGHT - 42 };
  const scale = {
    x: (perSecond) => plot.x0 + ((Math.log10(perSecond) - left) / (right - left)) * (plot.x1 - plot.x0),
    y: (size) => plot.y0 - ((Math.log2(size) - low) / (high - low)) * (plot.y0 - plot.y1),
  };
  svg.append(...crossingGrid(sizes, [left, right], plot, scale, t));
  const placed = data.marks.map((mark) => ({ mark, x: scale.x(mark.per_s), y: scale.y(mark.bytes) }));
  const taken = placed.map(({ x, y }) => ({ left: x - MARK, right: x + MARK, top: y - MARK, bottom: y + MARK }));
  svg.append(...bandwidthLines({ left, right, low, high }, plot, scale, taken));
  svg.append(...crossingMarks(placed, plot, taken, t));
  return CROSSING_HEIGHT;
}

function crossingGrid(sizes, [left, right], plot, scale, t) {
  const marks = [label(0, 11, t("crossings.y"), { kind: "lk-muted" }), label(plot.x1, CROSSING_HEIGHT - 4, t("crossings.x"), { anchor: "end", kind: "lk-muted" })];
  for (const power of sizes) {
    const y = scale.y(2 ** power);
    marks.push(s("line", { x1: plot.x0, x2: plot.x1, y1: y, y2: y, class: "lk-grid" }), label(plot.x0 - 6, y + 4, bytes(2 ** power), { anchor: "end", kind: "lk-muted" }));
  }
  let free = 0;
  for (let power = left; power <= right; power += 1) {
    const x = scale.x(10 ** power);
    const text = `${power < 0 ? 10 ** power : count(10 ** power)}/s`;
    const half = textWidth(text) / 2;
    const at = Math.min(x, plot.x1 - half);
    marks.push(s("line", { x1: x, x2: x, y1: plot.y1, y2: plot.y0, class: "lk-grid" }));
    if (at - half < free) continue;
    free = at + half + 6;
    marks.push(label(at, plot.y0 + 15, text, { anchor: "middle", kind: "lk-muted" }));
  }
  return marks;
}

/** Bytes a second of one rank: falling lines, named where they meet the frame. */
function bandwidthLines({ left, right, low, high }, plot, scale, taken) {
  const marks = [];
  const perDecade = Math.log2(10);
  for (let power = BYTE_STEP * Math.ceil((low + left * perDecade) / BYTE_STEP) + BYTE_STEP; power < high + right * perDecade; power += BYTE_STEP) {
    const at = (tens) => power - tens * perDecade; // log2 of the size on this line
    const from = Math.max(left, (power - high) / perDecade);
    const to = Math.min(right, (power - low) / perDecade);
    if (to - from < 0.2) continue;
    const [x, y] = [scale.x(10 ** from), scale.y(2 ** at(from))];
    marks.push(s("line", { x1: x, y1: y, x2: scale.x(10 ** to), y2: scale.y(2 ** at(to)), class: "lk-iso" }));
    const text = `${bytes(2 ** power)}/s`;
    const end = { x: scale.x(10 ** to), y: scale.y(2 ** at(to)) };
    const place = { x: end.x - 4, y: Math.min(end.y - 5, plot.y0 - 5), anchor: "end" };
    if (claim(taken, box(place, text, 11))) marks.push(label(place.x, place.y, text, { anchor: "end", kind: "lk-muted lk-small" }));
  }
  return marks;
}

function box({ x, y, anchor }, text, sizePx) {
  const width = textWidth(text, sizePx);
  return { left: anchor === "end" ? x - width : x, right: anchor === "end" ? x : x + width, top: y - sizePx, bottom: y + 3 };
}

/** Takes the place unless something is there already. */
function claim(taken, place) {
  const clash = taken.some((other) => place.left < other.right + 3 && place.right > other.left - 3 && place.top < other.bottom + 1 && place.bottom > other.top - 1);
  if (!clash) taken.push(place);
  return !clash;
}

/** Beside the mark; where that is taken further up or down, with a line that leads there. */
function namePlaces(x, y) {
  const near = [{ x: x + 10, y: y + 4, anchor: "start" }, { x: x - 10, y: y + 4, anchor: "end" }, { x: x + 4, y: y - 9, anchor: "start" }, { x: x + 4, y: y + 18, anchor: "start" }];
  const far = [2, 3, 4].flatMap((k) => [
    { x: x + 14, y: y + 4 - 14 * k, anchor: "start" }, { x: x - 14, y: y + 4 - 14 * k, anchor: "end" },
    { x: x + 14, y: y + 4 + 14 * k, anchor: "start" }, { x: x - 14, y: y + 4 + 14 * k, anchor: "end" },
  ]);
  return [...near, ...far.map((place) => ({ ...place, far: true }))];
}

function crossingMarks(placed, plot, taken, t) {
  const drawn = placed.map(({ mark, x, y }) => {
    const figure = shape(SHAPES[mark.phase], x, y, `lk-axis-${mark.axis}${mark.current ? "" : " lk-hollow"}`);
    figure.append(s("title", {}, markText(mark, t)));
    return figure;
  });
  const names = [...placed].reverse().flatMap(({ mark, x, y }) => {
    const text = mark.current ? axisName(mark.axis, t) : layoutName(mark.layout);
    const inside = (place) => place.left > plot.x0 && place.right < plot.x1 && place.top > plot.y1 - 8 && place.bottom < plot.y0;
    const free = namePlaces(x, y).find((place) => inside(box(place, text, 12)) && claim(taken, box(place, text, 12)));
    if (!free) return [];
    const name = label(free.x, free.y, text, { anchor: free.anchor, kind: mark.current ? "lk-strong" : "lk-muted" });
    return free.far ? [s("line", { x1: x, y1: y, x2: free.x, y2: free.y - 4, class: "lk-leader" }), name] : [name];
  });
  return [...drawn, ...names];
}

function crossingsTable(data, t) {
  const head = ["", t("crossings.axis"), t("crossings.phase"), t("crossings.y"), t("crossings.x"), t("crossings.rate"), t("crossings.ops")];
  const rows = [...data.marks].reverse().map((mark) => [
    layoutName(mark.layout), axisName(mark.axis, t), t(`phase.${mark.phase}`), bytes(mark.bytes), `${digits(mark.per_s)}/s`, `${bytes(mark.bytes * mark.per_s)}/s`,
    mark.ops.map(({ op, per_s, bytes: size }) => `${op} ${digits(per_s)}/s × ${bytes(size)}`).join(", "),
  ]);
  return { head, rows };
}
