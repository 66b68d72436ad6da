// The choice of a layout: a row of degrees an axis, presets, and for what does not fit the reason and the nearest that do.
//
// The browser decides nothing: which layouts are legal, and why the others are not, comes in one table from the server
// (labkit.layout.choice_table). A refused degree can be reached like any other; it tells its reason and stays unchosen.

import { h, s, uniqueId } from "./dom.js";

const GRID = ["dp", "pp", "pcp", "tp"];
const AXES = [...GRID, "dcp", "ep"];
const NUM_OFFERS = 3;

export function parseLayout(slug) {
  const [degreeText, ...options] = slug.split("+");
  const degrees = Object.fromEntries(AXES.map((axis) => [axis, 1]));
  for (const word of degreeText.split("x")) {
    const [, axis, degree] = /^([a-z]+)(\d+)$/.exec(word) ?? [];
    if (axis in degrees) degrees[axis] = Number(degree);
  }
  return { degrees, options };
}

function slugOf(degrees, options = []) {
  const words = AXES.filter((axis) => degrees[axis] > 1).map((axis) => `${axis}${degrees[axis]}`);
  return [words.join("x") || "tp1", ...options].join("+");
}

function numRanks({ degrees }) {
  return GRID.reduce((product, axis) => product * degrees[axis], 1);
}

export function isPools(slug) {
  return slug.includes(":");
}

/** As the server prints it: DP2×TP2+ring. */
export function layoutName(slug) {
  const pool = (text) => {
    const [degrees, ...options] = text.split("+");
    return [degrees.toUpperCase().replaceAll("X", "×"), ...options].join("+");
  };
  return slug.split(",").map((part) => part.replace(/([^:]+)$/, (text) => pool(text))).join(", ");
}

/** How far two layouts are apart, in doublings. */
function distance(a, b) {
  const doublings = (x, y) => Math.abs(Math.log2(x / y));
  const moved = AXES.reduce((sum, axis) => sum + doublings(a.degrees[axis], b.degrees[axis]), 0);
  return moved + doublings(numRanks(a), numRanks(b)) + (a.options.join() === b.options.join() ? 0 : 0.25);
}

export class Chooser {
  /** @param ctx {t, language, choices, pageId}; `onChoose(slug)` when a visitor has chosen */
  constructor(ctx, onChoose) {
    this.ctx = ctx;
    this.onChoose = onChoose;
    this.key = "";
    this.shape = "";
    this.refusal = null;
    this.legend = h("legend");
    this.now = h("div", { class: "lk-chosen" });
    this.presets = h("div", { class: "lk-presets", role: "group" });
    this.rows = h("div", { class: "lk-axes" });
    this.why = h("div", { class: "lk-why", role: "status" });
    this.absent = h("ul");
    this.absentSummary = h("summary");
    this.absentBox = h("details", { class: "lk-details lk-absent" }, this.absentSummary, this.absent);
    this.element = h("fieldset", { class: "lk-chooser" }, this.legend, this.now, this.presets, this.rows, this.why, this.absentBox);
  }

  show(frame, chosen) {
    const table = this.ctx.choices();
    const pools = frame.lab?.pool_choices ?? [];
    const standing = frame.lab?.state === "ready" ? frame.lab.layout : "";
    const key = JSON.stringify([chosen, standing, pools, this.ctx.language(), table.legal?.length]);
    if (key === this.key && table === this.table) return;
    if (chosen !== this.chosen) this.refusal = null;
    Object.assign(this, { key, table, pools, standing, chosen, base: isPools(chosen) ? parseLayout("tp1") : parseLayout(chosen) });
    this.build();
    this.mark();
  }

  /** The inputs stay while only the choice changes, so that the keyboard's place is not lost. */
  build() {
    const { t } = this.ctx;
    const offered = this.axisRows();
    const shape = JSON.stringify([offered, this.table.presets, this.pools, this.ctx.language()]);
    if (shape === this.shape) return;
    this.shape = shape;
    const had = this.rows.contains(document.activeElement) ? document.activeElement.id : "";
    this.legend.textContent = t("chooser.title");
    this.presets.setAttribute("aria-label", t("chooser.presets"));
    this.presets.replaceChildren(...this.presetGroups(t));
    this.rows.replaceChildren(...offered.map((row) => this.row(row, t)));
    if (had) document.getElementById(had)?.focus();
    const absent = this.table.absent ?? [];
    this.absentBox.hidden = absent.length === 0;
    this.absentSummary.textContent = t("chooser.absent", { axes: absent.map(({ axis }) => axis.toUpperCase()).join(", ") });
    this.absent.replaceChildren(
      ...absent.map(({ axis, reason }) => h("li", {}, h("b", {}, `${axis.toUpperCase()}: `), h("span", { lang: "en" }, reason))));
  }

