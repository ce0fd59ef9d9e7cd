import { linksOf } from "./links.js";
import { trajectoryView } from "./views.js";

const data = JSON.parse(document.querySelector("#data").textContent);
document.querySelector("#view").replaceChildren(...trajectoryView(data, linksOf(data)));
