// The page: connects documents, text and conversation.

import { json, Failure } from "./api.js";
import { Conversation } from "./conversation.js";
import { $, announce, count, el, notice, pause, size, write } from "./dom.js";
import { Library } from "./library.js";
import { Reader } from "./reader.js";

const THEMES = ["system", "light", "dark"];
const reader = new Reader();
const conversation = new Conversation((passages, go) => reader.mark(passages, go), () => library.adding);
const library = new Library(choose, (id) => conversation.forget(id));
let shown = null; // id of the document whose text is shown
let sample = null;

async function choose(document, isUpdate) {
  if (isUpdate && document.id === shown) return facts(document);
  shown = document?.id ?? null;
  $("welcome").hidden = document !== null;
  $("paper").hidden = document === null;
  const title = document && (document.name || "Untitled");
  write($("reader-title"), title ?? "Ask a long document");
  window.document.title = title ? `${title} · kvsift` : "kvsift";
  reader.show("");
  conversation.open(document);
  suggest(document);
  facts(document);
  if (!document) return;
  try {
    const text = await library.text(document.id);
    if (shown !== document.id) return;
    reader.show(text);
    conversation.open(document); // its marks
  } catch (error) {
    if (document.status !== "failed") notice(`The text of ${document.name} cannot be shown: ${error.message}`);
  }
}

function facts(document) {
  write($("reader-facts"), document ? `${size(document.bytes)}, ${count(document.characters)} characters` : "");
}

function suggest(document) {
  const isSample = sample && document?.name === sample.name;
  const button = (text) => el("button", { type: "button", onclick: (event) => ask(text, event.target) }, text);
  const ask = (text, chosen) => {
    $("turns").focus({ preventScroll: true });
    chosen.remove();
    conversation.ask(text);
  };
  $("questions").replaceChildren(...(isSample ? sample.questions.map(button) : []));
}

async function openSample() {
  sample = await json("/v1/sample");
  write($("about"), sample.about);
  suggest(library.current?.object);
  $("sample").hidden = false;
  $("load-sample").onclick = async () => {
    $("load-sample").disabled = true;
    await library.addText(sample.name, sample.text);
    $("load-sample").disabled = false;
    $("question").focus();
  };
}

async function connect() {
  for (;;) {
    try {
      return (await json("/v1/models")).data[0];
    } catch (error) {
      if (!(error instanceof Failure) || error.status) throw error;
      notice(error.message);
      await pause(3);
    }
  }
}

async function start() {
  const model = await connect();
  notice();
  write($("model"), model.id);
  $("plan").replaceChildren(...model.plans.map((plan) => el("option", { value: plan }, plan)));
  await library.open(model.documents);
  conversation.start(model);
  if (!library.current) conversation.open(null);
  if (model.has_sample) await openSample();
}

function view(name) {
  document.querySelector("main").dataset.view = name;
  for (const button of $("views").children) button.setAttribute("aria-pressed", button.dataset.view === name);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  write($("theme"), `Theme: ${name}`);
  try {
    localStorage.setItem("kvsift-theme", name);
  } catch {} // a browser without storage
  dispatchEvent(new Event("resize"));
}

for (const button of $("views").children) button.onclick = () => view(button.dataset.view);
addEventListener("view", (event) => view(event.detail));
theme(THEMES.find((name) => name === localStorage.getItem("kvsift-theme")) ?? "system");
$("theme").onclick = () => {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  announce($("theme").textContent);
};
start().catch((error) => notice(error.message));
