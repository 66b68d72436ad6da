// What the live pages have in common: take frames, draw them, and only then say that one is ready for the next.
//
// One widget, one comm. The browser asks (hello), the kernel answers with its newest frame; each frame is acknowledged
// after it was drawn, or at once and undrawn when the tab is in the background. When nothing comes for a while the
// page says so and keeps asking.

import { h, uniqueId } from "./dom.js";
import { Banners, Head } from "./status.js";
import { firstLanguage, makeText, store } from "./text.js";

const STALE_AFTER_MS = 4000;
const ASK_EVERY_MS = 2500;
const EMPTY_FRAME = { link: "connecting", role: "watching", quality: [], notice: "", lab: null, run: null, switch: null };

export class LivePage {
  /** traits: of the model, whose change is drawn. A page has makePanels(), show(frame) and, if it likes, announce(). */
  constructor(model, element, { title, traits }) {
    this.model = model;
    this.traits = traits;
    this.text = model.get("text");
    this.currentLanguage = firstLanguage(this.text);
    this.frame = null;
    this.pin = null;
    this.paused = false;
    this.stale = false;
    this.pendingAck = null;
    this.heardAt = this.askedAt = performance.now();
    this.ctx = this.makeContext();
    this.build(element, title);
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
      send: (message) => this.send(message),
      setLanguage: (code) => this.setLanguage(code),
      onPause: () => this.togglePause(),
    };
  }

  build(element, title) {
    const { ctx } = this;
    this.head = new Head(ctx, title);
    this.banners = new Banners(ctx);
    this.controls = this.makeControls();
    this.panels = this.makePanels();
    const grid = h("div", { class: "lk-grid-panels" }, this.panels.map((panel) => panel.element));
    this.root = h("div", { class: "lk", role: "main", "aria-labelledby": this.head.title.id });
    this.root.append(this.head.element, this.banners.element, this.controls.element, grid);
    this.setLanguage(this.currentLanguage);
    element.append(h("div", { class: "lk-frame" }, this.root));
  }

  listen() {
    this.onMessage = (message) => this.receive(message);
    this.onVisibility = () => document.visibilityState === "visible" ? this.schedule() : this.acknowledge();
    this.onTrait = () => this.schedule();
    this.model.on("msg:custom", this.onMessage);
    this.traits.forEach((trait) => this.model.on(`change:${trait}`, this.onTrait));
    document.addEventListener("visibilitychange", this.onVisibility);
    this.watch = setInterval(() => this.checkLife(), 500);
    this.observer = new ResizeObserver(() => this.measure());
    this.panels.forEach((panel) => this.observer.observe(panel.stage));
  }

  close() {
    clearInterval(this.watch);
    this.observer.disconnect();
    this.model.off("msg:custom", this.onMessage);
    this.traits.forEach((trait) => this.model.off(`change:${trait}`, this.onTrait));
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
    if (message.data && this.frame) this.announce(this.frame, message.data);
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

  /** What stands beside the current figures. */
  ghost() {
    return this.pin;
  }

  announce() {}
}
