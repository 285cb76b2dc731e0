// What the trace says. An event: {rows, read, written, stored, step}, see play.py's Event; a step:
// {cols, m_old, S, m, correction, P, l, O}. A pair [first, end] names rows of Q, of K or of V.

const sum = numbers => numbers.reduce((a, b) => a + b, 0);
const bytes = (events, way) => sum(events.flatMap(event => Object.values(event[way])));

// The values that stand after event `at`, in memory or on the chip: {name: matrix with holes}.
function replay(events, at) {
  const {Q, K, V} = TRACE, values = {Q, K, V, O: [], m: [], l: [], correction: [], S: [], P: []};
  const put = (name, block, i0, j0 = 0) => block.forEach((row, i) => row.forEach((x, j) => {
    (values[name][i0 + i] ??= [])[j0 + j] = x;
  }));
  for (const {rows, stored} of events.slice(0, at + 1)) {
    for (const name in stored) put(name, stored[name], rows[0]);
  }
  const {rows, step, stored} = events[at];
  if (step) {
    for (const name of ['m', 'correction', 'l']) put(name, step[name], rows[0]);
    for (const name of ['S', 'P']) put(name, step[name], rows[0], step.cols[0]);
    if (!stored.O) put('O', step.O, rows[0]);
  }
  return values;
}

// For each score the event that computes it; a score in a skipped tile has none.
function whenComputed(events) {
  const when = TRACE.Q.map(() => []);
  events.forEach(({rows, step, stored}, at) => {
    if (!step && !stored.S) return;
    const [first, end] = step ? step.cols : [0, Nk];
    for (let i = rows[0]; i < rows[1]; i++) for (let j = first; j < end; j++) when[i][j] ??= at;
  });
  return when;
}

// The rows of each array that are on the chip: {name: [first, end]}.
function onChip({rows, read, written, step}) {
  if (step) {
    const queries = ['Q', 'S', 'm', 'correction', 'l', 'O'].map(name => [name, rows]);
    return {...Object.fromEntries(queries), K: step.cols, V: step.cols};
  }
  const names = [...Object.keys(read), ...Object.keys(written)];
  return Object.fromEntries(names.map(name =>
    [name === 'P' ? 'S' : name, 'KV'.includes(name) ? [0, Nk] : rows]));
}

// O once more, added up in float64 from correction, P and V. Returns its largest difference from
// every O that was stored on the way and from `result`, which Python's function returned.
function difference(events, result) {
  const O = result.map(row => row.map(() => 0)), l = result.map(() => 0);
  const add = (q, correction, P, first) => {
    l[q] = correction * l[q] + sum(P);
    O[q] = O[q].map((o, c) => correction * o + sum(P.map((p, k) => p * TRACE.V[first + k][c])));
  };
  let largest = 0;
  const compare = (q, found) => found.forEach((o, c) => {
    largest = Math.max(largest, Math.abs(O[q][c] / (l[q] || 1) - o)); // l = 0: sees no key
  });
  for (const {rows, step, stored} of events) {
    if (step) step.P.forEach((P, r) => add(rows[0] + r, step.correction[r][0], P, step.cols[0]));
    if (stored.P) stored.P.forEach((P, q) => add(q, 0, P, 0));
    if (stored.O) stored.O.forEach((row, r) => compare(rows[0] + r, row));
  }
  result.forEach((row, q) => compare(q, row));
  return largest;
}
