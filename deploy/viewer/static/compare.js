// Curves of several runs: one colour a run, in all panels.
import { showPanels } from "./curves.js";
import { data } from "./page.js";

showPanels(data.panels);
