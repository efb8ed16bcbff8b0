// The graph of a job that is a workflow: boxes by columns of depth with lines between them; on a narrow screen the
// columns are rows, so that the graph goes down.

import { h, setAttribute, setHidden, setText, svg } from "./dom.js";
import { measured, plural } from "./format.js";

const BOX = { width: 168, least: 116, height: 76 };
const GAP = { along: 44, across: 16 };
const PADDING = 10;
/** below this width the graph goes down */
const NARROW = 620;

const WORDS = { waiting: "waiting", running: "running", done: "done", found: "found", failed: "failed", given: "your image", "not run": "not run" };

/** What a node does now: "running 3 of 20", "done in 1.2 s". */
function stateWords(node) {
  if (node.state === "running") return node.steps ? `running ${node.step} of ${node.steps}` : `running ${node.stage}`.trim();
  if (node.state === "done" && node.seconds !== null) return `done in ${measured(node.seconds)}`;
  if (node.state === "failed" && node.message) return `failed: ${node.message}`;
  return WORDS[node.state] ?? node.state;
}

/** The graph of one job. `update(graph)` shows the answer of the server; nodes stay selected and focused. */
export class NodeGraph {
  constructor() {
    this.lines = svg("svg", { class: "graph-lines", "aria-hidden": "true" });
    this.boxes = h("ol", { class: "graph-boxes" });
    this.board = h("div", { class: "graph-board" }, this.lines, this.boxes);
    this.frame = h("div", { class: "graph-frame" }, this.board);
    this.note = h("p", { class: "quiet", "aria-live": "off" });
    this.chosen = h("div", { class: "graph-chosen" });
    this.node = h("section", { class: "graph", hidden: true }, h("h3", { text: "Nodes" }), this.note, this.frame, this.chosen);
    this.views = new Map();
    this.nodes = [];
    this.selected = null;
    this.shape = "";
    this.resized = new ResizeObserver(() => this.place());
    this.resized.observe(this.frame);
  }

  end() {
    this.resized.disconnect();
  }

  update(graph) {
    this.nodes = graph.nodes;
    setHidden(this.node, !this.nodes.length);
    const count = (state) => this.nodes.filter((node) => node.state === state).length;
    const counts = ["running", "waiting", "done", "found", "failed", "not run"].filter(count).map((state) => `${count(state)} ${WORDS[state]}`);
    const more = graph.left_out ? `; ${plural(graph.left_out, "earlier node")} not drawn` : "";
    setText(this.note, `${plural(this.nodes.length, "node")}: ${counts.join(", ")}${more}`);
    const known = new Set(this.nodes.map((node) => node.id));
    for (const [id, view] of this.views) {
      if (known.has(id)) continue;
      view.item.remove();
      this.views.delete(id);
    }
    for (const node of this.nodes) this.show(node);
    this.place();
    this.showChosen();
  }

  show(node) {
    let view = this.views.get(node.id);
    if (view === undefined) {
      view = { title: h("span", { class: "graph-title" }), what: h("span", { class: "graph-what" }), state: h("span", { class: "graph-state" }), bar: h("progress", { hidden: true }) };
      view.button = h("button", { type: "button", class: "graph-box", "aria-pressed": "false", on: { click: () => this.select(node.id) } }, view.title, view.what, view.state, view.bar);
      view.item = h("li", {}, view.button);
      this.views.set(node.id, view);
      this.boxes.append(view.item);
    }
    setText(view.title, node.title);
    setText(view.what, [node.kind, node.what].filter(Boolean).join(" · "));
    setText(view.state, stateWords(node));
    setAttribute(view.button, "data-state", node.state);
    setAttribute(view.button, "title", node.message || null);
    setHidden(view.bar, node.state !== "running" || !node.steps);
    if (node.steps) {
      view.bar.max = node.steps;
      view.bar.value = node.step;
      setAttribute(view.bar, "aria-label", `Progress of ${node.title}`);
    }
  }

