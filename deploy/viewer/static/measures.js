// Measures by which tokens are coloured: their values, colours and meanings. Pure: uses no document.
import { number } from "./words.js";

export const value = (column, at) => (column && column[at] !== null && column[at] !== undefined ? Number(column[at]) : null);
const both = (a, b, of) => (a === null || b === null ? null : of(a, b));

export const surprise = (tokens, at) => both(value(tokens.rollout, at), 0, (sampled, none) => none - sampled);
export const policy = (tokens, at) => value(tokens.learned?.policy_logprobs, at);
export const mismatch = (tokens, at) => both(policy(tokens, at), value(tokens.rollout, at), (learner, sampled) => Math.abs(learner - sampled));
export const advantage = (tokens, at) => value(tokens.learned?.advantages, at);
export const weight = (tokens, at) => value(tokens.learned?.weights, at);
export const weighted = (tokens, at) => both(advantage(tokens, at), weight(tokens, at) ?? 1, (gain, times) => gain * times);
export const staleness = (tokens, at, step) => (tokens.mask[at] ? step - 1 - tokens.versions[at] : null);
export const entropy = (tokens, at) => value(tokens.learned?.entropies, at);
export const clipped = (tokens, at) => tokens.learned?.clipped?.[at] ?? null;

/** Log-prob of the policy in the ratio's denominator: the proximal policy, the sampler, or the learner itself. */
export function former(tokens, at) {
  return value(tokens.learned?.proximal_logprobs, at) ?? (tokens.proximal === "rollout" ? value(tokens.rollout, at) : policy(tokens, at));
}
export const ratio = (tokens, at) => both(policy(tokens, at), former(tokens, at), (now, then) => Math.exp(now - then));

/** log π − log π_ref of the token that was sampled. */
export function overReference(tokens, at) {
  return tokens.mask[at] ? both(policy(tokens, at) ?? value(tokens.rollout, at), value(tokens.reference, at), (ours, theirs) => ours - theirs) : null;
}

/** The smallest 1, 2 or 5 times a power of ten that is at least the largest absolute value. */
export function nice(values) {
  const largest = values.reduce((most, each) => (Number.isFinite(each) ? Math.max(most, Math.abs(each)) : most), 0);
  if (!largest) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  return [1, 2, 5, 10].map((times) => Number((times * power).toPrecision(1))).find((bound) => bound >= largest * (1 - 1e-9));
}

const centred = (largest) => [-0.75, -0.5, -0.25, -0.02, 0.02, 0.25, 0.5, 0.75].map((share) => Number((share * largest).toPrecision(3)));
const needs = (...names) => (tokens) => names.map((name) => tokens.missing[name]).find(Boolean) ?? null;

/** `scale` is sequential, diverging or mask; `bounds` lie between its nine colours; `own`: bounds are computed from the trajectory; `sparse`: few tokens have a value. */
export const MEASURES = [
  { name: "Surprise", unit: "nats", what: "−log π of the policy that sampled the token", scale: "sequential", bounds: [0.05, 0.2, 0.5, 1, 2, 3, 5, 8],
    read: (tokens, at) => (tokens.mask[at] ? surprise(tokens, at) : null), missing: needs("rollout") },
  { name: "Mismatch", unit: "nats", what: "|log π of the learner − log π of the sampler|", scale: "sequential",
    bounds: [1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3], read: mismatch, missing: needs("rollout", "learned") },
  { name: "Ratio, clip", unit: "", what: "π of the learner over π of the policy in the denominator of the loss's ratio; framed where the loss clipped it", scale: "diverging",
    bounds: [0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.2], read: ratio, missing: needs("rollout", "learned"), frames: true },
  { name: "Advantage", unit: "", what: "advantage × correction weight", scale: "diverging", own: true, read: weighted,
    missing: (tokens) => tokens.missing.learned ?? (tokens.learned.advantages ? null : "not recorded: a filter removed this trajectory from the step") },
  { name: "Staleness", unit: "versions", what: "versions between the policy that sampled the token and the one that learned from it", scale: "sequential",
    bounds: [1, 2, 3, 4, 5, 6, 7, 8], read: staleness, missing: () => null },
  { name: "KL", unit: "nats", what: "log π − log π of the reference model", scale: "diverging", bounds: [-1, -0.3, -0.1, -0.01, 0.01, 0.1, 0.3, 1],
    read: overReference, missing: needs("reference") },
  { name: "Loss mask", unit: "", what: "the learner trains on tokens of the policy, not on those of tools and environment", scale: "mask",
    read: (tokens, at) => (tokens.mask[at] ? 1 : 0), missing: () => null },
  { name: "Token reward", unit: "", what: "reward that the environment gave at the token", scale: "diverging", own: true,
    sparse: true, read: (tokens, at) => value(tokens.rewards, at), missing: needs("rewards") },
  { name: "Entropy", unit: "nats", what: "entropy of the learner's distribution of the token", scale: "sequential", bounds: [0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 3],
    read: entropy, missing: (tokens) => tokens.missing.learned ?? (tokens.learned.entropies ? null : "not recorded: this step did not measure it") },
];

