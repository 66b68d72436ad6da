// Where the ranks stand and what joins them: a box a node, a box a rank with the cores or the GPU that it has, a line for
// each two of them, wider where more bytes pass, and below each rank the groups that the layout has put it in.

import { h, label, s, textWidth, widest } from "./dom.js";
import { FABRICS, bandwidth, fabricName, microseconds, rangeText, spans } from "./measures.js";
import { Panel, key } from "./panel.js";
import { bytes } from "./text.js";

const RANK = { width: 104, height: 46 };
const PILL = 19;
const ARC = 36;
const INSIDE = 14;
const NODE_HEAD = 44;
const MAX_LABELLED = 4; // ranks of a node, beyond which its links are told together

export function topologyPanel(ctx) {
  return new Panel(ctx, {
    id: "topology",
    wide: true,
    pick: (frame) => pickTopology(frame, ctx.measured()),
    note: (data, t) => (data.pairs.length ? "" : t("measure.none")),
    legend: topologyLegend,
    empty: (data, t) => (data.nodes.length ? "" : t("ranks.empty")),
    paint: paintTopology,
    describe: (data, t) => `${t("topology.title")}: ${data.nodes.map((node) => nodeText(node, t)).join("; ")}. ${linkTexts(data, t).join("; ")}`,
    table: topologyTable,
  });
}

function pickTopology(frame, told) {
  const machine = told.machine ?? {};
  return {
    nodes: frame.nodes,
    groups: frame.groups.filter((group) => group.axis !== "world"),
    pairs: told.measured?.pairs ?? [],
    cores: told.cores_of_ranks ?? {},
    threads: frame.lab?.machine.threads_per_rank ?? 1,
    numCores: machine.num_cores ?? frame.lab?.machine.num_cores ?? 0,
    memory: machine.memory_bytes ?? null,
    numa: machine.numa_nodes ?? {},
    host: machine.host ?? "",
    gpus: frame.lab?.machine.fabric.startsWith("nccl") ? (machine.gpus ?? []) : [],
    gpuLinks: machine.gpu_links ?? [],
    link: frame.link_between,
  };
}

function topologyLegend(data, t) {
  const kinds = new Map(data.pairs.map((pair) => [`${pair.fabric} ${pair.spans_nodes}`, pair]));
  const lines = [...kinds.values()].sort((a, b) => FABRICS.indexOf(a.fabric) - FABRICS.indexOf(b.fabric));
  const axes = [...new Set(data.groups.map((group) => group.axis))];
  return [
    ...lines.map((pair) => key(`lk-stroke lk-fabric-${pair.fabric}`, fabricName(pair.fabric, pair.spans_nodes, t))),
    lines.length ? t("topology.wider") : null,
    axes.length ? h("span", {}, t("topology.groups")) : null,
  ].filter(Boolean);
}

function nodeText(node, t) {
  return t("topology.node_text", { node: node.node, host: node.host, ranks: spans(node.ranks) });
}

/** Of each kind of link: how many pairs, and from what to what. */
function linkTexts(data, t) {
  const kinds = new Map();
  for (const pair of data.pairs) {
    const kind = `${pair.fabric} ${pair.spans_nodes}`;
    kinds.set(kind, [...(kinds.get(kind) ?? []), pair]);
  }
  return [...kinds.values()].map((pairs) => `${fabricName(pairs[0].fabric, pairs[0].spans_nodes, t)}: ${rangesOfPairs(pairs)}`);
}

function rangesOfPairs(pairs) {
  return `${rangeText(pairs.map((pair) => pair.bandwidth_gb_s), bandwidth)} · ${rangeText(pairs.map((pair) => pair.latency_us), microseconds)}`;
}

function paintTopology(panel, svg, data, width) {
  const { t } = panel.ctx;
  const axes = [...new Set(data.groups.map((group) => group.axis))];
  const gap = 18;
  const beside = (width - gap * (data.nodes.length - 1)) / data.nodes.length >= Math.max(250, RANK.width * Math.min(4, data.nodes[0].ranks.length) + 40);
  const boxWidth = beside ? (width - gap * (data.nodes.length - 1)) / data.nodes.length : width;
  let [x, y, bottom] = [0, 0, 0];
  const boxes = [];
  for (const node of data.nodes) {
    const box = { x, y, width: boxWidth, ...nodeHeights(node, data, axes, boxWidth) };
    boxes.push(box);
    svg.append(...nodeMarks(node, box, data, axes, t));
    bottom = Math.max(bottom, box.y + box.height);
    if (beside) x += boxWidth + gap;
    else y = box.y + box.height + gap;
  }
  if (data.nodes.length < 2) return bottom + 2;
  svg.append(...switchMarks(boxes, bottom, beside, data, width, t));
  return bottom + 52;
}

function perRow(node, width) {
  return Math.max(1, Math.min(node.ranks.length, Math.floor((width - 2 * INSIDE) / (RANK.width + 8))));
}

