// What each rank has and does: memory against its budget, who holds which piece, and where its time goes. One row a
// rank in every panel, in the same order, so that an eye can run along.

import { fitted, label, s, textWidth, widest } from "./dom.js";
import { Panel, key, pinKey, pinOf } from "./panel.js";
import { linear } from "./scale.js";
import { bytes, percent } from "./text.js";

// ---- memory --------------------------------------------------------------------------------------------------------

const MEMORY = ["weights", "kv", "other", "free"];

export function memoryPanel(ctx) {
  return new Panel(ctx, {
    id: "memory",
    pick: (frame, pin) => ({
      ranks: frame.lab?.memory ?? [],
      pinned: pin?.lab ? pinOf(pin, { ranks: pin.lab.memory }) : null,
        lacks: pin && !pin.lab ? pinOf(pin, { lacks: true }) : null,
    }),
    legend: (data, t) => [...MEMORY.map((part) => key(`lk-mem-${part}`, t(`memory.${part}`))), pinKey(data.pinned ?? data.lacks, t)].filter(Boolean),
    empty: (data, t) => (data.ranks.length ? "" : t("ranks.empty")),
    paint: paintMemory,
    describe: (data, t) => `${t("memory.title")}: ${data.ranks.map((m) => `${rankName(m.rank, t)} ${memoryText(m, t)}`).join("; ")}`,
    table: memoryTable,
  });
}

function rankName(rank, t) {
  return rank == null ? t("rank.all") : t("rank", { rank });
}

function budgetOf(memory) {
  return memory.weights + memory.kv + memory.free;
}

function memoryText(memory, t) {
  return MEMORY.map((part) => `${t(`memory.${part}`)} ${bytes(memory[part])}`).join(" · ");
}

function paintMemory(panel, svg, data, width) {
  const { t } = panel.ctx;
  const x0 = widest(data.ranks.map((m) => rankName(m.rank, t))) + 12;
  const end = Math.max(...data.ranks.map((m) => budgetOf(m) + m.other), 1);
  const x = linear(end, x0, width - 2);
  data.ranks.forEach((memory, i) => svg.append(...memoryRow(memory, i * 46, x, x0, width, t, data.pinned)));
  return data.ranks.length * 46 + 2;
}

/** Weights, KV and what is free fill the budget; what the process needs beside it lies beyond the budget's line. */
function memoryRow(memory, y, x, x0, width, t, pinned) {
  const marks = [label(0, y + 17, rankName(memory.rank, t))];
  if (!budgetOf(memory)) return [...marks, label(x0, y + 17, t("memory.unused"), { kind: "lk-muted" })];
  let from = 0;
  for (const part of ["weights", "kv", "free", "other"]) {
    const to = from + memory[part];
    marks.push(s("rect", { x: x(from), y: y + 4, width: Math.max(memory[part] ? 1.5 : 0, x(to) - x(from)), height: 18, class: `lk-mem-${part}` }));
    from = to;
  }
  const budget = x(budgetOf(memory));
  marks.push(s("line", { x1: budget, x2: budget, y1: y, y2: y + 26, class: "lk-budget" }));
  const before = pinned?.ranks.find((m) => m.rank === memory.rank);
  if (before?.weights) {
    const weights = x(before.weights);
    marks.push(s("path", { d: `M${weights} ${y + 7}l6 6-6 6-6-6z`, class: "lk-diamond-mark" }));
  }
  marks.push(label(x0, y + 38, memoryLine(memory, before, width - x0, t), { kind: "lk-muted" }));
  return marks;
}

/** The figures in words where there is room, bare where there is not. */
function memoryLine(memory, before, room, t) {
  const budget = t("memory.of", { budget: bytes(budgetOf(memory)) });
  const words = ["weights", "kv", "other"].map((part) => `${t(`memory.${part}`)} ${bytes(memory[part])}`);
  const bare = [bytes(memory.weights), bytes(memory.kv)];
  const ghost = before?.weights ? [`◇ ${bytes(before.weights)}`] : [];
  const lines = [[...words, budget, ...ghost], [words[0], words[1], ...ghost], [...bare, budget]].map((parts) => parts.join(" · "));
  return lines.find((line) => textWidth(line) <= room) ?? fitted(lines[2], room);
}

