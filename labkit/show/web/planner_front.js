// TTFT against TPOT of every layout that holds the model, its dot as large as the tokens that one GPU makes: near the
// corner is good, large is good. Those that no other beats in all three have a dark rim.

import { layoutName } from "./chooser.js";
import { label, s, textWidth } from "./dom.js";
import { key, Panel } from "./panel.js";
import { digits, milliseconds } from "./text.js";
import { chosenOf } from "./planner_answer.js";

const FRONT_HEIGHT = 330;
const FRONT_BOX = { left: 62, top: 14, bottom: 46, right: 18 };
const DECADES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

export function frontPanel(ctx) {
  return new Panel(ctx, {
    id: "front",
    pick: () => frontData(ctx),
    empty: (data, t) => (data.dots.length ? "" : t("front.none")),
    legend: (data, t) => [key("lk-dot-does", t("front.does")), key("lk-dot-misses", t("front.misses")), key("lk-dot-front", t("front.line")), key("lk-limit-swatch", t("percentiles.limit"))],
    paint: (panel, svg, data, width) => paintFront(svg, data, width, ctx),
    table: (data, t) => ({ head: ["", "TTFT", "TPOT", t("front.per_gpu"), ""], rows: data.dots.map((dot) => [layoutName(dot.layout), milliseconds(dot.ttft), milliseconds(dot.tpot), digits(dot.perGpu), dot.front ? t("front.line") : ""]) }),
    describe: (data, t) => `${t("front.title")}. ${data.dots.filter((dot) => dot.front).map((dot) => `${layoutName(dot.layout)} ${milliseconds(dot.ttft)}, ${milliseconds(dot.tpot)}`).join("; ")}`,
    note: (data, t) => t("front.note", { p: data.percentile }),
  });
}

function frontData(ctx) {
  const [plan, card] = [ctx.plan(), ctx.card()];
  const percentile = plan.objective?.percentile ?? "p95";
  const front = new Set((plan.front ?? []).map((row) => row.layout));
  const dots = (plan.layouts ?? []).flatMap((candidate) => {
    const [ttft, tpot] = [candidate.predictions?.ttft_ms?.[percentile], candidate.predictions?.tpot_ms?.[percentile]];
    if (!(ttft > 0) || !(tpot > 0)) return [];
    return [{ layout: candidate.layout, ttft, tpot, perGpu: candidate.tokens_per_gpu, does: candidate.does, front: front.has(candidate.layout) }];
  });
  return { dots, percentile, limits: { ttft: plan.objective?.ttft_ms, tpot: plan.objective?.tpot_ms }, chosen: chosenOf(plan), selected: card.candidate?.layout ?? "" };
}

function paintFront(svg, data, width, ctx) {
  const { dots, limits } = data;
  const x = frontScale(dots.map((dot) => dot.ttft), limits.ttft, FRONT_BOX.left, width - FRONT_BOX.right);
  const y = frontScale(dots.map((dot) => dot.tpot), limits.tpot, FRONT_HEIGHT - FRONT_BOX.bottom, FRONT_BOX.top);
  const largest = Math.max(...dots.map((dot) => dot.perGpu ?? 0)) || 1;
  const radius = (dot) => 3 + 9 * Math.sqrt((dot.perGpu ?? 0) / largest);
  svg.append(...frontGrid(x, y, width), ...frontLimits(x, y, limits, width));
  const front = dots.filter((dot) => dot.front).sort((a, b) => a.ttft - b.ttft);
  const rank = (dot) => (dot.layout === data.selected ? 2 : dot.front ? 1 : 0);
  const order = [...dots].sort((a, b) => rank(a) - rank(b) || radius(b) - radius(a));
  for (const dot of order) svg.append(frontDot(dot, x, y, radius(dot), data, ctx));
  svg.append(...frontNames(front, dots, data, x, y, radius, width));
  return FRONT_HEIGHT;
}

function frontDot(dot, x, y, r, data, ctx) {
  const kind = [dot.does ? "lk-dot-does" : "lk-dot-misses", dot.front ? "lk-dot-front" : "", dot.layout === data.selected ? "lk-dot-selected" : ""].join(" ");
  const [cx, cy] = [x.at(dot.ttft), y.at(dot.tpot)];
  const mark = s("g", { class: "lk-dot", "data-layout": dot.layout, onclick: () => ctx.select(dot.layout) },
    dot.layout === data.selected ? s("circle", { cx, cy, r: r + 4, class: "lk-dot-ring" }) : null,
    s("circle", { cx, cy, r, class: kind }));
  mark.append(s("title", {}, `${layoutName(dot.layout)}: TTFT ${milliseconds(dot.ttft)}, TPOT ${milliseconds(dot.tpot)}, ${ctx.t("front.per_gpu")} ${digits(dot.perGpu)}`));
  return mark;
}

