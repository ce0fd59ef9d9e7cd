// An episode's completion as a conversation: heads of blocks, tool calls, and rules where the history was rewritten.
import { ENDS, ROLES } from "./prompts.js";
import { element, number } from "./words.js";

const LONG = 400;

const count = (size, one) => `${number(size)} ${size === 1 ? one : `${one}s`}`;

/** Blocks of a completion: those of its conversation, or else one for each stretch of one writer; none for a single writer. */
export function blocksOf(tokens) {
  if (tokens.conversation) return tokens.conversation.blocks;
  const found = [];
  tokens.mask.forEach((trained, at) => {
    if (at && trained === tokens.mask[at - 1]) found[found.length - 1].end = at + 1;
    else found.push({ start: at, end: at + 1, writer: trained ? "Policy" : "Tool or environment, not trained on" });
  });
  return found.length > 1 ? found : [];
}

/** A block's writer in words. */
export function writer(block) {
  if (block.turn) return `${block.label}, turn ${block.turn}`;
  return block.label ? `written: ${block.label}` : "written";
}

export function head(block, place) {
  if (block.writer) return element("p", { class: "writer" }, `${place + 1}. ${block.writer}`);
  const facts = [count(block.end - block.start, "token")];
  if (block.finish_reason && block.finish_reason !== "stop") facts.push(ENDS[block.finish_reason] ?? block.finish_reason);
  const earned = block.earned === null ? [] : [" ", element("span", block.earned ? { class: "earned" } : {}, `earned ${number(block.earned)}`)];
  return element("p", { class: "writer" }, element("b", {}, writer(block)), " ", element("span", {}, facts.join(" · ")), ...earned);
}

/** The element for a block's tokens. */
export function holder(block) {
  const role = ROLES.includes(block.role) ? block.role : "other";
  return element("section", { class: `block role-${role} ${block.turn ? "sampled" : "written"}`, "aria-label": writer(block) });
}

/** The tool calls of a turn, as boxes; null if it made none. */
export function calls(block) {
  if (!block.calls?.length) return null;
  return element("ul", { class: "calls", "aria-label": "Tool calls" }, ...block.calls.map((call) => element("li", { class: call.is_malformed ? "call malformed" : "call" },
    element("b", {}, call.name), " ", ...(call.is_malformed ? [element("span", { class: "bad" }, "malformed"), " "] : []), folded(call.arguments))));
}

/** The rule where the policy continued from another history than the one above. */
export function rewritten({ num_tokens, prompt }) {
  return element("details", { class: "rewritten" }, element("summary", {}, `history rewritten: ${count(num_tokens, "token")} of new context`), element("pre", {}, prompt));
}

function folded(text) {
  if (text.length <= LONG) return element("code", {}, text);
  return element("details", {}, element("summary", {}, `${number(text.length)} characters`), element("code", {}, text));
}
