// Collectives by size, on logarithmic axes: bus bandwidth, and time with the line through it; and where the messages of
// the model's own steps stand. Measured points are joined by solid lines, what the line says is dotted.

import { fitted, h, label, s, textWidth } from "./dom.js";
import { bandwidth, fabricName, microseconds, plain } from "./measures.js";
import { Panel } from "./panel.js";
import { bytes, percent } from "./text.js";

const CURVE_OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv"];
const CURVE_HEIGHT = 330;
const SIZE_STEP = 4; // a tick every 2^4
const POINT_KINDS = { shm: "circle", gloo: "square", nccl: "triangle" };

export function curvesPanel(ctx) {
  const state = { op: null };
  const panel = new Panel(ctx, {
    id: "curves",
    wide: true,
    pick: (frame) => pickCurves(frame, ctx.measured(), state),
    note: (data, t) => (data.curves.length ? t("curves.note", { dtype: data.dtype }) : ""),
    legend: curvesLegend,
    empty: (data, t) => (data.curves.length ? "" : t("measure.none")),
    paint: paintCurves,
    describe: (data, t) => `${t("curves.title")}, ${data.op}: ${data.curves.map((curve) => curveText(curve, t)).join("; ")}. ${data.messages.map((message) => messageText(message, t)).join("; ")}`,
    table: curvesTable,
  });
  const chooser = opChooser(ctx, (op) => {
    state.op = op;
    panel.data = { ...pickAgain(panel.data, state) };
    panel.draw();
  });
  panel.legend.before(chooser.element);
  const draw = panel.draw.bind(panel);
  panel.draw = () => {
    chooser.show(panel.data);
    draw();
  };
  return panel;
}

function pickCurves(frame, told, state) {
  const measured = told.measured;
  return pickAgain({
    all: measured?.rows ?? [], fits: measured?.fits ?? [], dtype: measured?.dtype ?? "", everyMessage: told.messages ?? [],
    layout: frame.lab?.layout_name ?? "", model: frame.lab?.machine.model ?? "",
  }, state);
}

/** Of the chosen operation; without a choice, the one on which a step of this layout spends most. */
function pickAgain(data, state) {
  const ops = CURVE_OPS.filter((op) => data.all.some((row) => row.op === op));
  const costs = (op) => data.everyMessage.filter((message) => message.op === op).reduce((sum, message) => sum + (message.step_us ?? 0), 0);
  const op = state.op ?? [...ops].sort((a, b) => costs(b) - costs(a))[0] ?? null;
  return { ...data, ops, op, curves: curvesOf(data, op), messages: data.everyMessage.filter((message) => message.op === op) };
}

function curvesOf(data, op) {
  const curves = new Map();
  for (const row of data.all.filter((each) => each.op === op)) {
    const id = `${row.fabric} ${row.group_ranks.join(",")}`;
    if (!curves.has(id)) {
      const fit = data.fits.find((each) => each.op === op && each.fabric === row.fabric && each.group_ranks.join(",") === row.group_ranks.join(","));
      const isSecond = [...curves.values()].some((curve) => curve.fabric === row.fabric);
      curves.set(id, { fabric: row.fabric, ranks: row.group_ranks, axis: row.axis, rows: [], fit, point: isSecond ? "diamond" : POINT_KINDS[row.fabric] });
    }
    curves.get(id).rows.push(row);
  }
  return [...curves.values()];
}

/** Native radio buttons: arrow keys, names and roles for nothing. They stay when the chart is drawn again. */
function opChooser(ctx, onChoice) {
  const segments = h("div", { class: "lk-segments lk-ops" });
  const element = h("fieldset", { class: "lk-chooser lk-op-chooser" }, segments);
  let shown = "";
  const show = (data) => {
    element.hidden = !data?.ops?.length;
    element.setAttribute("aria-label", ctx.t("curves.op"));
    const key = JSON.stringify(data?.ops ?? []);
    if (key !== shown) {
      shown = key;
      segments.replaceChildren(...(data?.ops ?? []).map((op) => h("label", { class: "lk-segment" },
        h("input", { type: "radio", name: `${ctx.pageId}-op`, value: op, onchange: () => onChoice(op) }), h("span", {}, op.replaceAll("_", "-")))));
    }
    for (const input of segments.querySelectorAll("input")) input.checked = input.value === data.op;
  };
  return { element, show };
}

function curveName(curve, t) {
  return `${fabricName(curve.fabric, false, t)}, ${curve.axis === "world" ? "" : `${curve.axis.toUpperCase()} · `}${t("controls.ranks", { n: curve.ranks.length })}`;
}

function fitText({ fit }, t) {
  if (!fit) return "";
  const beta = fit.gb_per_s ? bandwidth(fit.gb_per_s) : t("curves.no_bandwidth");
  return t("curves.fit", { alpha: microseconds(fit.alpha_us), beta, worst: percent(fit.worst_residual) });
}

