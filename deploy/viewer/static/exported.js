// A step in one file. The part of the address after # selects a group or a trajectory.
import { lastSaid, reward } from "./prompts.js";
import { groupView, range, trajectoryView } from "./views.js";
import { element, number } from "./words.js";

const data = JSON.parse(document.querySelector("#data").textContent);
const view = document.querySelector("#view");
const links = { step: () => "#", group: (ticket) => (ticket === null ? null : `#${ticket}`), trajectory: (ticket, sample) => `#${ticket}/${sample}` };

/** Totals over a group's episodes; nothing for single turns. */
function episodes(group) {
  const found = group.trajectories.map((each) => each.episode).filter(Boolean);
  if (!found.length) return [];
  const sum = (name) => found.reduce((all, each) => all + each[name], 0), turns = range(found.map((each) => each.num_turns));
  const malformed = sum("num_malformed_calls"), stages = [...new Set(found.map((each) => each.failed_stage).filter(Boolean))];
  return [element("small", {}, `${found[0].environment}: turns ${turns}, tool calls ${number(sum("num_calls"))}`,
    malformed ? ` (${number(malformed)} malformed)` : "", stages.length ? `, failed in ${stages.join(", ")}` : "")];
}

function stepView() {
  const rows = data.groups.map((group) => element("li", {}, element("a", { href: links.group(group.ticket) }, `Group ${group.ticket}`),
    element("div", {}, element("div", { class: "begins soft" }, lastSaid(group.prompt).slice(0, 160)), ...episodes(group)),
    element("div", { class: "row siblings" }, ...group.trajectories.map((each) =>
      element("a", { class: "chip", href: links.trajectory(group.ticket, each.sample_index), "aria-label": `Trajectory ${each.sample_index}: ${reward(each)}` }, reward(each))))));
  const left = data.num_left_out ? [element("p", { class: "soft" }, `${number(data.num_left_out)} more groups of this step are not in this file: it would be too large.`)] : [];
  return [element("h1", {}, `Step ${data.step} of ${data.run}`), element("p", { class: "soft" }, "Groups in the learner's order, each with its rewards, the best first."),
    element("ol", { class: "card groups" }, ...rows), ...left];
}

function show() {
  const [ticket, sample] = location.hash.slice(1).split("/").map(Number);
  const group = location.hash.length > 1 ? data.groups.find((each) => each.ticket === ticket) : undefined;
  const tokens = group?.tokens[sample];
  const made = tokens ? trajectoryView({ ...group, sample, tokens }, links) : group ? groupView(group, links) : stepView();
  view.replaceChildren(...made);
  scrollTo(0, 0);
}

addEventListener("hashchange", show);
show();