  /** Put the boxes and lines where they belong, if the nodes or the direction have changed. */
  place() {
    const down = this.frame.clientWidth > 0 && this.frame.clientWidth < NARROW;
    const shape = JSON.stringify([down && this.frame.clientWidth, this.nodes.map((node) => [node.id, node.column, node.row, node.reads])]);
    if (shape === this.shape || !this.nodes.length) return;
    this.shape = shape;
    const sizes = new Map();
    for (const { column } of this.nodes) sizes.set(column, (sizes.get(column) ?? 0) + 1);
    const widest = Math.max(...sizes.values());
    // boxes that go down are as wide as the screen permits
    const fitting = (this.frame.clientWidth - 2 * PADDING + GAP.across) / widest - GAP.across;
    const width = down ? Math.floor(Math.min(BOX.width, Math.max(BOX.least, fitting))) : BOX.width;
    const along = (down ? BOX.height : width) + (down ? GAP.across + 12 : GAP.along);
    const across = (down ? width : BOX.height) + GAP.across;
    const at = new Map();
    for (const { id, column, row } of this.nodes) {
      // columns with fewer nodes are in the middle
      const far = PADDING + column * along;
      const side = PADDING + (row + (widest - sizes.get(column)) / 2) * across;
      at.set(id, down ? { x: side, y: far } : { x: far, y: side });
    }
    const last = Math.max(...this.nodes.map((node) => node.column));
    const length = 2 * PADDING + last * along + (down ? BOX.height : width);
    const breadth = 2 * PADDING + widest * across - GAP.across;
    this.board.style.width = `${down ? breadth : length}px`;
    this.board.style.height = `${down ? length : breadth}px`;
    for (const [name, value] of [["width", down ? breadth : length], ["height", down ? length : breadth]]) this.lines.setAttribute(name, value);
    for (const [id, { x, y }] of at) {
      const { style } = this.views.get(id).item;
      style.left = `${x}px`;
      style.top = `${y}px`;
      style.width = `${width}px`;
    }
    this.lines.replaceChildren(...this.nodes.flatMap((node) => node.reads.map(([, source]) => this.line(source, node.id, at, down, width))));
    this.mark();
  }

  line(source, target, at, down, width) {
    const one = at.get(source);
    const other = at.get(target);
    const from = down ? [one.x + width / 2, one.y + BOX.height] : [one.x + width, one.y + BOX.height / 2];
    const to = down ? [other.x + width / 2, other.y] : [other.x, other.y + BOX.height / 2];
    const bend = Math.max(16, (down ? to[1] - from[1] : to[0] - from[0]) / 2);
    const [first, second] = down ? [[from[0], from[1] + bend], [to[0], to[1] - bend]] : [[from[0] + bend, from[1]], [to[0] - bend, to[1]]];
    const path = svg("path", { d: `M${from} C${first} ${second} ${to}` });
    path.dataset.source = source;
    path.dataset.target = target;
    return path;
  }

  select(id) {
    this.selected = this.selected === id ? null : id;
    this.mark();
    this.showChosen();
  }

  /** Mark the selected node and its lines. */
  mark() {
    for (const [id, view] of this.views) setAttribute(view.button, "aria-pressed", String(id === this.selected));
    for (const path of this.lines.children) {
      path.classList.toggle("marked", this.selected !== null && [path.dataset.source, path.dataset.target].includes(this.selected));
    }
  }

  showChosen() {
    const node = this.nodes.find((each) => each.id === this.selected);
    const titles = new Map(this.nodes.map((each) => [each.id, each.title]));
    const rows = node === undefined
      ? []
      : [
          ["Node", node.id === node.title ? node.id : `${node.title}, ${node.id}`],
          ["Type", [node.kind, node.what].filter(Boolean).join(", ")],
          ["State", node.state === "failed" ? WORDS.failed : stateWords(node)],
          ["Error", node.message],
          ["GPU", node.worker],
          ["Time", node.seconds === null ? "" : measured(node.seconds)],
          ["Reads", node.reads.map(([name, source]) => `${name}: ${titles.get(source)}`).join(", ")],
        ].filter(([, text]) => text);
    const text = JSON.stringify(rows);
    if (this.chosen.dataset.shown === text) return;
    this.chosen.dataset.shown = text;
    const facts = rows.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value })));
    this.chosen.replaceChildren(...(rows.length ? [h("dl", { class: "parameter-list" }, ...facts)] : []));
  }
}