function curveText(curve, t) {
  return `${curveName(curve, t)}: ${fitText(curve, t)}`;
}

function messageText(message, t) {
  const cost = message.step_us == null ? "" : t("curves.costs", { time: microseconds(message.time_us), step: microseconds(message.step_us) });
  const of = t("curves.message", { phase: t(`curves.phase.${message.phase}`), n: message.count, op: message.op.replaceAll("_", "-"), size: bytes(message.bytes) });
  return `${of}${cost}`;
}

function curvesLegend(data, t) {
  if (!data.curves.length) return [];
  const sample = (curve) => s("svg", { width: 24, height: 14, "aria-hidden": "true" },
    s("path", { d: "M1 7H23", class: `lk-curve lk-fabric-${curve.fabric}` }), point(curve.point, 12, 7, `lk-point lk-fabric-${curve.fabric}`));
  return [
    ...data.curves.map((curve) => h("span", { class: "lk-key" }, sample(curve), `${curveName(curve, t)}: ${fitText(curve, t)}`)),
    data.messages.length ? h("span", { class: "lk-key" }, h("i", { class: "lk-diamond", "aria-hidden": "true" }, "◇"), t("curves.marks", { model: data.model, layout: data.layout })) : null,
  ].filter(Boolean);
}

function point(kind, x, y, className) {
  const r = 4;
  if (kind === "circle") return s("circle", { cx: x, cy: y, r: r - 0.5, class: className });
  if (kind === "square") return s("rect", { x: x - r + 0.5, y: y - r + 0.5, width: 2 * r - 1, height: 2 * r - 1, class: className });
  if (kind === "triangle") return s("path", { d: `M${x} ${y - r}l${r} ${2 * r - 1}h${-2 * r}z`, class: className });
  return s("path", { d: `M${x} ${y - r}l${r} ${r}-${r} ${r}-${r}-${r}z`, class: className });
}

// ---- two charts, beside each other where there is room -------------------------------------------------------------

function paintCurves(panel, svg, data, width) {
  const { t } = panel.ctx;
  const beside = width >= 720;
  const gap = 36;
  const chart = beside ? (width - gap) / 2 : width;
  const sizes = data.curves.flatMap((curve) => curve.rows.map((row) => row.bytes)).concat(data.messages.map((message) => message.bytes));
  const range = { sizes: [Math.floor(Math.log2(Math.min(...sizes))), Math.ceil(Math.log2(Math.max(...sizes)))] };
  paintChart(svg, data, { x: 0, y: 0, width: chart }, range, {
    title: t("curves.busbw"), value: (row) => row.busbw_gb_s, show: bandwidth, line: null,
  }, t);
  const second = beside ? { x: chart + gap, y: 0, width: chart } : { x: 0, y: CURVE_HEIGHT + 14, width: chart };
  paintChart(svg, data, second, range, {
    title: t("curves.time"), value: (row) => row.time_us, show: microseconds, line: (fit, size) => fit.alpha_us + (fit.gb_per_s ? size / (1e3 * fit.gb_per_s) : 0),
  }, t);
  const bottom = beside ? CURVE_HEIGHT : 2 * CURVE_HEIGHT + 14;
  data.messages.forEach((message, i) => svg.append(label(0, bottom + 22 + i * 19, fitted(`◇ ${messageText(message, t)}`, width), { title: messageText(message, t) })));
  return bottom + (data.messages.length ? 12 + data.messages.length * 19 : 0);
}

function paintChart(svg, data, box, range, { title, value, show, line }, t) {
  const values = data.curves.flatMap((curve) => curve.rows.map(value));
  const lows = line ? data.curves.flatMap((curve) => (curve.fit ? [line(curve.fit, 2 ** range.sizes[0])] : [])) : [];
  const y = [Math.floor(Math.log10(Math.min(...values, ...lows.filter((low) => low > 0)))), Math.ceil(Math.log10(Math.max(...values) * 1.02))];
  const decades = [];
  for (let power = y[0]; power <= y[1]; power += 1) decades.push(10 ** power);
  const plot = { x0: box.x + Math.max(...decades.map((each) => textWidth(plain(show(each))))) + 10, x1: box.x + box.width - 4, y1: box.y + 54, y0: box.y + CURVE_HEIGHT - 26 };
  const scale = {
    x: (size) => plot.x0 + ((Math.log2(size) - range.sizes[0]) / (range.sizes[1] - range.sizes[0])) * (plot.x1 - plot.x0),
    y: (each) => plot.y0 - ((Math.log10(each) - y[0]) / (y[1] - y[0] || 1)) * (plot.y0 - plot.y1),
  };
  svg.append(label(box.x, box.y + 12, title, { kind: "lk-strong" }), ...curveGrid(decades, range, plot, scale, show));
  svg.append(...messageLines(data, plot, scale, box, t));
  data.curves.forEach((curve) => svg.append(...curveMarks(curve, data, range, scale, { value, show, line }, t)));
}