function memoryTable(data, t) {
  const head = ["", ...MEMORY.map((part) => t(`memory.${part}`)), t("memory.budget"), ...(data.pinned ? [`◇ ${data.pinned.name}: ${t("memory.weights")}`] : [])];
  const rows = data.ranks.map((m) => [
    rankName(m.rank, t), ...MEMORY.map((part) => bytes(m[part])), bytes(budgetOf(m)),
    ...(data.pinned ? [bytes(data.pinned.ranks.find((p) => p.rank === m.rank)?.weights)] : []),
  ]);
  return { head, rows };
}

// ---- who holds what ------------------------------------------------------------------------------------------------

export function ownershipPanel(ctx) {
  return new Panel(ctx, {
    id: "ownership",
    pick: (frame) => ({ ranks: frame.lab?.ownership ?? [] }),
    legend: (data, t) => [key("lk-solid", t("ownership.partitioned")), key("lk-hatched", t("ownership.replicated"))],
    empty: (data, t) => (data.ranks.length ? "" : t("ranks.empty")),
    paint: paintOwnership,
    describe: (data, t) => `${t("ownership.title")}: ${data.ranks.map((r) => ownershipText(r, t)).join("; ")}`,
    table: ownershipTable,
  });
}

function partNames(data) {
  const names = new Set(data.ranks.flatMap((row) => row.parts.map((piece) => piece.part)));
  const known = PART_ORDER.filter((name) => names.has(name));
  return [...known, ...[...names].filter((name) => !known.includes(name))];
}

const PART_ORDER = ["embedding", "attention", "mlp", "experts", "router", "norm", "head", "kv"];

function partName(part, t) {
  const known = t(`own.${part}`);
  return known === `own.${part}` ? part : known;
}

function pieceText(piece, t) {
  const share = piece.of > 1 ? `${piece.index + 1}/${piece.of}` : t("ownership.whole");
  return `${share} ${t(`ownership.${piece.kind}`)}`;
}

function ownershipText(row, t) {
  return `${rankName(row.rank, t)}: ${row.parts.map((p) => `${partName(p.part, t)} ${pieceText(p, t)}`).join(", ")}`;
}

