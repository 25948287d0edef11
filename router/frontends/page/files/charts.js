// Sparklines of the last five minutes; the newest second is at the right edge.

import { svg } from "./dom.js";

const NUM_POINTS = 300;
const HEIGHT = 40;

// Draws a line for each list of values; null is a gap.
export function spark(node, ...lines) {
  const values = lines.flat().filter((value) => value !== null);
  const top = Math.max(...values, 0) || 1;
  node.setAttribute("viewBox", `0 0 ${NUM_POINTS - 1} ${HEIGHT}`);
  node.setAttribute("preserveAspectRatio", "none");
  const shapes = [svg("line", { x1: 0, x2: NUM_POINTS - 1, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 })];
  const y = (value) => (HEIGHT - 1.5 - (value / top) * (HEIGHT - 4)).toFixed(1);
  lines.forEach((line, index) => {
    const start = NUM_POINTS - line.length;
    let drawing = false;
    let path = "";
    line.forEach((value, i) => {
      if (value !== null) path += `${drawing ? "L" : "M"}${start + i} ${y(value)}`;
      drawing = value !== null;
    });
    if (lines.length === 1 && line.length > 1 && path) {
      shapes.push(svg("path", { class: "area", d: `${path}L${NUM_POINTS - 1} ${HEIGHT}L${start} ${HEIGHT}Z` }));
    }
    shapes.push(svg("path", { class: index ? "second" : "first", d: path }));
  });
  node.replaceChildren(...shapes);
}
