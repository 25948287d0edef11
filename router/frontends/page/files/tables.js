// Workers, links and ended requests, as rows.

import { idButton } from "./copy.js";
import { byId, element, keepList, setText, stack } from "./dom.js";
import { bytes, count, milliseconds, rate, time } from "./format.js";

const PHASES = [
  ["tokenize", "tokenize"],
  ["assign", "assign"],
  ["earlier_attempts", "earlier attempts"],
  ["prefill_queue", "prefill queue"],
  ["prefill", "prefill"],
  ["handover", "handover"],
  ["decode", "decode"],
  ["finish", "finish"],
];
const NAMES = new Map(PHASES);
const GOOD_OUTCOMES = new Set(["stop", "length", "embedded"]);

byId("phases-legend").append(
  ...PHASES.map(([name, text]) => element("span", {}, element("i", { class: `k ${name}` }), text)),
);

function row(...cells) {
  return element("tr", {}, ...cells.map(([label, kind]) => element("td", { class: kind, ...(label ? { "data-label": label } : {}) })));
}

function showEmpty(body, columns, text) {
  const cell = element("td", { colspan: columns }, text);
  body.replaceChildren(element("tr", { class: "empty" }, cell));
}

function replaceIfNew(cell, signature, make) {
  if (cell.dataset.shown === signature) return;
  cell.dataset.shown = signature;
  cell.replaceChildren(...[make()].flat());
}

export function showSizes(sizes) {
  byId("sizes-table").hidden = !sizes.length;
  const make = () =>
    row(["", "half"], ["Bounds", "half"], ["Wanted", "n"], ["Ready", "n"], ["Starting", "n"], ["Leaving", "n"], ["Start time", "n half"], ["Latest change", "half"]);
  keepList(byId("sizes"), sizes, (size) => size.kind, make, (line, size) => {
    const [name, bounds, wanted, ready, starting, leaving, start, change] = line.children;
    setText(name, size.kind === "any" ? "workers" : size.kind);
    setText(bounds, `${size.low}:${size.high}`);
    for (const [cell, number] of [[wanted, size.target], [ready, size.ready], [starting, size.starting], [leaving, size.leaving]]) setText(cell, count(number));
    setText(start, milliseconds(1000 * size.start_s));
    replaceIfNew(change, `${size.reason} ${size.no_room}`, () => [
      size.reason || "–",
      ...(size.no_room ? [element("span", { class: "sub below bad-text" }, `No more now: ${size.no_room}`)] : []),
    ]);
  });
}

export function showWorkers(workers) {
  const body = byId("workers");
  if (!workers.length) return showEmpty(body, 10, "No worker has connected yet.");
  const make = () =>
    row(["", "whole"], ["Host", "host half"], ["Device", "half"], ["KV pages", "wide whole"], ["Queued", "n"], ["Running", "n"], ["Cached tok/s", "n"], ["Prompt tok/s", "n"], ["Output tok/s", "n"], ["Restarts", "n"]);
  keepList(body, workers, (worker) => worker.id, make, updateWorker);
}

function updateWorker(line, worker) {
  const [name, host, device, pages, queued, running, cached, prompt, output, restarts] = line.children;
  line.className = worker.alive ? "" : "away";
  // Its preferred work, if its role is `both`.
  const leans = worker.lean === "prefill" || worker.lean === "decode";
  const role = leans ? `${worker.role}, mostly ${worker.lean}` : worker.role;
  replaceIfNew(name, `${worker.alive} ${role}`, () => [
    element("span", { class: "state" }, element("i", { class: `dot ${worker.alive ? "good" : "bad"}` }), element("span", {}, worker.id)),
    element("span", { class: "sub below" }, `${role}${worker.alive ? "" : ", not connected"}`),
  ]);
  if (!worker.alive) {
    for (const cell of [host, device, queued, running, prompt, output, restarts]) setText(cell, "–");
    replaceIfNew(cached, "away", () => ["–"]);
    return replaceIfNew(pages, "away", () => [stack([], 0, "not known"), element("span", { class: "sub below" }, "–")]);
  }
  setText(host, worker.host || "–");
  host.title = worker.host;
  setText(device, worker.ranks > 1 ? `${worker.ranks} × ${worker.device}` : worker.device);
  setText(queued, count(worker.queued));
  setText(running, count(worker.running));
  const tiers = Object.entries(worker.loaded_tokens_per_s || {}).map(([tier, loaded]) => `${tier} ${rate(loaded)}`);
  replaceIfNew(cached, `${rate(worker.cached_tokens_per_s)} ${tiers}`, () => [
    rate(worker.cached_tokens_per_s),
    ...(tiers.length ? [element("span", { class: "sub below" }, tiers.join(", "))] : []),
  ]);
  setText(prompt, worker.role === "decode" ? "–" : rate(worker.prompt_tokens_per_s));
  setText(output, worker.role === "prefill" ? "–" : rate(worker.output_tokens_per_s));
  setText(restarts, count(worker.restarts));
  const parts = ["locked", "leased", "cached", "free"].map((state) => [state, worker[state]]);
  const words = parts.map(([state, number]) => `${state} ${count(number)}`).join(", ");
  replaceIfNew(pages, words, () => [
    stack(parts, worker.pages, `${words} of ${count(worker.pages)} pages of ${worker.page_size} tokens`),
    element("span", { class: "sub below" }, `${count(worker.locked + worker.leased)} in use, ${count(worker.cached)} cached, of ${count(worker.pages)}`),
  ]);
}

