// Curves of several runs: one colour a run, in all panels.
import { Curves } from "./curves.js";

const data = JSON.parse(document.querySelector("#data").textContent);
const panels = document.querySelector("#panels");
for (const panel of data.panels) panels.append(new Curves(panel).element);
