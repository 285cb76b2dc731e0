// The picture: an SVG whose cells are made once and painted anew at every step.

const UNIT = 20; // side of a cell
const GAP = 2; // cells between two arrays
const {Nq, Nk, d, Br, Bc} = TRACE.sizes;
const TOP = GAP + Math.max(d, 4) + GAP, LEFT = 2 + d + GAP, RIGHT = LEFT + Nk + GAP;

// Where each array stands, in cells. K and V are drawn turned: a key is a column, as it is in S.
const PLACES = {
  Q: {x: 2, y: TOP, rows: Nq, columns: d},
  K: {x: LEFT, y: TOP - GAP - d, rows: Nk, columns: d, turned: true},
  S: {x: LEFT, y: TOP, rows: Nq, columns: Nk},
  m: {x: RIGHT - 0.5, y: TOP, rows: Nq, columns: 1},
  correction: {x: RIGHT + 1.5, y: TOP, rows: Nq, columns: 1},
  l: {x: RIGHT + 3.5, y: TOP, rows: Nq, columns: 1},
  O: {x: RIGHT + 6, y: TOP, rows: Nq, columns: d},
  V: {x: LEFT, y: TOP + Nq + GAP, rows: Nk, columns: d, turned: true},
};
const LABELS = {Q: 'Q', K: 'Kᵀ', S: 'S, P', m: 'm', correction: 'correction', l: 'l', O: 'O', V: 'Vᵀ'};
const groups = {}, cells = {}, frames = {};

function make(tag, attributes, parent, text = '') {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return parent.appendChild(element);
}

function setBox(rect, {x, y, turned}, [i0, i1], [j0, j1]) {
  const [across, down] = turned ? [[i0, i1], [j0, j1]] : [[j0, j1], [i0, i1]];
  rect.setAttribute('x', (x + across[0]) * UNIT);
  rect.setAttribute('y', (y + down[0]) * UNIT);
  rect.setAttribute('width', (across[1] - across[0]) * UNIT);
  rect.setAttribute('height', (down[1] - down[0]) * UNIT);
}

function makePicture(svg) {
  const width = (RIGHT + 6 + d + 0.5) * UNIT, height = (TOP + Nq + GAP + d + 0.5) * UNIT;
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.style.maxWidth = `${Math.max(width * 1.1, 320)}px`;
  for (const [name, place] of Object.entries(PLACES)) {
    const group = make('g', {tabindex: 0, role: 'img', 'data-array': name}, svg);
    groups[name] = group;
    makeLabel(name, place, group);
    cells[name] = Array.from({length: place.rows}, (_, i) =>
      Array.from({length: place.columns}, (_, j) => {
        const cell = make('rect', {'data-i': i, 'data-j': j}, group);
        setBox(cell, place, [i, i + 1], [j, j + 1]);
        return cell;
      }));
    frames[name] = make('rect', {class: 'frame'}, group);
  }
  for (let i = 0; i < Nq; i += ticks(Br, Nq)) {
    make('text', {x: 1.6 * UNIT, y: (TOP + i + 0.75) * UNIT, class: 'tick end'}, svg, i);
  }
  for (let j = 0; j < Nk; j += ticks(Bc, Nk)) {
    make('text', {x: (LEFT + j) * UNIT, y: (TOP - GAP - d - 0.4) * UNIT, class: 'tick'}, svg, j);
  }
}

// A block's first row is numbered; where blocks are short, of some blocks only.
function ticks(block, length) {
  return block * Math.ceil(Math.min(3, length) / block);
}

function makeLabel(name, {x, y, turned, columns}, group) {
  const middle = (x + columns / 2) * UNIT, above = (y - 0.5) * UNIT;
  if (turned) {
    make('text', {x: (x - 0.5) * UNIT, y: (y + d / 2 + 0.3) * UNIT, class: 'end'}, group, LABELS[name]);
  } else if (name === 'correction') { // too long to lie above its column
    const turn = `rotate(-90 ${middle} ${above})`;
    make('text', {x: middle, y: above, transform: turn, dy: '0.35em'}, group, LABELS[name]);
  } else {
    make('text', {x: middle, y: above, class: 'middle'}, group, LABELS[name]);
  }
}

// Paint an array. kind(i, j): plus, minus, weight, ahead, gone or skipped. strength(i, j): 0 to 1.
// rows, columns: [first, end] of what is on the chip; no rows where nothing of it is.
function paint(name, kind, strength, rows, columns) {
  cells[name].forEach((row, i) => row.forEach((cell, j) => {
    const shade = kind(i, j), tinted = ['plus', 'minus', 'weight'].includes(shade);
    cell.setAttribute('class', shade);
    cell.style.fillOpacity = tinted ? 0.08 + 0.92 * strength(i, j) : ''; // above 1 is 1
  }));
  frames[name].style.display = rows ? '' : 'none';
  if (rows) setBox(frames[name], PLACES[name], rows, columns);
}
