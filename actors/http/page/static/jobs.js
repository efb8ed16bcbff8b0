// Batches, and the tiles of jobs: running and waiting ones, then ended ones, newest first.

import { call, words } from "./api.js";
import { byId, confirmedButton, h, KeyedList, setAttribute, setHidden, setText, toast } from "./dom.js";
import { count, duration, measured, plural } from "./format.js";
import { Picture, thumbnailPath } from "./previews.js";
import { entries, serverNow } from "./store.js";

const PAGE = 48;
const MOST_ACTIVE = 48;
const SEARCH_MS = 250;
const MOST_BATCHES = 60;

export const filter = { text: "", state: "", submission: "" };
/** pages of ended jobs that were asked for: the numbers before which they begin; empty while the live ones are shown */
let pages = [];
/** the answer to the latest search; null while the live ends are shown */
let found = null;
let asked = 0;
let searchTimer = 0;

const elsewhere = (submission) => entries("submissions").get(submission)?.source === "elsewhere";

const filtered = () => Boolean(filter.text || filter.state || filter.submission);

/** Return whether a job that has not ended passes the filter, as the server decides for ended ones. */
function passes(job) {
  if (filter.state && filter.state !== "active") return false;
  if (filter.submission && filter.submission !== job.submission) return false;
  const text = filter.text.toLowerCase();
  return !text || [job.job, job.prompt, job.model].some((each) => each.toLowerCase().includes(text));
}

function activeJobs() {
  const jobs = [...entries("tasks").values()].filter(passes);
  for (const [id, submission] of entries("submissions")) {
    if (submission.jobs > 1 || submission.state !== "active" || submission.running) continue;
    const { prompt, model, stopping, source } = submission;
    const job = { submission: id, index: 0, job: `${id}-0`, stage: "", step: 0, steps: 0, prompt, model, stopping, source };
    if (passes(job)) jobs.push(job);
  }
  return jobs.slice(0, MOST_ACTIVE);
}

const keyOf = (job) => `${job.submission}/${job.index}`;

let tiles = null;

export function showTiles(open) {
  tiles ??= new KeyedList(byId("tiles"), () => new Tile(open));
  const active = pages.length ? [] : activeJobs();
  const live = [...entries("ends").values()].sort((one, other) => other.number - one.number);
  const ended = found === null ? live : found.ends;
  const items = new Map(active.map((job) => [keyOf(job), { job, ended: false }]));
  for (const end of filter.state === "active" ? [] : ended) items.set(keyOf(end), { job: end, ended: true });
  tiles.update([...items]);
  const empty = byId("jobs-empty");
  setHidden(empty, items.size > 0);
  const waiting = [...entries("submissions").values()].some((each) => each.state === "active");
  setText(
    empty,
    elsewhere(filter.submission) ? "Another program has submitted these jobs, and has their results." : filtered() ? "No job matches the filter." : waiting ? "Jobs wait for a GPU." : "No jobs yet. New job (n) submits one.",
  );
  const more = found === null ? live.length === PAGE : found.next !== null;
  setHidden(byId("pager"), !(more || pages.length));
  byId("newer").disabled = pages.length === 0;
  byId("older").disabled = !more;
}

/** Ask for the page of ended jobs that the filter and the pager want; the live ends are enough for the first one. */
async function search(show) {
  const mine = (asked += 1);
  if (!filtered() && pages.length === 0) {
    found = null;
    show();
    return;
  }
  // what other programs submitted is counted, but only they have the results
  if (filter.state === "active" || elsewhere(filter.submission)) {
    found = { ends: [], next: null };
    show();
    return;
  }
  const query = new URLSearchParams({ ...filter, limit: PAGE });
  if (pages.length) query.set("before", pages.at(-1));
  try {
    let answer = await call("GET", `/api/ends?${query}`);
    // the server looks at a part of many jobs at a time
    while (answer.ends.length === 0 && answer.next !== null && mine === asked) {
      query.set("before", answer.next);
      answer = await call("GET", `/api/ends?${query}`);
    }
    if (mine === asked) found = answer;
  } catch (problem) {
    toast(words(problem));
  }
  show();
}

