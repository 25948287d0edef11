// The API key. It stays in this tab's session storage and is sent only in the Authorization header.

import { byId } from "./dom.js";

const NAME = "tandem.key";
const dialog = byId("key-dialog");
const input = byId("key-input");

export const storedKey = () => sessionStorage.getItem(NAME);

export function headers(more = {}) {
  const key = storedKey();
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

export function forgetKey() {
  sessionStorage.removeItem(NAME);
  byId("forget").hidden = true;
}

// Resolves when the user has entered a key.
export function askForKey(why) {
  byId("key-hint").textContent = why || "It stays in this tab, and is forgotten when the tab is closed.";
  if (!dialog.open) dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(NAME, input.value.trim());
      input.value = "";
      byId("forget").hidden = false;
      dialog.close();
      resolve();
    };
  });
}

// The page behind the dialog is empty without a key.
dialog.addEventListener("cancel", (event) => event.preventDefault());
byId("forget").hidden = !storedKey();
