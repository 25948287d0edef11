// Faults and restarts. What a lost worker brought about is shown as one entry.

import { byId, element, keepList, setText } from "./dom.js";
import { age, count, time } from "./format.js";

const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function inWords(entry) {
  if (entry.kind === "requests") return `${plural(entry.count, "request")} ${entry.text}`;
  return `${entry.subject} ${entry.text}${entry.count > 1 ? ` (${count(entry.count)} times)` : ""}`;
}

// Newest first: entries that stand alone, and losses with their effects, oldest first.
function grouped(entries) {
  const losses = new Map(entries.filter((entry) => entry.number === entry.loss).map((entry) => [entry.number, { entry, effects: [] }]));
  const items = [];
  for (const entry of entries) {
    const loss = losses.get(entry.loss);
    if (!loss) items.push({ entry, effects: [] });
    else if (loss.entry === entry) items.push(loss);
    else loss.effects.unshift(entry);
  }
  return items;
}

const joinedAgain = ({ entry, effects }) => effects.find((effect) => effect.kind === "worker" && effect.subject === entry.subject);

function summary(item) {
  const { entry, effects } = item;
  const links = new Map(effects.filter((effect) => effect.kind === "link").map((effect) => [effect.subject, effect.fault]));
  const numDown = [...links.values()].filter(Boolean).length;
  const numUp = links.size - numDown;
  const numRequests = effects.filter((effect) => effect.kind === "requests").reduce((sum, effect) => sum + effect.count, 0);
  const back = joinedAgain(item);
  return [
    numDown && `${plural(numDown, "link")} down`,
    numUp && `${plural(numUp, "link")} down and up again`,
    numRequests && `${plural(numRequests, "request")} restarted`,
    back && back.text.replace("joined", `joined again after ${age(back.at_s - entry.at_s)}`),
  ].filter(Boolean).join("; ");
}

function make() {
  const effects = element("details", {}, element("summary", { class: "sub" }), element("ol"));
  const words = element("div", {}, element("span"), effects);
  return element("li", {}, element("time", { class: "muted" }), element("i"), words);
}

function update(line, item) {
  const { entry, effects } = item;
  const [when, dot, words] = line.children;
  const [text, details] = words.children;
  setText(when, time(entry.at_s));
  dot.className = `dot ${entry.fault ? (joinedAgain(item) ? "mended" : "bad") : "good"}`;
  setText(text, inWords(entry));
  details.hidden = !effects.length;
  setText(details.firstElementChild, summary(item));
  keepList(details.lastElementChild, effects, (effect) => effect.number, () => element("li"), (node, effect) => setText(node, `${time(effect.at_s)} ${inWords(effect)}`));
}

export function showJournal(entries) {
  const list = byId("journal");
  if (!entries.length) return list.replaceChildren(element("li", { class: "empty" }, "Nothing has gone wrong."));
  keepList(list, grouped(entries), (item) => item.entry.number, make, update);
}
