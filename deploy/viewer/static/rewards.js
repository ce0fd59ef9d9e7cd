// Rewards: the curves that the server sent with the page.
import { Curves } from "./curves.js";

const root = document.documentElement.dataset.root;
const { run, panels } = JSON.parse(document.querySelector("#data").textContent);
const open = (step) => step > 0 && location.assign(`${root}/run/${encodeURIComponent(run)}/step/${step}`);
document.querySelector("#panels").append(...panels.map((panel) => new Curves(panel, { open }).element));
