// The form of new jobs. Its choices come from the server, which also checks the fields.

import { call, words } from "./api.js";
import { byId, h, setHidden, setText, toast } from "./dom.js";
import { plural } from "./format.js";

const TEXTS = ["prompt", "negative"];
const WHOLE_NUMBERS = ["width", "height", "steps"];
const NUMBERS = ["cfg", "seed", "strength"];
const CHOICES = ["sampler", "schedule"];
/** of one image, as a file: the server has a bound for the whole call */
const MOST_IMAGE_BYTES = 32 * 1024 * 1024;

let choices = null;
/** the start image: a File, or null */
let startImage = null;
let startAddress = "";

const form = () => byId("form");
const field = (name) => form().elements[name];

export function startForm() {
  byId("add-lora").addEventListener("click", () => focusFirst(addLora()));
  byId("add-control").addEventListener("click", () => focusFirst(addControl()));
  byId("add-option").addEventListener("click", () => focusFirst(addOption()));
  byId("start-image").addEventListener("change", () => setStartImage(byId("start-image").files[0] ?? null));
  byId("start-remove").addEventListener("click", () => {
    setStartImage(null);
    byId("start-image").focus();
  });
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
  form().addEventListener("input", (event) => clearError(event.target));
  field("model").addEventListener("change", showSizes);
  // a message below a control, in its label, is no part of its name
  for (const label of form().querySelectorAll("label")) label.control.ariaLabel = label.firstChild.textContent.trim();
}

const focusFirst = (row) => row.querySelector("select, input").focus();

/** Open the form, with the fields of an earlier request and a start image if given. */
export async function openForm(fields = null, image = null) {
  clearErrors();
  note("");
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
  // rows that are added before would have nothing to choose from
  for (const id of ["add-lora", "add-control", "add-option"]) byId(id).disabled = false;
  if (fields !== null) use(fields, image !== null);
  if (image !== null) setStartImage(image);
  showSizes();
  setHidden(byId("loras"), choices.loras.length === 0);
  setHidden(byId("controls"), choices.controlnets.length === 0 && byId("control-rows").childElementCount === 0);
}

function fillChoices(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, label]) => h("option", { value, text: label })));
  if (options.some(([value]) => value === before)) select.value = before;
}

/** Show the native size of the model where no size is set. */
function showSizes() {
  const model = choices?.models.find((each) => each.name === field("model").value);
  for (const name of ["width", "height"]) field(name).placeholder = model && !startImage ? String(model[name]) : "default";
}

function use(fields, hasImage) {
  for (const name of [...TEXTS, ...WHOLE_NUMBERS, ...CHOICES, ...NUMBERS, "model"]) {
    field(name).value = fields[name] ?? "";
  }
  field("count").value = 1;
  setStartImage(null);
  for (const rows of ["lora-rows", "control-rows", "option-rows"]) byId(rows).replaceChildren();
  for (const lora of fields.loras ?? []) addLora(lora);
  for (const control of fields.controls ?? []) addControl(control);
  for (const [name, settings] of Object.entries(fields.options ?? {})) addOption(name, settings);
  const others = fields.others.filter((name) => !(hasImage && (name === "image" || name === "strength")));
  note(others.length ? `Not taken over: ${others.join(", ")}.` : "");
}

function setStartImage(file) {
  if (startAddress) URL.revokeObjectURL(startAddress);
  startAddress = file === null ? "" : URL.createObjectURL(file);
  startImage = file;
  const picked = byId("start-picked");
  if (file === null) {
    picked.removeAttribute("src");
    byId("start-image").value = "";
  } else picked.src = startAddress;
  picked.alt = file === null ? "" : `Start image: ${file.name}`;
  setHidden(picked, file === null);
  setHidden(byId("start-remove"), file === null);
  clearError(byId("start-image"));
  showSizes();
}

/** Add a row with a button that removes it; `collect()` returns what it adds to a request, a promise or a value. */
function addRow(list, what, back, parts, collect) {
  const row = h("li", { class: "row" }, ...parts);
  const remove = h("button", { type: "button", class: "plain", text: "Remove", "aria-label": `Remove this ${what}` });
  remove.addEventListener("click", () => {
    row.remove();
    byId(back).focus();
  });
  row.append(remove);
  row.collect = collect;
  byId(list).append(row);
  return row;
}

function chooser(label, names, chosen) {
  const select = h("select", { "aria-label": label });
  const known = chosen && !names.includes(chosen) ? [...names, chosen] : names;
  fillChoices(select, known.map((each) => [each, each]));
  if (chosen) select.value = chosen;
  return select;
}

const strengthInput = (value, of) => h("input", { type: "number", step: "any", inputmode: "decimal", value: String(value), "aria-label": `Strength of the ${of}` });

function numberOf(input, name) {
  if (input.validity.badInput || input.value === "") throw new FieldError(name, "expected a number", input);
  return Number(input.value);
}

