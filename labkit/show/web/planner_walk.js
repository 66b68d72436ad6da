// How the layout was found, question by question, and what must be looked at before it is deployed.

import { layoutName } from "./chooser.js";
import { h } from "./dom.js";
import { WordCard } from "./card.js";
import { wishName } from "./planner_answer.js";
import { sentence, spoken } from "./sentence.js";

const ANSWERS = { yes: "✓", no: "–", "not asked": "·" };
const CHECK_MARKS = { passed: "✓", failed: "✕", "not yet measured": "?" };

export function walkPanel(ctx) {
  return new WordCard(ctx, {
    id: "walk",
    wide: true,
    pick: () => ({ walk: ctx.plan().walk ?? [], next: ctx.plan().next ?? [] }),
    build: ({ walk, next }, t) => (walk.length ? [h("ol", { class: "lk-walk" }, walk.map((step) => walkStep(step, t))), nextRuns(next, t)] : [h("p", { class: "lk-empty" }, t("planner.planning"))]),
  });
}

function walkStep({ question, answer, sentence: because, layout }, t) {
  const kind = answer.replaceAll(" ", "-");
  return h("li", { class: `lk-step-${kind}` },
    h("div", { class: "lk-question" },
      h("div", {}, h("span", { class: `lk-answer-mark lk-answer-${kind}` }, `${ANSWERS[answer] ?? ""} ${t(`walk.${kind}`)}`), " ", spoken("b", {}, question, t)),
      layout ? h("span", { class: "lk-stands" }, layoutName(layout)) : null),
    spoken("p", {}, because, t));
}

/** What to measure next. */
function nextRuns(next, t) {
  if (!next.length) return "";
  return h("div", {}, h("b", {}, t("walk.next")), h("ul", { class: "lk-next" }, next.map((told) => spoken("li", {}, told, t))));
}

export function checksPanel(ctx) {
  return new WordCard(ctx, {
    id: "checks",
    pick: () => ({ checks: ctx.plan().checks ?? [] }),
    build: ({ checks }, t) => (checks.length ? [h("ul", { class: "lk-checks" }, checks.map((check) => checkItem(check, t)))] : [h("p", { class: "lk-empty" }, t("checks.none"))]),
    note: ({ checks }, t) => (checks.length ? t("checks.note", { passed: numWith(checks, "passed"), n: checks.length }) : ""),
  });
}

function numWith(checks, status) {
  return checks.filter((check) => check.status === status).length;
}

function checkItem({ axis, name, status, sentence: found, measure }, t) {
  const kind = status.replaceAll(" ", "-");
  return h("li", { class: `lk-check-${kind}` },
    h("span", { class: `lk-answer-mark lk-check-mark-${kind}` }, `${CHECK_MARKS[status] ?? ""} ${t(`checks.${kind}`)}`), " ",
    h("b", {}, axis === "all" ? checkName(name, t) : `${axis.toUpperCase()}: ${checkName(name, t)}`), spoken("p", {}, found, t),
    measure ? spoken("p", { class: "lk-muted" }, measure, t) : null);
}

/** Of a wish: what is wished. */
function checkName(name, t) {
  return typeof name === "string" ? wishName(name, t) : sentence(name, t);
}
