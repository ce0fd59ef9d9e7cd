// The Gantt chart, with a row for each actor: its phases above, its life below. And the table of their states.
import { follow } from "./live.js";
import { data, renew, run } from "./page.js";
import { clock, element, lasting, number, seconds, svg, time } from "./words.js";

const ROW = 26, BAR = 16, AXIS = 22;
const NAMES = {
  sampling: "sampling", learning: "learning", judging: "judging", evaluation: "evaluation", loading: "sending or loading weights",
  saving: "saving", start: "starting", waiting: "waiting, idle",
};

function gantt() {
  const place = document.querySelector("#gantt"), narrow = place.clientWidth < 560;
  const left = narrow ? 84 : 130, width = place.clientWidth, height = data.rows.length * ROW + AXIS;
  const x = (unix) => left + (Math.min(Math.max((unix - data.begin) / (data.end - data.begin || 1), 0), 1)) * (width - left - 4);
  const bar = (span, y, high, cls, words) => svg("rect", {
    class: cls, x: x(span.start).toFixed(1), y, width: Math.max(1, x(span.end) - x(span.start)).toFixed(1), height: high, rx: high > 6 ? 2 : 0,
  }, svg("title", {}, words));
  const drawn = svg("svg", { width, height, role: "img", "aria-label": `Phases of ${data.rows.length} actors over ${lasting(data.end - data.begin)}; the table below has their states` });
  for (let share = 0; share <= 1.001; share += narrow ? 0.5 : 0.25) {
    const at = data.begin + share * (data.end - data.begin), across = x(at);
    drawn.append(svg("line", { class: "rule", x1: across, x2: across, y1: 0, y2: height - AXIS }));
    drawn.append(svg("text", { x: across, y: height - 6, "text-anchor": share > 0.99 ? "end" : share < 0.01 ? "start" : "middle" }, clock(at)));
  }
  data.rows.forEach((row, index) => {
    const y = index * ROW, name = narrow && row.actor.length > 11 ? `${row.actor.slice(0, 10)}…` : row.actor;
    drawn.append(svg("text", { class: "name", x: 0, y: y + 16 }, name, svg("title", {}, row.actor)));
    for (const span of row.life) {
      const words = `${row.actor}: ${span.state} for ${seconds(span.end - span.start)}${span.words ? ` (${span.words})` : ""}`;
      if (span.state === "dead") drawn.append(bar(span, y + 3, BAR + 3, "life dead", words));
      else drawn.append(bar(span, y + 3 + BAR, 3, "life", words));
    }
    for (const span of row.bars) {
      const many = span.number > 1 ? `, mostly, of ${span.number} phases` : "";
      drawn.append(bar(span, y + 3, BAR, `phase ${span.color}`, `${row.actor}: ${span.phase}${many}, ${seconds(span.end - span.start)}${span.step === null || span.step === undefined ? "" : `, step ${span.step}`}`));
    }
  });
  place.replaceChildren(drawn);
  const used = new Set(data.rows.flatMap((row) => row.bars.map((span) => span.color)));
  const entries = Object.keys(NAMES).filter((color) => used.has(color)).map((color) => element("li", {}, element("i", { class: `phase ${color}` }), NAMES[color]));
  if (data.rows.some((row) => row.life.some((span) => span.state === "dead"))) entries.push(element("li", {}, element("i", { class: "phase dead" }), "dead"));
  document.querySelector("#key").replaceChildren(...entries, element("li", {}, element("i", { class: "phase alive" }), "alive"));
}

function table(actors) {
  document.querySelector("#actors tbody").replaceChildren(...actors.map((actor) => {
    const state = element("span", { class: "state", "data-state": actor.state, "data-actor": actor.name }, actor.state);
    const does = actor.phase ? `${actor.phase} for ${lasting(Math.max(0, data.end - actor.phase_since))}` : "–";
    return element("tr", {}, element("th", { scope: "row" }, actor.name), element("td", {}, state), element("td", { class: "whole" }, actor.state === "healthy" ? does : "–"),
      element("td", { class: "number" }, number(actor.policy_version)), element("td", { class: "number" }, number(actor.num_restarts)),
      element("td", { class: "number" }, actor.pid ? String(actor.pid) : "–"),
      element("td", { class: "break" }, actor.trouble ? `${time(actor.trouble_at)} ${actor.trouble}` : "–"));
  }));
}

function events() {
  const entries = data.marks.map((mark) => element("li", { class: mark.tone }, element("time", {}, time(mark.time)),
    element("span", {}, `step ${mark.step}`), element("span", { class: "kind" }, mark.kind.replaceAll("_", " ")), element("span", { class: "break" }, mark.words)));
  document.querySelector("#events").replaceChildren(...(entries.length ? entries : [element("li", {}, "Nothing yet: all actors that started are still there.")]));
}

function show() {
  gantt();
  table(data.actors);
  events();
}

async function again() {
  if (await renew(`actors.json?window=${data.window}`)) show();
}

new ResizeObserver(gantt).observe(document.querySelector("#gantt"));
show();
follow(`${run}/live`, data.mark, { news: (content) => (content.state === "running" || content.marks.length ? again() : table(content.actors)), again });
