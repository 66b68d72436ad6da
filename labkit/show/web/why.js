// Where TTFT and TPOT go for the median request and for the one at p95, each part from its own instants; what is pinned
// (a low load, another layout) stands below each bar on the same scale. Underneath: what holds them up, with the
// figures that say so.

import { h, label, s, widest } from "./dom.js";
import { Panel, key, pinKey, pinOf } from "./panel.js";
import { StickyEnd, linear, ticks } from "./scale.js";
import { milliseconds, percent } from "./text.js";

const WHY_PARTS = ["lateness", "network", "queue", "compute", "wait", "transfer", "handoff", "delivery", "unaccounted"];
const WHY_FIGURES = ["ttft", "tpot"];
const BAR_HEIGHT = 16;
const GHOST_HEIGHT = 9;
const GROUP_TOP = 24;

export function whyPanel(ctx) {
  const panel = new Panel(ctx, {
    id: "why",
    wide: true,
    pick: (frame, pin) => ({
      why: frame.why ?? null, running: frame.role === "running",
      pinned: pinOf(pin, { why: pin?.why ?? null, lacks: Boolean(pin && !pin.why?.waterfalls.length) }),
    }),
    legend: whyLegend,
    empty: (data, t) => (data.why?.waterfalls.length || data.pinned?.why?.waterfalls.length ? "" : t(data.running ? "why.waiting" : "why.empty")),
    paint: paintWhy,
    below: reasonsBelow,
    describe: (data, t) => `${t("why.title")}: ${(data.why?.waterfalls ?? []).map((fall) => `${fallName(fall, t)} ${milliseconds(fall.total_ms)}`).join(", ")}`,
    table: whyTable,
  });
  panel.ends = Object.fromEntries(WHY_FIGURES.map((figure) => [figure, new StickyEnd()]));
  return panel;
}

function fallName({ figure, q }, t) {
  return `${figure.toUpperCase()}, ${t(q === 50 ? "why.median" : "why.p95")}`;
}

function fallOf(why, figure, q) {
  return why?.waterfalls.find((fall) => fall.figure === figure && fall.q === q) ?? null;
}

/** Parts that are nothing anywhere have no place in the legend. */
function seenParts(data) {
  const falls = [...(data.why?.waterfalls ?? []), ...(data.pinned?.why?.waterfalls ?? [])];
  return WHY_PARTS.filter((part) => falls.some((fall) => (fall.parts[part] ?? 0) > 0.003 * fall.total_ms));
}

function whyLegend(data, t) {
  return [...seenParts(data).map((part) => key(`lk-swatch-part lk-part-${part}`, t(part === "compute" ? "share.compute" : `part.${part}`))), pinKey(data.pinned, t)].filter(Boolean);
}

function paintWhy(panel, svg, data, width) {
  const beside = width > 700;
  const gap = 36;
  const groupWidth = beside ? (width - gap) / 2 : width;
  let bottom = 0;
  WHY_FIGURES.forEach((figure, i) => {
    const left = beside ? i * (groupWidth + gap) : 0;
    const top = beside || i === 0 ? 0 : bottom + 14;
    bottom = Math.max(bottom, paintGroup(panel, svg, data, figure, { left, top, width: groupWidth }));
  });
  return bottom;
}

