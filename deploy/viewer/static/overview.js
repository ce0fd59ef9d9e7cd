// The overview: the data that the server sent with the page, and news since.
import { showPanels } from "./curves.js";
import { follow } from "./live.js";
import { data, renew, run } from "./page.js";
import { element, lasting, number, seconds, time } from "./words.js";

const skew = Date.now() / 1000 - data.now; // this clock against the server's
const place = (id) => document.querySelector(`#${id}`);
const open = (step) => step > 0 && location.assign(`${run}/step/${step}`);
let charts = [];

function ago(unix) {
  return unix ? `${lasting(Math.max(0, Date.now() / 1000 - skew - unix))} ago` : "–";
}

function showFacts(facts) {
  place("step").textContent = `Step ${number(facts.step)}`;
  place("left").textContent = facts.left_s ? `${seconds(facts.left_s)} left` : "";
  place("progress").value = facts.step;
  const entries = [
    ["Reward", number(facts.reward)],
    ["Held-out accuracy", number(facts.held_out_accuracy)],
    ["A step", seconds(facts.step_s)],
    ["Sampling", number(facts.sampling && Math.round(facts.sampling)), "tokens/s"],
    ["Learning", number(facts.learning && Math.round(facts.learning)), "tokens/s"],
    ["Staleness", number(facts.staleness), facts.bound === null ? "" : `of at most ${number(facts.bound)}`],
    ["Last step", "", "", "last-step"],
  ];
  place("facts").replaceChildren(...entries.map(([name, value, unit, id]) =>
    element("div", {}, element("dt", {}, name), element("dd", { id }, value, ...(unit ? [" ", element("small", {}, unit)] : [])))));
  tick();
}

function tick() {
  place("last-step").textContent = ago(data.facts.last_step_at);
  for (const since of document.querySelectorAll("[data-since]")) {
    since.textContent = lasting(Math.max(0, Date.now() / 1000 - skew - Number(since.dataset.since)));
  }
}

function showActors(actors) {
  place("actors").replaceChildren(...actors.map((actor) => {
    const words = [element("b", {}, actor.name)];
    if (actor.state === "dead") words.push(element("small", {}, actor.trouble ?? "dead"));
    else if (actor.phase) words.push(element("small", {}, `${actor.phase} `, element("span", { "data-since": actor.phase_since })));
    else words.push(element("small", {}, actor.state));
    if (actor.num_restarts) words.push(element("small", { class: "restarts" }, `restarted ${actor.num_restarts}×`));
    return element("li", { "data-state": actor.state, "data-actor": actor.name, title: actor.trouble ?? "" },
      element("i", { role: "img", "aria-label": actor.state }), ...words);
  }));
}

function showEvents(events) {
  place("events").replaceChildren(...events.slice(0, 200).map((event) => element("li", { class: event.tone },
    element("time", { datetime: new Date(event.time * 1000).toISOString() }, time(event.time)),
    event.step > 0 && event.step <= data.facts.step ? element("a", { href: `${run}/step/${event.step}` }, `step ${event.step}`) : element("span", {}, `step ${event.step}`),
    element("span", { class: "kind" }, event.kind.replaceAll("_", " ")), element("span", { class: "break" }, event.words))));
  if (!events.length) place("events").replaceChildren(element("li", {}, "Nothing yet."));
}

function show() {
  showFacts(data.facts);
  showActors(data.actors);
  showEvents(data.events);
  charts = showPanels(data.panels, { marks: data.marks, open });
  place("waiting").hidden = charts.length > 0;
}

async function again() {
  if (await renew("index.json")) show();
}

const NO_CURVE = new Set(["started", "checkpoint"]);

function news(content) {
  data.facts = content.facts;
  showFacts(content.facts);
  showActors(content.actors);
  if (!content.steps.length && !content.marks.length) return;
  data.marks.push(...content.marks.filter((mark) => !NO_CURVE.has(mark.kind)));
  data.events.unshift(...content.marks.toReversed());
  showEvents(data.events);
  const isWhole = charts.map((chart) => chart.push(content.steps)).every(Boolean);
  if (!isWhole || (!charts.length && content.steps.length)) again();
}

show();
setInterval(tick, 1000);
follow(`${run}/live`, data.mark, { news, again });
