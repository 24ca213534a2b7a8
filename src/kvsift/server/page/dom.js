// Elements, numbers, and what is announced to screen readers.

export const $ = (id) => document.getElementById(id);

/** Create an element; strings become text nodes, never HTML. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Change a text only if it differs. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export function percent(share) {
  const value = 100 * share;
  return `${value >= 10 ? value.toFixed(0) : value.toPrecision(2)} %`;
}

export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return `${Math.round(seconds / 60)} min`;
}

export function size(bytes) {
  return bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1e3))} KB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** Have a screen reader say something when it is idle. */
export function announce(text) {
  $("status").textContent = "";
  setTimeout(() => ($("status").textContent = text), 50);
}

/** Show a sentence above everything; none hides it. */
export function notice(text = "") {
  $("notice").hidden = !text;
  write($("notice"), text);
  if (text) announce(text);
}

/** Show a dialog; resolves to whether it was confirmed. */
export function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
    dialog.showModal();
  });
}

export function sure(title, text, button) {
  write($("sure-title"), title);
  write($("sure-text"), text);
  write($("sure-ok"), button);
  return ask($("sure-dialog"));
}

export const pause = (seconds, signal) =>
  new Promise((resolve, reject) => {
    const stop = () => reject(signal.reason);
    if (signal?.aborted) return stop();
    signal?.addEventListener("abort", stop, { once: true });
    setTimeout(resolve, 1000 * seconds);
  });
