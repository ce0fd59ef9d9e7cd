// Numbers and times in the format of the page templates, and elements made from text.
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
  if (size < 1e-4) return value.toExponential(2);
  return size < 9999.5 ? String(Number(value.toPrecision(4))) : Math.round(value).toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(value) / 60), rest = Math.round(value) % 60;
  if (minutes < 60) return `${minutes} min ${rest} s`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
}

/** A duration that still grows, in whole units: `8 s`, `3 min`, `5 h`. */
export function lasting(value) {
  if (value < 100) return `${Math.floor(value)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min`;
  return value < 172800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86400)} days`;
}

/** `1.2 k`: short, for axes. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))} G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))} k`;
  return size > 0 && size < 1e-3 ? value.toExponential(1).replace(".0e", "e") : String(Number(value.toPrecision(3)));
}

/** Without the date: for axes. */
export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString();
}

/** With the date, unless it is today. */
export function time(unix) {
  const at = new Date(unix * 1000), isToday = at.toDateString() === new Date().toDateString();
  return isToday ? clock(unix) : `${at.toLocaleDateString()} ${clock(unix)}`;
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** An element with attributes and children. Text never becomes HTML. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** As `element`, for SVG. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}
