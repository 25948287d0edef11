// Light, dark, or the system's theme.

import { byId } from "./dom.js";

const NAME = "tandem.theme";
const CHOICES = ["system", "light", "dark"];
const button = byId("theme");
const stored = localStorage.getItem(NAME);
let choice = CHOICES.includes(stored) ? stored : "system";

function apply() {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  button.textContent = `Theme: ${choice}`;
}

button.addEventListener("click", () => {
  choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
  localStorage.setItem(NAME, choice);
  apply();
});
apply();
