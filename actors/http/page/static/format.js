// Numbers, sizes and times as texts.

const numbers = new Intl.NumberFormat("en-US");

export const count = (value) => numbers.format(value);

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Return a size with three digits, in the unit of `of` if given. */
export function bytes(value, of = value) {
  const place = of > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(of) / 10)) : 0;
  const scaled = value / 1024 ** place;
  return `${scaled >= 100 || place === 0 ? Math.round(scaled) : scaled.toFixed(1)} ${UNITS[place]}`;
}

/** Return the size of a part of something: "12.1 of 24.0 GiB". */
export function bytesOf(value, whole) {
  return `${bytes(value, whole).split(" ")[0]} / ${bytes(whole)}`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole < 180 && whole % 60 ? ` ${whole % 60} s` : ""}`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d`;
}

/** Return a measured time, with more digits for short ones. */
export const measured = (seconds) => (seconds < 10 ? `${seconds.toFixed(2)} s` : duration(seconds));

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "-");

const ROLES = {
  diffusion_model: "Diffusion model",
  diffusion_model_2: "Diffusion model 2",
  text_encoder: "Text encoder",
  text_encoder_2: "Text encoder 2",
  text_encoder_3: "Text encoder 3",
  text_encoder_4: "Text encoder 4",
  vision_encoder: "Vision encoder",
  vae: "VAE",
  lora: "LoRA",
  controlnet: "ControlNet",
};

export const roleName = (role) => ROLES[role] ?? role;

const KINDS = ["diffusion_model", "text_encoder", "vision_encoder", "vae", "lora", "controlnet"];

/** Return the role without its number: the color of a component. */
export const kindOf = (role) => KINDS.find((kind) => role.startsWith(kind)) ?? "other";

export { KINDS };
