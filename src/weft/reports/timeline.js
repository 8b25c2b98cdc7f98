// The timeline of a trace: DRAM channel, PE array and weight buffer over time, and an overview below.
/** A panel with the timeline of a trace. opening: the first visible window, [from, to] in nanoseconds; moved(view) is
 *  called after every change of the window. Returns the panel, its time axis and the decoded trace. */
function timeline(trace, { opening = null, moved = () => {} } = {}) {
  const read = readTrace(trace);
  const { count, total, fetchStart, fetchEnd, computeStart, computeEnd, modelOf, queryOf, layerOf, fetchLane, computeLane } = read;
  const { stallCount, stallSpan, stallStart, stallEnd, stalledOf, curveTime, curveBefore, curveAfter } = read;
  const lanes = [fetchLane, computeLane], hidden = new Set(), LEAST = 20;
  let lit = -1;        // model the legend points at
  let picked = -1;     // span under the pointer or reached by key
  let pickedLane = null;

  // ---- The panel
  const canvas = (role, label) => Object.assign(make("canvas"), { tabIndex: 0, role, ariaLabel: label });
  const main = canvas("application", "Timeline of the DRAM channel, the PE array and the weight buffer");
  const map = canvas("slider", "Position of the visible window in the whole schedule");
  const legend = box("div", "legend"), range = make("span", "", "range"), announcement = make("div", "", "said");
  legend.role = "group"; legend.ariaLabel = "Models: press to hide or show";
  announcement.ariaLive = "polite"; map.className = "overview";
  const axis = timeAxis(main, {
    fullRange: () => [0, total], shortest: () => LEAST, plot: () => [0, width], hover, alsoFocus: [map],
    changed: () => { redraw(); moved(view); }, keys: { n: () => step(1), p: () => step(-1) },
  });
  const { view, show } = axis, buttons = zoomButtons(axis);
  buttons.prepend(range);
  const panel = box("section", "panel", box("div", "bar", legend, buttons), main, map, helpLine(["N", "P", "next and previous layer"]), announcement);
  panel.ariaLabel = "Timeline";

  /** Nanoseconds between `from` and `to` in which visible models are busy. shares: per model, its busy time until t. */
  const within = (shares, from, to) => shares.reduce((sum, until, m) => hidden.has(m) ? sum : sum + until(to) - until(from), 0);
  const capacity = Number(trace.settings.weight_buffer_bytes) || 0;
  const bufferTop = Math.max(read.peakBytes, capacity, 1) * 1.08;
  /** Bytes held at a time before instant k of the curve and not before instant k - 1. */
  function levelAt(time, k) {
    if (k === 0 || k === curveTime.length) return k ? curveAfter[k - 1] : 0;
    const share = (time - curveTime[k - 1]) / (curveTime[k] - curveTime[k - 1] || 1);
    return curveAfter[k - 1] + share * (curveBefore[k] - curveAfter[k - 1]);
  }

  // ---- Formatting of numbers
  const UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];
  const unitFor = span => UNITS.find(([, size]) => span >= size) || UNITS[3];
  const showTime = ns => showSeconds(ns / 1e9);
  /** A position, in the unit of the axis, with enough digits to tell neighbours apart at the present zoom. */
  function showPosition(ns) {
    const [unit, size] = axisUnit((view.to - view.from) / 10), fine = (view.to - view.from) / 1000;
    return `${trim((ns / size).toFixed(digitsFor(fine, size)))} ${unit}`;
  }
  const digitsFor = (step, size) => Math.min(9, Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9)));
  /** The unit of the window's end, or a smaller one where that would need more than four decimals. */
  function axisUnit(step) {
    const first = UNITS.indexOf(unitFor(view.to));
    return UNITS.slice(first).find(([, size]) => digitsFor(step, size) <= 4) || UNITS[3];
  }

  // ---- Colours
  const tone = {};
  let fills = [];  // per model, for its even and its odd queries
  function readColours() {
    for (const name of ["panel", "ink", "muted", "lane", "grid", "accent", "limit", "buffer", "buffer-line", "shade", "seam"]) tone[name] = css(name);
    const ground = parse(tone.panel);
    fills = trace.models.map((_, model) => {
      const even = parse(modelColour(model)), odd = mix(even, ground, 0.36);
      return { even: rgb(even), odd: rgb(odd), pale: rgb(mix(even, ground, 0.84)), hatch: rgb(mix(even, ground, 0.4)), inkEven: inkOn(even), inkOdd: inkOn(odd) };
    });
    mapImage = null; hatches = [];
  }

  // ---- Drawing
  const pen = main.getContext("2d"), mapPen = map.getContext("2d");
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
  const BOLD = FONT.replace("12px", "600 12.5px"), SMALL = FONT.replace("12px", "11px");
  const AXIS = 24, CAPTION = 24, LANE = 74, STRIP = 62, MAP = 46;
  fetchLane.top = AXIS + CAPTION;
  computeLane.top = fetchLane.top + LANE + CAPTION + 6;
  const stripTop = computeLane.top + LANE + CAPTION + 4, HEIGHT = stripTop + STRIP + 2;
  let width = 0, ratio = 1;

  function fit(canvas, context, height) {
    const wide = Math.max(canvas.clientWidth, 100);
    canvas.width = Math.round(wide * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return wide;
  }
  function resize() {
    ratio = window.devicePixelRatio || 1;
    width = fit(main, pen, HEIGHT);
    fit(map, mapPen, MAP);
    mapImage = null; hatches = [];
    redraw();
  }
  let pending = false;
  function redraw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  }
  const xOf = time => (time - view.from) / (view.to - view.from) * width;
  const timeOf = x => view.from + x / width * (view.to - view.from);
  const snap = x => Math.round(x * ratio) / ratio;  // to device pixels, so that bars which touch leave no seam of ground
  const alphaOf = model => lit < 0 || lit === model ? 1 : 0.16;

  function draw() {
    pen.clearRect(0, 0, width, HEIGHT);
    drawAxis();
    for (const lane of lanes) drawLane(lane);
    drawBuffer();
    drawPicked();
    drawMap();
    range.textContent = `${showPosition(view.from)} – ${showPosition(view.to)}`;
    map.setAttribute("aria-valuemin", "0");
    map.setAttribute("aria-valuemax", "100");
    map.setAttribute("aria-valuenow", (100 * view.from / total).toFixed(1));
    map.setAttribute("aria-valuetext", range.textContent);
  }

  function drawAxis() {
    const span = view.to - view.from, rough = span / Math.max(width / 120, 2);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find(k => k * power >= rough) * power;
    const [unit, size] = axisUnit(step), digits = digitsFor(step, size);
    pen.font = SMALL; pen.textBaseline = "middle"; pen.fillStyle = tone.muted; pen.strokeStyle = tone.grid; pen.lineWidth = 1;
    for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
      const x = Math.round(xOf(k * step)) + 0.5, label = `${(k * step / size).toFixed(digits)} ${unit}`;
      pen.beginPath(); pen.moveTo(x, AXIS - 4); pen.lineTo(x, HEIGHT); pen.stroke();
      const half = pen.measureText(label).width / 2;
      pen.textAlign = "center";
      pen.fillText(label, Math.min(Math.max(x, half + 1), width - half - 1), 9);
    }
  }

  /** Draw a lane's name, and as many details as fit behind it. */
  function caption(name, details, y) {
    pen.textAlign = "left"; pen.textBaseline = "alphabetic";
    pen.font = BOLD;
    const after = 1 + pen.measureText(name).width;
    pen.font = FONT;
    let text = "";
    for (const detail of details) {
      const longer = text ? `${text} · ${detail}` : `  ${detail}`;
      if (after + pen.measureText(longer).width > width) break;
      text = longer;
    }
    pen.fillStyle = tone.panel; pen.fillRect(0, y - 13, after + pen.measureText(text).width + 8, 17);  // no grid behind words
    pen.fillStyle = tone.muted; pen.fillText(text, after, y);
    pen.font = BOLD; pen.fillStyle = tone.ink; pen.fillText(name, 1, y);
  }

  function drawLane(lane) {
    const first = lane.firstAfter(view.from), last = lane.firstFrom(view.to);
    pen.fillStyle = tone.lane; pen.fillRect(0, lane.top, width, LANE);
    const dense = last - first > width * 0.6;
    if (dense) drawDensity(pen, lane, view.from, view.to, lane.top, LANE); else drawBars(lane, first, last);
    const span = view.to - view.from, busy = within(lane.shares, view.from, view.to) / span;
    const details = [`${showShare(busy)} ${hidden.size ? "busy with the models shown" : "busy in view"}`];
    const stalled = lane === fetchLane ? within(read.stalledUntil, view.from, view.to) / span : 0;
    if (stalled > 0) details.push(`${showShare(stalled)} stalled: buffer full${dense ? "" : " (hatched)"}`);
    if (dense) details.push("height is each model's share of time");
    caption(lane.name, details, lane.top - 7);
  }

  /** Draw single bars; bars of one colour that are closer than a pixel become one rectangle. */
  function drawBars(lane, first, last) {
    const { start, end, order, top } = lane, names = [];
    let from = 0, to = -1, fill = "", alpha = 1;
    const flush = () => {
      if (to < from) return;
      pen.globalAlpha = alpha; pen.fillStyle = fill;
      pen.fillRect(from, top, Math.max(to - from, 0.75), LANE);
    };
    for (let k = first; k < last; k++) {
      const i = order[k], model = modelOf[i];
      if (hidden.has(model)) continue;
      const x = snap(Math.max(xOf(start[i]), -2)), wide = snap(Math.min(xOf(end[i]), width + 2)) - x;
      const colour = queryOf[i] & 1 ? fills[model].odd : fills[model].even, strength = alphaOf(model);
      if (wide < 1.5 && to >= from && fill === colour && alpha === strength && x - to < 1) { to = x + wide; continue; }
      flush();
      from = x; to = x + wide; fill = colour; alpha = strength;
      if (wide < 5) continue;
      flush(); to = from - 1;  // drawn: the next bar starts afresh
      pen.fillStyle = tone.seam; pen.fillRect(x + wide - 1, top, 1, LANE);
      if (wide > 34 && strength === 1) names.push([i, x, wide - 1]);
    }
    flush();
    if (lane === fetchLane) drawStalls(view.from, view.to);
    pen.globalAlpha = 1;
    for (const [i, x, wide] of names) nameBar(i, ...(lane === fetchLane ? movingPart(i, x, wide) : [x, wide]), top);
  }

  /** Draw the stalls of fetches (waits for buffer space) over them, pale and hatched. only: a span, or -1 for all. */
  function drawStalls(from, to, only = -1) {
    for (let k = firstLater(stallEnd, from); k < stallCount && stallStart[k] < to; k++) {
      const model = modelOf[stallSpan[k]];
      if (hidden.has(model) || only >= 0 && stallSpan[k] !== only) continue;
      const x = snap(Math.max(xOf(stallStart[k]), -2)), wide = snap(Math.min(xOf(stallEnd[k]), width + 2)) - x;
      if (wide <= 0) continue;
      pen.globalAlpha = 1; pen.fillStyle = tone.lane; pen.fillRect(x, fetchLane.top, wide, LANE);
      pen.globalAlpha = alphaOf(model); pen.fillStyle = hatchOf(model); pen.fillRect(x, fetchLane.top, wide, LANE);
    }
    pen.globalAlpha = 1;
  }
  let hatches = [];
  function hatchOf(model) {
    if (hatches[model]) return hatches[model];
    const tile = document.createElement("canvas"), size = 6, context = tile.getContext("2d");
    tile.width = tile.height = size * Math.ceil(ratio);
    context.scale(tile.width / size, tile.width / size);
    context.fillStyle = fills[model].pale; context.fillRect(0, 0, size, size);
    context.strokeStyle = fills[model].hatch; context.lineWidth = 1;
    for (const by of [-size, 0, size]) { context.beginPath(); context.moveTo(by - 1, size + 1); context.lineTo(by + size + 1, -1); context.stroke(); }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(size / tile.width));
    return hatches[model] = pattern;
  }
  /** The widest part of a bar without a stall of its fetch: [x, width] in pixels. */
  function movingPart(i, x, wide) {
    if (!stalledOf[i]) return [x, wide];
    let best = [x, 0], from = x;
    const offer = to => { if (to - from > best[1]) best = [from, to - from]; };
    for (let k = firstLater(stallEnd, fetchStart[i]); k < stallCount && stallSpan[k] === i; k++) {
      offer(Math.min(xOf(stallStart[k]), x + wide));
      from = Math.max(xOf(stallEnd[k]), x);
    }
    offer(x + wide);
    return best;
  }

  function nameBar(i, x, wide, top) {
    const left = Math.max(x, 0) + 5, room = Math.min(x + wide, width) - left - 4;
    if (room < 24) return;
    pen.font = SMALL; pen.textAlign = "left"; pen.textBaseline = "middle";
    pen.fillStyle = queryOf[i] & 1 ? fills[modelOf[i]].inkOdd : fills[modelOf[i]].inkEven;
    const fitted = shorten(layerOf(i), room);
    if (!fitted) return;
    const two = LANE > 40 && pen.measureText(`query ${queryOf[i]}`).width < room;
    pen.fillText(fitted, left, top + LANE / 2 - (two ? 7 : 0));
    if (two) { pen.globalAlpha = 0.78; pen.fillText(`query ${queryOf[i]}`, left, top + LANE / 2 + 8); pen.globalAlpha = 1; }
  }
  /** Shorten a layer's name to `room` pixels; "" if nothing fits. Parts of its beginning go, since neighbours share it. */
  function shorten(name, room) {
    const whole = pen.measureText(name).width;
    if (whole <= room) return name;
    const keep = Math.floor(room / (whole / name.length)) - 2;
    const cut = /[./_:-](.+)$/.exec(name.slice(Math.max(name.length - keep - 1, 0)));
    return keep >= 2 && cut ? "…" + cut[1] : "";
  }

  /** Draw each model's share of the time per column, stacked, because single spans would be narrower than a pixel. */
  function drawDensity(context, lane, from, to, top, high) {
    const bins = Math.max(1, Math.floor(width / 2)), step = width / bins, time = (to - from) / bins;
    const base = new Float64Array(bins).fill(top + high);
    lane.shares.forEach((served, model) => {
      if (hidden.has(model)) return;
      context.fillStyle = fills[model].even; context.globalAlpha = alphaOf(model);
      context.beginPath();
      let before = served(from);
      for (let bin = 0; bin < bins; bin++) {
        const now = served(from + (bin + 1) * time), tall = (now - before) / time * high;
        before = now;
        if (tall < 0.05) continue;
        base[bin] -= tall;
        context.rect(bin * step, base[bin], step + 0.3, tall);
      }
      context.fill();
    });
    context.globalAlpha = 1;
  }

  function drawBuffer() {
    const bottom = stripTop + STRIP, yOf = bytes => bottom - bytes / bufferTop * STRIP;
    const first = firstLater(curveTime, view.from), last = firstLater(curveTime, view.to);
    pen.fillStyle = tone.lane; pen.fillRect(0, stripTop, width, STRIP);
    const peak = (last - first > 1.5 * width ? drawEnvelope : drawCurve)(first, last, bottom, yOf);
    const details = [`${showBytes(peak)} at most in view`];
    if (capacity) {
      const y = Math.round(yOf(capacity)) + 0.5;
      pen.strokeStyle = tone.limit; pen.lineWidth = 1; pen.setLineDash([5, 3]);
      pen.beginPath(); pen.moveTo(0, y); pen.lineTo(width, y); pen.stroke(); pen.setLineDash([]);
      details.push(`capacity ${showBytes(capacity)} (dashed)`);
    }
    caption("Weight buffer", details, stripTop - 7);
  }
  function drawCurve(first, last, bottom, yOf) {
    const line = new Path2D(), from = levelAt(view.from, first), to = levelAt(view.to, last);
    let peak = Math.max(from, to);
    line.moveTo(0, yOf(from));
    for (let k = first; k < last; k++) {
      const x = xOf(curveTime[k]);
      peak = Math.max(peak, curveBefore[k], curveAfter[k]);
      line.lineTo(x, yOf(curveBefore[k])); line.lineTo(x, yOf(curveAfter[k]));
    }
    line.lineTo(width, yOf(to));
    const area = new Path2D(line);
    area.lineTo(width, bottom); area.lineTo(0, bottom);
    pen.fillStyle = tone.buffer; pen.globalAlpha = 0.6; pen.fill(area); pen.globalAlpha = 1;
    pen.strokeStyle = tone["buffer-line"]; pen.lineWidth = 1; pen.stroke(line);
    return peak;
  }
  /** Draw the curve where many bends share a pixel: per column the minimum in full tone, the maximum in a lighter one. */
  function drawEnvelope(first, last, bottom, yOf) {
    const bins = Math.ceil(width), most = new Float64Array(bins), least = new Float64Array(bins).fill(Infinity);
    const mark = (bin, level) => {
      if (level > most[bin]) most[bin] = level;
      if (level < least[bin]) least[bin] = level;
    };
    let bin = 0, time = view.from, level = levelAt(time, first), peak = level;
    const lineTo = (nextTime, next) => {  // marks both ends, and where the line passes from one pixel to the next
      const until = Math.min(Math.max(xOf(nextTime) | 0, bin), bins - 1);
      mark(bin, level);
      while (bin < until) {
        const border = level + (next - level) * (timeOf(bin + 1) - time) / (nextTime - time || 1);
        mark(bin, border); mark(++bin, border);
      }
      mark(bin, next);
      time = nextTime; level = next; peak = Math.max(peak, next);
    };
    for (let k = first; k < last; k++) {
      lineTo(curveTime[k], curveBefore[k]);
      level = curveAfter[k]; mark(bin, level);
    }
    lineTo(view.to, levelAt(view.to, last));
    pen.fillStyle = tone.buffer;
    for (const [column, alpha] of [[most, 0.5], [least, 0.6]]) {
      pen.globalAlpha = alpha; pen.beginPath(); pen.moveTo(0, bottom);
      for (let x = 0; x < bins; x++) { pen.lineTo(x, yOf(column[x])); pen.lineTo(x + 1, yOf(column[x])); }
      pen.lineTo(bins, bottom); pen.fill();
    }
    pen.globalAlpha = 1;
    return peak;
  }

  /** Draw the picked layer: framed on both resources, its fetch tied to its compute, its hold marked in the buffer. */
  function drawPicked() {
    if (picked < 0 || hidden.has(modelOf[picked])) return;
    const i = picked, hasFetch = fetchEnd[i] > fetchStart[i];
    const frame = lane => {
      const x = xOf(lane.start[i]), wide = Math.max(xOf(lane.end[i]) - x, 2);
      const colour = queryOf[i] & 1 ? fills[modelOf[i]].odd : fills[modelOf[i]].even;
      pen.fillStyle = colour; pen.fillRect(x, lane.top, wide, LANE);
      if (lane === fetchLane) drawStalls(fetchStart[i], fetchEnd[i], i);
      if (wide > 34) nameBar(i, ...(lane === fetchLane ? movingPart(i, x, wide - 1) : [x, wide - 1]), lane.top);
      pen.strokeStyle = tone.ink; pen.lineWidth = 2; pen.strokeRect(x, lane.top - 1, wide, LANE + 2);
    };
    const a = xOf(fetchStart[i]), b = xOf(computeEnd[i]);
    pen.fillStyle = tone.accent; pen.globalAlpha = 0.2; pen.fillRect(a, stripTop, Math.max(b - a, 1), STRIP); pen.globalAlpha = 1;
    if (hasFetch) {
      frame(fetchLane);
      const x = xOf(fetchEnd[i]), y = fetchLane.top + LANE + 1, X = xOf(computeStart[i]), Y = computeLane.top - 1, bend = (Y - y) / 2;
      for (const [colour, wide] of [[tone.panel, 5], [tone.ink, 2]]) {
        pen.strokeStyle = colour; pen.lineWidth = wide;
        pen.beginPath(); pen.moveTo(x, y); pen.bezierCurveTo(x, y + bend, X, Y - bend, X, Y); pen.stroke();
      }
      pen.fillStyle = tone.ink;
      for (const [u, v] of [[x, y], [X, Y]]) { pen.beginPath(); pen.arc(u, v, 3.5, 0, 7); pen.fill(); }
    }
    frame(computeLane);
  }

  let mapImage = null;
  function drawMap() {
    const row = (MAP - 6) / 2;
    if (!mapImage) {
      mapImage = document.createElement("canvas");
      const context = mapImage.getContext("2d");
      mapImage.width = map.width; mapImage.height = map.height;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = tone.lane; context.fillRect(0, 0, width, MAP);
      lanes.forEach((lane, k) => drawDensity(context, lane, 0, total, 2 + k * (row + 2), row));
    }
    mapPen.clearRect(0, 0, width, MAP);
    mapPen.drawImage(mapImage, 0, 0, width, MAP);
    const [a, b] = mapEdges();
    mapPen.fillStyle = tone.shade;
    mapPen.fillRect(0, 0, a, MAP); mapPen.fillRect(b, 0, width - b, MAP);
    mapPen.strokeStyle = tone.ink; mapPen.lineWidth = 1.5;
    mapPen.strokeRect(Math.max(a, 0.75), 0.75, Math.max(Math.min(b, width - 0.75) - Math.max(a, 0.75), 2), MAP - 1.5);
    mapPen.fillStyle = tone.ink;
    if (b - a > 16) for (const x of [a, b]) mapPen.fillRect(Math.min(Math.max(x - 2, 0), width - 4), MAP / 2 - 8, 4, 16);
  }
  const mapEdges = () => [view.from / total * width, view.to / total * width];

  // ---- Picking and the tip
  const laneAt = y => lanes.find(lane => y >= lane.top && y <= lane.top + LANE) || null;
  function spanAt(lane, x) {
    const time = timeOf(x), slack = (view.to - view.from) / width * 2;
    let best = -1, nearest = Infinity;
    const stop = Math.min(lane.firstFrom(time + slack) + 1, lane.size);
    for (let k = lane.firstAfter(time - slack); k < stop; k++) {
      const i = lane.order[k];
      if (hidden.has(modelOf[i])) continue;
      const away = Math.max(lane.start[i] - time, time - lane.end[i], 0);
      if (away < nearest && away <= slack) { best = i; nearest = away; }
      if (away === 0) break;
    }
    return best;
  }
  function pick(i, lane, x, y) {
    if (i !== picked || lane !== pickedLane) { picked = i; pickedLane = lane; redraw(); }
    if (i < 0) { hideTip(); return; }
    showTip(layerOf(i), describeSpan(i), facts(i, lane), x, y, main.getBoundingClientRect().top + computeLane.top + LANE + 10);  // hides neither lane
  }
  function describeSpan(i) {
    const same = trace.streams.filter(model => model === modelOf[i]).length > 1;
    return [`${trace.models[modelOf[i]]}, query ${queryOf[i]}${same ? `, stream ${read.streamOf[i]}` : ""}`, read.meaningOf(i)].filter(Boolean).join(": ");
  }
  function facts(i, lane) {
    const fetched = fetchEnd[i] > fetchStart[i];
    return [
      ["Fetch starts", fetched ? showPosition(fetchStart[i]) : "nothing to fetch"],
      ...(fetched ? [["Fetch takes", showTime(fetchEnd[i] - fetchStart[i]), lane === fetchLane]] : []),
      ...(stalledOf[i] ? [["of which stalled", showTime(stalledOf[i])]] : []),
      ...(fetched ? [["Waits before compute", showTime(computeStart[i] - fetchEnd[i])]] : []),
      ["Compute starts", showPosition(computeStart[i])],
      ["Compute takes", showTime(computeEnd[i] - computeStart[i]), lane === computeLane],
      ["Weights", showBytes(read.bytesOf(i))],
    ];
  }
  function step(by) { // to the next (1) or previous (-1) compute, even if the picked one is out of view
    const lane = computeLane;
    if (!lane.size) return;
    let k = picked >= 0 ? lane.firstFrom(computeStart[picked]) + by : lane.firstAfter(view.from);
    while (k >= 0 && k < lane.size && hidden.has(modelOf[lane.order[k]])) k += by;
    if (k < 0 || k >= lane.size) return;
    const i = lane.order[k], middle = (computeStart[i] + computeEnd[i]) / 2, half = (view.to - view.from) / 2;
    if (computeStart[i] < view.from || computeEnd[i] > view.to) show(middle - half, middle + half);
    const place = main.getBoundingClientRect();
    pick(i, lane, place.left + Math.min(Math.max(xOf(middle), 0), width), place.top + lane.top + LANE);
    announcement.textContent = `${layerOf(i)} of ${describeSpan(i)}. ${facts(i, lane).map(fact => fact.slice(0, 2).join(" ")).join(", ")}`;
  }
  function hover(event) {
    if (!event) { pick(-1, null); return; }
    const place = main.getBoundingClientRect(), lane = laneAt(event.clientY - place.top);
    pick(lane ? spanAt(lane, event.clientX - place.left) : -1, lane, event.clientX, event.clientY);
  }

  // ---- The overview: its window is dragged, or taken by an edge
  let mapDrag = null;
  const mapTime = event => (event.clientX - map.getBoundingClientRect().left) / width * total;
  function mapGrip(event) {
    const x = event.clientX - map.getBoundingClientRect().left, [a, b] = mapEdges();
    if (b - a > 16 && Math.abs(x - a) < 7) return "from";
    if (b - a > 16 && Math.abs(x - b) < 7) return "to";
    return x >= a - 3 && x <= b + 3 ? "window" : "outside";
  }
  on(map, "pointerdown", event => {
    if (event.button) return;
    let grip = mapGrip(event);
    const half = (view.to - view.from) / 2, time = mapTime(event);
    if (grip === "outside") { show(time - half, time + half); grip = "window"; }
    mapDrag = { grip, time, from: view.from, to: view.to };
    map.setPointerCapture(event.pointerId);
  });
  on(map, "pointermove", event => {
    if (!mapDrag) {
      map.style.cursor = { from: "ew-resize", to: "ew-resize", window: "grab", outside: "pointer" }[mapGrip(event)];
      return;
    }
    const time = mapTime(event), by = time - mapDrag.time;
    if (mapDrag.grip === "from") show(Math.min(Math.max(time, 0), mapDrag.to - LEAST), mapDrag.to);
    else if (mapDrag.grip === "to") show(mapDrag.from, Math.max(Math.min(time, total), mapDrag.from + LEAST));
    else show(mapDrag.from + by, mapDrag.to + by);
  });
  for (const name of ["pointerup", "pointercancel"]) on(map, name, () => { mapDrag = null; });

  // ---- The legend
  trace.models.forEach((name, model) => {
    const button = box("button", "", swatch(model), make("span", name));
    const light = to => { if (lit !== to) { lit = to; mapImage = null; redraw(); } };
    button.title = `${name}: press to hide or show`;
    button.ariaPressed = "true";
    on(button, "pointerenter", () => { if (!hidden.has(model)) light(model); });
    on(button, "focus", () => { if (button.matches(":focus-visible") && !hidden.has(model)) light(model); });
    for (const leave of ["pointerleave", "blur"]) on(button, leave, () => light(-1));
    on(button, "click", () => {
      if (!hidden.delete(model)) hidden.add(model);
      button.ariaPressed = String(!hidden.has(model));
      lit = -1; mapImage = null; redraw();
    });
    legend.append(button);
  });
  /** All of a short schedule, of a long one its first few hundred layers. */
  const firstWindow = () => count <= 900 ? [0, total] : [0, computeEnd[fetchLane.order[Math.min(220, fetchLane.size - 1)] ?? 220]];
  readColours();
  whenThemeChanges(() => { readColours(); redraw(); });
  new ResizeObserver(resize).observe(panel);
  show(...(opening || firstWindow()));
  return { panel, axis, read };
}
/** A table of the streams of a report: queries, mean latency, and latency with the device to itself. */
function streamsPanel(trace) {
  const time = seconds => showSeconds(seconds), times = value => isNumber(value) ? `${value.toFixed(2)} ×` : "–";
  const rows = trace.report.streams.map((stream, index) => [
    String(index), box("span", "", swatch(trace.models.indexOf(stream.model)), stream.model), String(stream.queries ?? "–"),
    time(stream.standalone_s), time(stream.mean_latency_s), times(stream.slowdown),
  ]);
  const heads = [["Stream", "text"], ["Model", "text"], ["Queries", ""], ["Alone", "", "A query's time when its model has the device to itself"],
    ["Mean latency", ""], ["Slowdown", "", "Mean latency over the time alone"]];
  return box("section", "panel", make("h2", "Streams"), table(heads, rows));
}
