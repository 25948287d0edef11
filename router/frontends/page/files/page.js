// Reads and shows the cluster's frames. Each frame has the whole state; points, requests and journal are complete in
// the first frame only.

import "./theme.js";
import "./chat.js";
import "./layout.js";
import { spark } from "./charts.js";
import { byId, setState, setText } from "./dom.js";
import { age, count, duration, milliseconds, rate, shortCount, shortDuration } from "./format.js";
import { showJournal } from "./journal.js";
import { askForKey, forgetKey, headers, storedKey } from "./key.js";
import { events, refusal } from "./stream.js";
import { showLinks, showRequests, showSizes, showWorkers } from "./tables.js";
import { drawTopology } from "./topology.js";

const NUM_POINTS = 300;
const NUM_REQUESTS = 60;
const NUM_ENTRIES = 200;
// Names of the header; its title has all.
const MAX_NAMED = 2;
// Frames come once a second.
const SILENCE_MS = 5000;
const MAX_DELAY_MS = 10000;
const [MIN_ASKED_MS, MAX_ASKED_MS] = [1000, 60000];
// Time after which a hidden tab stops reading.
const HIDDEN_MS = 30000;
const [NUMBER, , TTFT50, TTFT99, ITL50, ITL99, PROMPT, OUTPUT, IN_HAND, QUEUED] = Array(10).keys();

let points = [];
let requests = new Map();
let journal = new Map();
let latest = null;
let reading = null;

function keepNewest(map, items, limit) {
  for (const item of items) map.set(item.number, item);
  const numbers = [...map.keys()].sort((a, b) => a - b);
  for (const number of numbers.slice(0, -limit)) map.delete(number);
}

const newestFirst = (map) => [...map.values()].sort((a, b) => b.number - a.number);

function take(frame) {
  if (frame.whole) [points, requests, journal] = [[], new Map(), new Map()];
  const known = points.length ? points[points.length - 1][NUMBER] : 0;
  points = [...points, ...frame.points.filter((point) => point[NUMBER] > known)].slice(-NUM_POINTS);
  keepNewest(requests, frame.requests, NUM_REQUESTS);
  keepNewest(journal, frame.journal, NUM_ENTRIES);
  latest = frame;
  show(frame);
}

function show(frame) {
  const { router, routers } = frame;
  const state = readiness(frame);
  setState(byId("ready"), ...state);
  byId("ready").title = frame.reason || (frame.down.length ? `Down: ${frame.down.join(", ")}` : "");
  setText(byId("model"), router.model);
  const of = routers.length > 1 ? `, one of ${routers.length} routers` : "";
  setText(byId("through"), `seen by ${router.id}${of}`);
  setText(byId("version"), `up ${age(frame.now_s - router.started_s)}, version ${router.version}`);
  document.title = `${state[0] === "good" ? "" : `${state[1]}: `}${router.model} on Tandem`;
  for (const node of document.querySelectorAll(".own")) node.hidden = routers.length < 2;
  if (frame.ready) hideNotice();
  else showNotice(`No request would be served now: ${frame.reason}.`);
  showTiles(frame);
  drawTopology(byId("topology"), frame);
  showLinks(frame.links, frame.more_links, frame.workers);
  showSizes(frame.sizes);
  showWorkers(frame.workers);
  if (frame.whole || frame.requests.length) showRequests(newestFirst(requests), frame.own_only);
  if (frame.whole || frame.journal.length) showJournal(newestFirst(journal));
}

function readiness({ ready, down }) {
  if (!ready) return ["bad", "Not ready"];
  if (!down.length) return ["good", "Ready"];
  const more = down.length > MAX_NAMED ? ` and ${down.length - MAX_NAMED} more` : "";
  return ["warn", `Degraded: ${down.slice(0, MAX_NAMED).join(", ")}${more} down`];
}