  /** The degrees that are always offered, and whatever else fits just now. */
  axisRows() {
    return (this.table.axes ?? []).map(({ axis, degrees, options }) => {
      const fitting = this.legalSet().filter(({ degrees: other }) => AXES.every((a) => a === axis || other[a] === this.base.degrees[a]));
      const all = new Set([...degrees, this.base.degrees[axis], ...fitting.map(({ degrees: other }) => other[axis])]);
      return { axis, degrees: [...all].sort((a, b) => a - b), options };
    });
  }

  legalSet() {
    if (this.parsedFrom !== this.table) {
      this.parsedFrom = this.table;
      this.parsed = (this.table.legal ?? []).map((slug) => ({ slug, ...parseLayout(slug) }));
    }
    return this.parsed;
  }

  /** In groups by their number of ranks; what the server lists as pools comes last. */
  presetGroups(t) {
    const groups = new Map();
    for (const slug of this.table.presets ?? []) {
      const n = ranksOf(slug);
      if (!groups.has(n)) groups.set(n, []);
      groups.get(n).push({ layout: slug, name: layoutName(slug), legal: true });
    }
    const named = [...groups].map(([n, choices]) => [t(n === 1 ? "controls.rank" : "controls.ranks", { n }), choices]);
    if (this.pools.length) named.push([t("chooser.pools"), this.pools]);
    return named.map(([name, choices]) => {
      const title = h("span", { class: "lk-preset-title", id: uniqueId("presets") }, name);
      const buttons = choices.map((choice) => this.presetButton(choice, t));
      return h("div", { class: "lk-preset-group", role: "group", "aria-labelledby": title.id }, title, buttons);
    });
  }

  presetButton(choice, t) {
    return h("button", {
      type: "button", class: "lk-preset", "data-layout": choice.layout, "aria-disabled": choice.legal ? null : "true",
      title: choice.legal ? t("controls.ranks", { n: ranksOf(choice.layout) }) : choice.reason,
      onclick: () => (choice.legal ? this.choose(choice.layout) : this.refuse(choice.layout, choice.name, choice.reason, [])),
    }, glyph(choice.layout), choice.name);
  }

  row({ axis, degrees, options }, t) {
    const name = uniqueId(axis);
    const title = h("span", { class: "lk-axis-name", id: `${name}-name` }, h("b", {}, axis.toUpperCase()), " ", h("small", {}, t(`axis.${axis}`)));
    const inputs = degrees.map((degree) => this.degree(axis, degree, name));
    const toggles = options.map((option) =>
      h("button", { type: "button", class: "lk-option", "data-option": option, title: t(`option.${option}`), onclick: () => this.toggle(option) }, `+${option}`));
    return h("div", { class: "lk-axis", "data-axis": axis },
      title, h("div", { class: "lk-segments", role: "radiogroup", "aria-labelledby": `${name}-name` }, inputs), toggles);
  }

  degree(axis, degree, name) {
    const input = h("input", {
      type: "radio", name, id: `${this.ctx.pageId}-${axis}-${degree}`, value: degree, onchange: () => this.pick(axis, degree),
    });
    input.addEventListener("focus", () => this.tell(axis, degree));
    return h("label", { class: "lk-segment" }, input, h("span", {}, String(degree)));
  }

  // ---- what a choice leads to

  /** {slug, legal, reason}; an option goes when its axis does. */
  target(axis, degree) {
    const degrees = { ...this.base.degrees, [axis]: degree };
    const slug = [slugOf(degrees, this.base.options), slugOf(degrees)].find((candidate) => this.isLegal(candidate));
    return slug ? { slug, legal: true } : { slug: slugOf(degrees), legal: false, reason: this.reason(degrees) };
  }

  isLegal(slug) {
    return this.legalSet().some((layout) => layout.slug === slug);
  }

  reason(degrees) {
    const index = this.table.refused?.[slugOf(degrees)];
    if (index != null) return this.table.reasons[index];
    const factors = GRID.filter((axis) => degrees[axis] > 1).map((axis) => `${axis} ${degrees[axis]}`);
    const n = numRanks({ degrees });
    return this.ctx.t(factors.length > 1 ? "chooser.product" : "chooser.too_many", { product: factors.join(" × "), n, there: this.table.num_ranks });
  }

  /** The nearest legal layouts; those that have what was asked for come first. */
  nearest(slug, axis, degree) {
    const wanted = parseLayout(slug);
    const rated = this.legalSet().filter((layout) => !layout.options.length && layout.slug !== this.chosen).map((layout) => [
      (layout.degrees[axis] === degree ? 0 : 100) + distance(layout, wanted), layout.slug]);
    return rated.sort(([a], [b]) => a - b).slice(0, NUM_OFFERS).map(([, near]) => near);
  }