export function showLinks(links, numMore, workers) {
  const body = byId("links");
  setText(byId("more-links"), numMore ? `${count(numMore)} more links are up and idle, or less busy.` : "");
  const some = workers.some((worker) => worker.role !== "both");
  if (!links.length) return showEmpty(body, 5, some ? "No link is open yet." : "Workers of role both hand over to themselves: there are no links.");
  const make = () => row(["", ""], ["", ""], ["", ""], ["", "n"], ["", "n"]);
  keepList(body, links, (link) => `${link.from} ${link.to}`, make, (line, link) => {
    const [name, state, transport, speed, sent] = line.children;
    setText(name, `${link.from} \u2192 ${link.to}`);
    replaceIfNew(state, `${link.up} ${link.reason}`, () =>
      element("span", { class: "state", title: link.reason }, element("i", { class: `dot ${link.up ? "good" : "bad"}` }), element("span", {}, link.up ? "up" : "down")));
    setText(transport, link.transport.replaceAll("_", " ") || "–");
    setText(speed, `${bytes(link.bytes_per_s)}/s`);
    setText(sent, bytes(link.bytes));
  });
}

export function showRequests(requests, ownOnly) {
  const body = byId("requests");
  if (!requests.length) return showEmpty(body, 8, ownOnly ? "No request of this key has ended lately." : "No request has ended yet.");
  const make = (request) => {
    const line = row(["", ""], ["", "half"], ["", ""], ["Prompt", "n"], ["Output", "n"], ["TTFT", "n"], ["In all", "n"], ["", "wide whole"]);
    fillRequest(line, request);
    return line;
  };
  keepList(body, requests, (request) => request.number, make, () => {});
  // One stop of the Tab key for all ids; the arrow keys go from one to the next.
  body.querySelectorAll("button.id").forEach((button, i) => (button.tabIndex = i ? -1 : 0));
}

byId("requests").addEventListener("keydown", (event) => {
  const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  if (!next || !event.target.matches("button.id")) return;
  event.preventDefault();
  event.target.closest("tr")[next]?.querySelector("button.id").focus();
});

function fillRequest(line, request) {
  const [ended, id, outcome, prompt, output, ttft, whole, path] = line.children;
  setText(ended, time(request.ended_s));
  const title = [request.client_id, request.id, request.prefill && `${request.prefill} to ${request.decode}`, request.attempts > 1 && `${request.attempts} attempts`].filter(Boolean).join(", ");
  id.append(idButton(request.client_id || request.id, title));
  const tries = request.attempts > 1 ? ` \u00d7${request.attempts}` : "";
  setText(outcome, request.outcome + tries);
  if (!GOOD_OUTCOMES.has(request.outcome) && request.outcome !== "abort") outcome.classList.add("bad-text");
  outcome.title = request.error;
  setText(prompt, count(request.prompt_tokens));
  if (request.cached_tokens) prompt.append(element("span", { class: "sub" }, ` (${count(request.cached_tokens)})`));
  const { host_tokens: host = 0, disk_tokens: disk = 0, peer_tokens: peer = 0 } = request.loaded_tokens || {};
  const from = host + disk + peer ? `: ${request.cached_tokens - host - disk - peer} pool, ${host} host, ${disk} disk, ${peer} peer` : "";
  prompt.title = `${request.prompt_tokens} prompt tokens, ${request.cached_tokens} of them cached${from}`;
  setText(output, count(request.output_tokens));
  setText(ttft, milliseconds(request.ttft_ms));
  setText(whole, milliseconds(request.e2e_ms));
  const words = request.path.map(([name, ms]) => `${NAMES.get(name) ?? name} ${milliseconds(ms)}`).join(", ");
  path.replaceChildren(stack(request.path, request.path.reduce((sum, [, ms]) => sum + ms, 0), words || "nothing is known"));
}
