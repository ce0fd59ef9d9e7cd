// Parts shared by the pages of groups and trajectories: links upwards, the prompt with roles and tools, and results of trajectories.
import { element, number } from "./words.js";

const LONG = 1200, FEW = 6;
export const ROLES = ["system", "user", "assistant", "tool"];

/** Links `[words, address]` from the run down to here, the last one without an address. */
export function trail(links) {
  return element("nav", { class: "trail", "aria-label": "Where this is" }, element("ol", {}, ...links.map(([words, address]) =>
    element("li", {}, address ? element("a", { href: address }, words) : element("span", { "aria-current": "page" }, words)))));
}

/** Links to the previous and the next one, which the keys k and j follow. */
export function neighbours(before, after, what) {
  const link = (address, key, words, rel) => (address === null ? [] : [element("a", { class: "chip", href: address, rel, "data-key": key },
    element("kbd", { "aria-hidden": "true" }, key), words)]);
  return element("div", { class: "row" }, ...link(before, "k", `Previous ${what}`, "prev"), ...link(after, "j", `Next ${what}`, "next"));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "j" || event.key === "k") document.querySelector(`[data-key="${event.key}"]`)?.click();
});

function messageView(message) {
  const role = ROLES.includes(message.role) ? message.role : "other";
  return element("div", { class: `message role-${role}` }, element("b", {}, message.name ? `${message.role} ${message.name}` : message.role), element("pre", {}, content(message)));
}

function content(message) {
  const text = typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content, null, 2) : "";
  const calls = (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((call) => JSON.stringify(call?.function ?? call, null, 2));
  return [text, ...calls].filter(Boolean).join("\n");
}

/** The last message of a prompt, or its text if it is not a conversation. */
export function lastSaid({ text, messages }) {
  return messages?.length ? content(messages.at(-1)) : text;
}

/** The prompt as a conversation, if it is one, and as the text that the policy read. Closed, it shows the beginning of its last message. */
export function prompt({ text, messages, columns }, { open }) {
  const length = messages ? messages.reduce((sum, message) => sum + content(message).length, 0) : text.length;
  const shown = element("details", { class: "card prompt" }, element("summary", {}, element("h2", {}, "Prompt"),
    element("span", { class: "soft begins" }, lastSaid({ text, messages }).slice(0, 200)), element("small", {}, `${number(length)} characters`)));
  shown.open = open && length <= LONG;
  if (messages) {
    shown.append(...messages.map(messageView));
    shown.append(element("details", {}, element("summary", {}, "Text that the policy read"), element("pre", {}, text)));
  } else shown.append(element("pre", {}, text));
  if (Object.keys(columns).length) shown.append(element("details", {}, element("summary", {}, "Other columns"), element("pre", {}, JSON.stringify(columns, null, 2))));
  return shown;
}

export function reward(trajectory) {
  return trajectory.reward === null ? trajectory.reward_status ?? "no reward" : number(trajectory.reward);
}

export const ENDS = { stop: "ended by itself", length: "cut at the limit", aborted: "given up" };

/** Names and values of a trajectory's results. */
export function facts(trajectory) {
  const { oldest_version: oldest, newest_version: newest } = trajectory;
  const masked = trajectory.num_tokens - trajectory.num_trained;
  return [
    ["Reward", reward(trajectory)],
    ["Tokens", number(trajectory.num_tokens), masked ? `${number(masked)} not trained on` : ""],
    ["End", ENDS[trajectory.finish_reason] ?? trajectory.finish_reason],
    ...(trajectory.episode ? episodeFacts(trajectory.episode) : []),
    ["Staleness", number(trajectory.staleness), oldest === null ? "" : oldest === newest ? `policy ${oldest}` : `policies ${oldest} to ${newest}`],
    ["Worker", trajectory.worker],
  ];
}

function episodeFacts(episode) {
  return [
    ["Environment", episode.environment],
    ["Turns", number(episode.num_turns)],
    ["Tool calls", number(episode.num_calls)],
    ...(episode.num_malformed_calls ? [["Malformed calls", number(episode.num_malformed_calls)]] : []),
    ...(episode.failed_stage ? [["Failed in", episode.failed_stage]] : []),
  ];
}

export function factList(entries) {
  return element("dl", { class: entries.length > FEW ? "facts many" : "facts" }, ...entries.map(([name, value, more]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, ...(more ? [" ", element("small", {}, more)] : [])))));
}

/** Parts of the reward, and the judge's message; null if there are none. */
export function verdict(trajectory) {
  const parts = Object.entries(trajectory.components).map(([name, value]) => element("li", { class: "chip" }, name, element("b", {}, number(value))));
  if (!parts.length && !trajectory.reward_message) return null;
  return element("div", { class: "verdict" }, ...(parts.length ? [element("ul", { class: "row", "aria-label": "Parts of the reward" }, ...parts)] : []),
    ...(trajectory.reward_message ? [element("p", { class: trajectory.reward === null ? "bad" : "soft" }, trajectory.reward_message)] : []));
}
