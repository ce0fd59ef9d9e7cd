// A panel of curves in SVG: lines, points, a bound, marks of events, and the values at the pointer or at the step chosen by arrow keys.
import { nice, vertical } from "./scale.js";
import { element, number, short, svg } from "./words.js";

const HEIGHT = 190, LEFT = 46, RIGHT = 12, TOP = 14, BOTTOM = 24;
const MANY = 150; // points, from which on a line is drawn pale, with its mean
const NEWS = 50; // new steps, after which the server's means are too old

class Curves {
  /** `panel` is made by series.py; `open(step)` is called for the step that the reader chooses. */
  constructor(panel, marks, open) {
    this.panel = panel;
    this.marks = marks;
    this.open = open;
    this.hidden = new Set();
    this.news = 0;
    this.legend = element("div", { class: "legend" });
    this.plot = svg("svg", { height: HEIGHT, tabindex: 0, role: "img" });
    this.told = element("output", { class: "visually-hidden", "aria-live": "polite" });
    this.tip = element("div", { class: "tip", hidden: "" });
    const unit = panel.unit ? [" ", element("small", {}, panel.unit)] : [];
    const caption = element("figcaption", {}, element("h2", {}, panel.title, ...unit), this.legend);
    this.element = element("figure", { class: "card curves" }, caption, element("div", { class: "plot" }, this.plot, this.tip), this.told);
    this.plot.addEventListener("pointermove", (event) => this.point(this.stepAt(event.offsetX)));
    this.plot.addEventListener("pointerleave", () => this.point(undefined));
    this.plot.addEventListener("blur", () => this.point(undefined));
    this.plot.addEventListener("click", () => this.open && this.at !== undefined && this.open(this.at));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.list();
    this.draw(); // its name only: it has no width until it is on the page
  }

  update(panel, marks) {
    this.panel = panel;
    this.news = 0;
    this.marks = marks;
    this.list();
    this.draw();
  }

  /** Adds new steps, each `{policy_version, name: value}`. False if the data should be reloaded: too many points, old means, or a new line. */
  push(steps) {
    for (const line of this.panel.lines) {
      for (const step of steps) {
        const value = step[line.name];
        if (value !== undefined && value !== null) line.points.push([step.policy_version, value]);
      }
    }
    const shown = new Set(this.panel.lines.map((line) => line.name));
    this.news += steps.length;
    this.draw();
    return this.panel.lines.every((line) => line.points.length < 1600 && !(line.mean?.length && this.news >= NEWS))
      && !this.panel.wanted.some((name) => !shown.has(name) && steps.some((step) => step[name] !== undefined && step[name] !== null));
  }

  list() {
    const entries = this.panel.lines.map((line, index) => {
      const entry = element("button", { class: `chip series-${line.color ?? (index % 6) + 1}`, type: "button" }, element("i", { class: line.kind }), line.label);
      entry.setAttribute("aria-pressed", String(!this.hidden.has(line.name)));
      entry.addEventListener("click", () => {
        if (!this.hidden.delete(line.name)) this.hidden.add(line.name);
        entry.setAttribute("aria-pressed", String(!this.hidden.has(line.name)));
        this.draw();
      });
      return entry;
    });
    if (this.panel.bound) entries.push(element("span", { class: "chip bound" }, element("i", { class: "dashed" }), this.panel.bound.label));
    this.legend.replaceChildren(...entries);
  }

  lines() {
    return this.panel.lines
      .map((line, index) => ({ ...line, color: line.color ?? (index % 6) + 1 }))
      .filter((line) => !this.hidden.has(line.name) && line.points.length);
  }

  draw() {
    const lines = this.lines();
    this.plot.setAttribute("aria-label", this.inWords(lines));
    const width = this.plot.parentElement.clientWidth;
    if (!width) return;
    this.plot.setAttribute("width", width);
    const hasMean = lines.some((line) => line.kind === "line" && line.points.length >= MANY);
    this.element.title = hasMean ? "Pale: the steps. Strong: the mean of each with its neighbours." : "";
    if (!lines.length) return this.plot.replaceChildren();
    const steps = lines.flatMap((line) => [line.points[0][0], line.points.at(-1)[0]]);
    this.first = Math.min(...steps);
    this.last = Math.max(...steps, this.first + 1);
    const scale = vertical(lines, this.panel);
    this.x = (step) => LEFT + ((step - this.first) / (this.last - this.first)) * (width - LEFT - RIGHT);
    this.y = (value) => TOP + (1 - scale.place(value)) * (HEIGHT - TOP - BOTTOM);
    this.plot.replaceChildren(...this.axes(scale.ticks, width), ...this.drawnMarks(), ...this.drawnBound(scale, width), ...lines.flatMap((line) => this.drawn(line)));
    this.cursor = this.plot.appendChild(svg("g", { class: "cursor" }));
    if (this.at !== undefined) this.point(this.at);
  }

  drawn(line) {
    const places = line.points.map(([step, value]) => [this.x(step).toFixed(1), this.y(value).toFixed(1)]);
    if (line.kind === "points" || places.length === 1)
      return places.map(([x, y]) => svg("circle", { class: `series-${line.color}`, cx: x, cy: y, r: places.length > 60 ? 2.5 : 4 }));
    const path = (through, cls) => svg("path", { class: `series-${line.color} ${cls}`, d: "M" + through.map((place) => place.join(" ")).join("L") });
    if (places.length < MANY) return [path(places, "")];
    if (line.mean?.length === 0) return [path(places, "raw")]; // the mean of a maximum has no meaning
    return [path(places, "raw"), path((line.mean ?? smoothed(line.points)).map(([step, value]) => [this.x(step).toFixed(1), this.y(value).toFixed(1)]), "mean")];
  }

