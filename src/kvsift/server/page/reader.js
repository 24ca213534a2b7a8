// The text of a document, with marks on the passages that an answer read. The text is split into blocks, whose layout
// the browser skips while they are out of sight (content-visibility); their marks are made when they come near.

import { $, announce, count, el, percent, write } from "./dom.js";

const BLOCK = 1500; // characters, about
const SHORT = 40; // characters of the shortest sentence that counts in full
const LEVELS = 5; // strengths of marks

export class Reader {
  #text = $("text");
  #blocks = []; // {element, text, start, stop, isPlain, isMarked, spans, version}
  #visible = new Set();
  #version = 0;
  #sentences = null; // [start, stop], made for the first marks
  #strong = []; // those that are stepped through: {start, stop, weight}
  #spans = [];
  #at = -1;
  #passages = null;
  #strongest = 0; // largest share
  #width = 0;
  #watcher = new IntersectionObserver((entries) => this.#seen(entries), { root: this.#text, rootMargin: "800px 0px" });

  constructor() {
    $("previous").onclick = () => this.step(-1);
    $("next").onclick = () => this.step(1);
    $("strongest").onclick = () => this.toStrongest(true);
    $("layer").onchange = () => this.#choose(true);
    this.#text.addEventListener("keydown", (event) => this.#key(event));
    $("overview").onclick = (event) => this.#toPlace(event.offsetY / $("overview").clientHeight);
    new ResizeObserver(() => this.#resized()).observe(this.#text);
  }

  /** Show a text; passages index into its characters (code points, as the server counts). */
  show(text) {
    this.#watcher.disconnect();
    this.#visible.clear();
    let start = 0;
    this.#blocks = [...pieces(text)].map((piece) => {
      const length = characters(piece);
      const block = { text: piece, start, stop: start + length, isPlain: length === piece.length, spans: [], version: 0 };
      block.element = el("div", {}, piece);
      block.element.style.containIntrinsicSize = `auto ${Math.ceil(piece.length / 75 + piece.split("\n").length / 2)}lh`;
      block.element.block = block;
      start = block.stop;
      return block;
    });
    this.#text.replaceChildren(...this.#blocks.map((block) => block.element));
    this.#text.scrollTop = 0;
    this.#sentences = null;
    for (const block of this.#blocks) this.#watcher.observe(block.element);
    this.mark(null);
  }

  get length() {
    return this.#blocks.at(-1)?.stop ?? 0;
  }

  /** Mark the passages of an answer, as the server gives them; none removes all marks. */
  mark(passages, go = false) {
    this.#passages = passages;
    $("marks").hidden = !passages;
    const layers = Object.keys(passages?.layers ?? {}).sort((a, b) => a - b);
    const before = $("layer").value;
    $("layer").replaceChildren(el("option", { value: "" }, "All layers"), ...layers.map((id) => el("option", { value: id }, `Layer ${id}`)));
    $("layer").value = layers.includes(before) ? before : "";
    $("layer").hidden = !layers.length;
    this.#choose(go);
  }

