// The sections of the pool: key figures, GPUs, queues, nodes and groups.

import { Spark } from "./charts.js";
import { byId, fillRows, h, KeyedList, setAttribute, setHidden, setText } from "./dom.js";
import { bytes, bytesOf, count, duration, kindOf, KINDS, percent, plural, roleName } from "./format.js";
import { Picture, thumbnailPath } from "./previews.js";
import { entries, pool, serverNow } from "./store.js";

const MOST_GPUS = 120;
const UP = new Set(["idle", "busy"]);
const KIND_NAMES = {
  diffusion_model: "Diffusion model",
  text_encoder: "Text encoder",
  vision_encoder: "Vision encoder",
  vae: "VAE",
  lora: "LoRA",
  controlnet: "ControlNet",
  other: "Working memory",
};
const byName = new Intl.Collator("en", { numeric: true }).compare;

/** Return the entry of the task with this job id, if it is of a submission that may be seen. */
function tasksByJob() {
  const found = new Map();
  for (const task of entries("tasks").values()) found.set(task.job, task);
  return found;
}

/** Return the path of the latest finished image of each worker. */
function latestImages() {
  const found = new Map();
  const ends = [...entries("ends").values()].sort((one, other) => one.number - other.number);
  for (const end of ends) {
    if (end.state === "succeeded" && end.file) found.set(end.worker, thumbnailPath(end.submission, end.index, end.file));
  }
  return found;
}

const figures = new Map();

function figure(name, value, detail = "") {
  let view = figures.get(name);
  if (view === undefined) {
    view = { value: h("span", { class: "value" }), detail: h("span", { class: "detail" }) };
    figures.set(name, view);
    byId("figures").append(h("div", {}, h("dt", { text: name }), h("dd", {}, view.value, view.detail)));
  }
  setText(view.value, value);
  setText(view.detail, detail);
}

export function showFigures() {
  const now = pool();
  const workers = [...entries("workers").values()];
  const up = workers.filter((worker) => UP.has(worker.state)).length;
  const jobs = now.jobs ?? {};
  const waiting = Object.values(now.waiting ?? {}).reduce((sum, each) => sum + each, 0);
  figure("GPUs busy", count(workers.filter((worker) => worker.state === "busy").length), `of ${count(up)} up`);
  figure("Unfinished jobs", count(jobs.live ?? 0), plural(waiting, "task"));
  figure("Expected time", jobs.live && now.left_seconds ? duration(now.left_seconds) : "-", jobs.live ? "left" : "");
  figure("Succeeded", count(jobs.succeeded ?? 0), now.opened_at ? `in ${duration(serverNow() - now.opened_at)}` : "");
  figure("Failed", count(jobs.failed ?? 0), `${count(jobs.cancelled ?? 0)} cancelled`);
  figures.get("Failed").value.classList.toggle("bad", Boolean(jobs.failed));
  figure("Without loading", percent(now.runs_resident ?? 0, now.runs ?? 0), `of ${plural(now.runs ?? 0, "run")}`);
  if (now.costs) figure("Cost per hour", now.costs.per_hour.toFixed(2), `${now.costs.spent.toFixed(2)} so far`);
  const trouble = now.trouble ? `The pool does not answer: ${now.trouble}` : (now.waiting_for ?? "");
  setText(byId("notice"), trouble);
  setHidden(byId("notice"), !trouble);
}

let legend = "";

/** Show the colors that the bars have. */
function showLegend(workers) {
  const used = new Set(workers.flatMap((worker) => worker.parts.map((part) => kindOf(part.role))));
  const kinds = [...KINDS, "other"].filter((kind) => used.has(kind) || (kind === "other" && used.size));
  if (legend === kinds.join()) return;
  legend = kinds.join();
  byId("legend").replaceChildren(
    ...kinds.map((kind) =>
      h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), h("span", { text: KIND_NAMES[kind] })),
    ),
  );
}

/** One GPU. */
// what an operator wants of a worker, as a sentence; "" for nothing
function orderWords(worker) {
  const since = worker.ordered_since ? ` for ${duration(serverNow() - worker.ordered_since)}` : "";
  if (worker.order === "cordoned") return `Cordoned by the operator${since}: takes no new tasks`;
  if (worker.order === "draining") return `Its node is drained by the operator${since}`;
  if (worker.order === "drained") return `Ended: its node is drained by the operator${since}`;
  return worker.order === "restarting" ? "Restarts when its run has ended" : "";
}