  pick(axis, degree) {
    const { slug, legal } = this.target(axis, degree);
    if (legal) this.choose(slug);
    else this.tell(axis, degree);
    this.mark();
  }

  tell(axis, degree) {
    const { slug, legal, reason } = this.target(axis, degree);
    if (legal) this.refuse();
    else this.refuse(slug, layoutName(slug), reason, this.nearest(slug, axis, degree));
  }

  toggle(option) {
    const { degrees, options } = this.base;
    const slug = slugOf(degrees, options.includes(option) ? options.filter((name) => name !== option) : [...options, option]);
    if (this.isLegal(slug)) this.choose(slug);
  }

  choose(slug) {
    this.refusal = null;
    this.onChoose(slug);
  }

  refuse(slug = "", name = "", reason = "", near = []) {
    this.refusal = slug ? { name, reason, near } : null;
    this.showRefusal();
  }

  // ---- what is shown

  mark() {
    const { t } = this.ctx;
    for (const input of this.rows.querySelectorAll("input")) {
      const axis = input.closest(".lk-axis").dataset.axis;
      const { legal, reason } = this.target(axis, Number(input.value));
      input.checked = !isPools(this.chosen) && this.base.degrees[axis] === Number(input.value);
      input.setAttribute("aria-disabled", String(!legal));
      input.closest("label").classList.toggle("lk-refused", !legal);
      input.closest("label").title = legal ? "" : reason;
    }
    for (const button of this.rows.querySelectorAll(".lk-option")) {
      const option = button.dataset.option;
      const on = this.base.options.includes(option);
      button.setAttribute("aria-pressed", String(on));
      button.disabled = !on && !this.isLegal(slugOf(this.base.degrees, [...this.base.options, option]));
    }
    for (const button of this.presets.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.layout === this.chosen));
    }
    this.showChosen(t);
    this.showRefusal();
  }

  showChosen(t) {
    const n = ranksOf(this.chosen);
    const most = this.table.ranks_with_own_cores;
    const over = most != null && n > most && this.chosen;
    this.now.replaceChildren(...(this.chosen ? [
      glyph(this.chosen),
      h("b", { class: this.chosen === this.standing ? "lk-current" : "" }, layoutName(this.chosen)),
      h("small", {}, t(n === 1 ? "controls.rank" : "controls.ranks", { n })),
      over ? h("small", { class: "lk-over", title: t("controls.oversubscribed_why") }, `▲ ${t("controls.oversubscribed")}`) : "",
    ] : []));
  }

  showRefusal() {
    const { t } = this.ctx;
    const shown = JSON.stringify([this.refusal, this.ctx.language()]);
    if (shown === this.shownRefusal) return;
    this.shownRefusal = shown;
    if (!this.refusal) return this.why.replaceChildren();
    const { name, reason, near } = this.refusal;
    const offers = near.map((slug) => h("button", { type: "button", class: "lk-offer", onclick: () => this.choose(slug) }, layoutName(slug)));
    this.why.replaceChildren(
      h("p", {}, h("b", {}, t("chooser.refused", { name })), " ", h("span", { lang: "en" }, reason)),
      offers.length ? h("p", {}, t("chooser.nearest"), " ", offers) : "");
  }
}

export function ranksOf(slug) {
  return slug.split(",").reduce((sum, pool) => sum + numRanks(parseLayout(pool.replace(/^.*:/, ""))), 0);
}

/** The layout as a small picture: a row a replica, a square a rank, its colour the shard that it holds. */
export function glyph(slug) {
  const pools = slug.split(",").map((pool) => parseLayout(pool.replace(/^.*:/, "")));
  const size = pools.some(({ degrees }) => degrees.dp > 2) ? 4 : 9;
  const squares = [];
  let left = 0;
  let bottom = 0;
  for (const { degrees } of pools) {
    const rows = Math.min(4, degrees.dp);
    const columns = Math.min(8, degrees.pp * degrees.pcp * degrees.tp);
    for (let i = 0; i < rows * columns; i += 1) {
      const [row, column] = [Math.floor(i / columns), i % columns];
      squares.push(s("rect", { x: left + column * (size + 2), y: row * (size + 2), width: size, height: size, rx: 2, class: `lk-shard-${column % 8}` }));
    }
    left += columns * (size + 2) + 4;
    bottom = Math.max(bottom, rows * (size + 2) - 2);
  }
  return s("svg", { width: left - 6, height: bottom, "aria-hidden": "true", class: "lk-glyph" }, squares);
}
