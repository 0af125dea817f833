// Positions as pictures, drawn from OpenSpiel's text. A renderer returns markup (see charts.js); unreadable positions stay text.
const CELL = 44;
const lettered = (n) => [..."abcdefghijklmnopqrstuvwxyz"].slice(0, n);
const numbered = (n) => Array.from({length: n}, (_, i) => n - i);
const counted = (first) => (cells) => { // row and column labels as in action names like x(0,2)
  const from = (items) => Array.from(items, (_, i) => i + first);
  return {rows: from(cells), columns: from(cells[0]), top: true};
};
const textRows = (state) => state.split("\n").filter((row) => row.trim());

const disc = (x, y, player) => {
  const inner = player ? html`<circle cx="${x}" cy="${y}" r="7" fill="var(--board)"/>` : "";
  return html`<circle cx="${x}" cy="${y}" r="16" fill="var(--p${player})"/>${inner}`;
};
const stone = (x, y, player) => html`<circle cx="${x}" cy="${y}" r="17" fill="var(--stone${player})" stroke="var(--stone-line)" stroke-width="1.2"/>`;
const cross = (x, y) => html`<path d="M${x - 12} ${y - 12}l24 24m0 -24l-24 24" stroke="var(--p0)" stroke-width="5" stroke-linecap="round"/>`;
const ring = (x, y) => html`<circle cx="${x}" cy="${y}" r="12.5" fill="none" stroke="var(--p1)" stroke-width="5"/>`;
const crown = (x, y) => html`<text x="${x}" y="${y}" style="fill:var(--panel);font-size:18px">♛</text>`;
const glyph = (x, y, text, size, fill = "var(--ink)") => html`<text x="${x}" y="${y}" style="font-size:${size}px;fill:${fill}">${text}</text>`;

function board(width, height, body, columns, rows, top) {
  const gap = 0.06 * width, size = gap / 2; // relative to the width: boards of all sizes are drawn equally wide
  const left = rows.length ? gap : 0, foot = columns.length ? gap : 0;
  const label = (x, y, text) => glyph(x, y, text, size, "var(--soft)");
  const labels = [
    columns.map((c, i) => label(left + i * CELL + CELL / 2, top ? 0.45 * gap : height + 0.55 * gap, c)),
    rows.map((r, i) => label(0.4 * gap, (top ? foot : 0) + i * CELL + CELL / 2, r)),
  ];
  return html`<svg viewBox="-2 -2 ${width + left + 4} ${height + foot + 4}" role="img">${labels}
    <g transform="translate(${left} ${top ? foot : 0})">${body}</g></svg>`;
}

// cells[row][column] is a symbol, which piece(symbol, x, y) draws; cells that differ from before are highlighted.
function squares(cells, before, piece, {chequered = false, wood = false, columns = [], rows = [], top = false} = {}) {
  const body = [];
  cells.forEach((row, r) => row.forEach((symbol, c) => {
    const changed = before && before[r] && before[r][c] !== symbol;
    const ground = wood ? "wood" : "board";
    const fill = changed ? `var(--${wood ? "wood-" : ""}changed)` : `var(--${ground}${chequered && (r + c) % 2 ? 2 : ""})`;
    body.push(html`<rect x="${c * CELL}" y="${r * CELL}" width="${CELL}" height="${CELL}" fill="${fill}" stroke="var(--grid)" stroke-width="${chequered ? 0 : 1}"/>`);
    body.push(piece(symbol, c * CELL + CELL / 2, r * CELL + CELL / 2));
  }));
  return board(cells[0].length * CELL, cells.length * CELL, body, columns, rows, top);
}

const grid = (read, piece, options) => (state, before) => {
  const cells = read(state);
  return squares(cells, before && read(before), piece, typeof options === "function" ? options(cells) : options);
};

const plainCells = (state) => textRows(state).map((row) => [...row.trim()]);
const marks = (s, x, y) => ({x: cross, o: ring})[s]?.(x, y) ?? "";
const discs = (s, x, y) => ({x: disc(x, y, 0), o: disc(x, y, 1)})[s] ?? "";
const sides = (cells) => ({chequered: true, columns: lettered(cells[0].length), rows: numbered(cells.length)});

function chequeredCells(state) { // rows "8.+.+", the last line holds the column letters
  const rows = textRows(state), size = rows.pop().trim().length;
  return rows.map((row) => [...row.slice(-size)]);
}

