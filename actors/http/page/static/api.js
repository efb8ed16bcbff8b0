// Calls of the server: the key, the event stream, and images, which need the key, too.

const KEY = "modelpool.key";
/** silence after which the stream is opened again; the server sends a comment every 15 s */
const SILENT_MS = 40_000;
const FIRST_WAIT_MS = 500;
const MOST_WAIT_MS = 8_000;
const MOST_IMAGES = 240;
const IMAGES_AT_ONCE = 4;

export class CallFailed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

let onKeyNeeded = () => {};

/** Have `listener(message)` called when the server refuses the key, or asks for one. */
export function whenKeyNeeded(listener) {
  onKeyNeeded = listener;
}

async function response(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  // without credentials, or the browser asks for a password of its own where the server wants a key
  const answer = await fetch(path, { ...options, headers, credentials: "omit" });
  if (answer.ok) return answer;
  let message = `status ${answer.status}`;
  try {
    message = (await answer.json()).error.message ?? message;
  } catch {
    // not JSON: the status is all that is known
  }
  if (answer.status === 401) onKeyNeeded(key() ? "The server does not know this key." : "");
  const failed = new CallFailed(answer.status, message);
  failed.retryAfterSeconds = Number(answer.headers.get("retry-after")) || 0;
  throw failed;
}

/** Return the JSON answer to a call. Throws CallFailed, and TypeError if the server cannot be reached. */
export async function call(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  const answer = await response(path, options);
  return answer.json();
}

export const words = (problem) => (problem instanceof CallFailed ? problem.message : "The server does not answer.");

/** Follow a stream of events: `onData(value, serverTime)` for each, `onState("live" | "lost" | "refused")`. */
export class EventFollower {
  constructor(path, onData, onState) {
    this.path = path;
    this.onData = onData;
    this.onState = onState;
    this.abort = null;
    this.waitMs = FIRST_WAIT_MS;
    this.timer = 0;
  }

  start() {
    this.stop();
    this.abort = new AbortController();
    this.run(this.abort);
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async run(abort) {
    try {
      await this.read(abort);
    } catch (problem) {
      if (this.abort === abort && problem instanceof CallFailed && problem.status === 401) {
        this.abort = null;
        this.onState("refused");
        return;
      }
    }
    if (this.abort !== abort) return;
    this.onState("lost");
    // with chance, or all pages come back at the same moment
    this.timer = setTimeout(() => this.start(), this.waitMs * (0.5 + Math.random()));
    this.waitMs = Math.min(MOST_WAIT_MS, this.waitMs * 2);
  }

  async read(abort) {
    const answer = await response(this.path, { signal: abort.signal, cache: "no-store" });
    const serverTime = Date.parse(answer.headers.get("date") ?? "") || Date.now();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const watchdog = setTimeout(() => reader.cancel(), SILENT_MS);
      const { value, done } = await reader.read();
      clearTimeout(watchdog);
      if (done || this.abort !== abort) return;
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const line = block.split("\n").find((each) => each.startsWith("data: "));
        if (line === undefined) continue;
        this.waitMs = FIRST_WAIT_MS;
        this.onState("live");
        this.onData(JSON.parse(line.slice(6)), serverTime);
      }
    }
  }
}

/** Addresses of fetched images for <img>, the latest MOST_IMAGES of them. */
class Images {
  constructor() {
    this.known = new Map();
    this.waiting = [];
    this.loading = 0;
  }

  /** Return the address of the image at `path`. Throws as `call`. */
  load(path) {
    const known = this.known.get(path);
    if (known !== undefined) {
      this.known.delete(path);
      this.known.set(path, known);
      return known;
    }
    const found = new Promise((resolve, reject) => this.waiting.push({ path, resolve, reject }));
    this.known.set(path, found);
    found.catch(() => this.known.delete(path));
    for (const oldest of this.known.keys()) {
      if (this.known.size <= MOST_IMAGES) break;
      this.known.get(oldest).then(URL.revokeObjectURL, () => {});
      this.known.delete(oldest);
    }
    this.next();
    return found;
  }

  async next() {
    if (this.loading === IMAGES_AT_ONCE || this.waiting.length === 0) return;
    this.loading += 1;
    const { path, resolve, reject } = this.waiting.pop();
    try {
      resolve(URL.createObjectURL(await blobOf(path)));
    } catch (problem) {
      reject(problem);
    }
    this.loading -= 1;
    this.next();
  }
}

export const images = new Images();

/** Return the content of a file of the server. Waits once if the server asks for fewer calls. */
export async function blobOf(path) {
  try {
    return await (await response(path)).blob();
  } catch (problem) {
    if (problem.status !== 429) throw problem;
    await new Promise((resume) => setTimeout(resume, 1000 * Math.max(1, problem.retryAfterSeconds)));
    return (await response(path)).blob();
  }
}

/** Return the newest preview of a running job, or null if there is none. */
export async function previewOf(submission, index) {
  const answer = await response(`/api/jobs/${encodeURIComponent(submission)}/preview?index=${index}`);
  return answer.status === 204 ? null : answer.blob();
}
