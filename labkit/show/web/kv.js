// KV tokens: how many are resident, how many more would fit, for each replica; and pools with roles side by side, with
// what goes from the one that prefills to the one that decodes.

import { fitted, label, s, textWidth, widest } from "./dom.js";
import { Panel, key } from "./panel.js";
import { bytes, count, digits, milliseconds, percent } from "./text.js";

const KV_ROW = 46;

export function kvPanel(ctx) {
  return new Panel(ctx, {
    id: "kv",
    wanted: (frame) => frame.kv.length > 0,
    pick: (frame) => ({ replicas: frame.kv }),
    note: (data, t) => (data.replicas.some((r) => r.shared_by > 1) ? t("kv.shared", { n: Math.max(...data.replicas.map((r) => r.shared_by)) }) : ""),
    legend: (_, t) => [key("lk-mem-kv", t("kv.resident")), key("lk-mem-free", t("kv.room"))],
    paint: paintKv,
    describe: (data, t) => `${t("kv.title")}: ${data.replicas.map((r) => `${replicaName(r, t)} ${kvLine(r, t).join(", ")}`).join("; ")}`,
    table: kvTable,
  });
}

function replicaName(replica, t) {
  const name = t("inflight.replica", { i: replica.replica });
  return replica.role === "any" ? name : `${name} · ${t(`role_of.${replica.role}`)}`;
}

function roomOf(replica) {
  return replica.total_tokens - replica.resident_tokens;
}

function kvLine(replica, t) {
  const parts = [t("kv.of", { resident: count(replica.resident_tokens), total: count(replica.total_tokens) }), t("kv.left", { n: count(roomOf(replica)) })];
  if (replica.more_requests != null) parts.push(t("kv.more", { n: count(replica.more_requests) }));
  return parts;
}

function paintKv(panel, svg, data, width) {
  const { t } = panel.ctx;
  const names = data.replicas.map((replica) => replicaName(replica, t));
  const x0 = widest(names) + 12;
  const x1 = width - widest(["100 %"], 13, 600) - 12;
  const most = Math.max(...data.replicas.map((r) => r.total_tokens), 1);
  data.replicas.forEach((replica, i) => {
    const y = i * KV_ROW;
    const whole = (x1 - x0) * (replica.total_tokens / most);
    const share = replica.total_tokens ? replica.resident_tokens / replica.total_tokens : 0;
    svg.append(
      label(0, y + 17, names[i]),
      s("rect", { x: x0, y: y + 4, width: whole, height: 18, rx: 2, class: "lk-mem-free lk-outlined" }),
      s("rect", { x: x0, y: y + 4, width: Math.max(share ? 1.5 : 0, whole * share), height: 18, rx: 2, class: "lk-mem-kv" }),
      label(width - 2, y + 17, percent(share), { anchor: "end", kind: "lk-value" }),
      label(x0, y + 38, lineThatFits(kvLine(replica, t), width - x0), { kind: "lk-muted" }));
  });
  return data.replicas.length * KV_ROW + 2;
}

function lineThatFits(parts, room) {
  const shown = [...parts];
  while (shown.length > 1 && textWidth(shown.join(" · ")) > room) shown.pop();
  return fitted(shown.join(" · "), room);
}

function kvTable(data, t) {
  const head = ["", t("kv.resident"), t("kv.room"), t("kv.more_head"), t("kv.shared_head")];
  const rows = data.replicas.map((replica) => [
    replicaName(replica, t), count(replica.resident_tokens), count(roomOf(replica)), count(replica.more_requests), replica.shared_by,
  ]);
  return { head, rows };
}

// ---- pools ----------------------------------------------------------------------------------------------------------

const POOL_HEIGHT = 132;
const BRIDGE = 132;

export function poolsPanel(ctx) {
  return new Panel(ctx, {
    id: "pools",
    wide: true,
    wanted: (frame) => (frame.lab?.pools ?? []).length > 1,
    pick: (frame) => ({ pools: frame.lab.pools, handoff: frame.handoff }),
    paint: paintPools,
    describe: (data, t) => `${t("pools.title")}: ${data.pools.map((pool) => poolText(pool, t)).join("; ")}; ${handoffLines(data.handoff, t).join(", ")}`,
    table: poolsTable,
  });
}

function poolRanks({ ranks }, t) {
  return ranks.length > 1 ? t("pools.ranks", { ranks: `${ranks[0]}–${ranks.at(-1)}` }) : t("rank", { rank: ranks[0] });
}

function poolText(pool, t) {
  return `${t(`role_of.${pool.role}`)} ${pool.layout_name}, ${poolRanks(pool, t)}, ${t("inflight.counts", pool)}, KV ${percent(pool.resident_tokens / (pool.total_tokens || 1))}`;
}

