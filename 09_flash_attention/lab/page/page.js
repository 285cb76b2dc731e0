// What is shown beside the picture, and what the reader can do.

const state = {language: 'en', order: 'FA2', mask: TRACE.mask, at: 0, offset: 0, timer: null};
const by = id => document.getElementById(id);
const events = () => TRACE.traces[state.mask][state.order];
const event = () => events()[state.at];
const largest = matrix => Math.max(1e-9, ...matrix.flat().map(Math.abs));
const LARGEST = {Q: largest(TRACE.Q), K: largest(TRACE.K), V: largest(TRACE.V), O: largest(TRACE.V),
  S: largest(TRACE.traces.none.standard[0].stored.S), P: 1, correction: 1, l: Nk};
LARGEST.m = LARGEST.S;
let values, when; // of the event at hand; of the order at hand

const LOOPS = {
  standard: 'S = Q Kᵀ / √d\nP = softmax(S)\nO = P V',
  FA1: 'for K_block, V_block:\n    for Q_block, O, m, l:\n        m, l, O_block = step(...)\n        O = O_block / l',
  FA2: 'for Q_block:\n    for K_block, V_block:\n        m, l, O_block = step(...)\n    O = O_block / l',
};

// Words and numbers

function text(key, holes = {}) {
  return TEXTS[state.language][key].replace(/\{(\w+)\}/g, (_, name) => holes[name]);
}

function number(x) {
  if (x === null) return '−∞';
  if (x === undefined) return text('nothing');
  const shown = x < -1e6 ? x.toExponential(1) : x.toFixed(3); // m begins at float32's lowest
  return shown.replace('-', '−');
}

const numbers = row => row.map(number).join('  ');
const range = ([first, end]) => (end - first > 1 ? `${first}–${end - 1}` : `${first}`);
const named = (one, many, pair) => text(pair[1] - pair[0] > 1 ? many : one, {i: range(pair)});

function element(tag, content, parent, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = content;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return parent.appendChild(made);
}

// One line that says what happens in the event at hand.
function status() {
  const {rows, step, stored, read} = event(), blocks = {rows: named('query', 'queries', rows)};
  if (!step && state.order === 'standard') {
    return text(stored.P ? 'stored_P' : stored.O ? 'stored_O' : read.S ? 'stored_mask' : 'stored_S');
  }
  if (!step) return text(Object.keys(read).length ? 'blind' : 'start', blocks);
  blocks.cols = named('key', 'keys', step.cols);
  blocks.all = rows[1] - rows[0];
  blocks.risen = step.m.filter((m, r) => m[0] > step.m_old[r][0]).length;
  const before = events().slice(0, state.at).some(one => one.step && one.rows[0] === rows[0]);
  const said = [text(before ? 'step' : 'first', blocks)];
  if (stored.O) said.push(text(stored.m ? 'again' : 'last'));
  return said.join(text('between'));
}

// The picture

function kind(name, i, j) {
  const x = values[name][i]?.[j];
  if (name === 'S') {
    if (x === null || when[i][j] === undefined) return 'skipped';
    if (values.P[i]?.[j] !== undefined) return 'weight';
    if (x === undefined) return when[i][j] < state.at ? 'gone' : 'ahead';
  }
  if (x === undefined || x < -1e6) return 'ahead';
  return name === 'l' || name === 'correction' ? 'weight' : x < 0 ? 'minus' : 'plus';
}

function strength(name, i, j) {
  const P = values.P[i]?.[j];
  return name === 'S' && P !== undefined ? P : Math.abs(values[name][i][j]) / LARGEST[name];
}

function drawPicture() {
  const chip = onChip(event());
  for (const name in PLACES) {
    const columns = name === 'S' && event().step ? event().step.cols : [0, PLACES[name].columns];
    paint(name, (i, j) => kind(name, i, j), (i, j) => strength(name, i, j), chip[name], columns);
    groups[name].setAttribute('aria-label', describe(name, chip[name], columns));
  }
  by('picture').setAttribute('aria-label', text('picture_is', {status: status()}));
}

// An array's numbers that are on the chip, in one line.
function describe(name, rows, columns) {
  if (!rows) return text('array_empty', {name});
  const block = (values[name] ?? []).slice(...rows).map(row => numbers(row.slice(...columns)));
  return text('array_is', {name, rows: range(rows), columns: range(columns), values: block.join(' | ')});
}

function sayCell(cell) {
  const name = cell.parentNode.dataset.array, {i, j} = cell.dataset;
  const at = which => number(values[which][i]?.[j]);
  by('numbers').textContent = name === 'S' ? text('cell_S', {i, j, S: at('S'), P: at('P')})
    : text('cell', {name, i, j, value: at(name)});
}

// The row in hand

const rowInHand = () => Math.min(event().rows[0] + state.offset, event().rows[1] - 1);

