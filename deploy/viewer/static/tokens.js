// A completion, token by token: coloured by a measure, with a strip of all of it, a legend, and the numbers of one token.
// A piece far from the visible part is plain text; its spans are made when it comes near. All text is set by textContent.
import { facts, measured, MEASURES, stands } from "./measures.js";
import { blocksOf, calls, head, holder, rewritten } from "./turns.js";
import { element, number } from "./words.js";

const PIECE = 400, MOST = 800, STRIP = 240;
const CHOSEN = "treadwheel-measure";
const FEW = 60;
const WHOSE = { rollout: "The sampler’s log-probs:", learned: "The learner’s numbers:", reference: "The reference’s log-probs:", rewards: "Rewards of tokens:" };

/** Pieces, each of one writer and within one of `blocks`. They end at the end of a line if possible. */
export function pieces(tokens, blocks) {
  const found = [], starts = new Set(blocks.map((block) => block.start));
  let start = 0;
  for (let at = 1; at <= tokens.ids.length; at++) {
    const ends = at === tokens.ids.length || tokens.mask[at] !== tokens.mask[start] || starts.has(at);
    if (ends || at - start >= MOST || (at - start >= PIECE && tokens.texts[at - 1].includes("\n"))) {
      found.push({ start, end: at, trained: tokens.mask[start] });
      start = at;
    }
  }
  return found;
}

export class Tokens {
  /** `step` learned from these `tokens`. */
  constructor(tokens, step) {
    this.tokens = tokens;
    this.step = step;
    this.at = null;
    this.marks = { broken: new Set(tokens.broken), special: new Set(tokens.special) };
    this.blocks = blocksOf(tokens);
    this.pieces = pieces(tokens, this.blocks);
    this.switch = element("div", { class: "row measures", role: "group", "aria-label": "Colour tokens by" });
    this.legend = element("div", { class: "token-legend" });
    this.strip = element("div", { class: "strip", "aria-hidden": "true" });
    this.text = element("div", { class: tokens.ids.length <= FEW ? "tokens few" : "tokens", tabindex: "0", role: "group", "aria-describedby": "token-said",
      "aria-label": `Completion of ${number(tokens.ids.length)} tokens. Arrow keys go from token to token, n and p to those that stand out` });
    this.numbers = element("dl", { class: "numbers" });
    this.said = element("output", { id: "token-said", class: "visually-hidden" });
    const notes = Object.entries(WHOSE).filter(([name]) => tokens.missing[name]).map(([name, words]) => element("p", {}, `${words} ${tokens.missing[name]}.`));
    this.about = element("aside", { class: "about", "aria-label": "The token" }, this.numbers, this.said, ...notes);
    this.element = element("section", { class: "card token-card", "aria-label": "Tokens" },
      element("div", { class: "token-head" }, this.switch, this.legend, this.strip), element("div", { class: "token-columns" }, this.text, this.about));
    this.choices = MEASURES.map((measure, index) => element("button", { type: "button", class: "chip", title: measure.what },
      element("kbd", { "aria-hidden": "true" }, String(index + 1)), measure.name));
    this.choices.forEach((button, index) => button.addEventListener("click", () => this.show(index)));
    this.switch.append(...this.choices);
    this.#write();
    this.#listen();
    this.show(chosen());
    this.about.dataset.empty = "";
    this.numbers.append(element("div", {}, element("dt", {}, "Point at a token or use the arrow keys to see all its numbers.")));
  }

