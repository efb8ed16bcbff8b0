// Sets the theme before the page is drawn. Not a module: modules run later.
try {
  const chosen = localStorage.getItem("modelpool.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is turned off: the theme is that of the system
}
