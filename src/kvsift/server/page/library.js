// Documents: adding, reading progress, choosing, deleting.

import { events, Failure, json, post, request } from "./api.js";
import { $, announce, ask, count, duration, el, notice, pause, size, sure, write } from "./dom.js";

const KINDS = { md: "text/markdown", markdown: "text/markdown", htm: "text/html", html: "text/html", pdf: "application/pdf" };

export class Library {
  #documents = new Map(); // id -> {object, item, texts}
  #most = Infinity;
  #choose;
  #forgotten;
  current = null;
  adding = null; // promise of the latest upload

  /** choose(document or null) is called when another document is shown, forget(id) when one is gone. */
  constructor(choose, forget) {
    this.#choose = choose;
    this.#forgotten = forget;
    $("file").onchange = () => {
      this.addFiles([...$("file").files]);
      $("file").value = "";
    };
    $("paste").onclick = () => this.paste();
    this.#takeDrops();
  }

  /** Take the limits of the server, and list what it has. */
  async open(limits) {
    this.#most = limits?.max_bytes ?? Infinity;
    const kinds = (limits?.kinds ?? []).map((kind) => ({ text: "text", markdown: "Markdown", html: "HTML", pdf: "PDF" })[kind] ?? kind);
    if (kinds.length)
      write($("limits"), `${kinds.join(", ").replace(/^t/, "T")}, up to ${size(this.#most)}. Or drop files anywhere on this page.`);
    const listed = (await json("/v1/documents")).data;
    for (const object of listed) this.#put(object);
    if (listed.length) this.choose(listed.at(-1).id);
  }

  async addFiles(files) {
    for (const file of files) {
      if (file.size > this.#most) {
        notice(`${file.name} has ${size(file.size)}; this server takes up to ${size(this.#most)}.`);
        continue;
      }
      const kind = KINDS[file.name.split(".").pop().toLowerCase()] ?? "application/octet-stream";
      const path = `/v1/documents?name=${encodeURIComponent(file.name)}`;
      await this.#add(file.name, path, { method: "POST", headers: { "Content-Type": kind }, body: file });
    }
  }

  addText(name, text) {
    return this.#add(name, "/v1/documents", post({ text, name }));
  }

  async paste(text = "") {
    $("paste-text").value = text;
    if ((await ask($("paste-dialog"))) && $("paste-text").value)
      await this.addText($("paste-name").value.trim() || "Pasted text", $("paste-text").value);
    $("paste-text").value = "";
  }

  #add(name, path, options) {
    return (this.adding = this.#send(name, path, options));
  }

  async #send(name, path, options) {
    const item = el("li", { class: "adding" }, el("strong", {}, name), el("span", { class: "soft" }, "Uploading…"));
    $("documents").append(item);
    notice();
    try {
      const object = await json(path, options);
      this.#put(object);
      this.choose(object.id);
      if (object.status === "failed") notice(`${name} could not be read: ${object.error}`);
      return object;
    } catch (error) {
      notice(`${name} was not added: ${error.message}`);
    } finally {
      item.remove();
    }
  }

  #put(object) {
    const known = this.#documents.get(object.id);
    if (known) return this.#update(known, object);
    const parts = {
      name: el("strong", {}, object.name || "Untitled"),
      bar: el("progress", { max: 1, value: 0, "aria-label": `Reading ${object.name}` }),
      state: el("span", { class: "soft" }),
    };
    const button = el("button", { type: "button", class: "document", onclick: () => this.choose(object.id) }, parts.name, parts.bar, parts.state);
    const remove = el("button", { type: "button", class: "quiet remove", "aria-label": `Delete ${object.name}`, onclick: () => this.#delete(object.id) }, "Delete");
    const entry = { object, button, parts, quarter: 0, item: el("li", {}, button, remove) };
    this.#documents.set(object.id, entry);
    $("documents").append(entry.item);
    this.#update(entry, object);
    if (object.status === "reading") this.#watch(entry);
  }

  #update(entry, object) {
    entry.object = object;
    const { status, read_tokens: read, tokens, seconds_left: left, error } = object;
    const isReading = status === "reading";
    entry.parts.bar.hidden = !isReading;
    if (tokens) entry.parts.bar.value = read / tokens;
    else entry.parts.bar.removeAttribute("value");
    entry.item.classList.toggle("failed", status === "failed");
    const progress = tokens ? `${count(read)} of ${count(tokens)} tokens` : "waiting to be read";
    const rest = left == null ? "" : `, ${duration(left)} left`;
    write(entry.parts.state, isReading ? progress + rest : status === "failed" ? `Not read: ${error}` : `${count(tokens ?? 0)} tokens`);
    const quarter = tokens ? Math.floor((4 * read) / tokens) : 0;
    if (isReading && quarter > entry.quarter) announce(`${object.name}: ${25 * quarter} % read`);
    entry.quarter = quarter;
    if (this.current === entry) this.#choose(object, true);
  }

  async #watch(entry) {
    const { id, name } = entry.object;
    while (this.#documents.get(id) === entry && entry.object.status === "reading") {
      try {
        for await (const object of events(`/v1/documents/${id}/events`)) {
          if (this.#documents.get(id) !== entry) return;
          if (!("comment" in object)) this.#update(entry, object);
        }
      } catch (error) {
        if (error.status === 404) return this.#forget(id);
        await pause(2);
      }
    }
    if (entry.object.status === "ready") announce(`${name} is read.`);
    if (entry.object.status === "failed") notice(`${name} could not be read: ${entry.object.error}`);
  }

  /** Show a document; null shows the welcome. */
  choose(id) {
    const entry = this.#documents.get(id) ?? null;
    this.current = entry;
    for (const other of this.#documents.values())
      other.button.setAttribute("aria-current", other === entry ? "true" : "false");
    this.#choose(entry?.object ?? null, false);
  }

  /** The text of a document. */
  async text(id) {
    const response = await request(`/v1/documents/${id}/text`);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(await response.arrayBuffer());
  }

  async #delete(id) {
    const { name } = this.#documents.get(id).object;
    if (!(await sure("Delete the document?", `${name} and its conversation are removed. What the model read is forgotten.`, "Delete"))) return;
    try {
      await request(`/v1/documents/${id}`, { method: "DELETE" });
    } catch (error) {
      if (!(error instanceof Failure) || error.status !== 404) return notice(`${name} was not deleted: ${error.message}`);
    }
    this.#forget(id);
    announce(`${name} is deleted.`);
  }

  #forget(id) {
    this.#documents.get(id)?.item.remove();
    this.#documents.delete(id);
    this.#forgotten(id);
    if (this.current?.object.id === id) this.choose([...this.#documents.keys()].at(-1));
    $("paste").focus();
  }

  #takeDrops() {
    const isFile = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (!isFile(event)) return;
      event.preventDefault();
      $("drop").hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) $("drop").hidden = true;
    });
    addEventListener("drop", (event) => {
      if (!isFile(event)) return;
      event.preventDefault();
      $("drop").hidden = true;
      this.addFiles([...event.dataTransfer.files]);
    });
    addEventListener("paste", (event) => {
      if (event.target.closest?.("input, textarea, dialog")) return;
      const files = [...event.clipboardData.files];
      const text = event.clipboardData.getData("text/plain");
      if (files.length) this.addFiles(files);
      else if (text) this.paste(text);
    });
  }
}
