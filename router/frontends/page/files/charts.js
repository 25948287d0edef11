// Sparklines of the last five minutes; the newest second is at the right edge.

import { element, setText, svg } from "./dom.js";

const NUM_POINTS = 300;
const HEIGHT = 40;

// The smallest of 1, 2, 5, 10, 20, … that is not below the value.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * (1 - 1e-9));
}

// Draws a line for each list of values; null is a gap. `format` writes the scale's end.
export function spark(node, format, ...lines) {
  const values = lines.flat().filter((value) => value !== null);
  const top = roundUp(Math.max(...values, 0));
  node.setAttribute("viewBox", `0 0 ${NUM_POINTS - 1} ${HEIGHT}`);
  node.setAttribute("preserveAspectRatio", "none");
  const shapes = [0.5, HEIGHT / 2, HEIGHT - 0.5].map((y) => svg("line", { x1: 0, x2: NUM_POINTS - 1, y1: y, y2: y }));
  const y = (value) => (HEIGHT - 0.5 - (value / top) * (HEIGHT - 1)).toFixed(1);
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
  writeScale(node, format(top));
}

function writeScale(node, top) {
  const chart = node.parentElement;
  if (chart.childElementCount === 1) {
    const words = [["top", ""], ["bottom", "0"], ["left", "5 min ago"], ["right", "now"]];
    chart.append(...words.map(([place, text]) => element("span", { class: `scale ${place}`, "aria-hidden": "true" }, text)));
  }
  setText(chart.querySelector(".top"), top);
}