/** Add a LoRA; what the form does not show of `lora` stays while its name does. */
function addLora(lora = {}) {
  const { name = "", strength = 1, ...more } = lora;
  const select = chooser("LoRA", choices?.loras ?? [], name);
  const number = strengthInput(strength, "LoRA");
  return addRow("lora-rows", "LoRA", "add-lora", [select, number], () => ({
    ...(select.value === name ? more : {}),
    name: select.value,
    strength: numberOf(number, "loras"),
  }));
}

function addControl(control = {}) {
  const { model = "", strength = 1, ...more } = control;
  const select = chooser("ControlNet", choices?.controlnets ?? [], model);
  const file = h("input", { type: "file", accept: "image/*", "aria-label": "Control image" });
  const picture = h("img", { class: "picked", alt: "", hidden: true });
  let address = "";
  file.addEventListener("change", () => {
    if (address) URL.revokeObjectURL(address);
    address = file.files.length ? URL.createObjectURL(file.files[0]) : "";
    if (address) picture.src = address;
    setHidden(picture, !address);
  });
  const number = strengthInput(strength, "ControlNet");
  return addRow("control-rows", "ControlNet", "add-control", [picture, select, file, number], async () => {
    const found = { ...(select.value === model ? more : {}), model: select.value, strength: numberOf(number, "controls") };
    if (file.files.length) found.image = await base64(file.files[0], "controls", file);
    else if (startImage === null) throw new FieldError("controls", "choose a control image, or a start image for both", file);
    return found;
  });
}

/** Add an option of the run; settings that are left empty have their defaults. */
function addOption(name = "", settings = {}) {
  const select = chooser("Option", (choices?.options ?? []).map((each) => each.name), name);
  const inputs = h("div", { class: "settings" });
  const meaning = h("p", { class: "hint" });
  const show = () => {
    const option = choices?.options.find((each) => each.name === select.value);
    const given = select.value === name ? settings : {};
    setText(meaning, option?.meaning ?? "");
    inputs.replaceChildren(...(option?.settings ?? []).map((setting) => settingInput(setting, given[setting.name])));
  };
  select.addEventListener("change", show);
  show();
  return addRow("option-rows", "option", "add-option", [select, inputs, meaning], () => {
    const found = {};
    for (const input of inputs.querySelectorAll("[data-setting]")) {
      if (input.validity.badInput) throw new FieldError(`options.${select.value}`, "expected a number", input);
      if (input.value !== "") found[input.dataset.setting] = input.type === "number" ? Number(input.value) : input.value;
    }
    return [select.value, found];
  });
}

function settingText(value) {
  if (!Array.isArray(value)) return value === undefined || value === null ? "" : String(value);
  return value.map((each) => (Array.isArray(each) ? each.join("*") : String(each))).join(",");
}

function settingInput(setting, value) {
  const range = setting.kind === "number" || setting.kind === "whole" ? ` (${setting.least} to ${setting.most})` : "";
  const props = { "data-setting": setting.name, title: `${setting.meaning}${range}` };
  const fallback = settingText(setting.default);
  let input;
  if (setting.kind === "name") {
    input = h("select", props, h("option", { value: "", text: `${fallback} (default)` }), ...setting.names.map((each) => h("option", { value: each, text: each })));
  } else if (setting.kind === "number" || setting.kind === "whole") {
    input = h("input", { ...props, type: "number", step: setting.kind === "whole" ? "1" : "any", inputmode: "decimal", placeholder: fallback });
  } else input = h("input", { ...props, type: "text", placeholder: fallback || (setting.kind === "blocks" ? "IN04*0.5" : "7,8,9"), maxlength: "2000" });
  if (value !== undefined) input.value = settingText(value);
  return h("label", { text: setting.name.replaceAll("_", " ") }, input);
}

/** A problem of one field: `control` has it, if the field has several. */
class FieldError extends Error {
  constructor(name, text, control = null) {
    super(`${name}: ${text}`);
    this.control = control;
  }
}

/** Return the content of a file as base64. */
async function base64(file, name, control) {
  if (file.size > MOST_IMAGE_BYTES) throw new FieldError(name, `${file.name} is larger than ${MOST_IMAGE_BYTES >> 20} MiB`, control);
  const address = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new FieldError(name, `${file.name} cannot be read`, control));
    reader.readAsDataURL(file);
  });
  return address.slice(address.indexOf(",") + 1);
}

function note(text) {
  setText(byId("form-note"), text);
  setHidden(byId("form-note"), !text);
}

// ---- errors at their fields

function clearError(control) {
  if (!(control instanceof HTMLElement) || control.getAttribute("aria-invalid") !== "true") return;
  control.removeAttribute("aria-invalid");
  const message = document.getElementById(control.getAttribute("aria-errormessage") ?? "");
  control.removeAttribute("aria-errormessage");
  if (message && !form().querySelector(`[aria-errormessage="${message.id}"]`)) message.remove();
}

function clearErrors() {
  setText(byId("form-problem"), "");
  setHidden(byId("form-problem"), true);
  for (const control of form().querySelectorAll("[aria-invalid]")) clearError(control);
  for (const message of form().querySelectorAll(".field-error")) message.remove();
}

