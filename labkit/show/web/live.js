// The page Layouts: what changes when only the split of the model over the ranks does.

import { besidePanel } from "./beside.js";
import { Controls } from "./controls.js";
import { crossingsPanel } from "./crossings.js";
import { expertsPanel } from "./experts.js";
import { ganttPanel } from "./gantt.js";
import { kvPanel, poolsPanel } from "./kv.js";
import { ladderPanel } from "./ladder.js";
import { LivePage } from "./page.js";
import { inflightPanel, throughputPanel } from "./timeline.js";
import { memoryPanel, ownershipPanel, sharesPanel } from "./ranks.js";
import { waterfallPanel } from "./waterfall.js";
import { whyPanel } from "./why.js";

const OBJECTIVE_EVERY_MS = 150;

class LayoutsPage extends LivePage {
  constructor(model, element) {
    super(model, element, { title: "page", traits: ["choices", "stored"] });
  }

  makeContext() {
    return {
      ...super.makeContext(),
      choices: () => this.model.get("choices"),
      stored: () => this.model.get("stored") ?? [],
      onPin: () => this.togglePin(),
      onStored: (runId) => this.pinStored(runId),
    };
  }

  makeControls() {
    return new Controls(this.ctx);
  }

  makePanels() {
    const { ctx } = this;
    const onObjective = (change) => this.changeObjective(change);
    return [
      ladderPanel(ctx, { id: "ttft", metric: "ttft_ms", step: 1, onObjective }),
      ladderPanel(ctx, { id: "tpot", metric: "tpot_ms", step: 0.5, onObjective }),
      besidePanel(ctx), whyPanel(ctx), waterfallPanel(ctx), throughputPanel(ctx), ownershipPanel(ctx), inflightPanel(ctx), memoryPanel(ctx), kvPanel(ctx),
      sharesPanel(ctx), crossingsPanel(ctx), expertsPanel(ctx), poolsPanel(ctx), ganttPanel(ctx),
    ];
  }

  draw() {
    super.draw();
    this.root.dataset.n = this.frame?.run?.ttft_ms.n ?? 0;
  }

  /** A stored run, which comes with every frame, or a layout pinned here. */
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

export default {
  render({ model, el }) {
    const page = new LayoutsPage(model, el);
    return () => page.close();
  },
};
