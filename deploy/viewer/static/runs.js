// The list of runs: a comparison takes at least two runs, and at most as many as there are colours.
const form = document.querySelector("#choose");
if (form) {
  const button = form.querySelector("#compare"), note = form.querySelector("#chosen"), most = Number(form.dataset.most);
  const show = () => {
    const number = form.querySelectorAll("input:checked").length;
    button.disabled = number < 2 || number > most;
    note.textContent = number > most ? `${number} chosen: at most ${most}.` : number ? `${number} chosen.` : `Choose 2 to ${most}.`;
  };
  form.addEventListener("change", show);
  show();
}
