// The head of the page: title, provenance, language, who holds the ranks; and the banners that say what has gone wrong
// and what to do. Banners change only when their words do, so that a screen reader hears each of them once.

import { h } from "./dom.js";
import { clock, seconds } from "./text.js";

const BADGES = { measured: "●", recorded: "◐", predicted: "◇", none: "○" };

export class Head {
  /** name: of the page, under which its title and tagline are. */
  constructor(ctx, name) {
    this.ctx = ctx;
    this.name = name;
    this.title = h("h1", { id: `lk-page-title-${ctx.pageId}` });
    this.tagline = h("p", { class: "lk-tagline" });
    this.badge = h("span", { class: "lk-badge" });
    this.machine = h("span", { class: "lk-machine" });
    this.languages = h("div", { class: "lk-languages", role: "group" });
    this.state = h("span", { class: "lk-state" });
    this.switchTime = h("span", { class: "lk-chip lk-switch-time" });
    this.holder = h("span", { class: "lk-holder" });
    this.element = h(
      "div",
      { class: "lk-head" },
      h("div", { class: "lk-title-row" }, h("div", {}, this.title, this.tagline), this.languages),
      h("div", { class: "lk-status-row" }, this.badge, this.state, this.switchTime, this.holder, this.machine),
    );
  }

  show(frame) {
    const { t } = this.ctx;
    put(this.title, t(`${this.name}.title`));
    put(this.tagline, t(`${this.name}.tagline`));
    this.drawLanguages(t);
    this.drawBadge(frame, t);
    this.drawState(frame, t);
    put(this.switchTime, switchText(frame.switch, t));
    put(this.holder, holderText(frame, this.heldFor(frame.lab?.holder), t));
    put(this.machine, machineText(frame.lab, t));
  }

  /** The server says when somebody takes the ranks, not every second since: the page counts on from there. */
  heldFor(holder) {
    const said = holder ? `${holder.client} ${holder.since_s}` : "";
    if (said !== this.said) {
      this.said = said;
      this.saidAt = performance.now();
    }
    return holder ? clock(holder.since_s + (performance.now() - this.saidAt) / 1000) : "";
  }

  drawLanguages(t) {
    if (this.shownLanguage === this.ctx.language()) return;
    this.shownLanguage = this.ctx.language();
    this.languages.setAttribute("aria-label", "Language / 语言");
    if (this.languages.children.length === 0) {
      const button = ([code, name]) =>
        h("button", { type: "button", lang: code, "data-language": code, onclick: () => this.ctx.setLanguage(code) }, name);
      this.languages.append(...Object.entries(this.ctx.languages).map(button));
    }
    for (const button of this.languages.children) {
      button.setAttribute("aria-pressed", String(button.dataset.language === this.shownLanguage));
    }
  }

  drawBadge(frame, t) {
    const kind = frame.provenance ?? (frame.run?.ttft_ms.n > 0 ? "measured" : "none");
    const at = frame.measured_at ?? frame.run?.started_at ?? "";
    this.badge.dataset.provenance = kind;
    const waits = kind === "none" && frame.role === "running" && frame.run;
    const id = waits ? "badge.waiting" : frame.provenance && kind !== "none" ? `badge.fabric.${kind}` : `badge.${kind}`;
    put(this.badge, `${BADGES[kind]} ${t(id, { at })}`);
  }

  drawState(frame, t) {
    const state = frame.link === "connected" ? (frame.lab?.state ?? "connecting") : frame.link;
    this.state.dataset.state = state;
    put(this.state, `${t(`state.${state}`)}${frame.lab && state === "ready" ? ` · ${frame.lab.layout_name}` : ""}`);
  }
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = text === "";
}

function switchText(change, t) {
  if (!change) return "";
  const first = change.first_token_s == null ? "" : t("switch.first_token", { s: seconds(change.first_token_s) });
  return [t("switch.ready", { name: change.name, s: seconds(change.ready_s) }), first].filter(Boolean).join(t("switch.and"));
}

function holderText(frame, time, t) {
  const queue = frame.lab?.queue.length ?? 0;
  const waiting = queue ? ` · ${t("holder.queue", { n: queue })}` : "";
  if (frame.role === "queued") return t("holder.queued", { position: frame.position }) + waiting;
  const holder = frame.lab?.holder;
  if (!holder) return frame.link === "connected" ? t("holder.nobody") + waiting : "";
  if (holder.is_you) return t("holder.you", { time }) + waiting;
  return t("holder.other", { client: holder.client, time, purpose: holder.purpose }) + waiting;
}

function machineText(lab, t) {
  if (!lab) return "";
  const { machine } = lab;
  return t("machine", { ...machine, where: machine.host ? `${machine.host} · ` : "" });
}

