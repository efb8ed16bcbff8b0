// Elements from data. Texts become text nodes, never markup: prompts come from anybody.

/** Return an element. `props`: text, on (event -> listener), and attributes; those that are null or false are left out. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Return an element of SVG with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** The children of `parent`, one for each key, kept while their keys stay. `create(key)` returns {node, update, end}. */
export class KeyedList {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.views = new Map();
  }

  /** Show `items`, pairs of key and data, in this order. Focus stays on an element that is moved. */
  update(items) {
    const focused = this.parent.contains(document.activeElement) ? document.activeElement : null;
    const wanted = new Set(items.map(([key]) => key));
    for (const [key, view] of this.views) {
      if (wanted.has(key)) continue;
      view.end?.();
      view.node.remove();
      this.views.delete(key);
    }
    let next = this.parent.firstElementChild;
    for (const [key, data] of items) {
      let view = this.views.get(key);
      if (view === undefined) {
        view = this.create(key);
        this.views.set(key, view);
      }
      view.update(data);
      if (view.node === next) next = next.nextElementSibling;
      else this.parent.insertBefore(view.node, next);
    }
    if (focused === null || document.activeElement === focused) return;
    if (focused.isConnected) focused.focus({ preventScroll: true });
    else if (this.parent.tabIndex === -1) this.parent.focus({ preventScroll: true });
  }
}

/** Fill the body of a table with rows of texts; the first cell of each is its heading. */
export function fillRows(table, rows) {
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, place) => {
    const row = body.rows[place] ?? body.appendChild(h("tr", {}, h("th", { scope: "row" }), ...cells.slice(1).map(() => h("td"))));
    cells.forEach((text, column) => setText(row.cells[column], text));
    setAttribute(row.cells[0], "title", cells[0]);
  });
  setHidden(table, rows.length === 0);
}

/** Return a button that asks once more before it acts, if `question()` returns one. */
export function confirmedButton(label, question, act, props = {}) {
  let asked = 0;
  const button = h("button", { type: "button", text: label, ...props });
  const reset = () => {
    clearTimeout(asked);
    asked = 0;
    button.textContent = label;
    button.classList.remove("danger");
  };
  button.addEventListener("click", () => {
    const text = question();
    if (text && !asked) {
      button.textContent = text;
      button.classList.add("danger");
      asked = setTimeout(reset, 5000);
      return;
    }
    reset();
    act();
  });
  return button;
}

let toastTimer = 0;

/** Show a short message for some seconds; screen readers read it. */
export function toast(text) {
  const node = byId("toast");
  clearTimeout(toastTimer);
  // in an open dialog, which covers everything else
  const dialog = document.querySelector("dialog[open]");
  (dialog ?? document.body).append(node);
  node.hidden = false;
  node.textContent = text;
  toastTimer = setTimeout(() => (node.hidden = true), 5000);
}
