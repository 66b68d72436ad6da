// Elements as function calls: h() makes HTML, s() makes SVG, and nothing ever parses a string as markup.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const FONT = 'system-ui, "Noto Sans", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif';

function applyAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  return element;
}

export function h(tag, attributes = {}, ...children) {
  const element = applyAttributes(document.createElement(tag), attributes);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

export function s(tag, attributes = {}, ...children) {
  const element = applyAttributes(document.createElementNS(SVG_NAMESPACE, tag), attributes);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** A line of SVG text. `anchor` is start, middle or end; `kind` is a class of the style sheet. */
export function label(x, y, text, { anchor = "start", kind = "", title = "" } = {}) {
  const element = s("text", { x, y, "text-anchor": anchor, class: kind }, String(text));
  if (title) element.append(s("title", {}, title));
  return element;
}

let measuringContext = null;
const measured = new Map();

/** Width in px of `text` in the page's font, so that columns can be made wide enough beforehand. */
export function textWidth(text, sizePx = 12, weight = 400) {
  const key = `${weight} ${sizePx} ${text}`;
  if (!measured.has(key)) {
    measuringContext ??= document.createElement("canvas").getContext("2d");
    measuringContext.font = `${weight} ${sizePx}px ${FONT}`;
    if (measured.size > 3000) measured.clear();
    measured.set(key, measuringContext.measureText(text).width);
  }
  return measured.get(key);
}

export function widest(texts, sizePx = 12, weight = 400) {
  return Math.ceil(Math.max(0, ...texts.map((text) => textWidth(text, sizePx, weight))));
}

/** `text` cut to `width` px, with an ellipsis where something is missing. */
export function fitted(text, width, sizePx = 12, weight = 400) {
  if (textWidth(text, sizePx, weight) <= width) return text;
  let end = text.length;
  while (end > 1 && textWidth(text.slice(0, end) + "…", sizePx, weight) > width) end -= 1;
  return text.slice(0, end) + "…";
}

let counter = 0;

/** An id that no other widget on the page has. */
export function uniqueId(stem) {
  counter += 1;
  return `lk-${stem}-${counter}-${Math.random().toString(36).slice(2, 7)}`;
}