/** Names where there is room: the chosen first, then the one looked at, then the front. */
function frontNames(front, dots, data, x, y, radius, width) {
  const wanted = [data.chosen, data.selected, ...front.map((dot) => dot.layout)];
  const marks = [];
  const spots = dots.map((dot) => [x.at(dot.ttft), y.at(dot.tpot), radius(dot) * 0.7]);
  const placed = [];
  const free = (layout) => layout === data.chosen || layout === data.selected; // their names may lie on other dots
  const taken = spots.map(([cx, cy, r]) => ({ left: cx - r, right: cx + r, top: cy - r, bottom: cy + r }));
  for (const layout of new Set(wanted)) {
    const dot = dots.find((candidate) => candidate.layout === layout);
    if (!dot) continue;
    const text = layoutName(layout);
    const w = textWidth(text, 12, 600) + 4;
    const [cx, cy, r] = [x.at(dot.ttft), y.at(dot.tpot), radius(dot) + (layout === data.selected ? 5 : 2)];
    const places = [[cx + r, cy - 8], [cx - r - w, cy - 8], [cx - w / 2, cy - r - 15], [cx - w / 2, cy + r + 1]];
    const spot = places.map(([left, top]) => ({ left, top, right: left + w, bottom: top + 15 }))
      .find((box) => box.left > FRONT_BOX.left && box.right < width - 2 && box.top > 2 && box.bottom < FRONT_HEIGHT - FRONT_BOX.bottom - 1 && !(free(layout) ? placed : taken).some((other) => boxesOverlap(box, other)));
    if (!spot) continue;
    taken.push(spot);
    placed.push(spot);
    marks.push(label(spot.left + 2, spot.top + 12, text, { kind: layout === data.chosen ? "lk-strong" : "lk-small" }));
  }
  return marks;
}

function boxesOverlap(a, b) {
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}

function frontScale(values, limit, from, to) {
  const all = [...values, ...(limit > 0 ? [limit] : [])];
  let [low, high] = [Math.min(...all) / 1.25, Math.max(...all) * 1.25];
  if (high / low < 4) [low, high] = [low / 1.6, high * 1.6];
  const at = (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  let marks = DECADES.filter((value) => value >= low && value <= high);
  while (marks.length > 7) marks = marks.filter((_, i) => i % 2 === 0);
  return { at, marks };
}

function frontGrid(x, y, width) {
  const bottom = FRONT_HEIGHT - FRONT_BOX.bottom;
  const fits = Math.max(1, Math.floor((width - FRONT_BOX.left) / 64));
  const shown = x.marks.filter((_, i) => i % Math.ceil(x.marks.length / fits) === 0);
  return [
    ...shown.flatMap((value) => [s("path", { d: `M${x.at(value)} ${FRONT_BOX.top}V${bottom}`, class: "lk-grid" }), label(x.at(value), bottom + 16, milliseconds(value), { anchor: "middle", kind: "lk-muted lk-small" })]),
    ...y.marks.flatMap((value) => [s("path", { d: `M${FRONT_BOX.left} ${y.at(value)}H${width - FRONT_BOX.right}`, class: "lk-grid" }), label(FRONT_BOX.left - 6, y.at(value) + 4, milliseconds(value), { anchor: "end", kind: "lk-muted lk-small" })]),
    label((FRONT_BOX.left + width - FRONT_BOX.right) / 2, FRONT_HEIGHT - 8, "TTFT →", { anchor: "middle", kind: "lk-muted" }),
    label(2, FRONT_BOX.top - 2, "TPOT ↑", { kind: "lk-muted lk-small" }),
  ];
}

function frontLimits(x, y, limits, width) {
  const marks = [];
  if (limits.ttft > 0) marks.push(s("path", { d: `M${x.at(limits.ttft)} ${FRONT_BOX.top}V${FRONT_HEIGHT - FRONT_BOX.bottom}`, class: "lk-objective" }));
  if (limits.tpot > 0) marks.push(s("path", { d: `M${FRONT_BOX.left} ${y.at(limits.tpot)}H${width - FRONT_BOX.right}`, class: "lk-objective" }));
  return marks;
}
