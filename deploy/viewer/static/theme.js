// Runs before the first paint: sets the colours that were chosen last time. The default is the system's.
try {
  const chosen = localStorage.getItem("treadwheel-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage is switched off: the system's colours stay */ }
