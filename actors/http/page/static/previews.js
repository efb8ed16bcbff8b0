// Pictures that follow an image's address: finished outputs, and the live preview of a running job.

import { images, previewOf } from "./api.js";
import { h, setAttribute, setHidden } from "./dom.js";

const PREVIEW_MS = 1500;
const MOST_JOBS = 100;

/** job -> {url, step, askedAt, over}: shared by everything that shows the job */
const previews = new Map();

/** Paths of an output; with the name of its file, another server of the same application finds it, too. */
export const thumbnailPath = (submission, index, file) =>
  `/api/jobs/${encodeURIComponent(submission)}/outputs/${index}/thumbnail?file=${encodeURIComponent(file)}`;

export const outputPath = (submission, index, file) =>
  `/api/jobs/${encodeURIComponent(submission)}/outputs/${index}?file=${encodeURIComponent(file)}`;

/** Return the address of the newest preview of a running task, "" if there is none; ask for a newer one in time. */
async function preview(task) {
  let known = previews.get(task.job);
  if (known === undefined) {
    known = { url: "", step: 0, askedAt: 0, over: false };
    previews.set(task.job, known);
    for (const [job, oldest] of previews) {
      if (previews.size <= MOST_JOBS) break;
      previews.delete(job);
      if (oldest.url) URL.revokeObjectURL(oldest.url);
    }
  }
  if (known.over || task.stage !== "sample" || task.step <= known.step || Date.now() - known.askedAt < PREVIEW_MS) {
    return known.url;
  }
  known.askedAt = Date.now();
  known.step = task.step;
  try {
    const blob = await previewOf(task.submission, task.index);
    if (blob !== null) {
      const before = known.url;
      known.url = URL.createObjectURL(blob);
      if (before) setTimeout(() => URL.revokeObjectURL(before), 3000);
    }
  } catch {
    known.over = true; // the server has no previews of this job
  }
  return known.url;
}

const visible = new WeakMap();
const observer = new IntersectionObserver(
  (changes) => {
    for (const change of changes) {
      if (change.isIntersecting) visible.get(change.target)?.();
    }
  },
  { rootMargin: "300px" },
);

/** An image that is fetched when it comes into view. */
export class Picture {
  constructor(className) {
    this.image = h("img", { alt: "", decoding: "async", draggable: "false" });
    this.node = h("span", { class: className }, this.image);
    this.image.hidden = true;
    this.path = "";
    this.seen = false;
    visible.set(this.node, () => {
      this.seen = true;
      observer.unobserve(this.node);
      this.load();
    });
    observer.observe(this.node);
  }

  /** Show the output at `path`; "" shows nothing. */
  show(path, alt = "") {
    setAttribute(this.image, "alt", alt);
    if (path === this.path) return;
    this.path = path;
    if (!path) this.set("");
    else if (this.seen) this.load();
  }

  /** Show the live preview of a task, if there is one. */
  async follow(task, alt = "") {
    if (!this.seen) return;
    const path = `preview ${task.job}`;
    const url = await preview(task);
    if (!url || !this.node.isConnected) return;
    setAttribute(this.image, "alt", alt);
    this.path = path;
    this.set(url);
  }

  async load() {
    const path = this.path;
    if (!path || path.startsWith("preview ")) return;
    try {
      const url = await images.load(path);
      if (this.path === path) this.set(url);
    } catch {
      if (this.path === path) this.set("");
    }
  }

  set(url) {
    if (url) {
      setAttribute(this.image, "src", url);
      this.node.classList.add("filled");
    } else {
      this.image.removeAttribute("src");
      this.node.classList.remove("filled");
    }
    setHidden(this.image, !url);
  }

  end() {
    observer.unobserve(this.node);
  }
}