/** Have a filtered first page follow the ends that arrive. */
export function endsArrived(show) {
  if (found === null || pages.length || filter.state === "active" || searchTimer) return;
  searchTimer = setTimeout(() => {
    searchTimer = 0;
    search(show);
  }, 2000);
}

export function startFilter(show) {
  let typing = 0;
  const changed = () => {
    pages = [];
    search(show);
  };
  byId("filter").addEventListener("submit", (event) => event.preventDefault());
  byId("filter-text").addEventListener("input", () => {
    clearTimeout(typing);
    filter.text = byId("filter-text").value.trim();
    typing = setTimeout(changed, SEARCH_MS);
  });
  byId("filter-state").addEventListener("change", () => {
    filter.state = byId("filter-state").value;
    changed();
  });
  byId("filter-batch").addEventListener("click", () => {
    filterBatch("", show);
    byId("filter-text").focus();
  });
  byId("older").addEventListener("click", () => {
    const live = [...entries("ends").values()].map((end) => end.number);
    pages.push(found === null ? Math.min(...live) : found.next);
    search(show);
  });
  byId("newer").addEventListener("click", () => {
    pages.pop();
    search(show);
  });
}

/** Show the jobs of one batch only; "" shows all. */
export function filterBatch(id, show) {
  filter.submission = id;
  pages = [];
  const chip = byId("filter-batch");
  setText(chip, id ? `Batch ${id.slice(0, 8)} ×` : "");
  setAttribute(chip, "aria-label", id ? `Show all batches again, not only ${id}` : null);
  setHidden(chip, !id);
  search(show);
}

/** One job. */
class Tile {
  constructor(open) {
    this.picture = new Picture("tile-picture");
    this.mark = h("span", { class: "mark" });
    this.reason = h("span", { class: "reason" });
    this.progress = h("progress", { "aria-label": "Progress" });
    this.prompt = h("span", { class: "prompt" });
    this.facts = h("span", { class: "facts quiet" });
    this.button = h(
      "button",
      { type: "button", class: "tile-open", on: { click: () => open(this.job) } },
      this.picture.node,
      this.mark,
      this.reason,
      this.progress,
      this.prompt,
      this.facts,
    );
    this.node = h("li", { class: "tile" }, this.button);
  }

  update({ job, ended }) {
    this.job = job;
    const state = ended ? job.state : job.stage ? "running" : "waiting";
    setAttribute(this.node, "data-state", state);
    setText(this.prompt, job.prompt || job.job);
    setAttribute(this.prompt, "title", job.prompt || null);
    setHidden(this.progress, state !== "running");
    if (state === "running" && job.steps) this.progress.max = job.steps;
    if (state === "running" && job.steps) this.progress.value = job.step;
    else this.progress.removeAttribute("value");
    if (ended) this.showEnd(job);
    else {
      setText(this.mark, job.stopping ? "stopping" : job.stage ? `${job.stage}${job.steps ? ` ${job.step}/${job.steps}` : ""}` : "waiting");
      setText(this.facts, [job.model, job.worker].filter(Boolean).join(" · "));
      if (job.stage && job.source === "here") this.picture.follow(job, job.prompt);
    }
    setHidden(this.mark, !this.mark.textContent);
  }

  showEnd(end) {
    const isImage = end.state === "succeeded" && end.file;
    setText(this.mark, end.state === "succeeded" ? (isImage ? "" : "stored elsewhere") : end.kind ? `${end.state}: ${end.kind}` : end.state);
    if (isImage) this.picture.show(thumbnailPath(end.submission, end.index, end.file), end.prompt);
    else this.picture.show("");
    const took = end.seconds === null ? "" : measured(end.seconds);
    setText(this.reason, end.state === "failed" ? end.message : "");
    setText(this.facts, [end.model, took].filter(Boolean).join(" · "));
  }

  end() {
    this.picture.end();
  }
}

export async function cancel(submission) {
  try {
    await call("DELETE", `/api/jobs/${encodeURIComponent(submission)}`);
    toast("Cancelled. What runs stops at its next step.");
  } catch (problem) {
    toast(words(problem));
  }
}

export async function retry(submission) {
  try {
    const again = await call("POST", `/api/jobs/${encodeURIComponent(submission)}/retry`);
    toast(`Submitted again: ${plural(again.jobs, "job")}.`);
  } catch (problem) {
    toast(words(problem));
  }
}

