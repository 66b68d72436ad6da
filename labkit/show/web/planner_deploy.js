// The commands of each engine for the layout that is looked at, to copy; or what the engine cannot do.

import { layoutName } from "./chooser.js";
import { h, uniqueId } from "./dom.js";
import { WordCard } from "./card.js";
import { spoken } from "./sentence.js";

export function deployPanel(ctx) {
  const panel = new WordCard(ctx, {
    id: "deploy",
    wide: true,
    wanted: () => Boolean(ctx.card().commands?.length),
    pick: () => ({ engines: ctx.card().commands ?? [], layout: ctx.card().candidate?.layout ?? "", engine: ctx.wanted().engine }),
    build: (data, t, self) => deployParts(data, t, self, ctx),
    note: (data) => layoutName(data.layout),
  });
  panel.name = uniqueId("engine");
  return panel;
}

function deployParts(data, t, panel, ctx) {
  const shown = data.engines.find(({ engine }) => engine === (panel.engine ?? data.engine)) ?? data.engines[0];
  const tabs = data.engines.map(({ engine, name, version }) => h("label", { class: "lk-segment" },
    h("input", { type: "radio", name: panel.name, id: `${panel.name}-${engine}`, value: engine, checked: engine === shown.engine, onchange: () => chooseEngine(panel, engine) }),
    h("span", {}, `${name} ${version}`)));
  const body = shown.refused ? [spoken("p", { class: "lk-why" }, shown.refused, t)] : shown.commands.map((command) => commandBox(command, t, ctx));
  return [h("div", { class: "lk-segments lk-filters", role: "radiogroup", "aria-label": t("planner.engine") }, tabs), h("div", { class: "lk-commands" }, body)];
}

function chooseEngine(panel, engine) {
  panel.engine = engine;
  panel.extraKey = engine;
  panel.draw();
}

function commandBox({ role, engine, text, notes, node }, t, ctx) {
  const said = h("span", { role: "status" });
  const title = role === "load" ? t("deploy.load", { name: engine }) : t(`deploy.${role}`);
  const copy = h("button", { type: "button", class: "lk-copy", "aria-label": t("deploy.copy_what", { what: title }), onclick: () => copyText(text, said, ctx) }, t("deploy.copy"));
  return h("div", { class: "lk-command", "data-role": role },
    h("div", { class: "lk-command-head" }, h("b", {}, title), node ? h("small", { class: "lk-muted" }, t("deploy.node", { n: node })) : null, copy, said),
    h("pre", { tabindex: 0 }, text),
    (notes ?? []).map((note) => spoken("p", { class: "lk-muted" }, note, t)));
}

async function copyText(text, said, ctx) {
  try {
    await navigator.clipboard.writeText(text);
    said.textContent = ctx.t("deploy.copied");
  } catch {
    said.textContent = ctx.t("deploy.not_copied"); // plain http on another machine: the browser refuses
  }
}
