// The dialog of one job: its image, facts and actions, why its tasks ran where they did, and its story.

import { blobOf, call, CallFailed, words } from "./api.js";
import { byId, h, setText, toast } from "./dom.js";
import { bytes, measured, plural } from "./format.js";
import { NodeGraph } from "./graph.js";
import { cancel, retry } from "./jobs.js";
import { outputPath, Picture } from "./previews.js";
import { entries } from "./store.js";

const MOST_LINES = 300;
const MOST_ATTEMPTS = 6;
const REFRESH_MS = 2000;
const GRAPH_MS = 500;

let shown = null;
let timer = 0;
let fullImage = "";

export function startDetails() {
  byId("job-dialog").addEventListener("close", () => {
    clearTimeout(timer);
    clearTimeout(shown?.graphTimer);
    shown?.graph.end();
    shown?.picture.end();
    shown = null;
    if (fullImage) URL.revokeObjectURL(fullImage);
    fullImage = "";
  });
}

/** Open the dialog for a job: an entry of a task or of an end. `reuse(fields)` opens the form with its settings. */
export function openJob(job, reuse) {
  const dialog = byId("job-dialog");
  shown?.graph.end();
  clearTimeout(shown?.graphTimer);
  const picture = new Picture("job-picture");
  const graph = new NodeGraph();
  const facts = h("dl", { class: "job-facts" });
  const actions = h("div", { class: "actions" });
  const parameters = h("div", { class: "parameters" });
  const why = h("div", { class: "why" });
  const story = h("div", { class: "story" });
  const key = `${job.submission}/${job.index}`;
  shown = { key, job, picture, graph, graphTimer: 0, facts, actions, parameters, fields: null, why, story, reuse, state: "" };
  byId("job-body").replaceChildren(
    h("div", { class: "job-top" }, picture.node, h("div", { class: "job-side" }, facts, actions)),
    graph.node,
    h("section", {}, h("h3", { text: "Parameters" }), parameters),
    h("section", {}, h("h3", { text: "Why there" }), why),
    h("details", {}, h("summary", {}, h("h3", { text: "Story" })), story),
  );
  if (!dialog.open) dialog.showModal();
  showJob();
  refresh(shown);
}

/** Show what has changed of the job in the open dialog. */
export function showJob() {
  if (shown === null) return;
  const { key, picture } = shown;
  const end = entries("ends").get(key) ?? (shown.job.state ? shown.job : undefined);
  const task = end ? undefined : entries("tasks").get(key);
  const job = end ?? task ?? shown.job;
  const state = end ? end.state : task ? "running" : "waiting";
  setText(byId("job-title"), `Job ${job.job}`);
  showFacts(job, state, task);
  if (task && task.source === "here") picture.follow(task, task.prompt);
  if (state === shown.state) return;
  shown.state = state;
  picture.node.hidden = state === "failed" || state === "cancelled";
  showActions(job, state);
  if (state === "succeeded" && job.file) showOutput(shown, job);
  readParameters(shown);
  readGraph(shown);
}

/** Show the nodes of a job that is a workflow, and again while it has not ended. */
async function readGraph(mine) {
  if (mine.job.source === "elsewhere") return;
  clearTimeout(mine.graphTimer);
  const { job, state } = mine;
  try {
    const graph = await call("GET", `/api/jobs/${encodeURIComponent(job.submission)}/graph/${job.index}`);
    if (shown !== mine) return;
    mine.graph.update(graph);
    const isActive = state === "running" || state === "waiting";
    if (isActive && graph.nodes.length && state === mine.state) mine.graphTimer = setTimeout(() => readGraph(mine), GRAPH_MS);
  } catch {
    // the job may be known to the pool only: what else is known of it is shown
  }
}

function showFacts(job, state, task) {
  const rows = [
    ["State", task && task.steps ? `${task.stage}, step ${task.step} of ${task.steps}` : task ? task.stage : state],
    ["Error", [job.kind, job.message].filter(Boolean).join(": ")],
    ["Prompt", job.prompt],
    ["GPU", job.worker ?? ""],
    ["GPU time", job.seconds === undefined || job.seconds === null ? "" : measured(job.seconds)],
    ["File", job.file || job.address || ""],
  ].filter(([, text]) => text);
  const text = JSON.stringify(rows);
  if (shown.facts.dataset.shown === text) return;
  shown.facts.dataset.shown = text;
  shown.facts.replaceChildren(...rows.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))));
}

function showActions(job, state) {
  const { actions, reuse } = shown;
  const submission = entries("submissions").get(job.submission);
  const isElsewhere = (submission ?? job).source === "elsewhere";
  const alone = !isElsewhere && (submission === undefined || submission.jobs === 1);
  const buttons = [];
  if (state === "succeeded" && job.file) {
    buttons.push(h("button", { type: "button", text: "Download", on: { click: () => download(job) } }));
  }
  if ((state === "running" || state === "waiting") && alone) {
    buttons.push(h("button", { type: "button", text: "Cancel job", on: { click: () => cancel(job.submission) } }));
  }
  if ((state === "failed" || state === "cancelled") && alone) {
    buttons.push(h("button", { type: "button", text: "Retry", on: { click: () => retry(job.submission) } }));
  }
  if (!isElsewhere) {
    buttons.push(h("button", { type: "button", text: "Use these parameters", on: { click: () => use(job, reuse) } }));
  }
  if (state === "succeeded" && job.file) {
    buttons.push(h("button", { type: "button", class: "start-from", text: "Start from this image", hidden: true, on: { click: () => startFrom(shown) } }));
  }
  const focused = actions.contains(document.activeElement);
  actions.replaceChildren(...buttons);
  if (focused) buttons[0]?.focus();
}

