import { groupView } from "./views.js";
import { linksOf } from "./links.js";

const data = JSON.parse(document.querySelector("#data").textContent);
document.querySelector("#view").replaceChildren(...groupView(data, linksOf(data)));
