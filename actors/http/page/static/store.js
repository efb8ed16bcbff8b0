// The latest state of the pool, as the event stream describes it: sections of entries, each with fields.

const SECTIONS = ["pool", "workers", "models", "users", "groups", "submissions", "tasks", "ends", "samples"];

// maps, not objects: keys are names that anybody may choose, such as "__proto__"
const sections = new Map(SECTIONS.map((name) => [name, new Map()]));
let clockOffsetMs = 0;

/** Return the entries of a section: a Map of objects. */
export const entries = (name) => sections.get(name);

export const pool = () => sections.get("pool").get("pool") ?? {};

/** Return the server's time in seconds since 1970. */
export const serverNow = () => (Date.now() + clockOffsetMs) / 1000;

export function setServerTime(serverMs) {
  clockOffsetMs = serverMs - Date.now();
}

/** Apply a change; return the names of the sections that it touches. */
export function apply(change) {
  const touched = new Set(change.all ? SECTIONS : []);
  if (change.all) for (const section of sections.values()) section.clear();
  for (const [name, keys] of Object.entries(change.removed)) {
    touched.add(name);
    for (const key of keys) sections.get(name)?.delete(key);
  }
  for (const [name, changed] of Object.entries(change.set)) {
    const section = sections.get(name);
    if (section === undefined) continue;
    touched.add(name);
    for (const [key, fields] of Object.entries(changed)) {
      const entry = section.get(key);
      if (entry === undefined) section.set(key, fields);
      else Object.assign(entry, fields);
    }
  }
  return touched;
}
