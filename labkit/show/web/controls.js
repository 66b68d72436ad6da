// What a visitor sets: the layout, the load, the two policies, and the buttons. Native inputs bring keyboard, names and
// roles; nothing here is drawn eight times a second.

import { Chooser } from "./chooser.js";
import { h, uniqueId } from "./dom.js";
import { StoredPicker } from "./stored.js";

const ROUTERS = ["least-work", "round-robin", "prefix"];
const ADMISSIONS = ["labkit", "vllm"];
const SWITCH_DELAY_MS = 350; // an arrow key walks over layouts; only where it rests is switched to

export class Controls {
  /** @param ctx {t, send, choices, onPause, onPin, pageId}; `send` takes one command for the kernel */
  constructor(ctx) {
    this.ctx = ctx;
    this.want = { layout: "", workload: "", rate: 4, router: ROUTERS[0], admission: ADMISSIONS[0] };
    this.frame = null;
    this.touched = false;
    this.build();
  }

  build() {
    this.chooser = new Chooser(this.ctx, (layout) => this.choose(layout));
    this.fields = h("div", { class: "lk-fields" }, this.buildFields());
    this.startButton = h("button", { type: "button", class: "lk-primary", onclick: () => this.startOrStop() });
    this.pauseButton = h("button", { type: "button", onclick: () => this.ctx.onPause() });
    this.pinButton = h("button", { type: "button", onclick: () => this.ctx.onPin() });
    this.buttons = h("div", { class: "lk-buttons" }, this.startButton, this.pauseButton, this.pinButton);
    this.picker = new StoredPicker(this.ctx, (runId) => this.ctx.onStored(runId));
    this.element = h("div", { class: "lk-controls" }, this.chooser.element, h("div", { class: "lk-load" }, this.fields, this.buttons), this.picker.element);
  }

  buildFields() {
    this.selects = {
      workload: this.makeSelect("workload", []),
      router: this.makeSelect("router", ROUTERS),
      admission: this.makeSelect("admission", ADMISSIONS),
    };
    this.rate = h("input", {
      type: "number", min: 0.1, max: 500, step: "any", value: this.want.rate, id: uniqueId("rate"), inputmode: "decimal",
      onchange: (event) => this.setRate(event.target),
    });
    this.rateLabel = h("label", { for: this.rate.id });
    this.rateUnit = h("span", { class: "lk-muted" });
    const rateField = h("div", { class: "lk-field lk-rate" }, this.rateLabel, h("span", {}, this.rate, " ", this.rateUnit));
    const { workload, router, admission } = this.selects;
    return [workload.field, rateField, router.field, admission.field];
  }

  makeSelect(name, values) {
    const id = uniqueId(name);
    const text = h("label", { for: id });
    const select = h("select", { id, onchange: (event) => this.set({ [name]: event.target.value }) });
    return { name, values, text, select, field: h("div", { class: "lk-field" }, text, select) };
  }

  setRate(input) {
    const value = Number(input.value);
    if (!(value >= 0.1 && value <= 500)) {
      input.value = this.want.rate; // the browser shows its own sentence about the limits
      input.reportValidity();
      return;
    }
    this.set({ rate: value });
  }

  get isActive() {
    return ["queued", "switching", "running"].includes(this.frame?.role);
  }

  /** A choice counts at once for a load that runs, and otherwise for the next start. */
  set(change) {
    Object.assign(this.want, change);
    this.touched = true;
    if (!this.isActive && !this.isAsked) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ctx.send({ type: "change", ...this.want }), "layout" in change ? SWITCH_DELAY_MS : 0);
  }

  choose(layout) {
    this.set({ layout });
    if (this.frame) this.chooser.show(this.frame, layout);
  }

  /** `isAsked` bridges the moment between a start and the first frame that shows it: a choice made there counts. */
  startOrStop() {
    this.isAsked = !this.isActive;
    this.ctx.send(this.isActive ? { type: "stop" } : { type: "start", ...this.want });
  }

  show(frame, { paused, pinned }) {
    this.frame = frame;
    this.adopt(frame);
    const { t } = this.ctx;
    this.chooser.show(frame, this.want.layout);
    this.drawFields(frame, t);
    this.drawButtons(frame, t, paused, pinned);
    this.picker.show(frame);
  }

  /** The controls say what the server does, until the visitor chooses something and it has come true. */
  adopt(frame) {
    if (!this.want.workload) this.want.workload = frame.workloads[0] ?? "";
    if (!frame.lab || this.touched) {
      this.touched &&= this.want.layout !== frame.lab?.layout;
      return;
    }
    this.want.layout = frame.lab.layout;
    if (this.isActive) Object.assign(this.want, pickWanted({ ...this.want, ...frame.run, layout: frame.lab.layout }));
  }

  drawFields(frame, t) {
    const key = JSON.stringify([frame.workloads, this.ctx.language()]);
    if (key !== this.fieldsKey) {
      this.fieldsKey = key;
      this.selects.workload.values = frame.workloads;
      for (const field of Object.values(this.selects)) fillSelect(field, t);
      this.rateLabel.textContent = t("controls.rate");
      this.rateUnit.textContent = t("controls.rate_unit");
    }
    for (const { name, select } of Object.values(this.selects)) {
      if (document.activeElement !== select) select.value = this.want[name];
    }
    if (document.activeElement !== this.rate) this.rate.value = this.want.rate;
  }

  drawButtons(frame, t, paused, pinned) {
    const able = frame.link === "connected" && frame.lab != null;
    setText(this.startButton, t(startText(frame.role), { position: frame.position }));
    this.startButton.disabled = !able || frame.role === "stopping";
    this.startButton.classList.toggle("lk-primary", !this.isActive);
    setText(this.pauseButton, t(paused ? "controls.resume" : "controls.pause"));
    this.pauseButton.setAttribute("aria-pressed", String(paused));
    setText(this.pinButton, t(pinned ? "controls.unpin" : "controls.pin", { name: pinned?.name ?? "" }));
    this.pinButton.setAttribute("aria-pressed", String(Boolean(pinned)));
    this.pinButton.disabled = !pinned && !(frame.run?.ttft_ms.n > 0);
  }
}

function pickWanted({ layout, workload, rate, router, admission }) {
  return { layout, workload, rate, router, admission };
}

function startText(role) {
  if (role === "queued") return "controls.leave_queue";
  return role === "watching" ? "controls.start" : "controls.stop";
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fillSelect({ name, values, text, select }, t) {
  text.textContent = t(`controls.${name}`);
  select.replaceChildren(...values.map((value) => h("option", { value }, optionText(name, value, t))));
}

function optionText(name, value, t) {
  const text = t(`${name}.${value}`);
  return text === `${name}.${value}` ? value : text;
}