const parametersOf = (job) => call("GET", `/api/jobs/${encodeURIComponent(job.submission)}/requests/${job.index}`);

async function use(job, reuse) {
  try {
    const fields = await parametersOf(job);
    byId("job-dialog").close();
    reuse(fields);
  } catch (problem) {
    toast(words(problem));
  }
}

/** Open the form with the output as the start image, and the same parameters as far as they are known. */
async function startFrom(mine) {
  const { job, reuse, output } = mine;
  let fields = null;
  try {
    fields = await parametersOf(job);
  } catch {
    // the image is enough
  }
  byId("job-dialog").close();
  reuse(fields, new File([output], job.file || "output", { type: output.type }));
}

async function readParameters(mine) {
  if (mine.job.source === "elsewhere") {
    mine.parameters.replaceChildren(h("p", { class: "quiet", text: "Another program has submitted this job, and has its parameters." }));
    return;
  }
  try {
    const fields = await parametersOf(mine.job);
    if (shown === mine) showParameters(mine, fields);
  } catch (problem) {
    if (shown === mine && mine.fields === null) mine.parameters.replaceChildren(h("p", { class: "quiet", text: words(problem) }));
  }
}

const LABELS = {
  cfg: "Guidance (CFG)",
  loras: "LoRAs",
  controls: "ControlNets",
  image: "Start image",
  negative: "Negative prompt",
  clip_skip: "CLIP skip",
  hires: "Second pass",
};

const labelOf = (name) => LABELS[name] ?? `${name[0].toUpperCase()}${name.slice(1).replaceAll("_", " ")}`;

/** Return a JSON value in words: "light 0.8", "pag: scale 3". */
function textOf(value) {
  if (value === true) return "on";
  if (value === false) return "off";
  if (Array.isArray(value)) return value.map(textOf).join(", ");
  if (value === null || typeof value !== "object") return String(value);
  const { name, model, strength, ...rest } = value;
  const first = [name ?? model, strength].filter((each) => each !== undefined && each !== null).join(" ");
  const more = Object.entries(rest)
    .filter(([, each]) => each !== null && each !== "")
    .map(([key, each]) => `${key} ${textOf(each)}`)
    .join(", ");
  return first && more ? `${first} (${more})` : first || more || "on";
}

function parameterRows(parameters) {
  const { width, height, options, ...others } = parameters;
  const rows = Object.entries(others).map(([name, value]) => [labelOf(name), textOf(value)]);
  if (width && height) rows.push(["Size", `${width} × ${height}`]);
  for (const [name, value] of Object.entries(options ?? {})) rows.push([`Option ${name}`, textOf(value)]);
  return rows.filter(([, text]) => text !== "");
}

function showParameters(mine, fields) {
  const text = JSON.stringify(fields);
  if (mine.fields === text) return;
  mine.fields = text;
  const { prompt, ...others } = fields.parameters;
  const parameters = prompt === mine.job.prompt ? others : fields.parameters; // it is above already
  const rows = parameterRows(parameters).map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value })));
  const recipe = fields.recipe === null ? null : recipeDetails(fields.recipe);
  mine.parameters.replaceChildren(h("dl", { class: "parameter-list" }, ...rows), ...(recipe === null ? [] : [recipe]));
}

function recipeDetails(recipe) {
  const text = JSON.stringify(recipe, null, 2);
  const copy = h("button", { type: "button", class: "small", text: "Copy", on: { click: () => copied(text) } });
  return h("details", { class: "recipe" }, h("summary", { text: "Recipe" }), h("div", { class: "recipe-text" }, copy, h("pre", { text, tabindex: "0", "aria-label": "Recipe as JSON" })));
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser does not let this page copy: select the text.");
  }
}

async function showOutput(mine, job) {
  try {
    const blob = await blobOf(outputPath(job.submission, job.index, job.file));
    if (shown !== mine) return;
    if (fullImage) URL.revokeObjectURL(fullImage);
    fullImage = URL.createObjectURL(blob);
    if (blob.type.startsWith("image/")) {
      mine.output = blob;
      const button = mine.actions.querySelector(".start-from");
      if (button) button.hidden = false;
      mine.picture.path = "output";
      mine.picture.image.alt = job.prompt;
      mine.picture.set(fullImage);
    } else if (blob.type.startsWith("video/") || blob.type.startsWith("audio/")) {
      const player = h(blob.type.startsWith("video/") ? "video" : "audio", { controls: true });
      player.src = fullImage;
      mine.picture.node.replaceChildren(player);
      mine.picture.node.classList.add("filled");
    }
  } catch (problem) {
    toast(words(problem));
  }
}

