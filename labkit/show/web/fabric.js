// The page Fabric: what joins the ranks, as measured on them, and what they do with it right now.

import { curvesPanel } from "./curves.js";
import { FabricControls } from "./fabric_controls.js";
import { lastStepsPanel } from "./laststeps.js";
import { LivePage } from "./page.js";
import { pairsPanel } from "./pairs.js";
import { telemetryPanel } from "./telemetry.js";
import { topologyPanel } from "./topology.js";

class FabricPage extends LivePage {
  constructor(model, element) {
    super(model, element, { title: "fabric", traits: ["measured"] });
  }

  makeContext() {
    return { ...super.makeContext(), measured: () => this.model.get("measured") ?? {} };
  }

  makeControls() {
    return new FabricControls(this.ctx);
  }

  makePanels() {
    const { ctx } = this;
    return [topologyPanel(ctx), curvesPanel(ctx), pairsPanel(ctx), telemetryPanel(ctx), lastStepsPanel(ctx)];
  }

  draw() {
    super.draw();
    this.root.dataset.measured = this.ctx.measured().measured?.measured_at ?? "";
  }

  announce(before, after) {
    const { t } = this.ctx;
    if (!before.progress && after.progress) this.banners.say(t("measure.begun"));
    if (before.progress && !after.progress) this.banners.say(after.notice ? t("banner.notice") : t("measure.over"));
  }
}

export default {
  render({ model, el }) {
    const page = new FabricPage(model, el);
    return () => page.close();
  },
};
