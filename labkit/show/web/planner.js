// The page Planner: a model, GPUs, traffic and wishes in; layouts with their predictions, and why, out.
//
// A slider's move is answered twice: at once for the layout that is looked at (the trait `card`), and a moment later for
// all layouts (the trait `plan`). What is older than the newest move is shown pale.

import { LivePage } from "./page.js";
import { answerPanel } from "./planner_answer.js";
import { PlannerControls } from "./planner_controls.js";
import { deployPanel } from "./planner_deploy.js";
import { frontPanel } from "./planner_front.js";
import { percentilesPanel } from "./planner_percentiles.js";
import { layoutsPanel } from "./planner_table.js";
import { trialPanel } from "./planner_trial.js";
import { checksPanel, walkPanel } from "./planner_walk.js";

class PlannerPage extends LivePage {
  constructor(model, element) {
    super(model, element, { title: "planner", traits: ["plan", "card"] });
  }

  makeContext() {
    const trait = (name) => () => this.model.get(name) ?? {};
    return {
      ...super.makeContext(), plan: trait("plan"), card: trait("card"), options: trait("options"),
      wanted: () => this.controls.want, moved: () => this.markOld(), select: (layout) => this.controls.look(layout),
    };
  }

  makeControls() {
    return new PlannerControls(this.ctx);
  }

  makePanels() {
    const { ctx } = this;
    return [
      answerPanel(ctx), percentilesPanel(ctx), frontPanel(ctx), trialPanel(ctx), checksPanel(ctx), walkPanel(ctx), layoutsPanel(ctx), deployPanel(ctx),
    ];
  }

  draw() {
    super.draw();
    this.markOld();
    this.controls.answered(this.ctx.card().n ?? 0);
  }

  markOld() {
    if (!this.root) return; // the first question goes out before anything is drawn
    const [card, plan] = [this.ctx.card(), this.ctx.plan()];
    const { n } = this.controls.want;
    this.root.dataset.card = card.n ?? "";
    this.root.dataset.plan = plan.n ?? "";
    this.root.classList.toggle("lk-card-old", card.n != null && card.n < n);
    this.root.classList.toggle("lk-plan-old", plan.n != null && plan.n < n);
  }

  announce(before, after) {
    const { t } = this.ctx;
    if (!before.trial && after.trial) this.banners.say(t("trial.begun"));
    if (before.planning && !after.planning) this.banners.say(t("planner.planned"));
  }
}

export default {
  render({ model, el }) {
    const page = new PlannerPage(model, el);
    return () => page.close();
  },
};
