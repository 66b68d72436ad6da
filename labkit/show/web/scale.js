// Axes: round ends, few ticks, and a scale that stays put while figures tremble.

/** The smallest of 1, 2, 2.5, 4, 5, 6, 8 × 10^k that is at least `value`. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const decade = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 2.5, 4, 5, 6, 8, 10].find((candidate) => candidate * decade >= value * 0.99999);
  return step * decade;
}

export function linear(end, x0, x1) {
  return (value) => x0 + (x1 - x0) * Math.min(1, Math.max(0, value / end));
}

/** Round tick values from 0 to `end`, about `count` of them. */
export function ticks(end, count) {
  const step = roundUp(end / Math.max(1, count));
  const values = [];
  for (let i = 0; i * step <= end * 1.0001; i += 1) values.push(i * step);
  return values;
}

/** Remembers the end of an axis: it grows at once, and shrinks only when most of it stands empty. */
export class StickyEnd {
  constructor() {
    this.end = 0;
    this.held = false;
  }

  for(largest) {
    const wanted = roundUp(largest * 1.05);
    if (!this.held && (wanted > this.end || wanted < this.end * 0.45)) this.end = wanted;
    return this.end;
  }
}
