// The last steps, rank by rank, instant by instant: when each computed, waited, transferred or stood idle, and who was
// last. A bar for each stretch between two instants of the recorder; between steps there is nothing.

import { label, s, textWidth, widest } from "./dom.js";
import { plain } from "./measures.js";
import { Panel, key } from "./panel.js";
import { linear, ticks } from "./scale.js";
import { digits, milliseconds, percent } from "./text.js";

const STRETCHES = ["compute", "wait", "transfer", "idle"];
const STEP_ROW = 34;

export function lastStepsPanel(ctx) {
  return new Panel(ctx, {
    id: "laststeps",
    wide: true,
    pick: (frame) => frame.timeline ?? { span_ms: 0, steps: [], ranks: [], one_clock: true },
    note: (data, t) => (data.steps.length ? t("laststeps.note", { n: data.steps.length, span: milliseconds(data.span_ms) }) : ""),
    legend: (data, t) => (data.steps.length ? [...STRETCHES.map((kind) => key(`lk-share-${kind}`, t(`share.${kind}`))), data.one_clock ? null : t("laststeps.clocks")].filter(Boolean) : []),
    empty: (data, t) => (data.steps.length ? "" : t("laststeps.empty")),
    paint: paintLastSteps,
    describe: (data, t) => `${t("laststeps.title")}: ${data.ranks.map((row) => `${t("rank", { rank: row.rank })} ${stretchText(row, t)}, ${lastText(row, t)}`).join("; ")}`,
    table: lastStepsTable,
  });
}

function sumsOf(row) {
  const sums = [0, 0, 0, 0];
  row.bars.forEach(([, length, kind]) => { sums[kind] += length; });
  return sums;
}

function stretchText(row, t) {
  return sumsOf(row).map((sum, i) => `${t(`share.${STRETCHES[i]}`)} ${milliseconds(sum)}`).join(", ");
}

function lastText(row, t) {
  return row.of ? t("laststeps.last", { n: row.last, of: row.of }) : t("laststeps.alone");
}

/** The rank that was last three times in four: a pair's members share it evenly, and more members less often each. */
function isStraggler(row) {
  return row.of >= 12 && row.last / row.of > 0.75;
}

function paintLastSteps(panel, svg, data, width) {
  const { t } = panel.ctx;
  const x0 = widest(data.ranks.map((row) => t("rank", { rank: row.rank }))) + 12;
  const lasts = data.ranks.map((row) => `${isStraggler(row) ? "▲ " : ""}${lastText(row, t)}`);
  const narrow = width < 620;
  const x1 = narrow ? width - 2 : width - widest(lasts) - 14;
  const x = linear(data.span_ms, x0, x1);
  const rowHeight = narrow ? STEP_ROW + 14 : STEP_ROW;
  const top = 20;
  const bottom = top + data.ranks.length * rowHeight;
  svg.append(...stepHeads(data, x, bottom, t));
  data.ranks.forEach((row, i) => {
    const y = top + i * rowHeight;
    svg.append(label(0, y + 18, t("rank", { rank: row.rank })), s("rect", { x: x0, y: y + 4, width: x1 - x0, height: 21, rx: 2, class: "lk-track lk-between" }));
    svg.append(...stretches(row, y, x));
    const kind = isStraggler(row) ? "lk-warn" : "lk-muted";
    svg.append(narrow ? label(x0, y + 38, lasts[i], { kind: `${kind} lk-small` }) : label(width - 2, y + 18, lasts[i], { anchor: "end", kind }));
  });
  for (const tick of ticks(data.span_ms, Math.max(2, Math.floor((x1 - x0) / 130)))) {
    if (tick && x(tick) > x1 - 26) continue;
    svg.append(label(x(tick), bottom + 14, tick ? plain(`${digits(tick)} ms`) : "0", { anchor: tick ? "middle" : "start", kind: "lk-muted" }));
  }
  return bottom + 20;
}

function stretches(row, y, x) {
  return row.bars.map(([start, length, kind]) => {
    const left = x(start);
    return s("rect", { x: left.toFixed(1), y: y + 4, width: Math.max(0.4, x(start + length) - left).toFixed(1), height: 21, class: `lk-stretch lk-share-${STRETCHES[kind]}` });
  });
}

/** A line where each step begins, and what it carried where there is room to say so. */
function stepHeads(data, x, bottom, t) {
  const marks = [];
  let free = 0;
  for (const step of data.steps) {
    const left = x(step.start_ms);
    const text = stepText(step, t);
    marks.push(s("line", { x1: left, x2: left, y1: 16, y2: bottom, class: "lk-rule lk-step" }));
    if (left < free || left + textWidth(text, 11) > Math.max(x(step.end_ms), left + 1)) continue;
    free = left + textWidth(text, 11) + 8;
    marks.push(label(left + 2, 11, text, { kind: "lk-muted lk-small" }));
  }
  return marks;
}

function stepText(step, t) {
  if (step.prefill_tokens && step.decodes) return t("laststeps.mixed", step);
  return t(step.prefill_tokens ? "laststeps.prefill" : "laststeps.decode", step);
}

function lastStepsTable(data, t) {
  const head = ["", ...STRETCHES.map((kind) => t(`share.${kind}`)), t("laststeps.last_head"), t("laststeps.last_share")];
  const rows = data.ranks.map((row) => [t("rank", { rank: row.rank }), ...sumsOf(row).map(milliseconds), `${row.last} / ${row.of}`, row.of ? percent(row.last / row.of) : "–"]);
  return { head, rows };
}