function othelloCells(state) {
  return textRows(state).filter((row) => /^\s*\d/.test(row)).map((row) => row.trim().split(/\s+/).slice(1, -1));
}

function fenCells(state) {
  return state.trim().split(" ")[0].split("/").map((row) => [...row.replace(/\d/g, (n) => ".".repeat(Number(n)))]);
}

function chessPiece(symbol, x, y) {
  const solid = {k: "♚", q: "♛", r: "♜", b: "♝", n: "♞", p: "♟"}[symbol.toLowerCase()];
  if (!solid) return "";
  const white = symbol !== symbol.toLowerCase();
  return html`<text x="${x}" y="${y + 1}" style="font-size:36px;fill:${white ? "#fff" : "#16181b"};stroke:#16181b;stroke-width:${white ? 1.1 : 0}">${solid}\ufe0e</text>`;
}

function checker(symbol, x, y) {
  const player = {o: 0, 8: 0, "+": 1, "*": 1}[symbol];
  return player === undefined ? "" : [disc(x, y, player), "8*".includes(symbol) ? crown(x, y) : ""];
}

const amazon = (s, x, y) => ({X: disc(x, y, 0), O: disc(x, y, 1), "#": html`<rect x="${x - 13}" y="${y - 13}" width="26" height="26" fill="var(--soft)"/>`})[s] ?? "";
const tile = (s, x, y) => (s === "0" ? "" : glyph(x, y, s, s.length > 3 ? 13 : 18));

function go(state, before) {
  const read = (text) => textRows(text).filter((row) => /^\s*\d+\s+[+XO]+/.test(row)).map((row) => [...row.trim().split(/\s+/)[1]]);
  const cells = read(state), old = before && read(before), n = cells.length, half = CELL / 2, end = n * CELL - half;
  const body = [html`<rect width="${n * CELL}" height="${n * CELL}" fill="var(--board)"/>`];
  for (let i = 0; i < n; i++) {
    const at = i * CELL + half;
    body.push(html`<path d="M${half} ${at}H${end}M${at} ${half}V${end}" stroke="var(--grid)"/>`);
  }
  cells.forEach((row, r) => row.forEach((s, c) => {
    const x = c * CELL + half, y = r * CELL + half;
    if (s !== "+") body.push(stone(x, y, s === "X" ? 0 : 1));
    if (old && old[r][c] !== s) body.push(html`<circle cx="${x}" cy="${y}" r="6" fill="var(--changed)" stroke="var(--stone-line)"/>`);
  }));
  return board(n * CELL, n * CELL, body, [..."ABCDEFGHJKLMNOPQRST"].slice(0, n), numbered(n), false);
}

function hex(state, before) { // Player 0 joins top and bottom, Player 1 left and right.
  const read = (text) => textRows(text).map((row) => row.trim().split(/\s+/));
  const cells = read(state), old = before && read(before), n = cells.length, m = cells[0].length;
  const r = 25, w = r * Math.sqrt(3), width = w * (m + (n - 1) / 2) + 24, height = r * (1.5 * n + 0.5) + 24;
  const corner = (x, y, k) => [x + r * Math.sin(k * Math.PI / 3), y - r * Math.cos(k * Math.PI / 3)].map((v) => v.toFixed(1)).join(" ");
  const body = [], edges = [];
  cells.forEach((row, i) => row.forEach((s, j) => {
    const x = 12 + w * (j + 0.5 + i / 2), y = 12 + r * (1 + 1.5 * i);
    const at = (k) => corner(x, y, k), changed = old && old[i][j] !== s && (old[i][j] === "." || s === ".");
    body.push(html`<path d="M${[0, 1, 2, 3, 4, 5].map(at).join("L")}Z" fill="${changed ? "var(--changed)" : "var(--board)"}" stroke="var(--grid)"/>`);
    if ("xyzX".includes(s)) body.push(disc(x, y, 0));
    else if ("opqO".includes(s)) body.push(disc(x, y, 1));
    else body.push(glyph(x, y, `${lettered(m)[j]}${i + 1}`, 10, "var(--soft)"));
    const edge = (from, player) => { edges.push(html`<path d="M${from.map(at).join("L")}" fill="none" stroke="var(--p${player})" stroke-width="4" stroke-linecap="round"/>`); };
    if (i === 0) edge([5, 0, 1], 0);
    if (i === n - 1) edge([4, 3, 2], 0);
    if (j === 0) edge([5, 4, 3], 1);
    if (j === m - 1) edge([0, 1, 2], 1);
  }));
  return board(width, height, [body, edges], [], [], false);
}

