// The page of a group or of a trajectory.
import { data, run } from "./page.js";
import { groupView, trajectoryView } from "./views.js";

const step = `${run}/step/${data.step}`;
const group = (ticket) => (ticket === null ? null : `${step}/group/${ticket}`);
const links = { step: () => step, group, trajectory: (ticket, sample) => `${group(ticket)}/${sample}` };
document.querySelector("#view").replaceChildren(...(data.tokens ? trajectoryView : groupView)(data, links));
