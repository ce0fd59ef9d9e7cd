// Weights: tables and curves from the data that the server sent with the page, renewed with each step.
import { showPanels } from "./curves.js";
import { follow } from "./live.js";
import { data, renew, run } from "./page.js";
import { element, number, time } from "./words.js";

function digest(value) {
  return value ? element("code", { title: value }, value.slice(0, 16)) : "–";
}

function proof(canary) {
  if (!canary) return "–";
  const words = `step ${canary.policy_version}: ${number(canary.canary_mean_error)} nats (noise ${number(canary.noise_floor)})`;
  return canary.distinguishable === false ? `${words}, could not distinguish old weights from new ones` : words;
}

function cell(content, cls) {
  return element("td", cls ? { class: cls } : {}, content);
}

function show() {
  const workers = data.workers.map((worker) => element("tr", {}, element("th", { scope: "row" }, worker.actor),
    cell(element("span", { class: "state", "data-state": worker.state }, worker.state)), cell(number(worker.policy_version), "number"),
    cell(number(worker.behind), "number"), cell(digest(worker.digest)), cell(proof(worker.canary))));
  const none = element("tr", {}, element("td", { colspan: 6 }, "No rollout worker has started yet."));
  document.querySelector("#workers tbody").replaceChildren(...(workers.length ? workers : [none]));
  document.querySelector("#broadcasts tbody").replaceChildren(...data.broadcasts.map((sent) => element("tr", {},
    cell(number(sent.policy_version), "number"), cell(time(sent.time), "whole"), cell(number(sent.num_workers), "number"), cell(digest(sent.digest)))));
  showPanels(data.panels);
}

async function again() {
  if (await renew("weights.json")) show();
}

show();
follow(`${run}/live`, data.mark, { news: (content) => (content.steps.length || content.marks.length) && again(), again });
