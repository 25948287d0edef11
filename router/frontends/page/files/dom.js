// Makes and updates elements. Text is set as text, so the server's words never become markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setState(node, kind, text) {
  node.className = `state ${kind}`;
  setText(node.lastElementChild, text);
}

// Keeps one child of `parent` per item, by key, so that focus and scrolling survive updates.
export function keepList(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child) known.delete(key);
    else {
      child = make(item);
      child.dataset.key = key;
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

// A bar of parts, each [class, value]; `text` describes it.
export function stack(parts, total, text) {
  const bar = element("span", { class: "stack", role: "img", "aria-label": text, title: text });
  for (const [name, value] of parts) {
    if (value <= 0 || total <= 0) continue;
    const part = element("i", { class: name });
    part.style.width = `${(100 * value) / total}%`;
    bar.append(part);
  }
  return bar;
}
