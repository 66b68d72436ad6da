// Percentile ladders of TTFT and TPOT: p50 to p99 as bars, the objective as a line that can be dragged, the pinned
// layout as hollow diamonds. Values stand in a column of their own, so that no figure ever meets a mark.
//
// The objective's handle is a native range input laid exactly over the axis: keyboard, touch and screen readers come
// with it.

import { h, label, s, widest } from "./dom.js";
import { Panel, diamond, key, pinKey, pinOf } from "./panel.js";
import { StickyEnd, linear, ticks } from "./scale.js";
import { milliseconds } from "./text.js";

const RUNGS = ["p50", "p90", "p95", "p99"];
const RUNG_ROW = 30;
const LADDER_TOP = 26;
const THUMB = 18;

export function ladderPanel(ctx, { id, metric, onObjective, step }) {
  const panel = new Panel(ctx, {
    id,
    pick: (frame, pin) => pickLadder(frame, pin, metric),
    note: (data, t) => t("ladder.n", { n: data.now.n }),
    legend: ladderLegend,
    paint: paintLadder,
    describe: (data, t) => describeLadder(data, t, id),
    table: ladderTable,
  });
  panel.end = new StickyEnd();
  panel.handle = makeHandle(ctx, panel, id, step, (value) => onObjective({ [metric]: value }));
  panel.handleBox = h("div", { class: "lk-handle" }, panel.handle);
  panel.stage.append(panel.handleBox);
  makeLineDraggable(panel);
  return panel;
}

const NONE = { p50: null, p90: null, p95: null, p99: null, mean: null, n: 0, few: [] };

function pickLadder(frame, pin, metric) {
  return {
    now: frame.run?.[metric] ?? NONE,
    name: frame.run?.layout_name ?? "",
    pinned: pinOf(pin, pin?.run[metric]),
    objective: frame.objective[metric],
  };
}

function makeHandle(ctx, panel, id, step, commit) {
  const change = (event) => {
    panel.local = Math.max(step, Number(event.target.value));
    panel.extraKey = panel.local;
    panel.draw();
    commit(panel.local);
  };
  const hold = (held) => () => {
    panel.end.held = held;
  };
  return h("input", {
    type: "range", min: 0, max: 100, step, oninput: change, onpointerdown: hold(true), onpointerup: hold(false),
    onpointercancel: hold(false), "data-objective": id,
  });
}

/** A press on the plot takes the line there, as a press on the slider would. */
function makeLineDraggable(panel) {
  const move = (event) => {
    if (!event.buttons || !panel.plot) return;
    const { x0, x1 } = panel.plot;
    const share = (event.clientX - panel.svg.getBoundingClientRect().left - x0) / (x1 - x0);
    if (share < -0.02 || share > 1.02) return;
    panel.handle.value = share * panel.end.end;
    panel.handle.dispatchEvent(new Event("input"));
  };
  panel.svg.addEventListener("pointerdown", (event) => {
    panel.end.held = true;
    panel.svg.setPointerCapture(event.pointerId);
    move(event);
  });
  panel.svg.addEventListener("pointermove", move);
  panel.svg.addEventListener("pointerup", () => (panel.end.held = false));
}

/** While a visitor drags, the line follows the hand; the kernel's word counts once it agrees. */
function objectiveOf(panel, data) {
  if (panel.local === data.objective) panel.local = undefined;
  return panel.local ?? data.objective;
}

function verdict(value, objective) {
  if (value == null) return "";
  return value <= objective ? "✓" : "✕";
}

function columns(data, width, objective) {
  const now = RUNGS.map((rung) => `${milliseconds(data.now[rung])} ${verdict(data.now[rung], objective)}`);
  const pinned = data.pinned ? RUNGS.map((rung) => milliseconds(data.pinned[rung])) : [];
  const nowWidth = Math.max(72, widest(now, 13, 600) + 10);
  const pinWidth = data.pinned ? Math.max(64, widest(pinned) + 26) : 0;
  return { now, pinned, x0: 40, x1: width - nowWidth - pinWidth - 12, nowRight: width - pinWidth - 2, pinRight: width - 2 };
}

function largest(data, objective) {
  const known = [...RUNGS.map((r) => data.now[r]), ...RUNGS.map((r) => data.pinned?.[r])].filter((v) => v != null);
  return Math.max(objective * 1.15, ...known);
}

function paintLadder(panel, svg, data, width) {
  const { t } = panel.ctx;
  const objective = objectiveOf(panel, data);
  const end = panel.end.for(largest(data, objective));
  const cols = columns(data, width, objective);
  const x = linear(end, cols.x0, cols.x1);
  const bottom = LADDER_TOP + RUNGS.length * RUNG_ROW;
  panel.plot = cols;
  svg.append(...axis(end, x, cols, bottom));
  RUNGS.forEach((rung, i) => svg.append(...row(rung, LADDER_TOP + i * RUNG_ROW + RUNG_ROW / 2, data, cols, x, i, t, objective)));
  svg.append(...objectiveLine(x(objective), objective, cols, bottom, t));
  placeHandle(panel, cols, end, objective, bottom, t);
  return bottom + 40;
}

