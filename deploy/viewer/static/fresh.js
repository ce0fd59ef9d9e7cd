// On pages without live updates: says that there are new steps. The page changes only when the reader asks for them.
import { follow } from "./live.js";

const banner = document.querySelector("#fresh"), [words, show] = banner.children;
let numSteps = 0;

function say(text) {
  words.textContent = text;
  banner.hidden = false;
}

show.addEventListener("click", () => location.reload());
follow(banner.dataset.live, banner.dataset.mark, {
  news: ({ steps }) => steps.length && say((numSteps += steps.length) === 1 ? "1 step is new." : `${numSteps} steps are new.`),
  again: () => say("The content of this page has changed."),
});
