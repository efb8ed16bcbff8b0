// Charts of the load of the pool over the last hour, and of each GPU, from the samples of the server.

import { byId, h, setAttribute, setHidden, setText, svg } from "./dom.js";
import { count } from "./format.js";
import { entries, serverNow } from "./store.js";

const WIDTH = 300;
const HEIGHT = 60;
const MOST_SECONDS = 3600;
const LEAST_SECONDS = 300;
/** a longer time without a sample is a gap in the line */
const GAP_SECONDS = 65;

const samples = () => [...entries("samples").values()].sort((one, other) => one.at - other.at);

/** Return the path of a line of [at, value] pairs, and of the area below it; null values are gaps. */
function paths(points, from, until, most, height) {
  const x = (at) => ((WIDTH * (at - from)) / (until - from)).toFixed(1);
  const y = (value) => (height - 1 - (height - 4) * Math.min(1, value / most)).toFixed(1);
  let line = "";
  let area = "";
  let before = null;
  let begin = null;
  const end = () => {
    if (before !== null) area += `L${x(before)} ${height}L${x(begin)} ${height}Z`;
    before = null;
  };
  for (const [at, value] of points) {
    if (value === null || at < from) {
      end();
      continue;
    }
    if (before !== null && at - before > GAP_SECONDS) end();
    if (before === null) begin = at;
    const step = `${before === null ? "M" : "L"}${x(at)} ${y(value)}`;
    line += step;
    area += step;
    before = at;
  }
  end();
  return { line, area };
}

function niceTop(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 6, 8, 10].map((factor) => factor * power).find((each) => each >= value - 1e-9);
}

const spanWords = (seconds) => `${Math.round(seconds / 60)} min`;

/** One chart: its title with the latest value, a line with its area, the top of the axis, and the time that it shows. */
class Chart {
  constructor(title, short, words, top) {
    this.title = title;
    this.words = words;
    this.top = top;
    this.latest = h("span", { class: "chart-value" });
    this.area = svg("path", { class: "chart-area" });
    this.line = svg("path", { class: "chart-line" });
    this.image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" }, this.area, this.line);
    this.most = h("div", { class: "chart-axis", "aria-hidden": "true" });
    this.node = h("figure", { class: "chart" }, h("figcaption", {}, h("span", { text: short, title }), this.latest), this.image, this.most);
  }

  update(points, from, until) {
    const values = points.filter(([at, value]) => value !== null && at >= from).map(([, value]) => value);
    const most = this.top ?? niceTop(Math.max(0, ...values));
    const { line, area } = paths(points, from, until, most, HEIGHT);
    setAttribute(this.line, "d", line);
    setAttribute(this.area, "d", area);
    const last = values.at(-1);
    setText(this.latest, last === undefined ? "-" : this.words(last));
    setText(this.most, `to ${this.words(most)}`);
    const mean = values.reduce((sum, each) => sum + each, 0) / Math.max(1, values.length);
    const about = values.length ? `now ${this.words(last)}, ${this.words(mean)} on average, at most ${this.words(Math.max(...values))}` : "no values yet";
    setAttribute(this.image, "aria-label", `${this.title} in the last ${spanWords(until - from)}: ${about}`);
  }
}

let charts = null;

const whole = (value) => count(Math.round(value));
const rate = (value) => (value < 10 ? String(Math.round(value * 10) / 10) : whole(value));
const share = (value) => `${Math.round(value)}%`;

function range(all) {
  const until = serverNow();
  const first = all.length ? all[0].at : until;
  return [Math.max(until - MOST_SECONDS, Math.min(first, until - LEAST_SECONDS)), until];
}

/** Draw the charts of the pool. */
export function showCharts() {
  if (charts === null) {
    charts = {
      waiting: new Chart("Waiting tasks", "Waiting", whole, null),
      rate: new Chart("Outputs per minute", "Outputs/min", rate, null),
      busy: new Chart("GPUs busy", "GPUs busy", share, 100),
    };
    byId("charts").append(...Object.values(charts).map((chart) => chart.node));
  }
  const all = samples();
  const [from, until] = range(all);
  setText(byId("load-span"), all.length > 1 ? `last ${spanWords(until - from)}` : "");
  setHidden(byId("load-empty"), all.length > 1);
  setHidden(byId("charts"), all.length < 2);
  for (const [name, chart] of Object.entries(charts)) chart.update(all.map((sample) => [sample.at, sample[name]]), from, until);
}

const SPARK_HEIGHT = 30;

/** Use and memory of one GPU over the same time. */
export class Spark {
  constructor(name) {
    this.name = name;
    this.busyArea = svg("path", { class: "chart-area" });
    this.busy = svg("path", { class: "chart-line" });
    this.memory = svg("path", { class: "chart-line memory-line-path" });
    this.image = svg("svg", { viewBox: `0 0 ${WIDTH} ${SPARK_HEIGHT}`, role: "img", preserveAspectRatio: "none" }, this.busyArea, this.busy, this.memory);
    this.busyWords = h("span", { class: "spark-key busy-key" });
    this.memoryWords = h("span", { class: "spark-key memory-key" });
    this.node = h("div", { class: "spark", hidden: true }, this.image, h("div", { class: "spark-words", "aria-hidden": "true" }, this.busyWords, this.memoryWords));
    this.shown = 0;
  }

  update() {
    const all = samples();
    const newest = all.length ? all.at(-1).at : 0;
    if (newest === this.shown) return;
    this.shown = newest;
    const mine = all.map((sample) => [sample.at, sample.workers[this.name] ?? null]);
    const known = mine.filter(([, value]) => value !== null).map(([, value]) => value);
    setHidden(this.node, known.length < 2);
    if (known.length < 2) return;
    const [from, until] = range(all);
    const busy = paths(mine.map(([at, value]) => [at, value && value[0]]), from, until, 100, SPARK_HEIGHT);
    const memory = paths(mine.map(([at, value]) => [at, value && value[1]]), from, until, 100, SPARK_HEIGHT);
    setAttribute(this.busyArea, "d", busy.area);
    setAttribute(this.busy, "d", busy.line);
    setAttribute(this.memory, "d", memory.line);
    const mean = (place) => share(known.reduce((sum, each) => sum + each[place], 0) / known.length);
    setText(this.busyWords, `busy ${mean(0)}`);
    setText(this.memoryWords, `memory ${mean(1)}`);
    setAttribute(this.image, "aria-label", `${this.name} in the last ${spanWords(until - from)}, on average: busy ${mean(0)} of the time, ${mean(1)} of the memory used`);
  }
}
