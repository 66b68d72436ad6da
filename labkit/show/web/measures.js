// Figures of links: bandwidths in base 10 (as nccl-tests has them), times from microseconds up.

import { digits } from "./text.js";

/** For ticks: 10.0 µs is 10 µs. */
export function plain(text) {
  return text.replace(/\.0+(?= )/, "");
}

/** 14.6 GB/s, 24.0 MB/s. */
export function bandwidth(gigabytesPerSecond) {
  if (gigabytesPerSecond == null) return "–";
  if (gigabytesPerSecond >= 0.9995) return `${digits(gigabytesPerSecond)} GB/s`;
  const megabytes = gigabytesPerSecond * 1000;
  return megabytes >= 0.9995 ? `${digits(megabytes)} MB/s` : `${digits(megabytes * 1000)} kB/s`;
}

/** 10.7 µs, 1.03 ms, 2.10 s. */
export function microseconds(value) {
  if (value == null) return "–";
  if (value < 999.5) return `${digits(value)} µs`;
  return value < 999500 ? `${digits(value / 1000)} ms` : `${digits(value / 1e6)} s`;
}

/** The least and the most, or the one value that all of them show. */
export function rangeText(values, show) {
  const [least, most] = [show(Math.min(...values)), show(Math.max(...values))];
  if (least === most) return least;
  const unit = least.split(" ")[1];
  return most.endsWith(` ${unit}`) ? `${least.split(" ")[0]}–${most}` : `${least} – ${most}`;
}

export const FABRICS = ["shm", "nccl", "gloo"];

/** What joins ranks, in words: shared memory, TCP of one machine, the link between nodes. */
export function fabricName(fabric, spansNodes, t) {
  return t(spansNodes && fabric === "gloo" ? "fabric.gloo.across" : `fabric.${fabric}`);
}

/** [0, 1, 2, 5] → "0–2, 5". */
export function spans(numbers) {
  const runs = [];
  for (const n of numbers) {
    if (runs.length && runs.at(-1)[1] === n - 1) runs.at(-1)[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}