class GpuCard {
  constructor(name, open) {
    this.name = h("h3", { text: name });
    this.place = h("span", { class: "quiet" });
    this.state = h("span", { class: "state" });
    this.bar = h("div", { class: "memory", role: "img" });
    this.memory = h("span", { class: "number" });
    this.picture = new Picture("gpu-picture");
    this.stage = h("span", { class: "stage" });
    this.time = h("span", { class: "number quiet" });
    this.prompt = h("span", { class: "prompt" });
    this.progress = h("progress", { "aria-label": `Progress of ${name}` });
    this.open = h("button", { type: "button", class: "run-open", on: { click: () => this.task && open(this.task) } });
    this.run = h(
      "div",
      { class: "run" },
      this.picture.node,
      h("div", { class: "run-text" }, h("div", { class: "run-line" }, this.stage, this.time), this.prompt, this.progress),
      this.open,
    );
    this.spark = new Spark(name);
    this.trouble = h("p", { class: "trouble clamped" });
    this.before = h("p", { class: "before" });
    this.summary = h("summary");
    this.parts = h("ul", { class: "parts" });
    this.details = h("details", { class: "quiet" }, this.summary, this.parts, this.before);
    this.node = h(
      "li",
      { class: "gpu" },
      h("div", { class: "gpu-head" }, this.name, this.place, this.state),
      h("div", { class: "memory-line" }, this.bar, this.memory),
      this.spark.node,
      this.run,
      this.trouble,
      this.details,
    );
    this.segments = "";
  }

  update({ worker, task, image }) {
    this.task = task ?? null;
    setText(this.place, [worker.device, worker.node].filter(Boolean).join(" · "));
    const ordered = worker.order && worker.state !== "busy" ? worker.order : worker.state.replace("_", " ");
    setText(this.state, worker.stopping ? "stopping" : worker.silent ? "not answering" : ordered);
    setAttribute(this.state, "data-state", worker.silent ? "given_up" : worker.state);
    setText(this.memory, worker.capacity ? bytesOf(worker.used, worker.capacity) : "");
    this.showMemory(worker);
    this.spark.update();
    this.showRun(worker, task, image);
    // the reason of an earlier end is of little use while the worker runs
    const up = UP.has(worker.state);
    setText(this.trouble, worker.leaves_at ? `Its node ends in ${duration(worker.leaves_at - serverNow())}` : orderWords(worker) || (up ? "" : worker.trouble));
    setAttribute(this.trouble, "title", up ? null : worker.trouble);
    setHidden(this.trouble, !this.trouble.textContent);
    setText(this.before, up && worker.trouble ? `Latest trouble: ${worker.trouble}` : "");
  }

  showMemory(worker) {
    const known = JSON.stringify([worker.parts, worker.used, worker.capacity, worker.runs, worker.runs_resident]);
    if (known === this.segments) return;
    this.segments = known;
    const resident = worker.parts.reduce((sum, part) => sum + part.bytes, 0);
    const shares = worker.parts.map((part) => ({ kind: kindOf(part.role), bytes: part.bytes, text: partWords(part) }));
    shares.sort((one, other) => order(one.kind) - order(other.kind));
    if (worker.used > resident) {
      shares.push({ kind: "other", bytes: worker.used - resident, text: `Working memory: ${bytes(worker.used - resident)}` });
    }
    this.bar.replaceChildren(
      ...shares.map((share) => {
        const segment = h("span", { class: `segment ${share.kind}`, title: share.text });
        segment.style.flexGrow = share.bytes; // through the object model: the policy of the page forbids style attributes
        return segment;
      }),
    );
    const free = h("span", { class: "segment free" });
    free.style.flexGrow = Math.max(0, worker.capacity - Math.max(worker.used, resident));
    this.bar.append(free);
    const all = shares.map((share) => share.text).join("; ") || "empty";
    setAttribute(this.bar, "aria-label", `Memory: ${bytesOf(worker.used, worker.capacity)}. ${all}`);
    this.parts.replaceChildren(
      ...worker.parts.map((part) =>
        h("li", {}, h("span", { class: `swatch ${kindOf(part.role)}`, "aria-hidden": "true" }), h("span", { text: partWords(part) })),
      ),
    );
    const share = worker.runs ? ` · ${percent(worker.runs_resident, worker.runs)} without loading` : "";
    setText(this.summary, `${plural(worker.parts.length, "component")} · ${plural(worker.runs, "run")}${share}`);
  }

  showRun(worker, task, image) {
    const runs = worker.stage !== "";
    setAttribute(this.run, "data-idle", runs ? null : "true");
    const steps = worker.steps ? ` ${worker.step} / ${worker.steps}` : "";
    const mates = worker.mates ? ` +${worker.mates}` : "";
    const gpus = worker.gpus > 1 ? ` · ${worker.gpus} GPUs` : "";
    setText(this.stage, runs ? `${worker.stage}${steps}${mates}${gpus}` : UP.has(worker.state) ? "idle" : "not up");
    setText(this.time, runs && worker.since ? duration(serverNow() - worker.since) : "");
    setText(this.prompt, runs ? worker.prompt || [worker.user, worker.job].filter(Boolean).join(" · ") : "");
    setAttribute(this.prompt, "title", worker.prompt || null);
    if (worker.steps) this.progress.max = worker.steps;
    else this.progress.removeAttribute("max");
    if (worker.steps) this.progress.value = worker.step;
    else this.progress.value = 0;
    this.progress.classList.toggle("unseen", !runs);
    setHidden(this.open, !task);
    setAttribute(this.open, "aria-label", task ? `Open job ${task.job}` : null);
    if (task && task.source === "here" && task.stage === "sample") this.picture.follow(task, "");
    // the latest image is of another job: next to the prompt of a run, only the run's own preview is shown
    if (!(task && this.picture.path === `preview ${task.job}`)) this.picture.show(runs ? "" : image ?? "", "");
  }

