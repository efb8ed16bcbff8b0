// Connects the page: the event stream, the sections, dialogs, theme, key and keyboard.

import { EventFollower, key, keepKey, whenKeyNeeded } from "./api.js";
import { showCharts } from "./charts.js";
import { openJob, showJob, startDetails } from "./details.js";
import { byId, setText } from "./dom.js";
import { openForm, startForm } from "./form.js";
import { endsArrived, showBatches, showTiles, startFilter } from "./jobs.js";
import { showFailures, showFigures, showGpus, showNodes, showQueue } from "./pool.js";
import { apply, entries, pool, setServerTime } from "./store.js";

/** a page in the background lets go of the stream after this time */
const HIDDEN_MS = 15_000;
const STATES = { connecting: "Connecting", live: "Live", lost: "Reconnecting", refused: "No access" };

let drawing = false;
let touched = new Set();
let ends = 0;

const open = (job) => openJob(job, openForm);
const drawTiles = () => showTiles(open);

/** Draw the sections that `names` touch, once per frame. */
function draw(names) {
  names.forEach((name) => touched.add(name));
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const now = touched;
    touched = new Set();
    const any = (...sections) => sections.some((name) => now.has(name));
    if (any("pool", "workers", "clock")) showFigures();
    if (any("workers", "tasks", "ends", "samples", "clock")) showGpus(open);
    if (any("samples")) showCharts();
    if (any("tasks", "ends", "submissions")) drawTiles();
    if (any("submissions", "clock")) showBatches(drawTiles);
    if (any("pool")) showFailures();
    if (any("models", "users", "pool")) showQueue();
    if (any("workers", "groups", "pool")) showNodes();
    if (any("tasks", "ends", "submissions")) showJob();
  });
}

function showConnection(state) {
  const node = byId("connection");
  if (node.dataset.state === state) return;
  node.dataset.state = state;
  setText(node, STATES[state]);
}

const follower = new EventFollower(
  "/api/live",
  (change, serverTime) => {
    if (change.all) setServerTime(serverTime);
    const names = apply(change);
    const newest = Math.max(0, ...[...entries("ends").values()].map((end) => end.number + 1));
    if (newest !== ends) endsArrived(drawTiles);
    ends = newest;
    document.title = pool().jobs?.live ? `(${pool().jobs.live}) modelpool` : "modelpool";
    setText(byId("key-button"), pool().user ? `Key: ${pool().user}` : "API key");
    draw(names);
  },
  showConnection,
);

function startDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    for (const button of dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => dialog.close());
    // a click beside the dialog closes it, except the one for the key
    if (dialog.id !== "key-dialog") {
      dialog.addEventListener("mousedown", (event) => event.target === dialog && dialog.close());
    }
  }
}

function askForKey(message) {
  byId("key-button").hidden = false;
  byId("key-forget").hidden = !key();
  setText(byId("key-problem"), message);
  byId("key-problem").hidden = !message;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key-input").focus();
}

function startKey() {
  byId("key-button").hidden = !key();
  byId("key-button").addEventListener("click", () => askForKey(""));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("key-input").value.trim();
    if (!/^[\x21-\x7e]+$/.test(text)) {
      askForKey("A key has printable ASCII characters only, without spaces.");
      return;
    }
    keepKey(text);
    byId("key-input").value = "";
    byId("key-dialog").close();
    showConnection("connecting");
    follower.start();
  });
  byId("key-forget").addEventListener("click", () => {
    keepKey("");
    location.reload();
  });
  whenKeyNeeded(askForKey);
}

function startTheme() {
  const themes = ["auto", "light", "dark"];
  const button = byId("theme-button");
  const root = document.documentElement;
  const show = () => {
    const theme = root.dataset.theme ?? "auto";
    setText(button, `${theme[0].toUpperCase()}${theme.slice(1)} theme`);
  };
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme ?? "auto") + 1) % themes.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("modelpool.theme", next);
    } catch {
      // storage is turned off: the theme lasts until the page is closed
    }
    show();
  });
  show();
}

function startKeyboard() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.matches("input, textarea, select")) return;
    if (event.key === "n") {
      event.preventDefault();
      openForm();
    } else if (event.key === "/") {
      event.preventDefault();
      byId("filter-text").focus();
    }
  });
}

function startVisibility() {
  let timer = 0;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => follower.stop(), HIDDEN_MS);
    else if (follower.abort === null) follower.start();
  });
  setInterval(() => document.hidden || draw(["clock"]), 1000);
}

startDialogs();
startKey();
startTheme();
startKeyboard();
startForm();
startDetails();
startFilter(drawTiles);
startVisibility();
byId("new-button").addEventListener("click", () => openForm());
draw(["pool", "workers", "submissions", "tasks", "samples"]);
follower.start();