  axes(ticks, width) {
    const across = ticks.flatMap((value) => [
      svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: this.y(value), y2: this.y(value) }),
      svg("text", { x: LEFT - 8, y: this.y(value) + 4, "text-anchor": "end" }, short(value)),
    ]);
    const down = nice(this.first, this.last, Math.max(4, Math.floor(width / 90))).filter(Number.isInteger)
      .map((step) => svg("text", { x: this.x(step), y: HEIGHT - 6, "text-anchor": this.x(step) > width - 40 ? "end" : "middle" }, short(step)));
    return [...across, ...down];
  }

  drawnBound(scale, width) {
    const value = this.panel.bound?.value;
    if (value === undefined || value === null || value > scale.high) return [];
    return [svg("line", { class: "bound", x1: LEFT, x2: width - RIGHT, y1: this.y(value), y2: this.y(value) })];
  }

  /** Bad news has a triangle, good news a dot, all else only the line: the shapes work without colour. A step that is being made has no
   * number yet: its marks are at the end. */
  drawnMarks() {
    return this.marks.filter((mark) => mark.step >= this.first).slice(-80).map((mark) => {
      const x = this.x(Math.min(mark.step, this.last)).toFixed(1), group = svg("g", { class: `mark ${mark.tone}` });
      group.append(svg("line", { x1: x, x2: x, y1: TOP - 4, y2: HEIGHT - BOTTOM }), svg("title", {}, `step ${mark.step}: ${mark.words}`));
      if (mark.tone === "bad") group.append(svg("path", { d: `M${x} ${TOP}l-4.500 -8h9z` }));
      if (mark.tone === "good") group.append(svg("circle", { cx: x, cy: TOP - 4, r: 3.5 }));
      return group;
    });
  }

  stepAt(x) {
    const width = this.plot.clientWidth - LEFT - RIGHT;
    return this.nearest(this.first + ((x - LEFT) / width) * (this.last - this.first));
  }

  nearest(step) {
    const points = this.lines().flatMap((line) => (line.kind === "line" || line.points.length < 100 ? line.points : []));
    let best;
    for (const [at] of points) if (best === undefined || Math.abs(at - step) < Math.abs(best - step)) best = at;
    return best;
  }

  point(step) {
    this.at = step;
    if (!this.cursor) return;
    if (step === undefined) {
      this.cursor.replaceChildren();
      this.tip.hidden = true;
      return;
    }
    const x = this.x(step), lines = this.lines();
    const values = lines.flatMap((line) => {
      const point = line.points.find(([at]) => at === step);
      return point ? [{ line, value: point[1] }] : [];
    });
    this.cursor.replaceChildren(
      svg("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
      ...values.map(({ line, value }) => svg("circle", { class: `series-${line.color}`, cx: x, cy: this.y(value), r: 4 })),
    );
    const marks = this.marks.filter((mark) => mark.step === step).slice(0, 3);
    this.tip.replaceChildren(
      element("b", {}, `step ${number(step)}`),
      ...values.map(({ line, value }) => element("span", { class: `series-${line.color}` }, element("i"), line.label, element("b", {}, number(value)))),
      ...marks.map((mark) => element("span", { class: `said ${mark.tone}` }, mark.words)),
    );
    this.tip.hidden = false;
    const width = this.plot.parentElement.clientWidth, side = Math.min(Math.max(x + 12, 0), width - this.tip.offsetWidth);
    this.tip.style.left = `${x + 12 + this.tip.offsetWidth > width ? Math.max(0, x - 12 - this.tip.offsetWidth) : side}px`;
  }

  key(event) {
    if (event.key === "Enter" && this.open && this.at !== undefined) return this.open(this.at);
    const steps = [...new Set(this.lines().flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);
    const place = steps.indexOf(this.at);
    const next = { ArrowLeft: place < 0 ? steps.length - 1 : place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (next === undefined || steps[next] === undefined) return;
    event.preventDefault();
    this.point(steps[next]);
    this.told.textContent = this.tip.innerText.replaceAll("\n", ", ");
  }

  inWords(lines) {
    const values = lines.map((line) => `${line.label} ${number(line.points.at(-1)[1])} at step ${line.points.at(-1)[0]}`);
    return `${this.panel.title}${this.panel.unit ? `, ${this.panel.unit}` : ""}: ${values.join("; ") || "nothing"}. Arrow keys read values.`;
  }
}

const charts = new Map();

/** Panels of the page, by title: made once and then updated. */
export function showPanels(panels, { marks = [], open = undefined } = {}) {
  for (const panel of panels) {
    const chart = charts.get(panel.title);
    if (chart) chart.update(panel, marks);
    else {
      charts.set(panel.title, new Curves(panel, marks, open));
      document.querySelector("#panels").append(charts.get(panel.title).element);
    }
  }
  return [...charts.values()];
}

/** Mean of each point with its neighbours, the same number on both sides: near the ends there are few. */
function smoothed(points) {
  const most = Math.round(points.length / 50);
  const sums = [0];
  for (const [, value] of points) sums.push(sums.at(-1) + value);
  return points.map(([step], index) => {
    const reach = Math.min(most, index, points.length - 1 - index);
    return [step, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)];
  });
}
