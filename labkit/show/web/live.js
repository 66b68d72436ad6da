// The page Layouts: takes frames, draws them, and only then says that it is ready for the next.
//
// One widget, one comm. The browser asks (hello), the kernel answers with its newest frame; each frame is acknowledged
// after it was drawn, or at once and undrawn when the tab is in the background. When nothing comes for a while the
// page says so and keeps asking.

import { h, uniqueId } from "./dom.js";
import { besidePanel } from "./beside.js";
import { Controls } from "./controls.js";
import { crossingsPanel } from "./crossings.js";
import { expertsPanel } from "./experts.js";
import { ganttPanel } from "./gantt.js";
import { kvPanel, poolsPanel } from "./kv.js";
import { ladderPanel } from "./ladder.js";
import { inflightPanel, throughputPanel } from "./timeline.js";
import { memoryPanel, ownershipPanel, sharesPanel } from "./ranks.js";
import { Banners, Head } from "./status.js";
import { firstLanguage, makeText, store } from "./text.js";
import { waterfallPanel } from "./waterfall.js";
import { whyPanel } from "./why.js";

const STALE_AFTER_MS = 4000;
const ASK_EVERY_MS = 2500;
const OBJECTIVE_EVERY_MS = 150;

class LayoutsPage {
  constructor(model, element) {
    this.model = model;
    this.text = model.get("text");
    this.currentLanguage = firstLanguage(this.text);
    this.frame = null;
    this.pin = null;
    this.paused = false;
    this.stale = false;
    this.pendingAck = null;
    this.heardAt = this.askedAt = performance.now();
    this.ctx = this.makeContext();
    this.build(element);
    this.listen();
    this.send({ type: "hello" });
  }

  makeContext() {
    const language = () => this.currentLanguage;
    return {
      pageId: uniqueId("page"),
      language,
      languages: this.model.get("languages"),
      t: makeText(this.text, language),
      choices: () => this.model.get("choices"),
      stored: () => this.model.get("stored") ?? [],
      send: (message) => this.send(message),
      setLanguage: (code) => this.setLanguage(code),
      onPause: () => this.togglePause(),
      onPin: () => this.togglePin(),
      onStored: (runId) => this.pinStored(runId),
    };
  }

  build(element) {
    const { ctx } = this;
    this.head = new Head(ctx);
    this.banners = new Banners(ctx);
    this.controls = new Controls(ctx);
    const onObjective = (change) => this.changeObjective(change);
    this.panels = [
      ladderPanel(ctx, { id: "ttft", metric: "ttft_ms", step: 1, onObjective }),
      ladderPanel(ctx, { id: "tpot", metric: "tpot_ms", step: 0.5, onObjective }),
      besidePanel(ctx), whyPanel(ctx), waterfallPanel(ctx), throughputPanel(ctx), ownershipPanel(ctx), inflightPanel(ctx), memoryPanel(ctx), kvPanel(ctx),
      sharesPanel(ctx), crossingsPanel(ctx), expertsPanel(ctx), poolsPanel(ctx), ganttPanel(ctx),
    ];
    const grid = h("div", { class: "lk-grid-panels" }, this.panels.map((panel) => panel.element));
    this.root = h("div", { class: "lk", role: "main", "aria-labelledby": this.head.title.id });
    this.root.append(this.head.element, this.banners.element, this.controls.element, grid);
    this.setLanguage(this.currentLanguage);
    element.append(h("div", { class: "lk-frame" }, this.root));
  }

  listen() {
    this.onMessage = (message) => this.receive(message);
    this.onVisibility = () => document.visibilityState === "visible" ? this.schedule() : this.acknowledge();
    this.onChoices = () => this.schedule();
    this.model.on("msg:custom", this.onMessage);
    this.model.on("change:choices", this.onChoices);
    this.model.on("change:stored", this.onChoices);
    document.addEventListener("visibilitychange", this.onVisibility);
    this.watch = setInterval(() => this.checkLife(), 500);
    this.observer = new ResizeObserver(() => this.measure());
    this.panels.forEach((panel) => this.observer.observe(panel.stage));
  }

  close() {
    clearInterval(this.watch);
    this.observer.disconnect();
    this.model.off("msg:custom", this.onMessage);
    this.model.off("change:choices", this.onChoices);
    this.model.off("change:stored", this.onChoices);
    document.removeEventListener("visibilitychange", this.onVisibility);
  }

  send(message) {
    this.model.send(message);
  }

  // ---- frames ------------------------------------------------------------------------------------------------------

  receive(message) {
    if (message.type !== "frame") return;
    this.heardAt = performance.now();
    this.pendingAck = message.seq;
    if (message.data) this.announce(this.frame, message.data);
    this.frame = message.data ?? this.frame;
    if (document.visibilityState === "visible") this.schedule();
    else this.acknowledge();
  }

