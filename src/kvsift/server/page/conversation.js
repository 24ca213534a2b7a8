// Questions and answers: one conversation per document, answers under several plans side by side.

import { events, post } from "./api.js";
import { $, announce, count, el, percent, sure, write } from "./dom.js";

export class Conversation {
  #conversations = new Map(); // id of a document, or "" -> turns
  #turns = [];
  #document = null;
  #running = null; // {controller, turn}
  #show;
  #documentAdded;
  #model = null;

  /** show(passages, go) marks the passages of an answer; null removes the marks. documentAdded() waits for uploads. */
  constructor(show, documentAdded) {
    this.#show = show;
    this.#documentAdded = documentAdded;
    $("ask").onsubmit = (event) => {
      event.preventDefault();
      this.ask($("question").value.trim());
    };
    $("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("ask").requestSubmit();
    });
    $("stop").onclick = () => this.stop();
    $("export").onclick = () => this.export();
    $("clear").onclick = () => this.#clear();
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running && !document.querySelector("dialog[open]")) this.stop();
    });
  }

  /** Take questions from now on. */
  start(model) {
    this.#model = model;
    $("send").disabled = false;
  }

  /** Show the conversation about a document, or that without one. */
  open(document) {
    this.#document = document;
    const id = document?.id ?? "";
    if (!this.#conversations.has(id)) this.#conversations.set(id, []);
    this.#turns = this.#conversations.get(id);
    $("turns").replaceChildren(...this.#turns.map((turn) => turn.element));
    $("question").placeholder = document ? `Ask about ${document.name}` : "Ask without a document";
    this.#show(this.#turns.at(-1)?.chosen?.passages ?? null, false);
    this.#enable();
  }

  /** Ask a question under the plan that is selected. */
  async ask(question) {
    await this.#documentAdded(); // a question that is asked during an upload is about what is uploaded
    if (!question || this.#running || !this.#model) return;
    const turn = { question, answers: [], chosen: null, turns: this.#turns, document: this.#document };
    turn.row = el("div", { class: "answers" });
    turn.again = this.#again(turn);
    turn.element = el("li", {}, el("h3", {}, question), turn.row, turn.again.element);
    this.#turns.push(turn);
    $("turns").append(turn.element);
    $("question").value = "";
    return this.#answer(turn, $("plan").value);
  }

  stop() {
    this.#running?.controller.abort(new DOMException("stopped", "AbortError"));
  }

  #again(turn) {
    const select = el("select", { "aria-label": `Plan to answer again: ${turn.question}` });
    const button = el("button", { type: "button", onclick: () => this.#answer(turn, select.value) }, "Ask again");
    const hint = el("p", { class: "soft", hidden: true }, "The conversation goes on with the answer that has the stronger frame.");
    return { select, button, hint, element: el("div", { class: "again", hidden: true }, select, button, hint) };
  }

  /** The messages before an answer: turns that have one, by the answer that was chosen. */
  #history(turn) {
    const before = turn.turns.slice(0, turn.turns.indexOf(turn)).filter((other) => other.chosen?.text);
    const pairs = before.flatMap(({ question, chosen }) => [
      { role: "user", content: question },
      { role: "assistant", content: chosen.text },
    ]);
    return [...pairs, { role: "user", content: turn.question }];
  }

  async #answer(turn, plan) {
    if (this.#running) return;
    const answer = this.#card(turn, plan);
    const body = {
      messages: this.#history(turn),
      stream: true,
      stream_options: { include_usage: true },
      sparsity: { plan, ...(turn.document && { passages: true }) },
      ...(turn.document && { document: turn.document.id }),
    };
    const controller = new AbortController();
    this.#running = { controller, turn };
    this.#enable();
    this.#choose(turn, answer, false);
    answer.element.scrollIntoView({ block: "nearest" });
    try {
      await this.#stream(answer, post(body, controller.signal));
      announce(`Answer: ${answer.text.slice(0, 500)}`);
    } catch (error) {
      answer.error = controller.signal.aborted ? "Stopped." : error.message;
      announce(answer.error);
    }
    this.#running = null;
    this.#end(turn, answer);
  }

  async #stream(answer, options) {
    let [first, last] = [0, 0];
    const started = performance.now();
    for await (const object of events("/v1/chat/completions", options)) {
      if (object.comment) write(answer.state, waiting(object.comment));
      const delta = object.choices?.[0]?.delta;
      if (delta?.reasoning_content && !answer.text) write(answer.state, "Reasoning…");
      const piece = delta?.content;
      if (piece) {
        last = performance.now();
        first ||= last;
        this.#append(answer, piece);
      }
      if (object.usage) answer.usage = object.usage;
    }
    const tokens = answer.usage?.completion_tokens ?? 0;
    answer.passages = answer.usage?.sparsity?.passages ?? null;
    answer.firstS = first ? (first - started) / 1000 : null;
    answer.tokenMs = tokens > 1 && last > first ? (last - first) / (tokens - 1) : null;
  }

  #append(answer, piece) {
    const list = $("turns");
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    if (!answer.text) write(answer.state, "");
    answer.text += piece;
    answer.body.firstChild.appendData(piece);
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  #card(turn, plan) {
    const answer = { plan, text: "", error: null, usage: null, passages: null };
    answer.body = el("p", { class: "body" }, document.createTextNode(""));
    answer.state = el("p", { class: "soft state" }, "Waiting…");
    answer.figures = el("dl", { class: "figures" });
    answer.button = el("button", { type: "button", hidden: true, onclick: () => this.#choose(turn, answer, true) }, "Show passages");
    answer.element = el("article", { class: "answer running", "aria-label": `Answer under ${plan}` },
      el("h4", {}, el("code", {}, plan)), answer.body, answer.state, answer.figures, answer.button);
    turn.answers.push(answer);
    turn.row.append(answer.element);
    turn.row.classList.toggle("many", turn.answers.length > 1);
    return answer;
  }

  #end(turn, answer) {
    answer.element.classList.remove("running");
    answer.element.classList.toggle("failed", answer.error !== null);
    write(answer.state, answer.error ?? (answer.text ? "" : "The answer is empty."));
    answer.state.hidden = !answer.state.textContent;
    answer.figures.replaceChildren(...figures(answer).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    answer.button.hidden = !answer.text;
    write(answer.button, answer.passages?.all.length ? "Show passages" : "Choose");
    turn.again.hint.hidden = turn.answers.length < 2;
    const left = this.#model.plans.filter((plan) => !turn.answers.some((other) => other.plan === plan && !other.error));
    turn.again.select.replaceChildren(...(left.length ? left : this.#model.plans).map((plan) => el("option", { value: plan }, plan)));
    if (answer.error) turn.again.select.value = answer.plan;
    else if (left.includes("dense")) turn.again.select.value = "dense";
    turn.again.element.hidden = false;
    if (turn.chosen === answer && answer.error && !answer.text) turn.chosen = turn.answers.findLast((other) => other.text) ?? answer;
    if (turn.turns === this.#turns) this.#choose(turn, turn.chosen, false);
    this.#enable();
    if (turn.turns !== this.#turns) return;
    for (const element of [turn.again.element, answer.element]) element.scrollIntoView({ block: "nearest" });
    if (answer.passages) this.#show(answer.passages, true);
  }

  /** Take an answer as that of its turn: its passages are marked, and the conversation goes on with it. */
  #choose(turn, answer, go) {
    turn.chosen = answer;
    for (const turnOf of this.#turns)
      for (const other of turnOf.answers) {
        const isShown = other === answer;
        other.button.setAttribute("aria-pressed", isShown);
        other.element.classList.toggle("chosen", other === turnOf.chosen && turnOf.answers.length > 1);
      }
    this.#show(answer.passages, go);
    if (go) dispatchEvent(new CustomEvent("view", { detail: "document" }));
  }

  #enable() {
    const isRunning = this.#running !== null;
    const focused = document.activeElement;
    $("stop").hidden = !isRunning;
    $("send").hidden = isRunning;
    for (const id of ["export", "clear"]) $(id).disabled = isRunning || !this.#turns.length;
    for (const button of document.querySelectorAll(".again button, #questions button")) button.disabled = isRunning;
    if (focused?.disabled || focused?.hidden) $("turns").focus({ preventScroll: true }); // else the focus were lost
  }

  async #clear() {
    if (!(await sure("Start over?", "The questions and answers about this document are removed.", "Start over"))) return;
    this.#turns.length = 0;
    this.open(this.#document);
    $("question").focus();
  }

  /** Drop the conversation about a document. */
  forget(id) {
    if (this.#running?.turn.document?.id === id) this.stop();
    this.#conversations.delete(id);
  }

  /** Save the conversation as Markdown. */
  export() {
    const name = this.#document?.name ?? "conversation";
    const lines = [`# ${oneLine(name)}`, "", `${this.#model.id}, kvsift, ${new Date().toISOString().slice(0, 16).replace("T", " ")} UTC`];
    for (const { question, answers } of this.#turns) {
      lines.push("", `## ${oneLine(question)}`);
      for (const answer of answers) {
        const numbers = figures(answer).map(([key, value]) => `${key} ${value}`).join(", ");
        lines.push("", `\`${answer.plan}\`${numbers && `: ${numbers}`}`, "", answer.text.trim() || "(no text)");
        if (answer.error) lines.push("", `*${answer.error}*`);
      }
    }
    const url = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/markdown" }));
    el("a", { href: url, download: `${name.replace(/\.\w+$/, "").replace(/[^\p{L}\p{N} ._-]/gu, "_")}.answers.md` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }
}

const oneLine = (text) => text.replace(/\s+/g, " ").trim();

/** A comment of the stream in words: "waiting", or "read 5 of 9 tokens". */
function waiting(comment) {
  const [, read, all] = /^read (\d+) of (\d+)/.exec(comment) ?? [];
  return read ? `Reading: ${count(read)} of ${count(all)} tokens` : "Waiting for its turn…";
}

function figures({ usage, tokenMs, firstS }) {
  if (!usage) return [];
  const { density, recovery, guard_events: guards } = usage.sparsity ?? {};
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return [
    ["density", density == null ? null : percent(density)],
    ["per token", tokenMs == null ? null : `${tokenMs < 10 ? tokenMs.toFixed(1) : count(tokenMs)} ms`],
    ["cached", cached == null ? null : `${count(cached)} of ${count(usage.prompt_tokens)} tokens`],
    ["first token", firstS == null ? null : `${firstS.toFixed(firstS < 10 ? 2 : 0)} s`],
    ["recovery", recovery == null ? null : percent(recovery)],
    ["guard", guards ? `${guards} times` : null],
  ].filter(([, value]) => value !== null);
}
