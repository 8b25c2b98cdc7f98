// What all pages share: put into each page's script where it says so.
const byId = id => document.getElementById(id);
const make = (tag, text = "", className = "") => Object.assign(document.createElement(tag), { textContent: text, className });
const box = (tag, className, ...children) => { const node = make(tag, "", className); node.append(...children); return node; };
const on = (node, name, act, options) => node.addEventListener(name, act, options);

// ---- Numbers as people read them
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
const showBytes = bytes => bytes === 0 ? "0 B" : showIn(BYTES, bytes, 4);

// ---- Colours: those of the style, and one for each model by its place
const css = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const parse = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
const mix = (colour, other, share) => colour.map((part, k) => Math.round(part * (1 - share) + other[k] * share));
const rgb = colour => `rgb(${colour.join(",")})`;
/** Dark ink, or white where that reads better. */
function inkOn(colour) {
  const [r, g, b] = colour.map(part => ((part / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10161d" : "#fff";
}
/** The colour of a model; from the ninth model on hues all around, in three tones. */
function modelColour(index) {
  const light = [0.4, 0.68, 0.54][index % 3], spread = 0.58 * Math.min(light, 1 - light);
  const part = n => { const k = (n + index * 137.5 / 30) % 12; return 255 * (light - spread * Math.max(-1, Math.min(k - 3, 9 - k, 1))); };
  return css(`model-${index}`) || "#" + [0, 8, 4].map(n => Math.round(part(n)).toString(16).padStart(2, "0")).join("");
}
function swatch(index) { const node = make("i", "", "swatch"); node.style.background = `var(--model-${index}, ${modelColour(index)})`; return node; }
const whenThemeChanges = act => on(matchMedia("(prefers-color-scheme: dark)"), "change", act);

// ---- The tip: what one thing is, whose it is, and facts of it
const tip = document.body.appendChild(Object.assign(make("div"), { id: "tip", role: "tooltip" }));
const hideTip = () => { tip.style.display = "none"; };
/** Beside a point of the window, or at the height `below` where there is room; a fact may have a third entry: it is in bold. */
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

// ---- A time axis: scroll zooms, drag pans, 0 shows all, alike on every page
/** whole(): all there is to see, from and to; least(): the shortest stretch; plot(): left edge and width in pixels;
 *  changed(): draws again; hover(event): looks at what is there, or at nothing; keys: the page's own. A picture without
 *  `alone` leaves keys that were pressed elsewhere to others. */
function timeAxis(surface, { whole, least, plot, changed, hover, keys = {}, alone = true, also = [] }) {
  const view = { from: 0, to: 1 };
  let drag = null;
  function show(from, to) {
    const [first, last] = whole(), span = Math.min(Math.max(to - from, least()), last - first);
    view.from = Math.min(Math.max(from, first), last - span);
    view.to = view.from + span;
    changed();
  }
  const showAll = () => show(...whole());
  const zoom = (factor, around = (view.from + view.to) / 2) => show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const pan = share => { const by = (view.to - view.from) * share; show(view.from + by, view.to + by); };
  const xOf = time => plot()[0] + (time - view.from) / (view.to - view.from) * plot()[1];
  const timeOf = x => view.from + (x - plot()[0]) / plot()[1] * (view.to - view.from);
  const isWhole = () => { const [first, last] = whole(); return view.to - view.from >= (last - first) * 0.9999; };

  on(surface, "pointerdown", event => {
    if (event.button) return;
    drag = { x: event.clientX, from: view.from, to: view.to, far: false };
    surface.setPointerCapture(event.pointerId);
    surface.focus({ preventScroll: true });
  });
  on(surface, "pointermove", event => {
    if (drag && (drag.far ||= Math.abs(event.clientX - drag.x) > 3)) {
      surface.classList.add("dragging");
      hover(null);
      const by = (drag.x - event.clientX) / plot()[1] * (drag.to - drag.from);
      show(drag.from + by, drag.to + by);
    } else hover(event);
  });
  for (const name of ["pointerup", "pointercancel"]) on(surface, name, () => { drag = null; surface.classList.remove("dragging"); });
  on(surface, "pointerleave", () => { if (!drag) hover(null); });
  on(surface, "wheel", event => {
    const lines = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1, sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && event.deltaY > 0 && isWhole()) return;  // nothing more to see: the page scrolls on
    event.preventDefault();
    if (sideways) pan((event.deltaX || event.deltaY) * lines / plot()[1]);
    else zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * lines)) * (event.ctrlKey ? 0.01 : 0.0025)), timeOf(event.clientX - surface.getBoundingClientRect().left));
    hover(event);
  }, { passive: false });

  const actions = {
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "_": () => zoom(1 / 0.7), "0": showAll,
    ArrowUp: () => zoom(0.7), ArrowDown: () => zoom(1 / 0.7), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
    PageUp: () => pan(-0.9), PageDown: () => pan(0.9), Home: () => pan(-1e9), End: () => pan(1e9), Escape: () => hover(null), ...keys,
  };
  on(document, "keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const here = event.target === surface || also.includes(event.target);
    if (!here && !(alone && event.target === document.body && /^(.|ArrowLeft|ArrowRight|Escape)$/.test(event.key))) return;
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action) { event.preventDefault(); action(); }
  });
  surface.classList.add("drags");
  return { view, show, showAll, zoom, pan, xOf, timeOf, isWhole };
}
/** Buttons for who has no wheel. */
function zoomButtons(axis) {
  const button = (text, title, act) => { const node = Object.assign(make("button", text), { title, ariaLabel: title }); on(node, "click", act); return node; };
  const group = box("div", "tools", button("−", "Zoom out (-)", () => axis.zoom(2)), button("+", "Zoom in (+)", () => axis.zoom(0.5)), button("Show all", "Show all (0)", axis.showAll));
  group.role = "group"; group.ariaLabel = "Zoom";
  return group;
}
/** The line that says what pointer and keys do; own: further entries, keys first and what they do last. */
function helpLine(...own) {
  const line = box("p", "hint", make("span", "Scroll zooms, drag pans, hover tells more."));
  for (const entry of [["+", "−", "zoom"], ["←", "→", "pan"], ["0", "show all"], ...own])
    line.append(box("span", "", ...entry.slice(0, -1).flatMap(key => [make("kbd", key), " "]), entry.at(-1)));
  return line;
}