// [code, numbers] of what the event does with that row.
function lines() {
  const {rows, step, stored} = event(), q = rowInHand(), r = q - rows[0];
  if (!step) {
    const codes = {S: 'S = Q Kᵀ / √d', P: 'P = softmax(S)', O: 'O = P V', m: 'm', l: 'l'};
    if (state.order !== 'standard') codes.O = 'O';
    return Object.entries(codes).filter(([name]) => values[name][q]?.length)
      .map(([name, code]) => [code, numbers(values[name][q])]);
  }
  const old = stored.m ? 'correction · l · O' : 'correction · O'; // FA1 has divided it by l
  return [['m_old', numbers(step.m_old[r])], ['S', numbers(step.S[r])],
    ['m = max(m_old, S)', numbers(step.m[r])],
    ['correction = exp(m_old − m)', numbers(step.correction[r])],
    ['P = exp(S − m)', numbers(step.P[r])], ['l = correction · l + sum(P)', numbers(step.l[r])],
    [`O_block = ${old} + P V`, numbers(step.O[r])],
    ...(stored.O ? [['O = O_block / l', numbers(stored.O[r])]] : [])];
}

function showRow() {
  const {rows, read, written} = event(), buttons = by('rows').children;
  while (buttons.length < rows[1] - rows[0]) {
    const offset = buttons.length;
    element('button', '', by('rows')).onclick = () => { state.offset = offset; render(); };
  }
  while (buttons.length > rows[1] - rows[0]) by('rows').lastChild.remove();
  [...buttons].forEach((button, r) => { // kept, or the focus on one would be lost
    button.textContent = rows[0] + r;
    button.setAttribute('aria-label', text('query', {i: rows[0] + r}));
    button.setAttribute('aria-pressed', rows[0] + r === rowInHand());
  });
  by('steps').replaceChildren();
  for (const [code, found] of lines()) {
    const row = element('tr', '', by('steps'));
    element('th', code, row, {scope: 'row'});
    element('td', found, row);
  }
  const moved = way => Object.entries(way).map(([name, n]) => text('bytes', {name, n})).join(text('comma'));
  by('moved').textContent = text('moved', {read: moved(read) || text('nothing_moved'),
    written: moved(written) || text('nothing_moved')});
}

// The orders and what they move

function showOrders() {
  const traces = TRACE.traces[state.mask];
  const moved = list => bytes(list, 'read') + bytes(list, 'written');
  const widest = Math.max(...Object.values(traces).map(moved));
  for (const button of by('orders').children) {
    const order = button.dataset.order, all = moved(traces[order]);
    const now = order === state.order ? moved(events().slice(0, state.at + 1)) : 0;
    const [name, how, bar, count] = button.children;
    name.textContent = text(order);
    how.textContent = text(`${order}_how`);
    bar.style.width = `${100 * all / widest}%`;
    bar.firstChild.style.width = `${100 * now / all}%`;
    count.textContent = text('bytes_of', {now, all});
    button.setAttribute('aria-pressed', order === state.order);
    button.dataset.bytes = all;
  }
  for (const button of by('masks').querySelectorAll('button')) {
    button.textContent = text(button.dataset.mask);
    button.setAttribute('aria-pressed', button.dataset.mask === state.mask);
  }
}

// The table behind the picture: each query of each event is a row.

const COLUMNS = ['S', 'P', 'm', 'correction', 'l', 'O'];

function showTable() {
  const table = by('table');
  table.replaceChildren();
  element('caption', text('caption', {order: text(state.order), mask: text(state.mask)}), table);
  const head = element('tr', '', element('thead', '', table)), body = element('tbody', '', table);
  for (const name of [...['t_step', 't_query', 't_keys'].map(key => text(key)), ...COLUMNS,
    text('t_read'), text('t_written')]) element('th', name, head, {scope: 'col'});
  events().forEach((one, at) => {
    for (let q = one.rows[0]; q < one.rows[1]; q++) {
      const row = element('tr', '', body, {'data-at': at}), r = q - one.rows[0];
      element('th', at + 1, row, {scope: 'row'});
      const keys = one.step ? range(one.step.cols) : state.order === 'standard' ? range([0, Nk]) : '';
      const found = COLUMNS.map(name => (one.stored[name] ?? one.step?.[name])?.[r]);
      const moved = ['read', 'written'].map(way => (r ? '' : bytes([one], way)));
      for (const cell of [q, keys, ...found.map(x => (x ? numbers(x) : '')), ...moved]) {
        element('td', cell, row);
      }
    }
  });
}

// All of it

function render() {
  values = replay(events(), state.at);
  drawPicture();
  showRow();
  showOrders();
  by('status').textContent = status();
  by('status').setAttribute('aria-live', state.timer ? 'off' : 'polite');
  by('numbers').textContent = document.activeElement.dataset.array
    ? document.activeElement.getAttribute('aria-label') : text('hover');
  by('count').textContent = text('count', {step: state.at + 1, steps: events().length});
  by('position').max = events().length - 1;
  by('position').value = state.at;
  by('play').textContent = text(state.timer ? 'pause' : 'play');
  by('back').setAttribute('aria-disabled', state.at === 0); // disabled, it would lose the focus
  by('next').setAttribute('aria-disabled', state.at === events().length - 1);
  for (const row of by('table').tBodies[0].rows) {
    if (Number(row.dataset.at) === state.at) row.setAttribute('aria-current', 'step');
    else row.removeAttribute('aria-current');
  }
}

