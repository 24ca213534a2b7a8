// Requests to the server: the API key, waiting while it restarts, errors in plain words, server-sent events.

import { $, ask, notice, pause, write } from "./dom.js";

const KEY = "kvsift-key";
const LOST = "The server does not answer. Is kvsift serve running, and this machine connected to it?";
let asking = null; // the dialog for the key, which all requests share

/** A sentence for the reader, and the HTTP status; 0 without an answer. */
export class Failure extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }
}

/** Fetch a path. 401 asks for the key; 503 and 429 with Retry-After are asked again until the signal aborts. */
export async function request(path, options = {}) {
  let waited = false;
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await attempt(path, options, key);
    if (response.ok) {
      if (waited) notice();
      return response;
    }
    const reason = await sentence(response);
    if (response.status === 401) {
      if (key === sessionStorage.getItem(KEY)) await askKey(key !== null);
      continue;
    }
    const after = Number(response.headers.get("retry-after"));
    if (!after || ![503, 429].includes(response.status)) throw new Failure(reason, response.status);
    waited = true;
    notice(`${reason} This page asks again every ${after} s.`);
    try {
      await pause(after, options.signal);
    } catch (error) {
      notice();
      throw error;
    }
  }
}

async function attempt(path, options, key) {
  // keys may have any letters, headers only bytes
  const bytes = key === null ? "" : String.fromCharCode(...new TextEncoder().encode(key));
  const headers = { ...options.headers, ...(bytes && { Authorization: `Bearer ${bytes}` }) };
  try {
    return await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure(LOST);
  }
}

async function sentence(response) {
  try {
    return capital((await response.json()).error.message);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function askKey(wasWrong) {
  asking ??= (async () => {
    write($("key-why"), wasWrong
      ? "The server does not accept this key. Try another one."
      : "This server needs an API key. It is kept until this tab is closed.");
    $("key").value = "";
    while (!(await ask($("key-dialog"))) || !$("key").value.trim());
    sessionStorage.setItem(KEY, $("key").value.trim());
    $("key").value = "";
    asking = null;
  })();
  return asking;
}

export const json = async (path, options) => (await request(path, options)).json();

export const post = (body, signal) => ({
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
});

/** Yield the objects of an event stream, and {comment} for its comments. A stream without an end is a Failure. */
export async function* events(path, options = {}) {
  const response = await request(path, options);
  for await (const line of lines(response.body, options.signal)) {
    if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const object = JSON.parse(data);
    if (object.error?.message) throw new Failure(capital(object.error.message), 500);
    yield object;
  }
  throw new Failure("The connection to the server was lost before the end.");
}

async function* lines(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("The connection to the server was lost before the end.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
