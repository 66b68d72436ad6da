// What the devices say of themselves, live: a row a device (GPU, rank's process, host), a column a measure, each with its
// last minute. What a device does not tell has no column.

import { label, s, textWidth, widest } from "./dom.js";
import { plain } from "./measures.js";
import { Panel } from "./panel.js";
import { roundUp } from "./scale.js";
import { bytes, digits } from "./text.js";

const ROW = 46;
const COLUMN = 118;
const rate = (value) => `${bytes(value)}/s`;
/** By name of the value, in the order of the columns: how it is shown, and what the scale's end is, where it has one. */
const MEASURES = {
  cpu_cores: { show: (value) => digits(value), end: () => 1 },
  utilisation_percent: { show: (value) => `${Math.round(value)} %`, end: () => 100 },
  memory_used_bytes: { show: bytes, end: (now) => now.memory_total_bytes },
  power_w: { show: (value) => `${Math.round(value)} W` },
  sm_mhz: { show: (value) => `${Math.round(value)} MHz` },
  temperature_c: { show: (value) => `${Math.round(value)} °C` },
  nvlink_tx_bytes_per_s: { show: rate },
  nvlink_rx_bytes_per_s: { show: rate },
  pcie_tx_bytes_per_s: { show: rate },
  pcie_rx_bytes_per_s: { show: rate },
  net_sent_bytes_per_s: { show: rate },
  net_received_bytes_per_s: { show: rate },
};

export function telemetryPanel(ctx) {
  return new Panel(ctx, {
    id: "telemetry",
    pick: pickTelemetry,
    note: (data, t) => (data.source ? t("telemetry.note", { source: t(`telemetry.${data.source}`) }) : ""),
    empty: (data, t) => (data.devices.length ? "" : t("telemetry.empty")),
    paint: paintTelemetry,
    describe: (data, t) => `${t("telemetry.title")}: ${data.devices.map((device) => `${deviceName(device, t)} ${deviceText(device, t)}`).join("; ")}`,
    table: telemetryTable,
  });
}

/** GPUs tell so much that they take the whole row. */
function pickTelemetry(frame, _pin, panel) {
  panel.spec.wide = frame.telemetry.devices.some((device) => device.kind === "gpu");
  panel.element.classList.toggle("lk-wide", panel.spec.wide);
  return frame.telemetry;
}

function deviceName(device, t) {
  if (device.kind === "host") return t("telemetry.host");
  return device.kind === "gpu" ? `GPU ${device.index}` : t("rank", { rank: device.index });
}

function measuresOf(devices) {
  return Object.keys(MEASURES).filter((name) => devices.some((device) => name in device.series));
}

function deviceText(device, t) {
  return measuresOf([device]).map((name) => `${t(`telemetry.${name}`)} ${shown(device, name)}`).join(", ");
}

function shown(device, name) {
  return device.now[name] == null ? "–" : MEASURES[name].show(device.now[name]);
}

/** Devices of one kind share their columns; measures that find no room beside each other go below. */
function paintTelemetry(panel, svg, data, width) {
  const { t } = panel.ctx;
  const left = widest(data.devices.map((device) => deviceName(device, t))) + 14;
  let y = 0;
  for (const kind of ["gpu", "rank", "host"]) {
    const devices = data.devices.filter((device) => device.kind === kind);
    if (!devices.length) continue;
    const names = measuresOf(devices);
    const perBand = Math.max(1, Math.min(names.length, Math.floor((width - left) / COLUMN)));
    for (let from = 0; from < names.length; from += perBand) {
      y = paintBand(svg, devices, names.slice(from, from + perBand), { left, width, perBand }, y, t);
    }
  }
  return y;
}

function paintBand(svg, devices, names, { left, width, perBand }, top, t) {
  const step = (width - left) / perBand;
  names.forEach((name, i) => svg.append(label(left + i * step, top + 12, t(`telemetry.${name}`), { kind: "lk-muted lk-small" })));
  devices.forEach((device, row) => {
    const y = top + 18 + row * ROW;
    svg.append(label(0, y + 15, deviceName(device, t)));
    if (device.throttles.length && names[0] in device.series) svg.append(label(0, y + 30, "▲", { kind: "lk-warn", title: device.throttles.join(", ") }));
    names.forEach((name, i) => name in device.series && svg.append(...minute(device, name, commonEnd(devices, name), { x: left + i * step, y, width: step - 16 })));
  });
  const throttled = devices.filter((device) => device.throttles.length);
  const after = top + 18 + devices.length * ROW + 4;
  if (!throttled.length || !names.includes("sm_mhz")) return after;
  svg.append(label(0, after + 8, `▲ ${throttled.map((device) => `${deviceName(device, t)}: ${device.throttles.join(", ")}`).join("; ")}`, { kind: "lk-warn lk-small" }));
  return after + 18;
}

/** One scale for all devices of a kind, so that rows can be compared. */
function commonEnd(devices, name) {
  const fixed = Math.max(...devices.map((device) => MEASURES[name].end?.(device.now) ?? 0));
  const largest = Math.max(...devices.flatMap((device) => [...(device.series[name] ?? []), device.now[name]]).filter((value) => value != null), 0);
  if (fixed >= largest && fixed > 0) return fixed;
  return name.includes("bytes") ? 2 ** Math.ceil(Math.log2(Math.max(1, largest))) : roundUp(largest);
}

function minute(device, name, end, { x, y, width }) {
  const text = shown(device, name);
  const values = device.series[name];
  const [top, bottom] = [y + 19, y + 38];
  const across = (i) => x + (width * i) / (values.length - 1);
  const down = (value) => bottom - (bottom - top) * Math.min(1, value / end);
  const marks = [label(x, y + 14, text, { kind: "lk-value" }), s("line", { x1: x, x2: x + width, y1: bottom, y2: bottom, class: "lk-rule" })];
  let run = [];
  const flush = () => {
    if (run.length) {
      const line = run.map(([i, value]) => `${across(i).toFixed(1)} ${down(value).toFixed(1)}`).join("L");
      marks.push(s("path", { d: `M${across(run[0][0]).toFixed(1)} ${bottom}L${line}L${across(run.at(-1)[0]).toFixed(1)} ${bottom}z`, class: "lk-area lk-line-a" }));
      marks.push(s("path", { d: `M${line}`, class: "lk-line lk-line-a lk-thin" }));
    }
    run = [];
  };
  values.forEach((value, i) => (value == null ? flush() : run.push([i, value])));
  flush();
  if (textWidth(text, 13, 600) + 60 < width) marks.push(label(x + width, y + 14, `≤ ${plain(MEASURES[name].show(end))}`, { anchor: "end", kind: "lk-muted lk-small" }));
  return marks;
}

function telemetryTable(data, t) {
  const names = measuresOf(data.devices);
  const head = ["", ...names.map((name) => t(`telemetry.${name}`)), t("telemetry.throttled")];
  const rows = data.devices.map((device) => [deviceName(device, t), ...names.map((name) => shown(device, name)), device.throttles.join(", ") || "–"]);
  return { head, rows };
}
