// The form of new jobs. Its choices come from the server, which also checks the fields.

import { call, words } from "./api.js";
import { byId, h, setText, toast } from "./dom.js";
import { plural } from "./format.js";

const TEXTS = ["prompt", "negative"];
const WHOLE_NUMBERS = ["width", "height", "steps"];
const CHOICES = ["sampler", "schedule"];

let choices = null;

const form = () => byId("form");
const field = (name) => form().elements[name];

export function startForm() {
  byId("add-lora").addEventListener("click", () => addLora().querySelector("select").focus());
  form().addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  form().addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      submit();
    }
  });
  field("model").addEventListener("change", showSizes);
}

/** Open the form, with the fields of an earlier request if given. */
export async function openForm(fields = null) {
  problem("");
  if (!byId("form-dialog").open) byId("form-dialog").showModal();
  field("prompt").focus();
  try {
    choices = await call("GET", "/api/choices");
  } catch (failed) {
    problem(words(failed));
    return;
  }
  fillChoices(field("model"), choices.models.map((model) => [model.name, `${model.name} (${model.family})`]));
  fillChoices(field("sampler"), [["", "Default of the model"], ...choices.samplers.map((each) => [each.name, each.label])]);
  fillChoices(field("schedule"), [["", "Default of the model"], ...choices.schedules.map((each) => [each.name, each.label])]);
  if (fields !== null) use(fields);
  showSizes();
  byId("loras").hidden = choices.loras.length === 0;
}

function fillChoices(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, label]) => h("option", { value, text: label })));
  if (options.some(([value]) => value === before)) select.value = before;
}

/** Show the native size of the model where no size is set. */
function showSizes() {
  const model = choices?.models.find((each) => each.name === field("model").value);
  for (const name of ["width", "height"]) field(name).placeholder = model ? String(model[name]) : "default";
}

function use(fields) {
  for (const name of [...TEXTS, ...WHOLE_NUMBERS, ...CHOICES, "model", "cfg", "seed"]) {
    field(name).value = fields[name] ?? "";
  }
  field("count").value = 1;
  byId("lora-rows").replaceChildren();
  for (const lora of fields.loras ?? []) addLora(lora.name, lora.strength);
  if (fields.others.length) problem(`Not taken over: ${fields.others.join(", ")}. This form does not have them.`);
}

function addLora(name = "", strength = 1) {
  const select = h("select", { "aria-label": "LoRA" });
  fillChoices(select, (choices?.loras ?? []).map((each) => [each, each]));
  if (name) select.value = name;
  const number = h("input", { type: "number", step: "any", value: String(strength), "aria-label": "Strength" });
  const row = h("li", { class: "lora" }, select, number);
  const remove = h("button", { type: "button", class: "plain", text: "Remove", "aria-label": "Remove this LoRA" });
  remove.addEventListener("click", () => {
    row.remove();
    byId("add-lora").focus();
  });
  row.append(remove);
  byId("lora-rows").append(row);
  return row;
}

function problem(text) {
  setText(byId("form-problem"), text);
  byId("form-problem").hidden = !text;
  for (const control of form().elements) control.removeAttribute("aria-invalid");
  // messages of the server begin with the name of the field
  const control = text ? form().elements[text.split(":")[0].split(/[.[ ]/)[0]] : null;
  if (control instanceof HTMLElement && control.matches("input, select, textarea")) {
    control.setAttribute("aria-invalid", "true");
    control.focus();
  }
}

/** Return one request from the fields; throws an Error that begins with the name of a field. */
function request() {
  const found = { model: field("model").value, prompt: field("prompt").value };
  if (!found.model) throw new Error("model: this pool has no models");
  if (!found.prompt.trim()) throw new Error("prompt: missing");
  if (field("negative").value.trim()) found.negative = field("negative").value;
  for (const name of [...WHOLE_NUMBERS, "seed", "cfg"]) {
    const control = field(name);
    if (control.validity.badInput) throw new Error(`${name}: expected a number`);
    if (control.value !== "") found[name] = Number(control.value);
  }
  for (const name of CHOICES) if (field(name).value) found[name] = field(name).value;
  const loras = [...byId("lora-rows").children].map((row) => ({
    name: row.querySelector("select").value,
    strength: Number(row.querySelector("input").value),
  }));
  if (loras.length) found.loras = loras;
  return found;
}

async function submit() {
  const button = byId("submit-button");
  if (button.disabled) return;
  problem("");
  let requests;
  try {
    const one = request();
    const wanted = Number(field("count").value || 1);
    if (!Number.isInteger(wanted) || wanted < 1 || wanted > 1000) throw new Error("count: expected 1 to 1000");
    requests = Array.from({ length: wanted }, (_, place) => (one.seed === undefined ? one : { ...one, seed: one.seed + place }));
  } catch (wrong) {
    problem(wrong.message);
    return;
  }
  button.disabled = true;
  try {
    await call("POST", "/api/jobs", requests);
    byId("form-dialog").close();
    toast(`Submitted: ${plural(requests.length, "job")}.`);
  } catch (failed) {
    problem(words(failed));
  } finally {
    button.disabled = false;
  }
}
