// The keys left and right follow the page's links to the previous and the next step.
addEventListener("keydown", (event) => {
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const isTaken = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.defaultPrevented;
  if (!rel || isTaken || event.target.closest("input, select, textarea, .scroll")) return;
  document.querySelector(`a[rel="${rel}"]`)?.click();
});
