// The last ten minutes as the server kept them: curves of all models together, in ink, and of each in its colour.
const CHARTS = [
  { field: "rate", name: "Requests/s", least: 1, show: value => figure(value) },
  { field: "p99_ms", name: "p99 latency", least: 0.01, show: value => `${figure(value)} ms` },
  { field: "missed", name: "Deadlines missed", least: 0.05, show: showShare },
];
const FIELDS = ["rate", "p50_ms", "p99_ms", "missed", "failed"];
const past = (() => {
  const canvas = byId("past"), pen = canvas.getContext("2d"), HEAD = 22, TALL = 60, FOOT = 20, GAP = 8;
  const columns = count => Object.fromEntries(FIELDS.map(field => [field, Array(count).fill(null)]));
  let times = [], totals = columns(0), models = new Map(), stepS = 2, keptS = 600, width = 100, at = -1, scheduled = false;
  const axis = timeAxis(canvas, { fullRange: () => [-keptS, 0], shortest: () => 5 * stepS, plot: () => [0, width], changed: redraw, hover, keysAnywhere: false });
  Object.assign(axis.view, { from: -keptS, to: 0 });
  byId("past-bar").append(zoomButtons(axis));

  // ---- The samples
  /** Append an answer of /weft/history; models without samples in it get null. */
  function take(answer) {
    const first = !times.length, added = answer.times_s.length;
    stepS = answer.step_s; keptS = answer.kept_s;
    const grow = (target, source) => { for (const field of FIELDS) target[field].push(...(source ? source[field] : Array(added).fill(null))); };
    const received = new Map(answer.models.map(model => [keyOf(model), model]));
    for (const [key, model] of received) if (!models.has(key)) models.set(key, { name: model.name, ...columns(times.length) });
    for (const [key, model] of models) grow(model, received.get(key));
    grow(totals, answer.totals);
    times.push(...answer.times_s);
    const firstKept = times.findIndex(time => time >= times.at(-1) - keptS);
    if (firstKept > 0) for (const list of [times, ...[totals, ...models.values()].flatMap(series => FIELDS.map(field => series[field]))]) list.splice(0, firstKept);
    if (first) { fillCurves("", totals); for (const [key, model] of models) fillCurves(key, model); }
  }
  /** Begin the curves of the last minute with the server's samples, so that they are not empty at first. */
  function fillCurves(key, values) {
    const known = histories.get(key) || [], before = known.length ? known[0].at : Infinity;
    const points = times.map((time, k) => ({ at: time, ...Object.fromEntries(FIELDS.map(field => [field, values[field][k]])) }));
    histories.set(key, [...points.filter(point => point.at < before && point.at > times.at(-1) - TREND_S), ...known]);
  }
  const forget = () => { times = []; totals = columns(0); models = new Map(); };
  const now = () => lastState ? lastState.now_s : 0;

  // ---- Drawing
  function redraw() { if (!scheduled) { scheduled = true; requestAnimationFrame(() => { scheduled = false; draw(); }); } }
  const xOf = time => (time - now() - axis.view.from) / (axis.view.to - axis.view.from) * width;
  const topOf = place => place * (HEAD + TALL + GAP) + HEAD;
  function draw() {
    const ratio = devicePixelRatio || 1, height = topOf(CHARTS.length - 1) + TALL + FOOT;
    width = canvas.clientWidth;
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    canvas.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`; pen.textBaseline = "middle";
    CHARTS.forEach((chart, place) => drawChart(chart, topOf(place)));
    drawFoot(height);
    if (at >= 0) { pen.fillStyle = css("faint"); pen.fillRect(xOf(times[at]), HEAD, 1, height - HEAD - FOOT); }
  }
  function drawChart({ field, name, least, show }, top) {
    const first = Math.max(0, times.findIndex(time => time >= now() + axis.view.from) - 1), lines = [totals, ...models.values()];
    const most = lines.reduce((high, line) => line[field].slice(first).reduce((a, b) => isNumber(b) ? Math.max(a, b) : a, high), -1);
    const scale = Math.max(most * 1.08, least), last = totals[field].at(-1);
    pen.fillStyle = css("lane"); pen.fillRect(0, top, width, TALL);
    pen.textAlign = "left"; pen.fillStyle = css("ink"); pen.fillText(name, 0, top - 11);
    pen.textAlign = "right"; pen.fillStyle = css("muted"); pen.fillText(`now ${isNumber(last) ? show(last) : "–"}, highest ${most < 0 ? "–" : show(most)}`, width, top - 11);
    pen.save(); pen.beginPath(); pen.rect(0, top, width, TALL); pen.clip();
    for (const model of models.values()) {
      const index = modelIndex(model.name);
      drawLine(model[field], first, fills[index].fill, lit >= 0 && lit !== index ? 0.15 : 1, top, scale);
    }
    if (models.size !== 1) drawLine(totals[field], first, css("ink"), lit >= 0 ? 0.3 : 1, top, scale);
    pen.restore();
  }
  function drawLine(values, first, colour, alpha, top, scale) {
    pen.strokeStyle = pen.fillStyle = colour; pen.globalAlpha = alpha; pen.lineWidth = 1.6; pen.lineJoin = "round";
    pen.beginPath();
    for (let k = first; k < times.length; k++) {
      if (values[k] === null) continue;
      const x = xOf(times[k]), y = top + TALL - 1 - (TALL - 3) * values[k] / scale, alone = values[k + 1] === null || k === times.length - 1;
      if (values[k - 1] === null || k === first) { pen.moveTo(x, y); if (alone) pen.lineTo(x + 1.5, y); } else pen.lineTo(x, y);
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }
  function drawFoot(height) {
    let free = 0;  // where the last label ends
    pen.textAlign = "left";
    for (const ago of roundTimes(axis.view.from, axis.view.to, width / 110)) {
      const x = xOf(now() + ago);
      CHARTS.forEach((_, place) => { pen.fillStyle = css("rule"); pen.fillRect(Math.min(Math.round(x), width - 1), topOf(place), 1, TALL); });
      const label = ago < -1e-9 ? `−${showUptime(-ago).replace(" 0 s", "")}` : "now", wide = pen.measureText(label).width;
      const left = Math.min(Math.max(x - wide / 2, 0), width - wide);
      if (left < free) continue;
      pen.fillStyle = css("muted"); pen.fillText(label, left, height - 8);
      free = left + wide + 8;
    }
  }

  // ---- Details of one sample
  function hover(event) {
    at = -1;
    if (event && times.length) {
      const time = now() + axis.timeOf(event.clientX - canvas.getBoundingClientRect().left);
      at = times.reduce((best, other, k) => Math.abs(other - time) < Math.abs(times[best] - time) ? k : best, 0);
    }
    if (at < 0) hideTip();
    else showTip(`${showUptime(Math.max(0, now() - times[at]))} ago`, "all models, then those that served most", facts(at), event.clientX, event.clientY, canvas.getBoundingClientRect().bottom + 6);
    redraw();
  }
  function facts(k) {
    const busiest = [...models.values()].filter(model => model.rate[k]).sort((a, b) => b.rate[k] - a.rate[k]).slice(0, 6);
    return [
      ["Requests/s", figure(totals.rate[k])], ["p50, p99", `${figure(totals.p50_ms[k])}, ${figure(totals.p99_ms[k])} ms`],
      ["Deadlines missed", showShare(totals.missed[k])], ["Without result", `${figure(totals.failed[k])} /s`],
      ...busiest.map(model => [model.name, `${figure(model.rate[k])} /s, p99 ${figure(model.p99_ms[k])} ms`]),
    ];
  }
  return { take, forget, redraw, last: () => times.at(-1) ?? 0, due: time => !times.length || time - times.at(-1) >= stepS };
})();
