// A button that shows the end of an id and copies all of it.

import { element, setText } from "./dom.js";

// Ids that count have equal beginnings.
const NUM_SHOWN = 8;
const SHOWN_MS = 1200;

export function idButton(id, title) {
  const short = id.slice(-NUM_SHOWN);
  const button = element("button", { type: "button", class: "id", title, "aria-label": `Copy request id ${id}` }, short);
  button.addEventListener("click", async () => {
    setText(button, (await copy(id)) ? "copied" : "blocked");
    setTimeout(() => setText(button, short), SHOWN_MS);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // The clipboard needs HTTPS or this host.
    const field = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    field.value = text;
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return isCopied;
  }
}