function nodeHeights(node, data, axes, width) {
  const columns = perRow(node, width);
  const rows = Math.ceil(node.ranks.length / columns);
  const arcs = rows === 1 && node.ranks.length > 1 ? (node.ranks.length - 1) * ARC : 0;
  const summary = rows > 1 || node.ranks.length > MAX_LABELLED ? 20 : 0;
  return { columns, arcs, summary, height: NODE_HEAD + summary + arcs + rows * (RANK.height + axes.length * PILL + 10) + INSIDE };
}

function nodeMarks(node, box, data, axes, t) {
  const inside = data.pairs.filter((pair) => node.ranks.includes(pair.a) && node.ranks.includes(pair.b));
  const marks = [
    s("rect", { x: box.x + 0.5, y: box.y + 0.5, width: box.width - 1, height: box.height - 1, rx: 10, class: "lk-node" }),
    label(box.x + INSIDE, box.y + 20, t("topology.node", { node: node.node, host: node.host }), { kind: "lk-strong" }),
    label(box.x + INSIDE, box.y + 37, nodeFacts(node, data, box.width, t), { kind: "lk-muted lk-small" }),
  ];
  if (box.summary && inside.length) {
    marks.push(label(box.x + INSIDE, box.y + 56, `${t("topology.pairs", { n: inside.length })}: ${rangesOfPairs(inside)}`, {}));
  }
  const step = (box.width - 2 * INSIDE) / box.columns;
  const rowHeight = RANK.height + axes.length * PILL + 10;
  const places = new Map(node.ranks.map((rank, i) => [rank, {
    x: box.x + INSIDE + step * ((i % box.columns) + 0.5),
    y: box.y + NODE_HEAD + box.summary + box.arcs + Math.floor(i / box.columns) * rowHeight,
  }]));
  if (box.arcs) marks.push(...arcMarks(node, inside, places, step, t));
  for (const rank of node.ranks) marks.push(...rankMarks(rank, places.get(rank), node, data, axes, t));
  return marks;
}

/** Of the machine that the lab server runs on; what another one has is not known here. */
function nodeFacts(node, data, width, t) {
  if (node.host !== data.host) return "";
  const isShared = data.nodes.filter((other) => other.host === node.host).length > 1;
  const parts = data.gpus.length
    ? [`${data.gpus.length} × ${data.gpus[0].name}`, data.memory == null ? "" : bytes(data.memory)]
    : [t(isShared ? "topology.cores_shared" : "topology.cores", { n: data.numCores }), data.memory == null ? "" : bytes(data.memory), numaText(data.numa, t)];
  const shown = parts.filter(Boolean);
  while (shown.length > 1 && textWidth(shown.join(" · "), 11) > width - 2 * INSIDE) shown.pop();
  return shown.join(" · ");
}

function numaText(numa, t) {
  const names = Object.keys(numa);
  return names.length > 1 ? names.map((node) => t("topology.numa", { node, cores: spans(numa[node]) })).join(", ") : "";
}

/** A link's width goes with the logarithm of its bandwidth: a decade is 1.2 px. */
function strokeOf(pair) {
  return Math.max(1.2, Math.min(6, 3 + 1.2 * Math.log10(pair.bandwidth_gb_s)));
}

/** Links of one node as arcs above its ranks; the farther apart, the higher. Links not measured yet are dashed. */
function arcMarks(node, pairs, places, step, t) {
  const [lines, texts] = [[], []];
  const isDense = node.ranks.length > MAX_LABELLED;
  const all = node.ranks.flatMap((a, i) => node.ranks.slice(i + 1).map((b, d) => ({ a, b, distance: d + 1 })));
  for (const { a, b, distance } of all.reverse()) {
    const pair = pairs.find((each) => each.a === a && each.b === b);
    const [from, to] = [places.get(a), places.get(b)];
    const high = from.y - distance * ARC + 12;
    const spread = Math.min(26, step / 4) * (1 - distance / (node.ranks.length + 1));
    const d = `M${from.x + spread} ${from.y}C${from.x + spread} ${high - 8} ${to.x - spread} ${high - 8} ${to.x - spread} ${to.y}`;
    lines.push(s("path", { d, class: pair ? `lk-link lk-fabric-${pair.fabric}` : "lk-link lk-unmeasured", "stroke-width": pair ? (strokeOf(pair) * (isDense ? 0.45 : 1)).toFixed(1) : 1.5 }));
    if (!pair || isDense) continue;
    lines.at(-1).append(s("title", {}, `${a} – ${b}: ${bandwidth(pair.bandwidth_gb_s)}, ${microseconds(pair.latency_us)}`));
    const middle = from.y - 0.75 * (from.y - high + 8);
    texts.push(...linkLabel(pair, (from.x + to.x) / 2, middle, step));
  }
  return [...lines, ...texts];
}