/** Only where one pool hands its requests to another. */
function hasHandoff(data) {
  return data.pools.some((pool) => pool.role === "prefill");
}

function handoffLines(handoff, t) {
  if (!handoff) return [t("pools.handoff_none")];
  const time = handoff.p50_ms == null ? "" : `${milliseconds(handoff.p50_ms)}${handoff.p95_ms == null ? "" : ` (p95 ${milliseconds(handoff.p95_ms)})`}`;
  const rate = handoff.mib_per_s == null ? "" : `${digits(handoff.mib_per_s)} MiB/s`;
  const size = handoff.bytes == null ? "" : t("pools.each", { size: bytes(handoff.bytes) });
  const num = handoff.num == null ? "" : t("pools.transfers", { n: count(handoff.num) });
  return [size, time, rate, num].filter(Boolean);
}

function paintPools(panel, svg, data, width) {
  const { t } = panel.ctx;
  const n = data.pools.length;
  const bridge = hasHandoff(data) ? Math.max(BRIDGE, widest(handoffLines(data.handoff, t)) + 40) : 16;
  const stacked = width < 200 * n + bridge;
  const box = { width: stacked ? width : (width - bridge * (n - 1)) / n };
  const step = stacked ? POOL_HEIGHT + (hasHandoff(data) ? 92 : 12) : box.width + bridge;
  data.pools.forEach((pool, i) => {
    const at = stacked ? { x: 0, y: i * step } : { x: i * step, y: 0 };
    svg.append(...poolBox(pool, { ...at, ...box }, t));
  });
  const at = stacked ? { x: 20, y: POOL_HEIGHT + 4, down: true } : { x: box.width, y: 24, width: bridge };
  if (hasHandoff(data)) svg.append(...handoffMarks(data, at, t));
  return (stacked ? (n - 1) * step : 0) + POOL_HEIGHT + 2;
}

function poolBox(pool, box, t) {
  const share = pool.total_tokens ? pool.resident_tokens / pool.total_tokens : 0;
  const x = box.x + 14;
  const inner = box.width - 28;
  const kvText = t("kv.of", { resident: count(pool.resident_tokens), total: count(pool.total_tokens) });
  return [
    s("rect", { x: box.x + 1, y: box.y + 1, width: box.width - 2, height: POOL_HEIGHT - 2, rx: 8, class: "lk-pool" }),
    label(x, box.y + 24, fitted(t(`role_of.${pool.role}`), inner, 15, 600), { kind: "lk-pool-role" }),
    label(x, box.y + 44, fitted(`${pool.layout_name} · ${poolRanks(pool, t)}`, inner), { kind: "lk-muted" }),
    label(x, box.y + 70, fitted(t("inflight.counts", pool), inner, 13, 600), { kind: "lk-value" }),
    s("rect", { x, y: box.y + 84, width: inner, height: 12, rx: 2, class: "lk-mem-free lk-outlined" }),
    s("rect", { x, y: box.y + 84, width: Math.max(share ? 1.5 : 0, inner * share), height: 12, rx: 2, class: "lk-mem-kv" }),
    label(x, box.y + 114, fitted(`KV ${percent(share)} · ${kvText}`, inner), { kind: "lk-muted" }),
  ];
}

function handoffMarks(data, at, t) {
  const lines = handoffLines(data.handoff, t);
  const title = t("pools.handoff");
  if (at.down) {
    return [
      s("path", { d: `M${at.x} ${at.y}v78m-6 -8l6 8l6 -8`, class: "lk-arrow" }),
      label(at.x + 18, at.y + 14, title, { kind: "lk-value" }),
      ...lines.map((line, i) => label(at.x + 18, at.y + 30 + i * 16, line, { kind: "lk-muted" })),
    ];
  }
  const middle = at.x + at.width / 2;
  return [
    label(middle, at.y + 4, title, { anchor: "middle", kind: "lk-value" }),
    s("path", { d: `M${at.x + 10} ${at.y + 16}h${at.width - 20}m-8 -6l8 6l-8 6`, class: "lk-arrow" }),
    ...lines.map((line, i) => label(middle, at.y + 40 + i * 17, line, { anchor: "middle", kind: "lk-muted" })),
  ];
}

function poolsTable(data, t) {
  const head = ["", t("pools.layout"), t("pools.ranks_head"), t("inflight.running"), t("inflight.waiting"), t("kv.resident"), t("kv.room")];
  const rows = data.pools.map((pool) => [
    t(`role_of.${pool.role}`), pool.layout_name, pool.ranks.join(", "), pool.running, pool.waiting, count(pool.resident_tokens), count(pool.total_tokens - pool.resident_tokens),
  ]);
  if (hasHandoff(data)) rows.push([t("pools.handoff"), handoffLines(data.handoff, t).join(", "), "", "", "", "", ""]);
  return { head, rows };
}
