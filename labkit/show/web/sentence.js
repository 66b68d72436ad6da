// Sentences that the kernel makes of a pattern and values ({said, of}), put together in the visitor's language.

import { h } from "./dom.js";

/** A plain string is English as it stands; a value may be a sentence itself. */
export function sentence(told, t) {
  if (told == null || typeof told === "string") return told ?? "";
  return t(told.said, Object.fromEntries(Object.entries(told.of).map(([name, value]) => [name, sentence(value, t)])));
}

/** An element that says it, marked as English where there is no other. */
export function spoken(tag, attributes, told, t) {
  return h(tag, { ...attributes, lang: told && typeof told === "string" ? "en" : null }, sentence(told, t));
}