/** what is said of submissions that this server has not accepted */
const SOURCES = { here: "", journal: "journal", elsewhere: "another program" };

/** One submission of several jobs, or one that this server has not accepted. */
class Batch {
  constructor(id, show) {
    this.id = id;
    this.title = h("span", { class: "prompt" });
    this.open = h("button", { type: "button", class: "batch-open", on: { click: () => filterBatch(id, show) } }, this.title);
    this.state = h("span", { class: "state" });
    this.succeeded = h("span", { class: "segment succeeded" });
    this.failed = h("span", { class: "segment failed" });
    this.cancelled = h("span", { class: "segment cancelled" });
    this.rest = h("span", { class: "segment free" });
    this.bar = h("div", { class: "batch-bar", role: "progressbar", "aria-valuemin": "0" }, this.succeeded, this.failed, this.cancelled, this.rest);
    this.counts = h("span", { class: "number" });
    this.source = h("span", { class: "quiet source" });
    this.left = h("span", { class: "quiet number" });
    this.note = h("p", { class: "trouble" });
    this.cancel = confirmedButton("Cancel", () => `Cancel ${plural(this.unfinished, "job")}?`, () => cancel(id), { class: "small" });
    this.retry = h("button", { type: "button", class: "small", text: "Retry failed", on: { click: () => retry(id) } });
    this.actions = h("div", { class: "batch-actions" }, this.cancel, this.retry);
    this.node = h(
      "li",
      { class: "batch" },
      h("div", { class: "batch-head" }, this.open, this.state),
      this.bar,
      h("div", { class: "batch-line" }, this.counts, this.left, this.source, this.actions),
      this.note,
    );
  }

  update(batch) {
    const ended = batch.succeeded + batch.failed + batch.cancelled;
    this.unfinished = batch.jobs - ended;
    setText(this.title, batch.prompt || `Batch ${this.id}`);
    setText(this.source, [SOURCES[batch.source], batch.user].filter(Boolean).join(" · "));
    setAttribute(this.open, "title", batch.prompt ? `${batch.prompt}\n\nShow the jobs of this batch` : null);
    const state = batch.stopping ? "stopping" : batch.state;
    setText(this.state, state);
    setAttribute(this.state, "data-state", batch.state === "lost" ? "given_up" : batch.state === "active" ? "busy" : "idle");
    this.succeeded.style.flexGrow = batch.succeeded;
    this.failed.style.flexGrow = batch.failed;
    this.cancelled.style.flexGrow = batch.cancelled;
    this.rest.style.flexGrow = this.unfinished;
    setAttribute(this.bar, "aria-label", `Batch ${this.id}`);
    setAttribute(this.bar, "aria-valuemax", String(batch.jobs));
    setAttribute(this.bar, "aria-valuenow", String(ended));
    const failed = batch.failed ? ` · ${count(batch.failed)} failed` : "";
    setText(this.counts, `${count(ended)} / ${count(batch.jobs)}${failed}`);
    const began = `${duration(serverNow() - batch.created_at)} ago`;
    setText(this.left, batch.state !== "active" ? began : batch.left_seconds === null ? "" : `${duration(batch.left_seconds)} left`);
    setText(this.note, batch.waits_for);
    setHidden(this.note, !batch.waits_for);
    setHidden(this.cancel, batch.state !== "active" || batch.stopping || batch.source === "elsewhere");
    setHidden(this.retry, batch.state === "active" || !batch.can_retry || batch.failed + batch.cancelled === 0);
  }
}

let batches = null;

export function showBatches(show) {
  batches ??= new KeyedList(byId("batch-list"), (id) => new Batch(id, show));
  const shown = [...entries("submissions").entries()].filter(([, each]) => each.jobs > 1 || each.source !== "here");
  shown.sort(([, one], [, other]) => other.created_at - one.created_at);
  batches.update(shown.slice(0, MOST_BATCHES));
  setText(byId("batches-more"), shown.length > MOST_BATCHES ? `${count(shown.length - MOST_BATCHES)} older ones` : "");
  setHidden(byId("batches-more"), shown.length <= MOST_BATCHES);
  setHidden(byId("batches-empty"), shown.length > 0);
}