  end() {
    this.picture.end();
  }
}

const order = (kind) => (KINDS.indexOf(kind) + KINDS.length + 1) % (KINDS.length + 1);

function partWords(part) {
  const size = part.bytes < part.of ? bytesOf(part.bytes, part.of) : bytes(part.of);
  return `${part.model} · ${roleName(part.role)}: ${size}${part.patched ? ", with LoRAs" : ""}`;
}

let gpuList = null;

export function showGpus(open) {
  gpuList ??= new KeyedList(byId("gpu-list"), (name) => new GpuCard(name, open));
  const workers = [...entries("workers").entries()].sort(([one], [other]) => byName(one, other));
  showLegend(workers.map(([, worker]) => worker));
  const tasks = tasksByJob();
  const images = latestImages();
  gpuList.update(
    workers.slice(0, MOST_GPUS).map(([name, worker]) => [name, { worker, task: tasks.get(worker.job), image: images.get(name) }]),
  );
  const more = byId("gpus-more");
  const hidden = workers.slice(MOST_GPUS);
  const busy = hidden.filter(([, worker]) => worker.state === "busy").length;
  setText(more, hidden.length ? `${count(hidden.length)} more GPUs, ${count(busy)} of them busy` : "");
  setHidden(more, hidden.length === 0);
}

const total = (tasks) => tasks.encode + tasks.sample + tasks.decode + (tasks.operate ?? 0);

export function showQueue() {
  const models = [...entries("models").entries()].sort(([, one], [, other]) => total(other) - total(one));
  const rows = models.map(([name, tasks]) => [name, count(tasks.encode), count(tasks.sample), count(tasks.decode)]);
  const now = pool().waiting ?? { encode: 0, sample: 0, decode: 0, operate: 0 };
  // operations of workflows use no model
  const operations = now.operate ?? 0;
  const behind = total(now) - operations - models.reduce((sum, [, tasks]) => sum + total(tasks), 0);
  // jobs far back in the queue are counted without their models
  if (behind > 0 && models.length) rows.push(["further back", count(behind), "", ""]);
  if (operations > 0) rows.push(["operations", count(operations), "", ""]);
  fillRows(byId("queue-models"), rows);
  const users = [...entries("users").entries()].sort(([, one], [, other]) => total(other) - total(one));
  fillRows(
    byId("queue-users"),
    users.map(([name, tasks]) => [name || "no name", count(total(tasks)), duration(tasks.seconds)]),
  );
  setHidden(byId("queue-empty"), rows.length > 0);
}

export function showFailures() {
  const failures = [...(pool().failures ?? [])].reverse();
  fillRows(
    byId("failure-table"),
    failures.map((failure) => [failure.job, failure.message, duration(serverNow() - failure.at)]),
  );
  setHidden(byId("failures"), failures.length === 0);
}

export function showNodes() {
  const nodes = new Map();
  for (const worker of entries("workers").values()) {
    const name = worker.node || "this machine";
    const node = nodes.get(name) ?? { gpus: 0, busy: 0, used: 0, capacity: 0, leaves: null };
    nodes.set(name, node);
    node.gpus += 1;
    node.busy += worker.state === "busy" ? 1 : 0;
    node.used += worker.used;
    node.capacity += worker.capacity;
    node.leaves = worker.leaves_at ?? node.leaves;
  }
  const rows = [...nodes.entries()].sort(([one], [other]) => byName(one, other)).slice(0, MOST_GPUS);
  fillRows(
    byId("node-table"),
    rows.map(([name, node]) => [
      node.leaves ? `${name}, ends in ${duration(node.leaves - serverNow())}` : name,
      count(node.gpus),
      count(node.busy),
      node.capacity ? bytesOf(node.used, node.capacity) : "-",
    ]),
  );
  setHidden(byId("nodes-empty"), rows.length > 0);
  fillRows(
    byId("group-table"),
    [...entries("groups").entries()].map(([name, group]) => [
      group.obstacle ? `${name}: ${group.obstacle}` : name,
      `${count(group.nodes)} / ${count(group.most)}${group.starting ? `, ${count(group.starting)} starting` : ""}`,
      group.price.toFixed(2),
    ]),
  );
  const now = pool();
  const costs = now.costs ? `${now.costs.spent.toFixed(2)} spent, ${now.costs.per_hour.toFixed(2)} per hour. ` : "";
  setText(byId("costs"), costs + (now.decision ?? ""));
  setHidden(byId("costs"), !now.costs);
  setText(byId("pins"), (now.pins ?? []).map((pin) => `${pin.model} is pinned: ${pin.words}.`).join(" "));
  setHidden(byId("pins"), !now.pins?.length);
}
