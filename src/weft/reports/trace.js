// A trace, decoded for pages.
/** Index of the first of the sorted `times` that is later than `time`. */
function firstLater(times, time) {
  let low = 0, high = times.length;
  while (low < high) { const middle = (low + high) >> 1; if (times[middle] > time) high = middle; else low = middle + 1; }
  return low;
}
/** Decode a trace: typed columns of its spans (times in nanoseconds), its lanes, stalls and the weight buffer's curve. */
function readTrace(trace) {
  const { columns } = trace, count = columns.start.length;
  const fetchStart = new Float64Array(count), fetchEnd = new Float64Array(count);
  const computeStart = new Float64Array(count), computeEnd = new Float64Array(count);
  const modelOf = new Uint16Array(count), kindOf = Uint32Array.from(columns.kind);
  let makespan = 0;
  for (let i = 0, at = 0; i < count; i++) {
    at += columns.start[i];
    fetchStart[i] = at;
    fetchEnd[i] = at + columns.fetch[i];
    computeStart[i] = fetchEnd[i] + columns.wait[i];
    computeEnd[i] = computeStart[i] + columns.compute[i];
    modelOf[i] = trace.streams[columns.stream[i]];
    if (computeEnd[i] > makespan) makespan = computeEnd[i];
  }
  /** For each model a function from a time to its busy time until then, so that any window's share is two look-ups. */
  function makeShares(start, end, order, modelAt) {
    return trace.models.map((_, model) => {
      const mine = order.filter(i => modelAt(i) === model), sum = new Float64Array(mine.length + 1);
      for (let k = 0; k < mine.length; k++) sum[k + 1] = sum[k] + end[mine[k]] - start[mine[k]];
      return time => {
        let low = 0, high = mine.length;
        while (low < high) { const middle = (low + high) >> 1; if (start[mine[middle]] < time) low = middle + 1; else high = middle; }
        return low ? sum[low] - Math.max(end[mine[low - 1]] - time, 0) : 0;
      };
    });
  }
  // A lane holds the spans that occupy a resource for some time, by start; `reach` is the latest end so far, which
  // makes the first visible span a binary search even if a resource ever served two spans at once.
  function makeLane(name, start, end) {
    let order = new Uint32Array(count), size = 0, sorted = true;
    for (let i = 0; i < count; i++) {
      if (end[i] <= start[i]) continue;
      if (size && start[order[size - 1]] > start[i]) sorted = false;
      order[size++] = i;
    }
    order = order.subarray(0, size);
    if (!sorted) order.sort((a, b) => start[a] - start[b]);
    const reach = new Float64Array(size);
    for (let k = 0, far = 0; k < size; k++) reach[k] = far = Math.max(far, end[order[k]]);
    const firstFrom = time => { // index of the first span that starts at or after `time`
      let low = 0, high = size;
      while (low < high) { const middle = (low + high) >> 1; if (start[order[middle]] >= time) high = middle; else low = middle + 1; }
      return low;
    };
    const firstAfter = time => firstLater(reach, time);
    return { name, start, end, order, size, firstAfter, firstFrom, top: 0, shares: makeShares(start, end, order, i => modelOf[i]) };
  }
  const fetchLane = makeLane("DRAM channel", fetchStart, fetchEnd), computeLane = makeLane("PE array", computeStart, computeEnd);

  // When a fetch waited for space in the buffer, by time; the channel is not busy then.
  const stallCount = trace.stalls.span.length, stallSpan = Uint32Array.from(trace.stalls.span);
  const stallStart = new Float64Array(stallCount), stallEnd = new Float64Array(stallCount), stalledOf = new Float64Array(count);
  for (let k = 0, at = 0; k < stallCount; k++) {
    stallStart[k] = at += trace.stalls.start[k];
    stallEnd[k] = at + trace.stalls.length[k];
    stalledOf[stallSpan[k]] += trace.stalls.length[k];
  }
  const stalledUntil = makeShares(stallStart, stallEnd, stallSpan.map((_, k) => k), k => modelOf[stallSpan[k]]);
  fetchLane.shares = fetchLane.shares.map((served, model) => time => served(time) - stalledUntil[model](time));

  // The weight buffer: a curve of straight pieces, which drops where a compute frees its weights.
  const curveTime = new Float64Array(trace.buffer.time.length);
  const curveBefore = new Float64Array(curveTime.length), curveAfter = new Float64Array(curveTime.length);
  let peakBytes = 0;
  for (let k = 0, at = 0, held = 0; k < curveTime.length; k++) {
    curveTime[k] = at += trace.buffer.time[k];
    curveBefore[k] = held += trace.buffer.rise[k];
    peakBytes = Math.max(peakBytes, held);
    curveAfter[k] = held -= trace.buffer.fall[k];
  }
  const kind = i => trace.kinds[kindOf[i]];
  return {
    count, makespan, total: Math.max(makespan, 1), fetchStart, fetchEnd, computeStart, computeEnd, modelOf,
    queryOf: Uint32Array.from(columns.query), streamOf: Uint32Array.from(columns.stream),
    layerOf: i => trace.layers[kind(i)[0]], bytesOf: i => kind(i)[1], meaningOf: i => trace.meanings[trace.meaning[kind(i)[0]]] || "",
    fetchLane, computeLane, stallCount, stallSpan, stallStart, stallEnd, stalledOf, stalledUntil,
    curveTime, curveBefore, curveAfter, peakBytes,
  };
}
/** Pairs of layer names (three, and the number of others) and their common meaning. */
function layerWords(trace) {
  const names = trace.meanings.map(() => []);
  trace.layers.forEach((name, k) => names[trace.meaning[k]]?.push(name));
  return trace.meanings.map((meaning, k) => [names[k].slice(0, 3).join(", ") + (names[k].length > 3 ? ` and ${names[k].length - 3} more` : ""), meaning]);
}