async function download(job) {
  try {
    const url = URL.createObjectURL(await blobOf(outputPath(job.submission, job.index, job.file)));
    const link = h("a", { href: url, download: job.file });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  } catch (problem) {
    toast(words(problem));
  }
}

/** Read the history of the job, and again while it has not ended. */
async function refresh(mine) {
  if (shown !== mine) return;
  try {
    const history = await call("GET", `/api/job-history/${encodeURIComponent(mine.job.job)}`);
    if (shown !== mine) return;
    showWhy(mine.why, history);
    showStory(mine.story, history);
    if (history.ended_at === null) timer = setTimeout(() => refresh(mine), REFRESH_MS);
  } catch (problem) {
    if (shown !== mine) return;
    const text = problem instanceof CallFailed ? problem.message : words(problem);
    mine.why.replaceChildren(h("p", { class: "quiet", text }));
  }
}

function showWhy(node, history) {
  const text = JSON.stringify([history.tasks, history.status]);
  if (node.dataset.shown === text) return;
  node.dataset.shown = text;
  const named = withNames(history);
  const tasks = history.tasks.map((task) => h("li", {}, h("h4", { text: task.stage }), ...taskParts(task, history, named)));
  node.replaceChildren(tasks.length ? h("ol", { class: "tasks" }, ...tasks) : h("p", { class: "quiet", text: history.note || "Its tasks are no longer known." }));
}

/** Return a function that replaces ids in texts of the history by the words that the dialog uses. */
function withNames(history) {
  const names = [[history.job_id, "job"], ...history.tasks.map((task) => [task.task_id, task.stage])];
  return (text) => names.reduce((found, [id, name]) => found.replaceAll(id, name), text);
}

function taskParts(task, history, named) {
  const earlier = task.attempts.length - MOST_ATTEMPTS;
  const parts = task.attempts.slice(-MOST_ATTEMPTS).map((attempt) => {
    const where = [attempt.worker_id, attempt.node].filter(Boolean).join(" on ");
    const cost = attempt.cost;
    const took = cost ? `took ${measured(cost.run_seconds)}${cost.uploaded_bytes ? `, loaded ${bytes(cost.uploaded_bytes)}` : ""}` : "";
    const expected = `expected ${measured(attempt.why.chosen.run_seconds)}`;
    const again = attempt.attempt > 1 ? `attempt ${attempt.attempt}` : "";
    const error = attempt.error ? `${attempt.error.kind}: ${attempt.error.message}` : ["done", "running"].includes(attempt.end) ? "" : attempt.end.replace("_", " ");
    return h(
      "div",
      { class: "attempt" },
      h("p", {}, h("strong", { text: where }), h("span", { class: "quiet", text: [again, took, expected].filter(Boolean).join(" · ") })),
      h("p", { text: attempt.why.words }),
      error ? h("p", { class: "trouble", text: error }) : null,
    );
  });
  if (task.wait) parts.push(...waitParts(task.wait, history.at, named));
  if (earlier > 0) parts.unshift(h("p", { class: "quiet", text: `${plural(earlier, "earlier attempt")}` }));
  const why = history.status === "succeeded" ? "an earlier job had its result already" : "did not run";
  if (!parts.length) parts.push(h("p", { class: "quiet", text: why }));
  return parts;
}

function waitParts(wait, at, named) {
  const since = wait.since === null ? "" : `, for ${measured(at - wait.since)} so far`;
  const until = wait.until === null ? "; when it will start is unknown" : `; should start in ${measured(Math.max(0, wait.until - at))}`;
  const parts = [h("p", { text: `${named(wait.reason)}${since}${until}` })];
  if (wait.options.length) {
    const head = h("tr", {}, ...["GPU", "Wait", "Setup", "Run", "Together"].map((text) => h("th", { scope: "col", text })));
    const rows = wait.options.slice(0, 8).map((option) => {
      const seconds = [option.wait_seconds, option.extra_seconds, option.run_seconds];
      const sum = seconds.reduce((one, other) => one + other, 0);
      return h("tr", {}, h("th", { scope: "row", text: option.worker_id }), ...[...seconds, sum].map((each) => h("td", { text: measured(each) })));
    });
    parts.push(h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
  }
  return parts;
}

function showStory(node, history) {
  const text = `${history.lines.length} ${history.status}`;
  if (node.dataset.shown === text) return;
  node.dataset.shown = text;
  const named = withNames(history);
  const since = history.submitted_at ?? history.at;
  const lines = history.lines.slice(-MOST_LINES);
  const rows = lines.map((line) =>
    h(
      "tr",
      {},
      h("td", { class: "number", text: `${line.at >= since ? "+" : "-"}${Math.abs(line.at - since).toFixed(2)} s` }),
      h("td", { text: named(line.subject) }),
      h("td", { text: line.after }),
      h("td", { text: [named(line.cause), named(line.note)].filter(Boolean).join(": ") }),
    ),
  );
  const head = h("tr", {}, ...["When", "What", "Became", "Because"].map((each) => h("th", { scope: "col", text: each })));
  node.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}