function axis(end, x, cols, bottom) {
  const marks = ticks(end, cols.x1 - cols.x0 > 260 ? 4 : 2);
  return marks.flatMap((value) => [
    s("line", { x1: x(value), x2: x(value), y1: LADDER_TOP, y2: bottom, class: "lk-grid" }),
    label(x(value), bottom + 36, milliseconds(value).replace(/\.0 ms$| ms$/, ""), { anchor: "middle", kind: "lk-muted" }),
  ]);
}

function row(rung, y, data, cols, x, index, t, objective) {
  const value = data.now[rung];
  const few = data.now.few.includes(rung);
  const missed = value != null && value > objective;
  const parts = [label(0, y + 4, rung, { kind: "lk-rung" })];
  if (value != null) {
    const kind = `lk-bar ${missed ? "lk-missed" : "lk-met"} ${few ? "lk-few" : ""}`;
    parts.push(s("rect", { x: cols.x0, y: y - 8, width: Math.max(2, x(value) - cols.x0), height: 16, rx: 3, class: kind }));
  }
  const title = few ? t("ladder.few_title", { rung, n: data.now.n, needed: needed(rung) }) : "";
  parts.push(label(cols.nowRight, y + 4.5, cols.now[index], { anchor: "end", kind: few ? "lk-value lk-muted" : "lk-value", title }));
  if (data.pinned) {
    const fewThen = data.pinned.few.includes(rung);
    if (data.pinned[rung] != null) parts.push(diamond(x(data.pinned[rung]), y, fewThen));
    const why = fewThen ? t("ladder.few_title", { rung, n: data.pinned.n, needed: needed(rung) }) : "";
    parts.push(label(cols.pinRight, y + 4.5, `◇ ${cols.pinned[index]}`, { anchor: "end", kind: fewThen ? "lk-muted lk-faint-text" : "lk-muted", title: why }));
  }
  return parts;
}

/** Ten samples have to lie beyond a percentile before it is drawn as firm. */
function needed(rung) {
  return { p50: 20, p90: 100, p95: 200, p99: 1000 }[rung];
}

function objectiveLine(x, objective, cols, bottom, t) {
  const text = t("ladder.objective", { value: milliseconds(objective) });
  const half = widest([text], 12, 600) / 2 + 3;
  const middle = Math.min(Math.max(x, half), cols.x1 - half + 40);
  return [
    s("line", { x1: x, x2: x, y1: LADDER_TOP - 4, y2: bottom + 10, class: "lk-objective" }),
    label(middle, 14, text, { anchor: "middle", kind: "lk-objective-text" }),
  ];
}

function placeHandle(panel, cols, end, objective, bottom, t) {
  const { handle, handleBox } = panel;
  Object.assign(handleBox.style, {
    left: `${cols.x0 - THUMB / 2}px`, width: `${cols.x1 - cols.x0 + THUMB}px`, top: `${bottom + 2}px`,
  });
  handle.max = end;
  if (document.activeElement !== handle || !panel.end.held) handle.value = objective;
  handle.setAttribute("aria-label", t(`${panel.id}.objective`));
  handle.setAttribute("aria-valuetext", milliseconds(objective));
}

function ladderLegend(data, t) {
  return [
    key("lk-met", t("ladder.met")),
    key("lk-missed", t("ladder.missed")),
    data.now.few.length ? key("lk-few", t("ladder.few")) : null,
    pinKey(data.pinned, t),
  ].filter(Boolean);
}

function describeLadder(data, t, id) {
  const rungs = RUNGS.map((rung) => `${rung} ${milliseconds(data.now[rung])}`).join(", ");
  return `${t(`${id}.title`)}: ${rungs}; ${t("ladder.objective", { value: milliseconds(data.objective) })}; n = ${data.now.n}`;
}

function ladderTable(data, t) {
  const head = ["", data.name || t("table.now"), t("table.meets"), ...(data.pinned ? [`◇ ${data.pinned.name}`] : [])];
  const rows = [...RUNGS, "mean"].map((rung) => [
    rung === "mean" ? t("table.mean") : rung,
    milliseconds(data.now[rung]),
    rung === "mean" ? "" : verdict(data.now[rung], data.objective),
    ...(data.pinned ? [milliseconds(data.pinned[rung])] : []),
  ]);
  return { head, rows: [...rows, ["n", data.now.n, "", ...(data.pinned ? [data.pinned.n] : [])]] };
}
