// A page that was made once says that its run has gone on. What the reader looks at stays where it is until they ask.
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
  again: () => say("What this page shows has changed."),
});
