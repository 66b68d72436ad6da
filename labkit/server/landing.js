// The landing page asks for the state with the token that came in its own address, and hides it from the address bar.
"use strict";

const EVERY_MS = 5000;
const STATES = {
  ready: ["good", "Ready."],
  starting: ["busy", "The ranks are starting; this takes some seconds."],
  switching: ["busy", "Switching the layout."],
  restarting: ["busy", "A rank has failed; the pool is restarting."],
  failed: ["bad", "The ranks have failed."],
  stopped: ["bad", "The engine has stopped."],
};

const $ = (id) => document.getElementById(id);

function takeToken() {
  const address = new URL(location.href);
  const given = address.searchParams.get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    address.searchParams.delete("token");
    history.replaceState(null, "", address);
  }
  return sessionStorage.getItem("token") || "";
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function showState(kind, text) {
  const line = $("state");
  if (line.textContent !== text) line.textContent = text;
  line.className = `state ${kind}`;
}

function facts(state) {
  const device = state.environment ? state.environment.device : state.device;
  const rows = [
    ["Model", state.model],
    ["Layout", state.layout_name || "–"],
    ["Ranks", `${state.num_ranks} on ${device}, ${state.threads_per_rank} threads each, ${state.num_cores} cores`],
    ["Held by", state.holder ? `${state.holder.client}, for ${state.holder.purpose}` : "nobody"],
    ["Waiting", String(state.queue.length)],
    ["In flight", String(state.requests_in_flight)],
  ];
  $("facts").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
}

function card(link) {
  const anchor = document.createElement("a");
  anchor.href = link.url;
  anchor.append(element("strong", link.title), element("span", link.description || ""));
  const item = document.createElement("li");
  item.append(anchor);
  return item;
}

let shownLinks = "";

function links(state) {
  const wanted = JSON.stringify(state.links);
  if (wanted === shownLinks) return;
  shownLinks = wanted;
  $("links").replaceChildren(...state.links.map(card));
  $("no-links").hidden = state.links.length > 0;
}

async function refresh(token) {
  let answer;
  try {
    answer = await fetch("/lab/state", { headers: { Authorization: `Bearer ${token}` } });
  } catch {
    return showState("bad", "The lab server does not answer: it has ended, or this machine is out of reach.");
  }
  if (answer.status === 401) {
    return showState("bad", "This page needs its token: open the link that the server printed.");
  }
  const state = await answer.json();
  const [kind, text] = STATES[state.state] || ["busy", state.state];
  showState(kind, state.message ? `${text} ${state.message}` : text);
  facts(state);
  links(state);
}

const token = takeToken();
$("base").textContent = `${location.origin}/v1`;
refresh(token);
setInterval(() => document.hidden || refresh(token), EVERY_MS);
