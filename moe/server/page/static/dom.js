// Small helpers: elements, numbers as text, colours of the theme.

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** A new element. Properties are set on it, children appended as text or nodes. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(made.dataset, value);
    else if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const whole = new Intl.NumberFormat("en");

export function count(number) {
  if (number >= 1e9) return `${(number / 1e9).toFixed(1)} G`;
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)} M`;
  return whole.format(Math.round(number));
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (number >= 1000 && at < units.length - 1) [number, at] = [number / 1024, at + 1];
  return `${number >= 100 || at === 0 ? number.toFixed(0) : number.toFixed(1)} ${units[at]}`;
}

export function seconds(number) {
  if (number < 0.995) return `${(number * 1000).toFixed(0)} ms`;
  return number < 100 ? `${number.toFixed(1)} s` : `${(number / 60).toFixed(0)} min`;
}

export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
export const rate = (number) => (number < 10 ? number.toFixed(1) : count(number));

let probe = null;

/** A custom property of the style sheet as [r, g, b], resolved for the theme in use. */
export function colour(name) {
  if (!probe) document.body.append((probe = el("span", { hidden: true })));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

export const css = (rgb, alpha = 1) => `rgb(${rgb.map(Math.round).join(" ")} / ${alpha})`;
export const mix = (from, to, share) => from.map((at, i) => at + (to[i] - at) * share);
