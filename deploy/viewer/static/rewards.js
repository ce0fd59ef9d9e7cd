// Rewards: the curves that the server sent with the page.
import { showPanels } from "./curves.js";
import { data, run } from "./page.js";

showPanels(data.panels, { open: (step) => step > 0 && location.assign(`${run}/step/${step}`) });