/** names of parts of the form in messages that do not begin with a field */
const KINDS = [
  [/^unknown model\b|^model\b/, "model"],
  [/^unknown LoRA\b/, "loras"],
  [/^unknown ControlNet\b/, "controls"],
  [/^unknown (option|setting of options)\b/, "options"],
  [/^unknown sampler\b/, "sampler"],
  [/^unknown schedule\b/, "schedule"],
];

/** Return the name of the field that a message is about; "" if it names none. */
function fieldOf(text) {
  const begin = /^([a-z_]+)[\w.[\]]*(?:, [\w.]+)*: /.exec(text);
  return begin?.[1] ?? KINDS.find(([pattern]) => pattern.test(text))?.[1] ?? "";
}

/** Return the control of a field that a message is about, and the element that shows the message: a label or a row. */
function placeOf(name, text) {
  const group = name && form().querySelector(`fieldset[data-field="${CSS.escape(name)}"]`);
  if (group && !group.hidden) {
    const setting = /^options\.(\w+)(?:\.(\w+))?/.exec(text);
    const rows = [...group.querySelectorAll("li.row")];
    const row = rows.find((each) => setting && each.querySelector("select").value === setting[1]) ?? rows.find((each) => text.includes(`'${each.querySelector("select").value}'`)) ?? rows[0];
    const control = row?.querySelector(setting?.[2] ? `[data-setting="${CSS.escape(setting[2])}"]` : /\bstrength\b/.test(text) ? "input[type=number]" : /\bimage\b/.test(text) ? "input[type=file]" : "select");
    return [control ?? row?.querySelector("select, input") ?? group.querySelector("input, button"), row ?? group];
  }
  const control = name ? form().elements[name] : null;
  return control instanceof HTMLElement && control.matches("input, select, textarea") ? [control, control.closest("label") ?? control.parentElement] : [null, null];
}

let errors = 0;

/** Show the messages of the server, or of one FieldError, at their fields, and above the form what has none. */
function problem(text, control = null) {
  clearErrors();
  const parts = text.replace(/^requests\[\d+\]: /, "").split("; also ");
  const left = [];
  const marked = [];
  for (const part of parts) {
    const name = fieldOf(part);
    const [found, place] = placeOf(name, part);
    const at = control ?? found;
    if (!at) {
      left.push(part);
      continue;
    }
    const message = h("span", { class: "field-error", id: `field-error-${(errors += 1)}`, text: part.replace(/^[a-z_][\w.[\]]*: /, "") });
    (control?.closest("li.row, fieldset") ?? place).append(message);
    at.setAttribute("aria-invalid", "true");
    at.setAttribute("aria-errormessage", message.id);
    marked.push(at);
  }
  const count = parts.length - left.length;
  setText(byId("form-problem"), left.length ? left.join("; ") : count === 1 ? parts[0] : `${plural(count, "field")} cannot be used: ${parts.join("; ")}`);
  setHidden(byId("form-problem"), false);
  marked.sort((one, other) => (one.compareDocumentPosition(other) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1));
  marked[0]?.focus();
}

/** Return one request from the fields; throws a FieldError. */
async function request() {
  const found = { model: field("model").value, prompt: field("prompt").value };
  if (!found.model) throw new FieldError("model", "this pool has no models");
  if (!found.prompt.trim()) throw new FieldError("prompt", "missing");
  if (field("negative").value.trim()) found.negative = field("negative").value;
  for (const name of [...WHOLE_NUMBERS, ...NUMBERS]) {
    const control = field(name);
    if (control.validity.badInput) throw new FieldError(name, "expected a number");
    if (control.value !== "") found[name] = Number(control.value);
  }
  for (const name of CHOICES) if (field(name).value) found[name] = field(name).value;
  if (startImage !== null) found.image = await base64(startImage, "image", byId("start-image"));
  else if (found.strength !== undefined) throw new FieldError("strength", "needs a start image");
  const collected = (list) => Promise.all([...byId(list).children].map(async (row) => row.collect()));
  const loras = await collected("lora-rows");
  const controls = await collected("control-rows");
  const options = await collected("option-rows");
  if (loras.length) found.loras = loras;
  if (controls.length) found.controls = controls;
  if (options.length) found.options = Object.fromEntries(options.map(([name, settings]) => [name, Object.keys(settings).length ? settings : true]));
  if (options.length !== Object.keys(found.options ?? {}).length) throw new FieldError("options", "each option once");
  return found;
}

async function submit() {
  const button = byId("submit-button");
  if (button.disabled) return;
  clearErrors();
  button.disabled = true;
  try {
    const one = await request();
    const wanted = Number(field("count").value || 1);
    if (!Number.isInteger(wanted) || wanted < 1 || wanted > 1000) throw new FieldError("count", "expected 1 to 1000");
    // one request for all, so that its images are sent once
    await call("POST", "/api/jobs", wanted === 1 ? one : { ...one, n: wanted });
    byId("form-dialog").close();
    toast(`Submitted: ${plural(wanted, "job")}.`);
  } catch (failed) {
    problem(failed instanceof FieldError ? failed.message : words(failed), failed.control ?? null);
  } finally {
    button.disabled = false;
  }
}