function showTiles(frame) {
  const column = (index) => points.map((point) => point[index]);
  const now = points[points.length - 1];
  setText(byId("in-hand"), count(frame.requests_in_hand));
  const oldest = frame.router.oldest_s > 0 ? `, oldest ${age(frame.router.oldest_s)}` : "";
  const waiting = frame.waiting ? `, ${count(frame.waiting)} without a worker` : "";
  setText(byId("in-hand-detail"), `${count(frame.queued)} queued${waiting}${oldest}`);
  spark(byId("spark-in-hand"), shortCount, column(IN_HAND), column(QUEUED));
  if (!now) return;
  setText(byId("output-rate"), rate(now[OUTPUT]));
  setText(byId("prompt-rate"), rate(now[PROMPT]));
  setText(byId("output-detail"), `peak ${rate(Math.max(...column(OUTPUT)))}`);
  const cached = frame.workers.reduce((sum, worker) => sum + (worker.cached_tokens_per_s || 0), 0);
  const tiers = frame.workers.map((worker) => Object.values(worker.loaded_tokens_per_s || {}));
  const stored = tiers.flat().reduce((sum, loaded) => sum + loaded, 0);
  const source = tiers.some((tier) => tier.length) ? `, ${rate(stored)} from the store` : "";
  setText(byId("prompt-detail"), `+ ${rate(cached)} cached${source}`);
  spark(byId("spark-output"), shortCount, column(OUTPUT));
  spark(byId("spark-prompt"), shortCount, column(PROMPT));
  for (const [name, p50, p99] of [["ttft", TTFT50, TTFT99], ["itl", ITL50, ITL99]]) {
    const [number, unit] = duration(now[p50]);
    setText(byId(name), number);
    setText(byId(`${name}-unit`), `${unit} p50`);
    setText(byId(`${name}-detail`), `p99 ${milliseconds(now[p99])}`);
    spark(byId(`spark-${name}`), shortDuration, column(p50), column(p99));
  }
}

function showNotice(text) {
  const notice = byId("notice");
  setText(notice, text);
  notice.hidden = false;
}

function hideNotice() {
  byId("notice").hidden = true;
}

const connected = (kind, text) => setState(byId("connection"), kind, text);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Reads until the stream ends; returns the wait before the next try.
async function read() {
  const controller = (reading = new AbortController());
  let silence = setTimeout(() => controller.abort(), SILENCE_MS);
  try {
    const response = await fetch("live", { headers: headers(), cache: "no-store", signal: controller.signal });
    if (response.status === 401) {
      const wrong = storedKey() !== null;
      forgetKey();
      clearTimeout(silence);
      connected("bad", "Key needed");
      await askForKey(wrong ? "That key is not known here. Try another one." : "");
      return 0;
    }
    if (!response.ok) {
      const why = await refusal(response);
      showNotice(`${why}. Trying again.`);
      const asked = 1000 * Number(response.headers.get("retry-after"));
      // A proxy may send a date, nothing, or more than a timer can wait.
      return asked > 0 ? Math.min(Math.max(asked, MIN_ASKED_MS), MAX_ASKED_MS) : null;
    }
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      clearTimeout(silence);
      silence = setTimeout(() => controller.abort(), SILENCE_MS);
      document.body.classList.remove("stale");
      connected("good", "Live");
      take(JSON.parse(data));
    }
  } catch (error) {
    if (!(error instanceof TypeError) && error.name !== "AbortError") console.error(error);
  } finally {
    clearTimeout(silence);
  }
  return null;
}

async function run() {
  let delay = 500;
  for (;;) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    const begun = latest;
    const wait = await read();
    if (latest !== begun) delay = 500;
    if (wait === 0) continue;
    document.body.classList.toggle("stale", latest !== null);
    connected("bad", "Connection lost, trying again");
    await sleep(wait ?? delay);
    delay = Math.min(2 * delay, MAX_DELAY_MS);
  }
}

let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => reading?.abort(), HIDDEN_MS);
});
byId("forget").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
new ResizeObserver(() => latest && drawTopology(byId("topology"), latest)).observe(byId("topology").parentElement);
run();
