// Before the first paint: the colours that were chosen here last time. Without a choice they are the system's.
try {
  const chosen = localStorage.getItem("treadwheel-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage is switched off: the system's colours stay */ }
