// Nodes, formatting of numbers, colours and the tooltip, for every page.
const byId = id => document.getElementById(id);
const make = (tag, text = "", className = "") => Object.assign(document.createElement(tag), { textContent: text, className });
const box = (tag, className, ...children) => { const node = make(tag, "", className); node.append(...children); return node; };
const on = (node, name, act, options) => node.addEventListener(name, act, options);

// ---- Formatting of numbers
const isNumber = value => typeof value === "number" && isFinite(value);
const trim = text => text.includes("e") ? String(Number(text)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
const showShare = share => isNumber(share) ? `${(100 * share).toFixed(1)} %` : "–";
const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const BYTES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
function showIn(units, value, digits) {
  if (!isNumber(value)) return "–";
  const [unit, size] = units.find(([, size]) => Math.abs(value) >= size) || units.at(value ? -1 : 0);
  return `${trim((value / size).toPrecision(digits))} ${unit}`;
}
const showSeconds = (seconds, digits = 4) => showIn(TIMES, seconds, digits);
const showMemory = bytes => isNumber(bytes) ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : "–";
const showBytes = bytes => bytes === 0 ? "0 B" : showIn(BYTES, bytes, 4);

// ---- Colours: those of the style, and one for each model by its index
const css = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const parse = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
const mix = (colour, other, share) => colour.map((part, k) => Math.round(part * (1 - share) + other[k] * share));
const rgb = colour => `rgb(${colour.join(",")})`;
/** The text colour on a background [r, g, b]: dark ink, or white on dark colours. */
function inkOn(colour) {
  const [r, g, b] = colour.map(part => ((part / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10161d" : "#fff";
}
/** The colour of a model: from the style for the first eight, then hues around the circle in three tones. */
function modelColour(index) {
  const light = [0.4, 0.68, 0.54][index % 3], spread = 0.58 * Math.min(light, 1 - light);
  const part = n => { const k = (n + index * 137.5 / 30) % 12; return 255 * (light - spread * Math.max(-1, Math.min(k - 3, 9 - k, 1))); };
  return css(`model-${index}`) || "#" + [0, 8, 4].map(n => Math.round(part(n)).toString(16).padStart(2, "0")).join("");
}
function swatch(index) { const node = make("i", "", "swatch"); node.style.background = `var(--model-${index}, ${modelColour(index)})`; return node; }
const whenThemeChanges = act => on(matchMedia("(prefers-color-scheme: dark)"), "change", act);

// ---- The tooltip: a title, a note and facts
const tip = document.body.appendChild(Object.assign(make("div"), { id: "tip", role: "tooltip" }));
const hideTip = () => { tip.style.display = "none"; };
/** Show the tooltip beside a point of the window, at the height `below` if there is room. facts: [name, value, bold]. */
function showTip(title, note, facts, x, y, below = y + 16) {
  const list = make("dl");
  for (const [name, value, here] of facts) list.append(make("dt", name, here ? "here" : ""), make("dd", value, here ? "here" : ""));
  tip.replaceChildren(make("b", title), make("p", note), list);
  tip.style.display = "block";
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth - 6 ? x - 16 - width : x + 16;
  const top = below + height <= innerHeight - 6 ? below : Math.min(y + 16, innerHeight - 6 - height);
  tip.style.transform = `translate(${Math.max(6, Math.round(left))}px, ${Math.max(6, Math.round(top))}px)`;
}
