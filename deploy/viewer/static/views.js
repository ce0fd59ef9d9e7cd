// The views of a group and of a trajectory, from their data and functions that give addresses.
import { factList, facts, neighbours, prompt, reward, trail, verdict } from "./prompts.js";
import { Tokens } from "./tokens.js";
import { element, number, seconds } from "./words.js";

const ifAny = (made) => (made ? [made] : []);

/** Each trajectory's reward as a chip; `current` is the sample of this page. */
function siblings(group, links, current) {
  return element("nav", { class: "row siblings", "aria-label": "Trajectories of this group, the best first" }, ...group.trajectories.map((each) =>
    element("a", { class: "chip", href: links.trajectory(group.ticket, each.sample_index), ...(each.sample_index === current ? { "aria-current": "page" } : {}) },
      element("small", {}, `#${each.sample_index}`), reward(each))));
}

export function range(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return least === most ? number(least) : `${number(least)} – ${number(most)}`;
}

function spread(group) {
  const rewards = group.trajectories.map((each) => each.reward).filter((each) => each !== null);
  if (!rewards.length) return [["Rewards", "none"]];
  const mean = rewards.reduce((sum, each) => sum + each, 0) / rewards.length;
  return [["Mean reward", number(mean)], ["Rewards", range(rewards)]];
}

export function groupView(group, links) {
  const lengths = group.trajectories.map((each) => each.num_tokens);
  const cards = group.trajectories.map((each) => {
    const entries = facts(each).slice(1).map(([name, value, more]) => element("div", more ? { title: more } : {}, element("dt", {}, name), element("dd", {}, value)));
    const address = links.trajectory(group.ticket, each.sample_index);
    return element("article", { class: "card completion", "aria-label": `Trajectory ${each.sample_index}` },
      element("header", {}, element("a", { href: address }, `Trajectory ${each.sample_index}`), element("b", { class: "reward" }, reward(each))),
      ...ifAny(verdict(each)),
      ...(each.episode?.num_turns ? [element("p", { class: "soft" }, `Last message of ${number(each.episode.num_turns)} turns:`)] : []),
      element("pre", { tabindex: "0", "aria-label": `Completion of trajectory ${each.sample_index}` }, ...(group.folded ? [element("span", { class: "fold", title: group.folded }, "… ")] : []), each.text),
      ...(each.num_left_out ? [element("p", { class: "soft" }, `${number(each.num_left_out)} more characters: `, element("a", { href: address }, "all tokens"))] : []),
      element("dl", { class: "lines" }, ...entries));
  });
  const folded = group.folded ? [element("details", { class: "card" }, element("summary", {}, `All ${group.trajectories.length} completions begin with the same ${number(group.folded.length)} characters`), element("pre", {}, group.folded))] : [];
  return [
    trail([[`Step ${group.step}`, links.step(group.step)], [`Group ${group.ticket}`, null]]),
    element("div", { class: "row spread" }, element("h1", {}, `Group ${group.ticket} of step ${group.step}`), neighbours(links.group(group.before), links.group(group.after), "group")),
    factList([...spread(group), ["Trajectories", String(group.trajectories.length)], ["Tokens", range(lengths)],
      ["Place in the step", `${group.place}`, `of ${group.num_groups}, sampled in ${seconds(group.seconds)}`]]),
    element("p", { class: "soft break" }, `Prompt ${group.prompt_id}`),
    prompt(group.prompt, { open: true }), ...folded,
    element("section", { class: "completions", "aria-label": "Completions, the best reward first" }, ...cards),
  ];
}

export function trajectoryView(group, links) {
  const place = group.trajectories.findIndex((each) => each.sample_index === group.sample), each = group.trajectories[place];
  const at = (index) => (group.trajectories[index] ? links.trajectory(group.ticket, group.trajectories[index].sample_index) : null);
  return [
    trail([[`Step ${group.step}`, links.step(group.step)], [`Group ${group.ticket}`, links.group(group.ticket)], [`Trajectory ${group.sample}`, null]]),
    element("div", { class: "row spread" }, element("h1", {}, `Trajectory ${group.sample}`), neighbours(at(place - 1), at(place + 1), "trajectory")),
    siblings(group, links, group.sample),
    factList(facts(each)), ...ifAny(verdict(each)),
    prompt(group.prompt, { open: false }),
    ...(group.tokens.tokenizer ? [element("p", { class: "card" }, group.tokens.tokenizer)] : []),
    new Tokens(group.tokens, group.step).element,
  ];
}
