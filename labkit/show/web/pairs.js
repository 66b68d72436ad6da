// Every two ranks: bandwidth above the diagonal, latency below it, each shaded on its own scale. Strong is good in both.

import { label, s, textWidth, widest } from "./dom.js";
import { bandwidth, fabricName, microseconds } from "./measures.js";
import { Panel, key } from "./panel.js";
import { bytes } from "./text.js";

const MAX_CELL = 150;
const CELL_HEIGHT = 44;

export function pairsPanel(ctx) {
  return new Panel(ctx, {
    id: "pairs",
    pick: (frame) => ({ pairs: ctx.measured().measured?.pairs ?? [], num: frame.lab?.machine.num_ranks ?? 0 }),
    note: (data, t) => (data.pairs.length ? t("pairs.note") : ""),
    legend: (data, t) => (data.pairs.length ? [key("lk-heat-swatch", t("pairs.fast")), t("pairs.halves"), data.pairs.some((p) => p.spans_nodes) ? key("lk-across-swatch", t("pairs.across")) : null].filter(Boolean) : []),
    empty: (data, t) => (data.pairs.length ? "" : t("measure.none")),
    paint: paintPairs,
    describe: (data, t) => `${t("pairs.title")}: ${data.pairs.map((pair) => pairText(pair, t)).join("; ")}`,
    table: pairsTable,
  });
}

function pairText(pair, t) {
  return t("pairs.pair", {
    a: pair.a, b: pair.b, bandwidth: bandwidth(pair.bandwidth_gb_s), latency: microseconds(pair.latency_us),
    fabric: fabricName(pair.fabric, pair.spans_nodes, t),
  });
}

/** 0 (worst) to 1 (best) on a logarithmic scale; 1 where all are within a tenth of each other. */
function goodness(values, lowIsGood) {
  const logs = values.map((value) => Math.log(value));
  const [low, high] = [Math.min(...logs), Math.max(...logs)];
  return (value) => {
    if (high - low < 0.1) return 1;
    const share = (Math.log(value) - low) / (high - low);
    return lowIsGood ? 1 - share : share;
  };
}

function paintPairs(panel, svg, data, width) {
  const { t } = panel.ctx;
  const num = Math.max(...data.pairs.map((pair) => pair.b)) + 1;
  const left = widest([t("rank", { rank: 10 })]) + 12;
  const cell = Math.min(MAX_CELL, (width - left - 2) / num);
  const fast = goodness(data.pairs.map((pair) => pair.bandwidth_gb_s), false);
  const near = goodness(data.pairs.map((pair) => pair.latency_us), true);
  const at = (column, row) => ({ x: left + column * cell, y: 20 + row * CELL_HEIGHT });
  for (let i = 0; i < num; i += 1) {
    const name = cell > textWidth(t("rank", { rank: i })) + 6 ? t("rank", { rank: i }) : String(i);
    svg.append(label(at(i, 0).x + cell / 2, 13, name, { anchor: "middle", kind: "lk-muted" }));
    svg.append(label(0, at(0, i).y + 27, t("rank", { rank: i })));
    const { x, y } = at(i, i);
    svg.append(s("rect", { x: x + 1, y: y + 1, width: cell - 3, height: CELL_HEIGHT - 3, rx: 4, class: "lk-track" }));
  }
  for (const pair of data.pairs) {
    svg.append(...pairCell(at(pair.b, pair.a), cell, fast(pair.bandwidth_gb_s), bandwidth(pair.bandwidth_gb_s), pair, t));
    svg.append(...pairCell(at(pair.a, pair.b), cell, near(pair.latency_us), microseconds(pair.latency_us), pair, t));
  }
  return 20 + num * CELL_HEIGHT + 2;
}

/** Number and unit on two lines, which is narrower; a dashed frame where the pair's ranks stand on two nodes. */
function pairCell({ x, y }, cell, good, text, pair, t) {
  const [number, unit] = text.split(" ");
  const frame = `lk-heat${pair.spans_nodes ? " lk-across" : ""}`;
  const box = s("rect", { x: x + 1, y: y + 1, width: cell - 3, height: CELL_HEIGHT - 3, rx: 4, class: frame, "fill-opacity": (0.06 + 0.44 * good).toFixed(3) });
  box.append(s("title", {}, pairText(pair, t)));
  const marks = [box, label(x + cell / 2, y + 20, number, { anchor: "middle", kind: "lk-value" })];
  if (textWidth(unit, 11) < cell - 4) marks.push(label(x + cell / 2, y + 35, unit, { anchor: "middle", kind: "lk-small" }));
  return marks;
}

function pairsTable(data, t) {
  const head = ["", t("pairs.bandwidth"), t("pairs.size"), t("pairs.latency"), t("pairs.p90"), t("curves.over"), t("curves.wrong")];
  const rows = data.pairs.map((pair) => [
    `${pair.a} – ${pair.b}`, bandwidth(pair.bandwidth_gb_s), bytes(pair.bytes), microseconds(pair.latency_us), microseconds(pair.latency_p90_us),
    fabricName(pair.fabric, pair.spans_nodes, t), String(pair.wrong),
  ]);
  return { head, rows };
}