  /** Colours tokens by `MEASURES[index]`. */
  show(index) {
    this.measure = measured(MEASURES[index], this.tokens, this.step);
    this.element.dataset.measure = String(index + 1);
    this.choices.forEach((button, each) => button.setAttribute("aria-pressed", String(each === index)));
    try { localStorage.setItem(CHOSEN, String(index)); } catch { /* only for this page, then */ }
    this.#explain();
    this.#drawStrip();
    for (const piece of this.pieces) if (piece.spans) piece.spans.forEach((span, place) => this.#color(span, piece.start + place));
  }

  /** Shows the numbers of the token at place `at`. */
  point(at) {
    this.#span(this.at)?.classList.remove("at");
    this.at = at;
    const span = this.#built(at);
    span.classList.add("at");
    delete this.about.dataset.empty;
    const part = this.tokens.characters[at] ? ` part of “${this.tokens.characters[at]}”` : "";
    const text = JSON.stringify(this.tokens.texts[at]).slice(1, -1) + part;
    const entries = facts(this.tokens, at, this.step).filter(([, shown]) => shown !== "–");
    this.numbers.replaceChildren(element("div", { class: "whole-row" }, element("dt", {}, "Text"), element("dd", { class: "mono break" }, text)),
      ...entries.map(([name, shown]) => element("div", {}, element("dt", {}, name), element("dd", {}, shown))));
    return `${text}: ${entries.map(([name, shown]) => `${name} ${shown}`).join(", ")}`;
  }

  /** As `point`, for the keyboard: also scrolls to the token and gives a screen reader its numbers. */
  go(at) {
    this.said.textContent = this.point(at);
    this.#span(at).scrollIntoView({ block: "nearest" });
  }

  #write() {
    const near = new IntersectionObserver((entries) => entries.forEach((entry) => entry.isIntersecting && this.#build(this.pieces[Number(entry.target.dataset.piece)])),
      { rootMargin: "800px" });
    if (!this.pieces.length) this.text.append(element("p", { class: "writer" }, "There are no tokens: the trajectory failed before the first one."));
    const starts = new Map(this.blocks.map((block, place) => [block.start, place]));
    let home = this.text;
    this.pieces.forEach((piece, index) => {
      if (starts.has(piece.start)) home = this.#begin(starts.get(piece.start));
      piece.place = element("div", { class: piece.trained ? "piece" : "piece masked", "data-piece": index });
      piece.place.textContent = this.tokens.texts.slice(piece.start, piece.end).join("");
      home.append(piece.place);
      near.observe(piece.place);
    });
    this.blocks.forEach((block, place) => { const made = calls(block); if (made) this.text.querySelector(`[data-block="${place}"]`).append(made); });
  }

  /** Adds the head of a block, and above it the rule if the history was rewritten there. Returns the element for its pieces. */
  #begin(place) {
    const block = this.blocks[place], before = this.tokens.conversation?.rewrites.filter((each) => each.start === block.start) ?? [];
    const home = this.tokens.conversation ? holder(block) : this.text;
    this.text.append(...before.map(rewritten));
    if (home !== this.text) { home.dataset.block = String(place); this.text.append(home); }
    home.append(head(block, place));
    return home;
  }

