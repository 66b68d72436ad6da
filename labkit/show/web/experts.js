// What the experts are asked: tokens of each with the mean and the busiest marked, and what that makes of the ranks.

import { label, s, textWidth, widest } from "./dom.js";
import { Panel, key } from "./panel.js";
import { StickyEnd, linear } from "./scale.js";
import { bytes, count, digits, milliseconds } from "./text.js";

const PLOT_HEIGHT = 110;
const RANK_ROW = 40;

export function expertsPanel(ctx) {
  const panel = new Panel(ctx, {
    id: "experts",
    wide: true,
    wanted: (frame) => frame.experts != null,
    pick: (frame) => frame.experts,
    note: (data, t) => t("experts.note", { ratio: digits(busiestOverMean(data)), n: count(data.num_dropped) }),
    legend: (data, t) => (data.owners.length
      ? groupRanks(data).map((rank) => key(`lk-shard-${rank % 8}`, t("experts.owner", { rank })))
      : [key("lk-shard-0", t("experts.everywhere"))]),
    paint: paintExperts,
    describe: (data, t) => `${t("experts.title")}: ${data.tokens.map((n, i) => `${i}: ${n}`).join(", ")}`,
    table: expertsTable,
  });
  panel.end = new StickyEnd();
  return panel;
}

function meanOf(values) {
  return values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
}

function busiestOverMean(data) {
  const mean = meanOf(data.tokens);
  return mean ? Math.max(...data.tokens) / mean : null;
}

function groupRanks(data) {
  return [...new Set(data.owners.flat())].sort((a, b) => a - b);
}

function paintExperts(panel, svg, data, width) {
  const { t } = panel.ctx;
  const end = panel.end.for(Math.max(...data.tokens, 1));
  const mean = meanOf(data.tokens);
  const meanText = t("experts.mean", { n: count(mean) });
  const plot = { x0: widest([count(end)]) + 8, x1: width - textWidth(meanText) - 8, y0: PLOT_HEIGHT + 16, y1: 16 };
  const y = (value) => linear(end, plot.y0, plot.y1)(value);
  for (const value of [0, end / 2, end]) {
    svg.append(
      s("line", { x1: plot.x0, x2: plot.x1, y1: y(value), y2: y(value), class: value ? "lk-grid" : "lk-rule" }),
      label(plot.x0 - 6, y(value) + 4, count(value), { anchor: "end", kind: "lk-muted" }));
  }
  svg.append(...expertBars(data, plot, y));
  svg.append(
    s("line", { x1: plot.x0, x2: plot.x1, y1: y(mean), y2: y(mean), class: "lk-mean" }),
    label(plot.x1 + 6, y(mean) + 4, meanText, { kind: "lk-muted" }),
    label((plot.x0 + plot.x1) / 2, plot.y0 + 30, t("experts.axis"), { anchor: "middle", kind: "lk-muted" }));
  return expertRanks(svg, data, plot.y0 + 44, width, t);
}

function expertBars(data, plot, y) {
  const slot = (plot.x1 - plot.x0) / data.tokens.length;
  const busiest = data.tokens.indexOf(Math.max(...data.tokens));
  const every = Math.ceil((widest([String(data.tokens.length)]) + 6) / slot);
  return data.tokens.flatMap((tokens, expert) => {
    const x = plot.x0 + expert * slot + slot * 0.12;
    const width = Math.max(1, slot * 0.76);
    const owner = data.owners[expert]?.[0] ?? 0;
    const marks = [s("rect", { x, y: y(tokens), width, height: plot.y0 - y(tokens), class: `lk-expert lk-shard-${owner % 8}` })];
    if (expert % every === 0) marks.push(label(x + width / 2, plot.y0 + 14, expert, { anchor: "middle", kind: "lk-muted" }));
    if (expert === busiest && tokens) marks.push(busiestLabel(`▼ ${count(tokens)}`, x + width / 2, y(tokens) - 3, plot));
    return marks;
  });
}

/** Above its bar, and inside the plot also when that is the first or the last. */
function busiestLabel(text, x, y, plot) {
  const half = textWidth(text, 13, 600) / 2;
  return label(Math.min(Math.max(x, plot.x0 + half), plot.x1 - half), y, text, { anchor: "middle", kind: "lk-value" });
}

function expertRanks(svg, data, top, width, t) {
  const names = data.ranks.map(({ rank }) => t("rank", { rank }));
  const values = data.ranks.map(({ rows }) => t("experts.rows", { n: count(rows) }));
  const x0 = widest(names) + 12;
  const x1 = width - widest(values, 13, 600) - 12;
  const x = linear(Math.max(...data.ranks.map(({ rows }) => rows), 1), x0, x1);
  data.ranks.forEach((rank, i) => {
    const y = top + i * RANK_ROW;
    svg.append(
      label(0, y + 13, names[i]),
      s("rect", { x: x0, y: y + 2, width: x1 - x0, height: 14, rx: 2, class: "lk-track" }),
      s("rect", { x: x0, y: y + 2, width: Math.max(1, x(rank.rows) - x0), height: 14, rx: 2, class: "lk-running" }),
      label(width - 2, y + 13, values[i], { anchor: "end", kind: "lk-value" }),
      label(x0, y + 31, rankLine(rank, width - x0, t), { kind: "lk-muted" }));
  });
  return top + data.ranks.length * RANK_ROW;
}

function rankLine(rank, room, t) {
  const parts = [t("experts.computed", { time: milliseconds(rank.compute_ms) })];
  if (rank.sent_bytes) parts.unshift(t("experts.sent", { size: bytes(rank.sent_bytes) }), t("experts.waited", { time: milliseconds(rank.wait_ms) }));
  while (parts.length > 1 && textWidth(parts.join(" · ")) > room) parts.pop();
  return parts.join(" · ");
}

function expertsTable(data, t) {
  const head = ["", t("experts.tokens"), t("experts.held")];
  const rows = data.tokens.map((tokens, expert) => [
    t("experts.expert", { expert }), count(tokens), data.owners[expert]?.length ? data.owners[expert].join(", ") : t("experts.all_ranks"),
  ]);
  const ranks = data.ranks.map((rank) => [t("rank", { rank: rank.rank }), t("experts.rows", { n: count(rank.rows) }), rankLine(rank, Infinity, t)]);
  return { head, rows: [...rows, ...ranks] };
}
