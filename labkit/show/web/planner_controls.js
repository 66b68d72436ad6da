// What is planned for: model, GPUs, traffic, wishes. Native inputs; every change is sent at once, the newest wins.

import { h, uniqueId } from "./dom.js";
import { count } from "./text.js";

const GPU_COUNTS = [1, 2, 4, 8, 16, 32];
const NODE_COUNTS = [1, 2, 4];
const GPU_LINKS = ["", "nvswitch", "pairs", "pcie"];
const ENGINE_NAMES = ["vllm", "sglang", "trtllm"];
const KV_TYPES = ["auto", "fp8"];
const JUDGED_AT = ["p50", "p95", "p99"];
const LOST_AFTER_MS = 3000; // an answer that did not come by then was refused

// name → [least, most, steps]: a slider moves by equal ratios
const SLIDERS = {
  prompt_tokens: [16, 131072, 104], output_tokens: [1, 8192, 104], rate: [0.1, 200, 110], concurrency: [1, 2048, 88],
  ttft_ms: [20, 60000, 115], tpot_ms: [2, 500, 96], max_num_seqs: [1, 2048, 11], max_num_batched_tokens: [512, 65536, 7],
};
const WHOLE = new Set(["prompt_tokens", "output_tokens", "concurrency", "max_num_seqs", "max_num_batched_tokens"]);

export function sliderValue(name, step) {
  const [low, high, steps] = SLIDERS[name];
  const value = low * (high / low) ** (step / steps);
  return WHOLE.has(name) ? Math.round(value) : Number(value.toPrecision(2));
}

export function sliderStep(name, value) {
  const [low, high, steps] = SLIDERS[name];
  return Math.round((steps * Math.log(Math.max(low, Math.min(high, value)) / low)) / Math.log(high / low));
}

export class PlannerControls {
  constructor(ctx) {
    this.ctx = ctx;
    this.want = { ...(ctx.options().defaults ?? {}), n: 0 };
    this.sent = 0;
    this.redraws = [];
    this.build();
    this.change({});
  }

  build() {
    const options = this.ctx.options();
    this.model = this.select("model", options.models ?? []);
    this.config = h("textarea", { id: uniqueId("config"), rows: 6, spellcheck: "false", onchange: (event) => this.change({ config: event.target.value.trim() }) });
    this.configLabel = h("label", { for: this.config.id });
    this.configTitle = h("summary");
    this.forget = h("button", { type: "button", onclick: () => this.clearConfig() });
    this.paste = h("details", { class: "lk-details lk-paste" }, this.configTitle, this.configLabel, this.config, this.forget);
    const groups = [
      ["model", [this.model, this.paste]],
      ["gpus", [this.select("device", options.devices ?? []), this.select("num_gpus", GPU_COUNTS, Number), this.select("nodes", NODE_COUNTS, Number), this.select("link", GPU_LINKS), this.select("engine", ENGINE_NAMES)]],
      ["traffic", [this.select("workload", ["lengths", "trace", ...(options.workloads ?? [])]), this.traceField(), this.slider("prompt_tokens"), this.slider("output_tokens"), this.select("load", ["rate", "concurrency"]), this.slider("rate"), this.slider("concurrency")]],
      ["wishes", [this.slider("ttft_ms"), this.slider("tpot_ms"), this.select("percentile", JUDGED_AT)]],
    ];
    const settings = [this.slider("max_num_seqs"), this.slider("max_num_batched_tokens"), this.select("kv_cache_dtype", KV_TYPES)];
    this.settingsTitle = h("summary");
    const more = h("details", { class: "lk-details lk-engine-settings" }, this.settingsTitle, h("div", { class: "lk-fields" }, settings));
    this.redraws.push((t) => (this.settingsTitle.textContent = t("planner.settings")), (t) => this.drawConfig(t));
    const boxes = groups.map(([name, fields]) => {
      const legend = h("legend");
      this.redraws.push((t) => (legend.textContent = t(`planner.group.${name}`)));
      return h("fieldset", { class: `lk-group lk-group-${name}` }, legend, h("div", { class: "lk-fields" }, fields));
    });
    this.element = h("div", { class: "lk-controls lk-planner-controls" }, h("div", { class: "lk-groups" }, boxes), more);
  }

  select(name, values, type = String) {
    const id = uniqueId(name);
    const text = h("label", { for: id });
    const input = h("select", { id, "data-input": name, onchange: (event) => this.change({ [name]: type(event.target.value) }) });
    this.redraws.push((t) => {
      text.textContent = nameOf(name, t);
      input.replaceChildren(...values.map((value) => h("option", { value, selected: value === this.want[name] }, wordFor(name, value, t))));
    });
    return this.field(name, text, input);
  }