// What depends on the language, the order and the mask, and then the rest.
function renderAll() {
  document.documentElement.lang = state.language === 'zh' ? 'zh-CN' : 'en';
  document.title = text('title');
  for (const node of document.querySelectorAll('[data-text]')) node.textContent = text(node.dataset.text);
  for (const node of document.querySelectorAll('[data-label]')) {
    node.setAttribute('aria-label', text(node.dataset.label));
  }
  by('intro').textContent = text('intro', TRACE.sizes);
  by('language').textContent = text('other');
  by('language').setAttribute('aria-label', text('other_label'));
  by('language').lang = state.language === 'zh' ? 'en' : 'zh-CN';
  by('legend').replaceChildren();
  for (const name of ['on_chip', 'weight', 'plus', 'minus', 'gone', 'ahead', 'skipped']) {
    const passing = name === 'on_chip' && state.order === 'standard'; // it is no tile
    element('li', text(passing ? 'passing' : name), by('legend'), {class: name});
  }
  by('loops').textContent = LOOPS[state.order];
  when = whenComputed(events());
  const worst = difference(events(), TRACE.O[state.mask]);
  by('check').textContent = text('check', {difference: worst ? worst.toExponential(1).replace('-', '−') : 0});
  by('check').dataset.difference = worst;
  showTable();
  render();
}

function stop() {
  clearInterval(state.timer);
  state.timer = null;
}

function go(at) {
  state.at = Math.max(0, Math.min(at, events().length - 1));
  if (state.at === events().length - 1) stop();
  render();
}

function play() {
  if (state.timer) {
    stop();
  } else {
    if (state.at === events().length - 1) state.at = 0;
    state.timer = setInterval(() => go(state.at + 1), 1000 / Number(by('speed').value));
  }
  render();
}

function choose(change) {
  stop();
  Object.assign(state, change);
  state.at = Math.min(state.at, events().length - 1);
  renderAll();
}

function moveRow(by) {
  const [first, end] = event().rows;
  state.offset = Math.max(0, Math.min(rowInHand() - first + by, end - first - 1));
  render();
}

const KEYS = {' ': play, ArrowRight: () => go(state.at + 1), ArrowLeft: () => go(state.at - 1),
  ArrowUp: () => moveRow(-1), ArrowDown: () => moveRow(1), Home: () => go(0),
  End: () => go(events().length - 1)};

document.addEventListener('keydown', pressed => {
  const own = pressed.target.closest('input, select, .scroll') // they have a use for these keys
    || (pressed.key === ' ' && pressed.target.closest('button, summary'));
  if (own || !KEYS[pressed.key] || pressed.ctrlKey || pressed.altKey || pressed.metaKey) return;
  pressed.preventDefault();
  KEYS[pressed.key]();
});

// asked: what stands after the # of the address, as in #language=zh&order=FA1&mask=causal&step=3.
function beginAt(asked) {
  const pick = (name, known, otherwise) => (asked.get(name) in known ? asked.get(name) : otherwise);
  state.language = pick('language', TEXTS, navigator.language.startsWith('zh') ? 'zh' : 'en');
  state.order = pick('order', LOOPS, state.order);
  state.mask = pick('mask', TRACE.traces, state.mask);
  state.at = Math.max(0, Math.min(Number(asked.get('step')) || 1, events().length) - 1);
}

function begin() {
  makePicture(by('picture'));
  for (const part of ['python play.py', `--seq-len ${Nq}`, `--kv-len ${Nk}`, `--head-dim ${d}`,
    `--br ${Br}`, `--bc ${Bc}`, `--seed ${TRACE.seed}`]) {
    element('span', part, by('command'));
    by('command').append(' ');
  }
  for (const order of ['standard', 'FA1', 'FA2']) {
    const button = element('button', '', by('orders'), {'data-order': order});
    element('strong', '', button);
    element('span', '', button);
    element('i', '', element('span', '', button, {class: 'bar', 'aria-hidden': true}));
    element('span', '', button);
    button.onclick = () => choose({order, at: 0});
  }
  for (const mask of ['none', 'causal']) {
    element('button', '', by('masks'), {'data-mask': mask}).onclick = () => choose({mask, at: 0});
  }
  by('language').onclick = () => choose({language: state.language === 'en' ? 'zh' : 'en'});
  by('play').onclick = play;
  by('back').onclick = KEYS.ArrowLeft;
  by('next').onclick = KEYS.ArrowRight;
  by('position').oninput = () => go(Number(by('position').value));
  by('speed').onchange = () => { if (state.timer) { stop(); play(); } };
  by('picture').addEventListener('pointerover', ({target}) => { if (target.dataset.i) sayCell(target); });
  by('picture').addEventListener('focusin', ({target}) => {
    by('numbers').textContent = target.getAttribute('aria-label');
  });
  beginAt(new URLSearchParams(location.hash.slice(1)));
  renderAll();
}

begin();