// ---- banners -------------------------------------------------------------------------------------------------------

export class Banners {
  constructor(ctx) {
    this.ctx = ctx;
    this.alerts = h("div", { class: "lk-banners", role: "alert" });
    this.remarks = h("div", { class: "lk-remarks" });
    this.spoken = h("div", { class: "lk-spoken", role: "status", "aria-live": "polite" });
    this.element = h("div", {}, this.alerts, this.remarks, this.spoken);
    this.shown = "";
    this.shownRemarks = "";
    this.failed = null;
  }

  show(frame, stale, paused) {
    const list = bannersOf(frame, stale, this.recovered(frame), this.dismissed);
    const shown = JSON.stringify([list, this.ctx.language()]);
    if (shown !== this.shown) {
      this.shown = shown;
      this.alerts.replaceChildren(...list.map((banner) => this.draw(banner)));
    }
    this.showRemarks(frame, paused);
  }

  /** The last failure, for a while after everything works again. */
  recovered(frame) {
    const failure = frame.lab?.failure;
    if (failure && frame.lab.state !== "ready") this.failed = failure;
    if (!this.failed || frame.lab?.state !== "ready") return null;
    this.recoveredAt ??= performance.now();
    if (performance.now() - this.recoveredAt < 30000) return this.failed;
    this.failed = this.recoveredAt = null;
    return null;
  }

  draw({ id, values = {}, kind = "bad", detail = "", action = "", english = "" }) {
    const { t } = this.ctx;
    const button = action && h("button", { type: "button", onclick: () => this.act(action, id) }, t(`banner.${action}`));
    return h(
      "div",
      { class: `lk-banner lk-${kind}`, "data-banner": id },
      h("span", { class: "lk-icon", "aria-hidden": "true" }, kind === "good" ? "✓" : "▲"),
      h("div", {},
        h("b", {}, t(`banner.${id}`, values)), " ", h("span", {}, t(`banner.${id}.do`, values)),
        english ? h("div", { lang: "en", class: "lk-sentence" }, english) : null,
        detail ? h("details", { class: "lk-details" }, h("summary", {}, t("banner.traceback")), h("pre", { tabindex: 0, lang: "en" }, detail)) : null),
      button || null,
    );
  }

  act(action, id) {
    if (action === "reload") location.reload();
    else this.dismissed = id === "notice" ? this.noticeOf : null;
  }

  showRemarks(frame, paused) {
    this.noticeOf = frame.notice;
    const { t } = this.ctx;
    const remarks = frame.quality.map((verdict) => remarkOf(verdict, t, this.ctx.language()));
    if (paused) remarks.unshift({ gist: t("remark.paused"), severity: "note", sentence: "" });
    const shown = JSON.stringify([remarks, this.ctx.language()]);
    if (shown === this.shownRemarks) return;
    this.shownRemarks = shown;
    const draw = ({ gist, severity, sentence }) =>
      h("p", { class: `lk-remark lk-remark-${severity}` },
        h("span", { "aria-hidden": "true" }, severity === "note" ? "ℹ " : "▲ "), gist, " ", h("span", { lang: "en" }, sentence));
    this.remarks.replaceChildren(...remarks.map(draw));
  }

  /** For screen readers: what just happened, never the running figures. */
  say(text) {
    if (text && text !== this.spoken.textContent) this.spoken.textContent = text;
  }
}

/** In English the verdict's own sentence, with its figures; in other languages its gist, and the sentence after it. */
function remarkOf({ code, severity, sentence }, t, language) {
  const gist = t(`quality.${code}`);
  return { severity, sentence, gist: language === "en" || gist === `quality.${code}` ? "" : gist };
}

function bannersOf(frame, stale, recovered, dismissed) {
  if (stale) return [{ id: "stale", action: "reload" }];
  if (frame.link === "absent") return [{ id: "absent" }];
  if (frame.link === "lost") return [{ id: "lost", english: frame.link_message }];
  const list = [];
  const { lab } = frame;
  if (lab?.failure && lab.state !== "ready") list.push(failureBanner(lab));
  else if (lab?.state === "failed") list.push({ id: "failed", english: lab.message });
  if (recovered) list.push({ id: "recovered", kind: "good", values: { rank: recovered.rank } });
  if (frame.notice && frame.notice !== dismissed) list.push({ id: "notice", english: frame.notice, action: "dismiss", kind: "note" });
  return list;
}

function failureBanner(lab) {
  const values = { rank: lab.failure.rank, left: lab.restarts_left };
  const id = lab.restarts_left > 0 || lab.state === "restarting" ? "rank" : "rank_final";
  return { id, values, english: lab.failure.error, detail: lab.failure.traceback };
}