// ---- Parts of a page
function card(name, value, note = "", title = "") {
  const shown = make("dd", value);
  if (note) shown.append(make("small", ` ${note}`));
  const made = box("div", "card", make("dt", name), shown);
  made.title = title || `${name}: ${value} ${note}`;
  return made;
}
/** heads: [words, class, what they mean]; cells: text or nodes. */
function table(heads, rows) {
  const fill = (tag, cells) => box("tr", "", ...cells.map((cell, k) => {
    const node = cell instanceof Node ? box(tag, heads[k][1], cell) : make(tag, cell, heads[k][1]);
    if (tag === "th") Object.assign(node, { scope: "col", title: heads[k][2] || "" });
    return node;
  }));
  return box("div", "scroll", box("table", "", box("thead", "", fill("th", heads.map(([words]) => words))), box("tbody", "", ...rows.map(cells => fill("td", cells)))));
}
function listPanel(title, entries, open = entries.length <= 14) {
  const list = make("dl", "", "settings"), panel = box("details", "panel", make("summary", title), list);
  for (const [name, value] of entries) list.append(make("dt", name), make("dd", typeof value === "string" ? value || "nothing" : JSON.stringify(value)));
  panel.open = open;
  return panel;
}
/** A name with its meaning on hover, where there is one among `words`. */
function named(name, words) {
  const node = make("span", name, words[name] ? "means" : "");
  if (words[name]) node.title = words[name];
  return node;
}
/** Links to the pages that lie beside this one; whoever wrote the last of them put them into its head. */
function linksBeside() {
  const found = JSON.parse(document.querySelector('meta[name="weft-page"]').dataset.beside || "[]");
  return box("nav", "", ...found.map(([words, address]) => Object.assign(make("a", words), { href: address })));
}