  #build(piece) {
    if (piece.spans) return;
    piece.spans = [];
    for (let at = piece.start; at < piece.end; at++) {
      const span = document.createElement("span");
      span.textContent = this.tokens.texts[at];
      span.dataset.at = String(at);
      this.#color(span, at);
      piece.spans.push(span);
    }
    piece.place.replaceChildren(...piece.spans);
  }

  #color(span, at) {
    const level = this.measure.level(at), text = this.tokens.texts[at];
    const names = ["t", level === null ? "unknown" : `${this.measure.scale}-${level}`];
    if (this.measure.frame?.(at)) names.push("clipped");
    if (this.marks.broken.has(at)) names.push("broken");
    if (this.marks.special.has(at)) names.push("special");
    if (text.includes("\n")) names.push("line");
    if (at === this.at) names.push("at");
    span.className = names.join(" ");
  }

  #piece(at) {
    return this.pieces.find((piece) => at >= piece.start && at < piece.end);
  }

  #span(at) {
    const piece = at === null ? undefined : this.#piece(at);
    return piece?.spans?.[at - piece.start];
  }

  #built(at) {
    this.#build(this.#piece(at));
    return this.#span(at);
  }

  #explain() {
    const { name, scale, bounds, missing, own, what, unit } = this.measure;
    if (missing) return this.legend.replaceChildren(element("p", { class: "missing" }, `${name}: ${missing}.`));
    const colours = scale === "mask" ? [["mask-1", "trained on"], ["mask-0", "not trained on"]]
      : Array.from({ length: 9 }, (_, level) => [`${scale}-${level}`, level === 0 ? `< ${bounds[0]}` : String(bounds[level - 1])]);
    const swatches = colours.map(([colour, words]) => element("li", { class: `t ${colour}` }, words));
    if (this.measure.frames) swatches.push(element("li", { class: "t clipped" }, "clipped"));
    this.legend.replaceChildren(element("p", {}, what, unit ? `, in ${unit}` : "", own ? "; the scale is this trajectory’s" : ""), element("ol", { "aria-label": `Colours, from ${scale === "mask" ? "trained" : "small"} on` }, ...swatches));
  }

  /** One bar for each stretch, in the colour that a tenth of its tokens reach: in long stretches the maximum would be the same everywhere.
   *  For a sparse measure it is the maximum. */
  #drawStrip() {
    const count = this.tokens.ids.length, bars = Math.min(STRIP, count);
    this.strip.hidden = count < 200 || this.measure.missing !== null;
    if (this.strip.hidden) return;
    const far = (level) => (this.measure.scale === "diverging" ? Math.abs(level - 4) : level);
    this.strip.replaceChildren(...Array.from({ length: bars }, (_, bar) => {
      const levels = [];
      for (let at = Math.floor((bar * count) / bars); at < Math.floor(((bar + 1) * count) / bars); at++) {
        const level = this.measure.level(at);
        if (level !== null) levels.push(level);
      }
      levels.sort((one, other) => far(other) - far(one));
      return element("i", { class: levels.length ? `${this.measure.scale}-${levels[this.measure.sparse ? 0 : Math.floor(levels.length / 10)]}` : "unknown" });
    }));
  }

  #listen() {
    this.text.addEventListener("pointerover", (event) => event.target.dataset.at && this.point(Number(event.target.dataset.at)));
    this.text.addEventListener("click", (event) => event.target.dataset.at && this.point(Number(event.target.dataset.at)));
    this.text.addEventListener("keydown", (event) => {
      const last = this.tokens.ids.length - 1, at = this.at ?? -1;
      const goal = { ArrowRight: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => this.#below(1), ArrowUp: () => this.#below(-1), Home: () => 0, End: () => last }[event.key];
      if (!goal || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      this.go(Math.min(Math.max(goal(), 0), last));
    });
    this.strip.addEventListener("click", (event) => {
      const box = this.strip.getBoundingClientRect();
      this.point(Math.min(this.tokens.ids.length - 1, Math.floor(((event.clientX - box.left) / box.width) * this.tokens.ids.length)));
      this.#span(this.at).scrollIntoView({ block: "center" });
    });
    document.addEventListener("keydown", (event) => {
      if (!this.element.isConnected || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
      const index = Number(event.key) - 1;
      if (index >= 0 && index < MEASURES.length) this.show(index);
      if (event.key === "n" || event.key === "p") this.#goToOne(event.key === "n" ? 1 : -1);
    });
  }

  /** Place of the token below or above this one: in the next or previous line on the screen, at the left edge of this one. */
  #below(direction) {
    const from = this.#span(this.at)?.getBoundingClientRect();
    for (let at = (this.at ?? -1) + direction; from && at >= 0 && at < this.tokens.ids.length; at += direction) {
      const box = this.#built(at).getBoundingClientRect(), down = direction * (box.top - from.top);
      if (down > from.height / 2 && (direction > 0 ? box.right > from.left : box.left <= from.left)) return at;
      if (down > 3 * from.height) return at;
    }
    return (this.at ?? -1) + direction;
  }

  #goToOne(direction) {
    for (let at = (this.at ?? -1) + direction; at >= 0 && at < this.tokens.ids.length; at += direction) {
      if (stands(this.measure.scale, this.measure.level(at)) || this.measure.frame?.(at)) {
        this.text.focus({ preventScroll: true });
        return this.go(at);
      }
    }
    this.said.textContent = "No further token stands out.";
  }
}

function chosen() {
  try {
    const index = Number(localStorage.getItem(CHOSEN));
    return index >= 0 && index < MEASURES.length ? index : 0;
  } catch {
    return 0;
  }
}