  #choose(go) {
    const layer = $("layer").value;
    this.#spans = (layer === "" ? this.#passages?.all : this.#passages?.layers[layer]) ?? [];
    this.#at = -1;
    this.#version += 1;
    for (const block of this.#blocks) block.spans = [];
    const strongest = this.#spans.reduce((most, span) => Math.max(most, span[2]), 0);
    let first = 0;
    for (const [start, stop, share] of this.#spans) {
      while (first < this.#blocks.length - 1 && this.#blocks[first].stop <= start) first += 1;
      for (let i = first; i < this.#blocks.length && this.#blocks[i].start < stop; i += 1)
        this.#blocks[i].spans.push([start, stop, share]);
    }
    this.#strongest = strongest;
    const lists = layer === "" && this.#passages ? Object.values(this.#passages.layers) : [];
    this.#sentences ??= this.#passages ? this.#blocks.flatMap(sentences) : null;
    this.#strong = strongestSentences(this.#sentences ?? [], lists.length ? lists : [this.#spans]);
    for (const block of this.#blocks) if (this.#visible.has(block) || block.isMarked) this.#render(block);
    for (const id of ["previous", "next", "strongest"]) $(id).disabled = !this.#strong.length;
    this.#tell(`Read by up to ${percent(strongest)} of steps and heads`);
    this.#draw();
    if (go) this.toStrongest(false);
  }

  #tell(what) {
    const note = this.#passages?.note ?? "";
    if (!this.#strong.length) return write($("marks-note"), note || "No passage was selected.");
    const read = this.#spans.reduce((sum, [start, stop]) => sum + stop - start, 0);
    write($("marks-note"), `${what}. ${percent(read / this.length)} of the text is marked. ${note}`);
  }

  /** Go to the next passage (1), or the previous one (-1), after where the reader is. */
  step(by) {
    if (!this.#strong.length) return;
    const last = this.#strong.length - 1;
    const next = this.#at < 0 ? (by > 0 ? 0 : last) : this.#at + by;
    this.#go(next > last ? 0 : next < 0 ? last : next, true);
  }

  toStrongest(speak) {
    if (!this.#strong.length) return;
    const weights = this.#strong.map((group) => group.weight); // a single token may be read by chance
    this.#go(weights.indexOf(Math.max(...weights)), speak);
  }

  #go(index, speak) {
    this.#at = index;
    const group = this.#strong[index];
    this.#version += 1;
    for (const block of this.#visible) this.#render(block);
    const block = this.#blocks.find((each) => each.stop > group.start);
    this.#render(block);
    const target = block.element.querySelector("mark.here") ?? block.element;
    const center = () => target.isConnected && target.scrollIntoView({ block: "center" });
    center();
    requestAnimationFrame(() => requestAnimationFrame(center)); // heights of blocks on the way were estimates
    this.#draw();
    const place = `Passage ${index + 1} of ${this.#strong.length}`;
    const share = this.#spans.reduce((most, span) => (touches(span, group) ? Math.max(most, span[2]) : most), 0);
    this.#tell(`${place}, read by up to ${percent(share)} of steps and heads`);
    if (speak) announce(`${place}: ${target.textContent.slice(0, 200)}`);
  }

  #toPlace(share) {
    const place = share * this.length;
    this.#blocks.find((block) => block.stop >= place)?.element.scrollIntoView({ block: "center" });
  }

  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.#visible.add(target.block);
      else this.#visible.delete(target.block);
      if (isIntersecting) this.#render(target.block);
    }
  }

  #render(block) {
    if (block.version === this.#version) return;
    block.version = this.#version;
    if (!block.spans.length && !block.isMarked) return;
    block.isMarked = block.spans.length > 0;
    const here = this.#strong[this.#at];
    const text = block.isPlain ? block.text : Array.from(block.text);
    const cut = (from, to) => (block.isPlain ? text.slice(from, to) : text.slice(from, to).join(""));
    const parts = [];
    let done = 0;
    for (const [start, stop, share] of block.spans) {
      const level = Math.max(1, Math.ceil(LEVELS * (share / this.#strongest) ** 2)); // what is read now and then is faint
      let [from, to] = [Math.max(0, start - block.start), Math.min(block.stop, stop) - block.start];
      while (from > done && from < to && /\s/.test(text[from])) from += 1; // tokens begin with a space
      if (from === to) continue;
      const isHere = here && touches([start, stop], here);
      if (from > done) parts.push(cut(done, from));
      parts.push(el("mark", { class: `m${level}${isHere ? " here" : ""}` }, cut(from, to)));
      done = to;
    }
    block.element.replaceChildren(...parts, cut(done));
  }

  #key(event) {
    const act = { n: () => this.step(1), p: () => this.step(-1), s: () => this.toStrongest(true) }[event.key];
    if (!act || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    act();
  }

  #resized() {
    this.#draw();
    if (this.#at >= 0 && this.#width !== this.#text.clientWidth) this.#go(this.#at, false);
    this.#width = this.#text.clientWidth;
  }

  /** Draw where in the document the passages are. */
  #draw() {
    const canvas = $("overview");
    const { clientWidth: width, clientHeight: height } = canvas;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    pen.scale(ratio, ratio);
    const bar = ([start, stop], colour, alpha) => {
      pen.fillStyle = colour;
      pen.globalAlpha = alpha;
      pen.fillRect(3, Math.min((start / this.length) * height, height - 2), width - 3, Math.max(2, ((stop - start) / this.length) * height));
    };
    for (const span of this.#spans) bar(span, style.borderRightColor, (span[2] / this.#strongest) ** 2);
    const here = this.#strong[this.#at];
    if (here) bar([here.start, here.stop], style.color, 1);
  }
}

/** Split a text into blocks that end with a line where that is possible. */
function* pieces(text) {
  let start = 0;
  while (start < text.length) {
    let stop = text.length;
    if (text.length - start > BLOCK) {
      const paragraph = text.indexOf("\n\n", start + BLOCK / 2);
      const line = text.indexOf("\n", start + BLOCK);
      stop = paragraph >= 0 && paragraph < start + 2 * BLOCK ? paragraph + 2 : line >= 0 ? line + 1 : text.length;
      if (stop > start + 4 * BLOCK) stop = text.lastIndexOf(" ", start + 4 * BLOCK) + 1;
      if (stop <= start) stop = start + 4 * BLOCK;
      const code = text.charCodeAt(stop - 1);
      if (code >= 0xd800 && code < 0xdc00 && stop < text.length) stop += 1; // not inside a character
    }
    yield text.slice(start, stop);
    start = stop;
  }
}

function characters(text) {
  const pairs = text.match(/[\ud800-\udbff][\udc00-\udfff]/g);
  return text.length - (pairs?.length ?? 0);
}

const touches = ([start, stop], other) => start < other.stop && stop > other.start;

/** Sentences of a block as [start, stop], in characters of the document. */
function sentences(block) {
  let [start, done] = [block.start, 0];
  return [...block.text.matchAll(/[^]{1,400}?(?:[.!?]["')\]]*\s+|\n+|$)|[^]{1,400}/g)].map(([text]) => {
    done += text.length;
    const stop = block.isPlain ? block.start + done : start + characters(text);
    return [start, (start = stop)];
  });
}

/** What is stepped through: the sentences that were read most, in order, as {start, stop, weight}. The weight is the mean
 * of the fourth powers of shares, over lists: a token that many heads read counts more than many read now and then. */
function strongestSentences(places, lists) {
  const weights = new Float64Array(places.length);
  for (const spans of lists) {
    let first = 0;
    for (const [start, stop, share] of spans) {
      while (first < places.length && places[first][1] <= start) first += 1;
      for (let i = first; i < places.length && places[i][0] < stop; i += 1) {
        const common = Math.min(stop, places[i][1]) - Math.max(start, places[i][0]);
        weights[i] += (common * share ** 4) / Math.max(places[i][1] - places[i][0], SHORT);
      }
    }
  }
  const most = weights.reduce((best, weight) => Math.max(best, weight), 0);
  const found = places.map(([start, stop], i) => ({ start, stop, weight: weights[i] }));
  return most ? found.filter((each) => each.weight >= most / 10) : [];
}
