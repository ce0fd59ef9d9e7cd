// On pages without live updates: says that there are new steps. The page changes only when the reader asks for them.
import { follow } from "./live.js";

const said = document.querySelector("#fresh"), [words, show] = said.children;
let numSteps = 0;

function say(text) {
  words.textContent = text;
  said.hidden = false;
}

show.addEventListener("click", () => location.reload());
follow(said.dataset.live, said.dataset.mark, {
  news: ({ steps }) => steps.length && say((numSteps += steps.length) === 1 ? "1 step is new." : `${numSteps} steps are new.`),
  again: () => say("The content of this page has changed."),
});