  /** A range with its value beside it; the value can be typed, too. */
  slider(name) {
    const [id, boxId] = [uniqueId(name), uniqueId(`${name}-value`)];
    const text = h("label", { for: id });
    const box = h("input", { type: "number", id: boxId, min: SLIDERS[name][0], max: SLIDERS[name][1], step: "any", "data-value": name,
      onchange: (event) => this.typed(name, event.target) });
    const range = h("input", { type: "range", id, min: 0, max: SLIDERS[name][2], step: 1, "data-input": name,
      oninput: (event) => this.slid(name, Number(event.target.value), box) });
    this.redraws.push((t) => {
      text.textContent = nameOf(name, t);
      box.setAttribute("aria-label", nameOf(name, t));
      this.putSlider(name, range, box);
    });
    return this.field(name, text, h("span", { class: "lk-slider" }, range, box));
  }

  putSlider(name, range, box) {
    const value = this.want[name];
    if (document.activeElement !== range) range.value = sliderStep(name, value);
    range.setAttribute("aria-valuetext", String(value));
    if (document.activeElement !== box) box.value = value;
  }

  field(name, label, input) {
    return h("div", { class: "lk-field", "data-field": name }, label, input);
  }

  traceField() {
    const id = uniqueId("trace");
    const text = h("label", { for: id });
    const input = h("input", { type: "text", id, spellcheck: "false", onchange: (event) => this.change({ trace: event.target.value.trim() }) });
    this.redraws.push((t) => (text.textContent = t("planner.trace")));
    return this.field("trace", text, input);
  }

  slid(name, step, box) {
    const value = sliderValue(name, step);
    box.value = value;
    this.change({ [name]: value });
  }

  typed(name, box) {
    const [low, high] = SLIDERS[name];
    const value = WHOLE.has(name) ? Math.round(Number(box.value)) : Number(box.value);
    if (!(value >= low && value <= high)) {
      box.reportValidity(); // the browser's own sentence about the limits
      box.value = this.want[name];
      return;
    }
    this.change({ [name]: value });
  }

  clearConfig() {
    this.config.value = "";
    this.change({ config: "" });
  }

  /** A layout to look at; it stays until another is chosen. */
  look(layout) {
    this.change({ layout });
  }

  // ---- what is sent

  change(change) {
    Object.assign(this.want, change, { n: this.want.n + 1 });
    this.showFields();
    this.ctx.moved();
    this.send();
  }

  /** One question under way at a time: what was moved meanwhile goes out with the answer, as it is by then. */
  send() {
    if (this.waiting && performance.now() - this.sentAt < LOST_AFTER_MS) return;
    this.waiting = this.want.n;
    this.sentAt = performance.now();
    this.ctx.send({ type: "want", ...this.want });
  }

  answered(n) {
    if (!this.waiting || n < this.waiting) {
      if (this.waiting && performance.now() - this.sentAt > LOST_AFTER_MS) this.waiting = 0;
      return;
    }
    const last = this.waiting;
    this.waiting = 0;
    if (this.want.n > last) this.send();
  }

  // ---- what is shown

  show(frame) {
    const { t } = this.ctx;
    if (frame.notice && frame.notice !== this.noticed) this.waiting = 0;
    this.noticed = frame.notice;
    if (this.shownLanguage === this.ctx.language()) return;
    this.shownLanguage = this.ctx.language();
    for (const redraw of this.redraws) redraw(t);
    this.showFields();
  }

  /** Fields that say nothing as things stand are not there. */
  showFields() {
    const { want } = this;
    const hidden = {
      trace: want.workload !== "trace", prompt_tokens: want.workload !== "lengths", output_tokens: want.workload !== "lengths",
      rate: want.load !== "rate", concurrency: want.load !== "concurrency",
    };
    for (const field of this.element.querySelectorAll("[data-field]")) field.hidden = hidden[field.dataset.field] ?? false;
    for (const range of this.element.querySelectorAll("input[type=range]")) range.setAttribute("aria-valuetext", String(want[range.dataset.input]));
  }

  drawConfig(t) {
    this.configTitle.textContent = t("planner.paste");
    this.configLabel.textContent = t("planner.paste_here");
    this.forget.textContent = t("planner.forget");
  }
}

const NAMES_OF = { vllm: "vLLM", sglang: "SGLang", trtllm: "TensorRT-LLM", nvswitch: "NVSwitch" };

function wordFor(name, value, t) {
  if (name === "num_gpus") return count(value);
  const text = t(`planner.${name}.${value || "usual"}`);
  return text.startsWith("planner.") ? NAMES_OF[value] ?? String(value) : text;
}

/** An engine's own word for a setting has no other. */
function nameOf(name, t) {
  const text = t(`planner.${name}`);
  return text.startsWith("planner.") ? name : text;
}