function curveGrid(decades, { sizes: [low, high] }, plot, scale, show) {
  const marks = decades.flatMap((value) => [
    s("line", { x1: plot.x0, x2: plot.x1, y1: scale.y(value), y2: scale.y(value), class: "lk-grid" }),
    label(plot.x0 - 6, scale.y(value) + 4, plain(show(value)), { anchor: "end", kind: "lk-muted" }),
  ]);
  for (let power = Math.ceil(low / 2) * 2; power <= high; power += SIZE_STEP) {
    const [x, text] = [scale.x(2 ** power), plain(bytes(2 ** power))];
    const half = textWidth(text) / 2;
    marks.push(
      s("line", { x1: x, x2: x, y1: plot.y1, y2: plot.y0, class: "lk-grid" }),
      label(Math.min(Math.max(x, plot.x0 + half - 8), plot.x1 - half), plot.y0 + 16, text, { anchor: "middle", kind: "lk-muted" }));
  }
  return marks;
}

/** A line down from the name of each message's phase to where its size is; names that would collide share one. */
function messageLines(data, plot, scale, box, t) {
  const marks = [];
  const rows = [box.x - 1, box.x - 1];
  const bySize = new Map();
  for (const message of data.messages) {
    const name = t(`curves.phase.${message.phase}`);
    bySize.set(message.bytes, [...(bySize.get(message.bytes) ?? []), name]);
  }
  for (const [size, names] of [...bySize].sort(([a], [b]) => a - b)) {
    const x = scale.x(size);
    const text = [...new Set(names)].join(", ");
    const half = textWidth(text, 11) / 2;
    const at = Math.min(Math.max(x, box.x + half), plot.x1 - half);
    const row = rows.findIndex((free) => at - half > free + 8);
    marks.push(s("line", { x1: x, x2: x, y1: row === 0 ? 50 + box.y : 36 + box.y, y2: plot.y0, class: "lk-message-line" }));
    if (row < 0) continue;
    rows[row] = at + half;
    marks.push(label(at, box.y + (row === 0 ? 47 : 32), text, { anchor: "middle", kind: "lk-muted lk-small" }));
  }
  return marks;
}

function curveMarks(curve, data, { sizes: [low, high] }, scale, { value, show, line }, t) {
  const kind = `lk-fabric-${curve.fabric}`;
  const marks = [];
  if (line && curve.fit) {
    const places = Array.from({ length: 41 }, (_, i) => 2 ** (low + ((high - low) * i) / 40));
    marks.push(s("path", { d: `M${places.map((size) => `${scale.x(size).toFixed(1)} ${scale.y(Math.max(line(curve.fit, size), 1e-3)).toFixed(1)}`).join("L")}`, class: `lk-curve lk-fit ${kind}` }));
  }
  marks.push(s("path", { d: `M${curve.rows.map((row) => `${scale.x(row.bytes).toFixed(1)} ${scale.y(value(row)).toFixed(1)}`).join("L")}`, class: `lk-curve ${kind}` }));
  for (const row of curve.rows) {
    const mark = point(curve.point, scale.x(row.bytes), scale.y(value(row)), `lk-point ${kind}`);
    mark.append(s("title", {}, `${curveName(curve, t)}, ${bytes(row.bytes)}: ${show(value(row))} (n = ${row.n})`));
    marks.push(mark);
  }
  if (line) marks.push(...messageMarks(curve, data, scale, t));
  return marks;
}

/** Hollow, because the line says so and no message was timed; on the curve of the group that the message crosses. */
function messageMarks(curve, data, scale, t) {
  return data.messages
    .filter((message) => message.time_us != null && message.fabric === curve.fabric && message.ranks === curve.ranks.length)
    .map((message) => {
      const [x, y] = [scale.x(message.bytes), scale.y(message.time_us)];
      const mark = s("path", { d: `M${x} ${y - 7}l7 7-7 7-7-7z`, class: "lk-diamond-mark" });
      mark.append(s("title", {}, messageText(message, t)));
      return mark;
    });
}

function curvesTable(data, t) {
  const head = ["", t("curves.over"), t("curves.size"), t("curves.time_head"), "p90", t("curves.algbw"), t("curves.busbw"), "n", t("curves.wrong")];
  const rows = data.curves.flatMap((curve) => curve.rows.map((row) => [
    row.op.replaceAll("_", "-"), curveName(curve, t), bytes(row.bytes), microseconds(row.time_us), microseconds(row.p90_us), bandwidth(row.algbw_gb_s),
    bandwidth(row.busbw_gb_s), String(row.n), String(row.wrong),
  ]));
  const messages = data.everyMessage.map((message) => [
    `◇ ${t(`curves.phase.${message.phase}`)}`, `${message.axis.toUpperCase()} · ${message.count} × ${message.op.replaceAll("_", "-")}`, bytes(message.bytes),
    microseconds(message.time_us), "", "", "", "", "",
  ]);
  return { head, rows: [...rows, ...messages] };
}