function hatches(id) {
  return s("defs", {}, Array.from({ length: 8 }, (_, i) =>
    s("pattern", { id: `${id}-${i}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { width: 6, height: 6, class: `lk-shard-${i} lk-faint` }),
      s("rect", { width: 2.2, height: 6, class: `lk-shard-${i}` }),
    )));
}

function paintOwnership(panel, svg, data, width) {
  const { t } = panel.ctx;
  const patternId = `lk-hatch-${panel.ctx.pageId}`;
  const names = partNames(data);
  const left = widest(data.ranks.map((row) => rankName(row.rank, t))) + 14;
  const cell = (width - left) / names.length;
  svg.append(hatches(patternId));
  names.forEach((name, i) =>
    svg.append(label(left + i * cell, 12, fitted(partName(name, t), cell - 6), { kind: "lk-muted", title: partName(name, t) })));
  let y = 20;
  let replica = data.ranks[0].replica;
  for (const row of data.ranks) {
    if (row.replica !== replica) y += 8; // a gap between replicas: they share nothing
    replica = row.replica;
    svg.append(label(0, y + 16, rankName(row.rank, t)));
    for (const piece of row.parts) {
      svg.append(...paintPiece(piece, left + names.indexOf(piece.part) * cell, y, cell - 8, patternId));
    }
    y += 44;
  }
  return y;
}

/** The cell is the whole part; the filled stretch is this rank's piece, where it lies in the whole. */
function paintPiece(piece, x, y, width, patternId) {
  const step = width / Math.max(1, piece.of);
  const color = piece.index % 8;
  const fill = piece.kind === "replicated" ? { fill: `url(#${patternId}-${color})` } : { class: `lk-shard-${color}` };
  const share = piece.of > 1 ? `${piece.index + 1}/${piece.of} ` : "";
  const size = bytes(piece.bytes);
  const text = textWidth(share + size, 11) <= width + 4 ? share + size : share || fitted(size, width + 4, 11);
  return [
    s("rect", { x, y, width, height: 22, rx: 3, class: "lk-track" }),
    s("rect", { x: x + piece.index * step, y, width: Math.max(2, step), height: 22, rx: 3, ...fill }),
    s("rect", { x: x + piece.index * step, y, width: Math.max(2, step), height: 22, rx: 3, class: "lk-outline" }),
    label(x, y + 35, text.trim(), { kind: "lk-small lk-muted" }),
  ];
}

function ownershipTable(data, t) {
  const names = partNames(data);
  const head = ["", ...names.map((name) => partName(name, t))];
  const rows = data.ranks.map((row) => [
    rankName(row.rank, t),
    ...names.map((name) => {
      const piece = row.parts.find((p) => p.part === name);
      return piece ? `${pieceText(piece, t)}, ${bytes(piece.bytes)}` : "–";
    }),
  ]);
  return { head, rows };
}

// ---- where the time goes -------------------------------------------------------------------------------------------

const SHARES = ["compute", "wait", "transfer", "idle"];
const GROUPS = ["all", "prefill", "mixed", "decode"];

export function sharesPanel(ctx) {
  return new Panel(ctx, {
    id: "shares",
    pick: (frame) => frame.steps,
    legend: () => [],
    empty: (data, t) => (GROUPS.some((group) => data[group].length) ? "" : t("shares.empty")),
    paint: paintShares,
    describe: (data, t) => `${t("shares.title")}: ${GROUPS.flatMap((g) => data[g].map((row) => `${t(`shares.${g}`)} ${shareText(row, t)}`)).join("; ")}`,
    table: sharesTable,
  });
}

function shareText(row, t) {
  return `${rankName(row.rank, t)} ${SHARES.map((share) => `${t(`share.${share}`)} ${percent(row[share])}`).join(", ")}`;
}

/** The heads of the number columns carry the swatches, so that they are the legend too. */
function paintShares(panel, svg, data, width) {
  const { t } = panel.ctx;
  const column = Math.max(54, widest(SHARES.map((share) => t(`share.${share}`)), 12) + 20);
  const narrow = width < 4 * column + 230;
  const cols = { x0: widest([rankName(10, t), rankName(null, t)]) + 12, x1: narrow ? width - 2 : width - 4 * column - 6, width, column, narrow };
  let y = shareHeads(svg, cols, t);
  for (const group of GROUPS.filter((name) => data[name].length)) {
    svg.append(label(0, y + 14, t(`shares.${group}`), { kind: "lk-value" }));
    y += 21;
    for (const row of data[group]) {
      svg.append(...shareRow(row, y, cols, t));
      y += narrow ? 38 : 22;
    }
    y += 6;
  }
  return y;
}

function columnRight(cols, i) {
  if (cols.narrow) return cols.x0 + ((cols.width - cols.x0) * (i + 1)) / SHARES.length - 8;
  return cols.width - (SHARES.length - 1 - i) * cols.column - 2;
}

function shareHeads(svg, cols, t) {
  SHARES.forEach((share, i) => {
    const text = t(`share.${share}`);
    const right = columnRight(cols, i);
    svg.append(
      s("rect", { x: right - textWidth(text) - 15, y: 4, width: 10, height: 10, rx: 2, class: `lk-share-${share}` }),
      label(right, 13, text, { anchor: "end", kind: "lk-muted" }),
    );
  });
  return 20;
}

function shareRow(row, y, cols, t) {
  const x = linear(1, cols.x0, cols.x1);
  const marks = [label(0, y + 13, rankName(row.rank, t)), s("rect", { x: cols.x0, y: y + 2, width: cols.x1 - cols.x0, height: 14, rx: 2, class: "lk-track" })];
  let from = 0;
  for (const share of SHARES) {
    const to = from + row[share];
    if (row[share] > 0) marks.push(s("rect", { x: x(from), y: y + 2, width: Math.max(0.5, x(to) - x(from)), height: 14, class: `lk-share-${share}` }));
    from = to;
  }
  SHARES.forEach((share, i) => {
    marks.push(label(columnRight(cols, i), y + (cols.narrow ? 30 : 13), percent(row[share]), { anchor: "end", kind: "lk-value" }));
  });
  return marks;
}

function sharesTable(data, t) {
  const head = ["", ...SHARES.map((share) => t(`share.${share}`))];
  const rows = GROUPS.flatMap((group) =>
    data[group].map((row) => [
      `${t(`shares.${group}`)}, ${rankName(row.rank, t)}`,
      ...SHARES.map((share) => percent(row[share])),
    ]));
  return { head, rows };
}
