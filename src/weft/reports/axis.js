// A time axis: scroll zooms, drag pans, 0 shows all, alike on every page.
/** fullRange(): the whole range, [from, to]; shortest(): the shortest window; plot(): left edge and width in pixels;
 *  changed(): called after a change of the window; hover(event): called as the pointer moves, with null when it leaves;
 *  keys: the page's own keys -> actions; keysAnywhere: whether keys also act while nothing has the focus; alsoFocus:
 *  further elements that take keys. */
function timeAxis(surface, { fullRange, shortest, plot, changed, hover, keys = {}, keysAnywhere = true, alsoFocus = [] }) {
  const view = { from: 0, to: 1 };
  let drag = null;
  function show(from, to) {
    const [first, last] = fullRange(), span = Math.min(Math.max(to - from, shortest()), last - first);
    view.from = Math.min(Math.max(from, first), last - span);
    view.to = view.from + span;
    changed();
  }
  const showAll = () => show(...fullRange());
  const zoom = (factor, around = (view.from + view.to) / 2) => show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const pan = share => { const by = (view.to - view.from) * share; show(view.from + by, view.to + by); };
  const xOf = time => plot()[0] + (time - view.from) / (view.to - view.from) * plot()[1];
  const timeOf = x => view.from + (x - plot()[0]) / plot()[1] * (view.to - view.from);
  const isWhole = () => { const [first, last] = fullRange(); return view.to - view.from >= (last - first) * 0.9999; };

  on(surface, "pointerdown", event => {
    if (event.button) return;
    drag = { x: event.clientX, from: view.from, to: view.to, far: false };  // far: moved by more than a click may
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
    if (event.ctrlKey || event.metaKey || event.altKey || !surface.offsetParent) return;
    const here = event.target === surface || alsoFocus.includes(event.target);
    if (!here && !(keysAnywhere && event.target === document.body && /^(.|ArrowLeft|ArrowRight|Escape)$/.test(event.key))) return;
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action) { event.preventDefault(); action(); }
  });
  surface.classList.add("drags");
  return { view, show, showAll, zoom, pan, xOf, timeOf, isWhole };
}
/** Round times between two times, about `count` of them at most. */
function roundTimes(from, to, count) {
  const rough = (to - from) / Math.max(count, 2), power = 10 ** Math.floor(Math.log10(rough));
  const step = rough < 10 ? [1, 2, 5, 10].find(n => n * power >= rough) * power : [10, 15, 30, 60, 120, 300].find(n => n >= rough) || 600;
  return Array.from({ length: Math.floor(to / step + 1e-9) - Math.ceil(from / step - 1e-9) + 1 }, (_, k) => (Math.ceil(from / step - 1e-9) + k) * step);
}
/** Buttons for zooming without a wheel. */
function zoomButtons(axis) {
  const button = (text, title, act) => { const node = Object.assign(make("button", text), { title, ariaLabel: title }); on(node, "click", act); return node; };
  const group = box("div", "tools", button("−", "Zoom out (-)", () => axis.zoom(2)), button("+", "Zoom in (+)", () => axis.zoom(0.5)), button("Show all", "Show all (0)", axis.showAll));
  group.role = "group"; group.ariaLabel = "Zoom";
  return group;
}
/** The line that explains pointer and keys. own: further entries [key, ..., meaning], which replace entries of the same
 *  key. */
function helpLine(...own) {
  const line = box("p", "hint", make("span", "Scroll zooms, drag pans, hover tells more."));
  const others = [["+", "−", "zoom"], ["←", "→", "pan"], ["0", "show all"]].filter(([key]) => !own.some(([mine]) => mine === key));
  for (const entry of [...others, ...own])
    line.append(box("span", "", ...entry.slice(0, -1).flatMap(key => [make("kbd", key), " "]), entry.at(-1)));
  return line;
}