/** The measure for one trajectory: `level(at)` is 0 to 8, or null for a token without a value. */
export function measured(measure, tokens, step) {
  const missing = measure.missing(tokens);
  if (missing) return { ...measure, missing, bounds: [], level: () => null };
  // Tokens that no policy sampled have no value.
  const read = (at) => (tokens.mask[at] || measure.scale === "mask" ? measure.read(tokens, at, step) : null);
  const bounds = measure.own ? centred(nice(tokens.ids.map((_, at) => read(at) ?? 0))) : measure.bounds ?? [];
  const level = (at) => {
    const found = read(at);
    if (found === null || measure.scale === "mask") return found;
    return Number.isNaN(found) ? 8 : bounds.filter((bound) => found >= bound).length;
  };
  return { ...measure, missing: null, bounds, level, frame: (at) => Boolean(measure.frames && clipped(tokens, at)) };
}

/** Whether a token stands out: its colour is one of the last three of a sequential scale, or of the outer two at either end of a diverging one. */
export function stands(scale, level) {
  return level !== null && (scale === "sequential" ? level >= 6 : scale === "diverging" ? level <= 1 || level >= 7 : false);
}

/** Names and values of all that is known of one token. */
export function facts(tokens, at, step) {
  if (!tokens.mask[at]) return factsOfWritten(tokens, at);
  const sampled = value(tokens.rollout, at), gap = overReference(tokens, at);
  const chance = sampled === null ? "" : ` (${share(Math.exp(sampled))})`;
  return [
    ["Token", `${tokens.ids[at]}, place ${number(at + 1)}`],
    ["Trained on", "yes"],
    ["Log-prob, sampler", `${number(sampled)}${chance}`],
    ["Log-prob, learner", number(policy(tokens, at))],
    ["Mismatch", number(mismatch(tokens, at))],
    ["Ratio", `${number(ratio(tokens, at))}${clipped(tokens, at) ? ", clipped" : ""}`],
    ["Advantage", number(advantage(tokens, at))],
    ["Weight", number(weight(tokens, at))],
    ["Entropy", number(entropy(tokens, at))],
    ["Policy version", `${tokens.versions[at]}, ${number(staleness(tokens, at, step))} behind`],
    ["Log-prob, reference", number(value(tokens.reference, at))],
    ["KL, k1 · k3", gap === null ? "–" : `${number(gap)} · ${number(Math.exp(-gap) - 1 + gap)}`],
    ["Token reward", number(value(tokens.rewards, at))],
  ];
}

function factsOfWritten(tokens, at) {
  const reward = value(tokens.rewards, at);
  return [
    ["Token", `${tokens.ids[at]}, place ${number(at + 1)}`],
    ["Trained on", "no"],
    ...(reward ? [["Token reward", number(reward)]] : []),
  ];
}

function share(part) {
  return part > 0.9999 ? "100 %" : part < 1e-4 ? `${(100 * part).toExponential(0)} %` : `${Number((100 * part).toPrecision(3))} %`;
}