  schedule() {
    cancelAnimationFrame(this.request);
    this.request = requestAnimationFrame(() => {
      this.draw();
      this.acknowledge();
    });
  }

  acknowledge() {
    if (this.pendingAck == null) return;
    this.root.dataset.seq = this.pendingAck;
    this.send({ type: "ack", seq: this.pendingAck, hidden: document.visibilityState !== "visible" });
    this.pendingAck = null;
  }

  draw() {
    if (!this.frame) return;
    this.head.show(this.frame);
    this.banners.show(this.frame, this.stale, this.paused);
    this.controls.show(this.frame, { paused: this.paused, pinned: this.ghost() });
    if (!this.paused) this.drawPanels();
    this.root.dataset.n = this.frame.run?.ttft_ms.n ?? 0;
    this.root.dataset.layout = this.frame.lab?.layout ?? "";
    this.root.dataset.role = this.frame.role;
  }

  /** Panels of axes that the layout does not use are hidden; a last one that would stand alone gets the whole row. */
  drawPanels() {
    const ghost = this.ghost();
    this.panels.forEach((panel) => panel.show(this.frame, ghost));
    const shown = this.panels.filter((panel) => !panel.element.hidden && !panel.spec.wide);
    for (const panel of shown) panel.element.classList.toggle("lk-wide", shown.length % 2 === 1 && panel === shown.at(-1));
  }

  measure() {
    this.panels.forEach((panel) => panel.resize(Math.floor(panel.stage.clientWidth)));
  }

  checkLife() {
    const now = performance.now();
    const stale = now - this.heardAt > STALE_AFTER_MS;
    if (stale && now - this.askedAt > ASK_EVERY_MS) {
      this.askedAt = now;
      this.send({ type: "hello" });
    }
    if (stale === this.stale) return;
    this.stale = stale;
    this.root.classList.toggle("lk-is-stale", stale);
    this.banners.show(this.frame ?? EMPTY_FRAME, stale, this.paused);
  }

  // ---- what a visitor does -----------------------------------------------------------------------------------------

  setLanguage(code) {
    this.currentLanguage = code;
    this.root.lang = code === "zh" ? "zh-CN" : code;
    store("labkit-language", code);
    this.frame ? this.draw() : this.head.show(EMPTY_FRAME);
    this.panels.forEach((panel) => panel.draw());
  }

  togglePause() {
    this.paused = !this.paused;
    this.draw();
  }

  /** What stands beside the current figures: a stored run, which comes with every frame, or a layout pinned here. */
  ghost() {
    const beside = this.frame?.beside;
    if (!beside?.run_id) return this.pin;
    const { run, at, recorder, memory, why } = beside;
    return { run, at, recorder, why, name: run.layout_name, stored: true, lab: memory.length ? { memory } : null };
  }

  togglePin() {
    const { frame } = this;
    const at = new Date().toLocaleTimeString([], { hour12: false });
    if (this.ghost()) return this.pinStored("");
    this.pin = structuredClone({ run: frame.run, lab: frame.lab, why: frame.why, name: frame.run.layout_name, at });
    this.send({ type: "pin" });
    this.draw();
  }

  /** "": nothing is pinned any more. */
  pinStored(runId) {
    this.pin = null;
    this.send(runId ? { type: "pin", run_id: runId } : { type: "unpin" });
    this.draw();
  }

  /** The newest objective goes out at most every 150 ms; the last one always does. */
  changeObjective(change) {
    this.objective = { ...this.frame?.objective, ...this.objective, ...change };
    this.objectiveTimer ??= setTimeout(() => {
      this.send({ type: "objective", ...this.objective });
      this.objectiveTimer = this.objective = null;
    }, OBJECTIVE_EVERY_MS);
  }

  announce(before, after) {
    const { t } = this.ctx;
    if (!before) return;
    if (before.role !== after.role) this.banners.say(t(`role.${after.role}`));
    const change = after.switch;
    if (change && JSON.stringify(change) !== JSON.stringify(before.switch)) this.banners.say(t("switch.said", { name: change.name }));
    for (const metric of ["ttft_ms", "tpot_ms"]) this.announceCrossing(metric, before, after);
  }

  /** Said when the p90 crosses its objective, and only where the p90 is firm. */
  announceCrossing(metric, before, after) {
    const met = (frame) => {
      const figures = frame.run?.[metric];
      return !figures || figures.p90 == null || figures.few.includes("p90") ? null : figures.p90 <= frame.objective[metric];
    };
    const [was, is] = [met(before), met(after)];
    if (was == null || is == null || was === is) return;
    this.banners.say(this.ctx.t(is ? "said.met" : "said.missed", { metric: metric.slice(0, 4).toUpperCase() }));
  }
}

const EMPTY_FRAME = { link: "connecting", role: "watching", quality: [], notice: "", lab: null, run: null, switch: null };

export default {
  render({ model, el }) {
    const page = new LayoutsPage(model, el);
    return () => page.close();
  },
};