const card = (text, kind = "") => html`<span class="card ${kind}">${text}</span>`;
const line = (who, items) => html`<div class="cards"><span class="who">${who}</span>${items}</div>`;

function kuhn(state) {
  const [first, second, bets = ""] = state.trim().split(/\s+/);
  if (/\d/.test(bets)) throw new Error("hands of three stay text");
  const face = (c) => (c === undefined || c === "" ? card("?", "hidden") : card("JQK"[c] ?? c));
  const said = [...bets].map((b, i) => `Player ${i % 2}: ${b === "b" ? "bet" : "pass"}`).join(" · ");
  return [line("Player 0", [face(first)]), line("Player 1", [face(second)]), line("Betting", [html`<span class="text">${said || "–"}</span>`])];
}

function leduc(state) {
  const value = (name) => state.match(new RegExp(`${name}:(.*)`))[1].trim(); // of three players some are called otherwise
  const [open, first, second] = value("Cards \\(public player_0 player_1\\)").split(/\s+/).map(Number);
  const face = (c) => (c < 0 ? card("?", "hidden") : card("JQK"[c >> 1] + (c % 2 ? "♥" : "♠"), c % 2 ? "red" : ""));
  const said = (name) => value(name).split(/[\s,]+/).filter(Boolean).join(" · ") || "–";
  const money = value("Money \\(player_0 player_1\\)").split(/\s+/);
  return [
    line("Public", [face(open)]), line("Player 0", [face(first), `money ${money[0]}`]), line("Player 1", [face(second), `money ${money[1]}`]),
    line("Pot", [value("Pot")]), line("Round 1", [said("Round 1 sequence")]), line("Round 2", [said("Round 2 sequence")]),
  ];
}

function goofspiel(state) {
  return textRows(state).map((row) => {
    const [name, items] = row.split(/:\s*/), cards = /^P\d|Point card/.test(name);
    // Actions count from 0, cards from 1.
    const face = (v) => card(/actions/.test(name) ? Number(v) + 1 : v, "small");
    return line(name.replace("actions", "played").replace(/^P(\d)/, "Player $1"), cards ? items.trim().split(/\s+/).filter(Boolean).map(face) : [items]);
  });
}

function liarsDice(state) {
  const tokens = state.trim().split(/\s+/), dice = tokens.slice(0, 2).filter((t) => /^[1-6]+$/.test(t));
  const bids = tokens.filter((t) => /^(\d+-\d+|Liar)$/.test(t)); // other tokens say whose roll it is
  const faces = (t) => [...(t || "")].map((d) => html`<span class="card die">${"⚀⚁⚂⚃⚄⚅"[d - 1] ?? d}</span>`);
  const said = bids.map((b, i) => `Player ${i % 2}: ${b.replace(/(\d+)-(\d+)/, "$1 × $2")}`).join(" · ");
  return [...[0, 1].map((p) => line(`Player ${p}`, faces(dice[p]))), line("Bids", [html`<span class="text">${said || "–"}</span>`])];
}

const BOARDS = {
  tic_tac_toe: grid(plainCells, marks, counted(0)),
  phantom_ttt: grid(plainCells, marks, counted(0)),
  connect_four: grid(plainCells, discs, (cells) => ({columns: counted(0)(cells).columns})),
  othello: grid(othelloCells, (s, x, y) => ({x: stone(x, y, 0), o: stone(x, y, 1)})[s] ?? "", {columns: lettered(8), rows: [1, 2, 3, 4, 5, 6, 7, 8], top: true}),
  chess: grid(fenCells, chessPiece, (cells) => ({...sides(cells), wood: true})),
  checkers: grid(chequeredCells, checker, sides),
  clobber: grid(chequeredCells, (s, x, y) => ({o: disc(x, y, 0), x: disc(x, y, 1)})[s] ?? "", sides),
  amazons: grid(plainCells, amazon, (cells) => ({chequered: true, ...counted(1)(cells)})),
  2048: grid((state) => textRows(state).map((row) => row.trim().split(/\s+/)), tile, {}),
  go, hex, hex_small: hex, kuhn_poker: kuhn, leduc_poker: leduc,
  goofspiel, goofspiel_small: goofspiel, liars_dice: liarsDice, liars_dice_small: liarsDice,
};

function drawPosition(game, state, before) {
  const plain = html`<pre>${state}</pre>`;
  if (!BOARDS[game]) return plain;
  try { return BOARDS[game](state, before); } catch (error) { return plain; }
}