function linkLabel(pair, x, y, room) {
  const choices = [`${bandwidth(pair.bandwidth_gb_s)} · ${microseconds(pair.latency_us)}`, bandwidth(pair.bandwidth_gb_s)];
  const text = choices.find((choice) => textWidth(choice, 12, 600) + 12 <= room);
  if (!text) return [];
  const width = textWidth(text, 12, 600) + 10;
  return [
    s("rect", { x: x - width / 2, y: y - 9, width, height: 18, rx: 4, class: "lk-label-ground" }),
    label(x, y + 4, text, { anchor: "middle", kind: "lk-link-label" }),
  ];
}

function rankMarks(rank, { x, y }, node, data, axes, t) {
  const left = x - RANK.width / 2;
  const marks = [
    s("rect", { x: left, y, width: RANK.width, height: RANK.height, rx: 6, class: "lk-rank" }),
    label(x, y + 19, t("rank", { rank }), { anchor: "middle", kind: "lk-strong" }),
    label(x, y + 36, placeOf(rank, node, data, t), { anchor: "middle", kind: "lk-muted lk-small" }),
  ];
  axes.forEach((axis, i) => {
    const groups = data.groups.filter((group) => group.axis === axis);
    const mine = groups.findIndex((group) => group.ranks.includes(rank));
    if (mine < 0) return;
    const top = y + RANK.height + 5 + i * PILL;
    const text = `${axis.toUpperCase()} ${groups.length > 1 ? String.fromCharCode(97 + (mine % 26)) : ""} ${groups[mine].ranks.indexOf(rank) + 1}/${groups[mine].ranks.length}`.replace("  ", " ");
    marks.push(
      s("rect", { x: left, y: top, width: RANK.width, height: PILL - 4, rx: 7, class: `lk-pill lk-of-${axis}` }),
      label(x, top + 11.5, text, { anchor: "middle", kind: "lk-small" }));
  });
  return marks;
}

/** What the rank has: a GPU of its own, or the cores that it may run on with its threads. */
function placeOf(rank, node, data, t) {
  if (data.gpus.length) {
    const local = node.ranks.indexOf(rank);
    const gpu = node.host === data.host ? data.gpus[local] : null;
    return gpu?.numa_node == null ? `GPU ${local}` : `GPU ${local} · NUMA ${gpu.numa_node}`;
  }
  const cores = data.cores[rank];
  return cores ? t("topology.on_cores", { cores: spans(cores) }) : t("topology.threads", { n: data.threads });
}

/** What joins the nodes: one line to which each has a stub, with what was set and what was measured. */
function switchMarks(boxes, bottom, beside, data, width, t) {
  const across = data.pairs.filter((pair) => pair.spans_nodes);
  const stroke = across.length ? Math.max(...across.map(strokeOf)) : 1.5;
  const kind = across.length ? `lk-link lk-fabric-${across[0].fabric}` : "lk-link lk-unmeasured";
  const y = bottom + 18;
  const marks = [];
  if (beside) {
    const centers = boxes.map((box) => box.x + box.width / 2);
    marks.push(s("path", { d: `M${centers[0]} ${y}H${centers.at(-1)}`, class: kind, "stroke-width": stroke }));
    centers.forEach((x) => marks.push(s("path", { d: `M${x} ${bottom}V${y}`, class: kind, "stroke-width": stroke })));
  } else {
    boxes.slice(1).forEach((box) => marks.push(s("path", { d: `M${width / 2} ${box.y - 18}V${box.y}`, class: kind, "stroke-width": stroke })));
  }
  const words = [
    t("topology.between"), across.length ? fabricName(across[0].fabric, false, t) : "", data.link ? t("topology.set", { link: data.link }) : "",
    across.length ? t("topology.measured", { range: rangesOfPairs(across) }) : t("topology.unmeasured"),
  ].filter(Boolean);
  while (words.length > 1 && widest([words.join(" · ")]) > width) words.shift();
  marks.push(label(width / 2, bottom + 44, words.join(" · "), { anchor: "middle" }));
  return marks;
}

function topologyTable(data, t) {
  const head = ["", t("topology.node_head"), t("topology.place"), t("topology.groups_head")];
  const rows = data.nodes.flatMap((node) => node.ranks.map((rank) => [
    t("rank", { rank }), `${node.node} (${node.host})`, placeOf(rank, node, data, t),
    data.groups.filter((group) => group.ranks.includes(rank)).map((group) => `${group.axis.toUpperCase()} {${group.ranks.join(", ")}} ${group.fabric}`).join("; ") || "–",
  ]));
  const links = data.gpuLinks.map((link) => [
    `GPU ${link.first} – ${link.second}`, link.num_nvlinks ? `${link.num_nvlinks} × NVLink` : "–", link.way || "–", "",
  ]);
  return { head, rows: [...rows, ...links] };
}
