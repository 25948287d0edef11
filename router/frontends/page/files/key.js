// The API key: it is kept in this tab's session storage, and goes out in the Authorization header alone.

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

// Resolves when the user has given a key.
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

// Without a key there is nothing behind the dialog.
dialog.addEventListener("cancel", (event) => event.preventDefault());
byId("forget").hidden = !storedKey();
