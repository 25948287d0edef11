// A drawing of the cluster: routers, prefill workers and decode workers, with their links.

import { svg } from "./dom.js";
import { bytes, count } from "./format.js";

const NODE_HEIGHT = 38;
const ROW = 48;
const HEAD = 20;
// With more links the rates would overlap, so only the table shows them.
const MAX_LABELS = 4;
const LABEL_WIDTH = 72;

export function drawTopology(box, state) {
  const width = Math.max(280, box.clientWidth);
  const columns = [
    ["Routers", state.routers.map((router) => routerNode(router, state.router.id))],
    ["Prefill", workersOf(state, "prefill")],
    ["Prefill and decode", workersOf(state, "both")],
    ["Decode", workersOf(state, "decode")],
  ].filter(([, nodes]) => nodes.length);
  const nodeWidth = Math.min(190, Math.floor(width / (columns.length + (width < 500 ? 0.55 : 1.1))));
  const tallest = Math.max(...columns.map(([, nodes]) => nodes.length), 1);
  const height = HEAD + tallest * ROW;
  const places = new Map();
  const heads = [];
  columns.forEach(([title, nodes], i) => {
    const x = columns.length === 1 ? 0 : (i * (width - nodeWidth)) / (columns.length - 1);
    heads.push(svg("text", { class: "head", x, y: 12 }, title));
    const top = HEAD + ((tallest - nodes.length) * ROW) / 2;
    nodes.forEach((node, j) => places.set(node.id, { ...node, x, y: top + j * ROW }));
  });
  const lines = [...controlLines(state, places, nodeWidth), ...linkLines(state, places, nodeWidth)];
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": inWords(state) });
  drawing.append(...heads, ...lines, ...[...places.values()].map((place) => drawNode(place, nodeWidth)));
  box.style.minHeight = `${height}px`;
  box.replaceChildren(drawing);
}

function routerNode(router, self) {
  return { id: router.id, alive: router.alive, isSelf: router.id === self, sub: router.alive ? `${count(router.requests_in_hand)} in hand` : "no answer" };
}

function workersOf(state, role) {
  return state.workers
    .filter((worker) => worker.role === role)
    .map(({ id, alive, running, queued }) => ({ id, alive, sub: alive ? `${running} run, ${queued} wait` : "not connected" }));
}

function drawNode({ id, alive, isSelf, sub, x, y }, width) {
  return svg(
    "g",
    { class: alive ? "" : "off" },
    svg("rect", { class: isSelf ? "node self" : "node", x: x + 0.5, y: y + 0.5, width: width - 1, height: NODE_HEIGHT, rx: 3 }),
    svg("rect", { class: "mark", x: x + 0.5, y: y + 0.5, width: 3, height: NODE_HEIGHT }),
    svg("text", { x: x + 10, y: y + 16 }, id),
    svg("text", { class: "sub", x: x + 10, y: y + 31 }, sub),
  );
}

// Lines from this router to the workers; the other routers' streams are unknown here.
function controlLines(state, places, width) {
  const self = places.get(state.router.id);
  return state.workers
    .filter((worker) => worker.alive && places.has(worker.id))
    .map((worker) => svg("path", { d: curve(self, places.get(worker.id), width) }));
}

function linkLines(state, places, width) {
  const drawn = [];
  const labels = [];
  const isFan = new Set(state.links.map((link) => link.from)).size === 1;
  for (const link of state.links) {
    const [from, to] = [places.get(link.from), places.get(link.to)];
    if (!from || !to) continue;
    const kind = !link.up ? "down" : link.bytes_per_s > 0 ? "busy" : "";
    const thickness = link.bytes_per_s > 0 ? Math.min(5, 1 + Math.log10(1 + link.bytes_per_s / 1e5)) : 1.5;
    drawn.push(svg("path", { class: `link ${kind}`, d: curve(from, to, width), "stroke-width": thickness.toFixed(2) }));
    const room = to.x - from.x - width;
    if (state.links.length <= MAX_LABELS && room > LABEL_WIDTH + 12) {
      // Links cross in the middle, and one worker's links begin at one point.
      const wanted = to.y === from.y ? 0.5 : isFan ? 0.72 : 0.22;
      const margin = LABEL_WIDTH / 2 / room;
      const at = Math.min(Math.max(wanted, margin), 1 - margin);
      const y = from.y + NODE_HEIGHT / 2 + (to.y - from.y) * bend(at) + 4;
      labels.push(svg("text", { class: "rate", x: from.x + width + room * at, y, "text-anchor": "middle" }, link.up ? `${bytes(link.bytes_per_s)}/s` : "down"));
    }
  }
  return [...drawn, ...labels];
}

function curve(from, to, width) {
  const [x1, y1, x2, y2] = [from.x + width, from.y + NODE_HEIGHT / 2, to.x, to.y + NODE_HEIGHT / 2];
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

// Relative height of a curve at a relative position along its width.
const bend = (at) => 3 * at * at - 2 * at * at * at;

function inWords(state) {
  const alive = state.workers.filter((worker) => worker.alive).length;
  const up = state.links.filter((link) => link.up).length + state.more_links;
  return `${state.routers.length} routers, ${alive} of ${state.workers.length} workers connected, ${up} of ${state.links.length + state.more_links} links up`;
}