function paintGroup(panel, svg, data, figure, { left, top, width }) {
  const { t } = panel.ctx;
  const pairs = [50, 95].map((q) => ({ q, now: fallOf(data.why, figure, q), then: fallOf(data.pinned?.why, figure, q) }));
  const falls = pairs.flatMap(({ now, then }) => [now, then]).filter(Boolean);
  const end = panel.ends[figure].for(Math.max(0.1, ...falls.map((fall) => fall.total_ms)));
  const totals = falls.map((fall) => `◇ ${milliseconds(fall.total_ms)}`);
  const names = [50, 95].map((q) => t(q === 50 ? "why.median" : "why.p95"));
  const x = linear(end, left + widest(names) + 12, left + width - widest(totals, 13, 600) - 10);
  svg.append(label(left, top + 13, figure.toUpperCase(), { kind: "lk-strong" }));
  let y = top + GROUP_TOP;
  pairs.forEach(({ now, then }, i) => {
    svg.append(label(left, y + 12.5, names[i], { kind: "lk-muted" }));
    svg.append(...bar(now, x, y, BAR_HEIGHT, left + width, "", t));
    if (data.pinned) svg.append(...bar(then, x, y + BAR_HEIGHT + 5, GHOST_HEIGHT, left + width, "◇ ", t));
    y += BAR_HEIGHT + (data.pinned ? GHOST_HEIGHT + 18 : 12);
  });
  for (const tick of ticks(end, 3)) {
    svg.prepend(s("line", { x1: x(tick), x2: x(tick), y1: top + GROUP_TOP - 4, y2: y - 4, class: "lk-grid" })); // under the bars
    if (x(tick) < x(end) - 1 || tick === 0) svg.append(label(x(tick), y + 11, tick === 0 ? "0" : milliseconds(tick).replace(".0 ms", " ms"), { anchor: tick ? "middle" : "start", kind: "lk-muted" }));
  }
  return y + 18;
}

/** Below nothing: a part below 0 (the first token was longer on its way than the last) takes no width. */
function bar(fall, x, y, height, right, mark, t) {
  if (!fall) return mark ? [] : [label(x(0), y + 12.5, "–", { kind: "lk-muted" })];
  const marks = [];
  let before = 0;
  for (const part of WHY_PARTS) {
    const value = Math.max(0, fall.parts[part] ?? 0);
    const [from, to] = [x(before), x(before + value)];
    before += value;
    if (to - from < 0.3) continue;
    const piece = s("rect", { x: from, y, width: to - from, height, class: `lk-part-${part}${fall.few ? " lk-few-part" : ""}${mark ? " lk-ghost-part" : ""}` });
    piece.append(s("title", {}, `${t(part === "compute" ? "share.compute" : `part.${part}`)}: ${milliseconds(value)}, ${percent(value / (fall.total_ms || 1))}`));
    marks.push(piece);
  }
  const kind = mark || fall.few ? "lk-muted" : "lk-value";
  const title = fall.few ? t("ladder.few_title", { rung: `p${fall.q}`, n: fall.n, needed: { 50: 20, 95: 200 }[fall.q] }) : "";
  marks.push(label(right - 2, y + height / 2 + 4.5, `${mark}${milliseconds(fall.total_ms)}`, { anchor: "end", kind, title }));
  return marks;
}

/** In English the verdict's own sentence with its figures; in other languages its gist, and the sentence after it. */
function reasonsBelow(data, t, panel) {
  const reasons = (data.why?.reasons ?? []).filter(({ figure, q }) => fallOf(data.why, figure, q));
  return reasons.map(({ figure, q, kind, sentence }) =>
    h("p", { class: "lk-reason", "data-kind": kind },
      h("span", { class: "lk-muted-text" }, `${fallName({ figure, q }, panel.ctx.t)}: `), h("b", {}, t(`why.${kind.replace(" ", "_")}`)), " ", h("span", { lang: "en" }, sentence)));
}

function whyTable(data, t) {
  const falls = [...(data.why?.waterfalls ?? [])];
  const ghosts = data.pinned?.why?.waterfalls ?? [];
  const head = ["", ...falls.map((fall) => fallName(fall, t)), ...ghosts.map((fall) => `◇ ${fallName(fall, t)}`)];
  const cell = (fall, part) => milliseconds(fall.parts[part]);
  const rows = WHY_PARTS.map((part) => [t(part === "compute" ? "share.compute" : `part.${part}`), ...[...falls, ...ghosts].map((fall) => cell(fall, part))]);
  return { head, rows: [...rows, [t("why.total"), ...[...falls, ...ghosts].map((fall) => milliseconds(fall.total_ms))], ["n", ...[...falls, ...ghosts].map((fall) => fall.n)]] };
}
