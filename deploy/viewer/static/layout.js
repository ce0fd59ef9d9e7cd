// On every page: the switch of colours, the navigation, and times in the reader's time zone.
const html = document.documentElement;
const button = document.querySelector("#theme");
const SAID = { system: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
const NEXT = { system: "light", light: "dark", dark: "system" };

function show() {
  const [glyph, words] = SAID[html.dataset.theme ?? "system"];
  button.textContent = glyph;
  button.setAttribute("aria-label", `Colours: ${words}`);
  button.title = `Colours: ${words}`;
}

button.addEventListener("click", () => {
  const next = NEXT[html.dataset.theme ?? "system"];
  if (next === "system") delete html.dataset.theme;
  else html.dataset.theme = next;
  try { localStorage.setItem("treadwheel-theme", next); } catch { /* only for this page, then */ }
  show();
});
show();

// On a small screen the entry of this page may lie beyond the edge.
const tabs = document.querySelector(".tabs"), current = tabs?.querySelector("[aria-current]");
if (current && current.offsetLeft + current.offsetWidth > tabs.clientWidth) tabs.scrollLeft = current.offsetLeft - tabs.clientWidth / 3;

for (const time of document.querySelectorAll("time[data-unix]")) {
  time.title = time.textContent;
  time.textContent = new Date(Number(time.dataset.unix) * 1000).toLocaleString();
}
