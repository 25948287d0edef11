// A chat with the model over the API. Only this page remembers it.

import { byId, element, setText } from "./dom.js";
import { milliseconds, rate } from "./format.js";
import { headers } from "./key.js";
import { events, refusal } from "./stream.js";

const log = byId("chat-log");
const input = byId("chat-input");
let messages = [];
let running = null;

function showEmpty() {
  log.replaceChildren(element("p", { class: "muted" }, "Ask something. The answer streams through this router's API."));
}

function addTurn(who) {
  if (!messages.length || log.querySelector("p")) log.replaceChildren();
  const text = element("span");
  const thought = element("span", { class: "thought", hidden: "" });
  const turn = element("div", { class: "turn" }, element("b", {}, who), thought, text);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return { turn, text, thought };
}

function setRunning(controller) {
  running = controller;
  byId("chat-send").disabled = Boolean(controller);
  byId("chat-stop").disabled = !controller;
}

const say = (text) => setText(byId("chat-status"), text || "\u00a0");

// The server chooses empty settings.
function settings() {
  const [max, temperature] = [byId("chat-max").value, byId("chat-temperature").value];
  return { ...(max ? { max_tokens: Number(max) } : {}), ...(temperature ? { temperature: Number(temperature) } : {}) };
}

async function send() {
  const content = input.value.trim();
  if (!content || running) return;
  const question = addTurn("You");
  question.text.append(content);
  messages.push({ role: "user", content });
  input.value = "";
  const { turn, text, thought } = addTurn("Model");
  const controller = new AbortController();
  setRunning(controller);
  say("Waiting for the first token");
  const begun = performance.now();
  let [first, last, numTokens, answer] = [null, null, null, ""];
  let numPieces = 0;
  let ending = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify({ messages, ...settings(), stream: true, stream_options: { include_usage: true } }),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      if (event.usage) numTokens = event.usage.completion_tokens;
      const delta = event.choices?.[0]?.delta;
      if (!delta) continue;
      const piece = delta.content || delta.reasoning_content;
      if (!piece) continue;
      last = performance.now();
      first ??= last;
      numPieces += 1;
      if (delta.reasoning_content) {
        thought.hidden = false;
        thought.append(delta.reasoning_content);
      } else {
        answer += delta.content;
        text.append(delta.content);
      }
      log.scrollTop = log.scrollHeight;
      if (numPieces === 1) say(`First token after ${milliseconds(first - begun)}`);
    }
  } catch (error) {
    ending = error.name === "AbortError" ? "Stopped. " : `Failed: ${error.message}. `;
  }
  setRunning(null);
  if (controller.isForgotten) return;
  if (ending.startsWith("Failed") && first === null) {
    // Without the empty answer the message can be changed and sent again.
    messages.pop();
    turn.remove();
    question.turn.remove();
    if (!input.value) input.value = content;
    if (!messages.length) showEmpty();
  } else {
    messages.push({ role: "assistant", content: answer });
  }
  const total = numTokens ?? numPieces;
  const speed = first !== null && last > first ? `, ${rate(((total - 1) * 1000) / (last - first))} tok/s` : "";
  // The server sends no count for a stopped answer.
  const counted = numTokens === null ? `${total} pieces` : `${total} tokens`;
  say(first === null ? ending || "The answer is empty" : `${ending}TTFT ${milliseconds(first - begun)}, ${counted}${speed}`);
  input.focus();
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("chat-stop").addEventListener("click", () => running?.abort());
byId("chat-clear").addEventListener("click", () => {
  if (running) {
    running.isForgotten = true;
    running.abort();
  }
  messages = [];
  showEmpty();
  say("");
});
showEmpty();
