// Words and numbers: text by id in the visitor's language, and figures with as many digits as mean something.

/** `t("id", {name: value})` in the current language; an unknown id shows itself, so that it gets noticed. */
export function makeText(catalogues, getLanguage) {
  return (id, values = {}) => {
    const text = catalogues[getLanguage()]?.[id] ?? catalogues.en?.[id] ?? id;
    return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
  };
}

export function firstLanguage(catalogues) {
  const wanted = [
    new URLSearchParams(location.search).get("lang"),
    stored("labkit-language"),
    ...(navigator.languages ?? []),
  ];
  const known = wanted.map((tag) => tag?.slice(0, 2).toLowerCase()).find((tag) => tag in catalogues);
  return known ?? "en";
}

export function stored(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null; // storage is refused in some private windows
  }
}

export function store(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // the choice lasts as long as the page, then
  }
}

const NOTHING = "–";

/** Three significant digits, never an exponent: 0.0123, 1.23, 12.3, 123, 1234. */
export function digits(value) {
  if (value == null || Number.isNaN(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 100 || size === 0) return String(Math.round(value));
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.995) return value.toFixed(2);
  return value.toFixed(size >= 0.0995 ? 2 : 3);
}

/** Milliseconds, or seconds from ten thousand on. */
export function milliseconds(value) {
  if (value == null) return NOTHING;
  if (value >= 9999.5) return `${digits(value / 1000)} s`;
  const text = Math.abs(value) >= 99.5 ? String(Math.round(value)) : value.toFixed(1);
  return `${text === "-0.0" ? "0.0" : text} ms`;
}

export function seconds(value) {
  return value == null ? NOTHING : `${value.toFixed(2)} s`;
}

export function percent(fraction) {
  if (fraction == null) return NOTHING;
  const value = fraction * 100;
  return `${value > 0 && value < 1 ? value.toFixed(1) : Math.round(value)} %`;
}

export function bytes(value) {
  if (value == null) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(size) : digits(size)} ${units[unit]}`;
}

/** 12345 → "12 345", with a narrow space that does not break. */
export function count(value) {
  return value == null ? NOTHING : String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** 72 → "1:12". */
export function clock(value) {
  const whole = Math.max(0, Math.round(value));
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
