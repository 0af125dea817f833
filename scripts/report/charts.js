// Charts as plain SVG. A panel's lines are {x, y, mean, low, high, label, colour, dash}.
const W = 400, H = 210, PAD = {left: 46, right: 10, top: 8, bottom: 22};
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "14 3", "8 3 2 3 2 3", "2 8", "14 3 6 3"];
const COLOURS = 7;

const colour = (i) => `var(--c${i % COLOURS})`;
// Marks that turn text around would reach beyond it: they made 62.5 of a number after a name 5.26.
const escapeText = (s) => String(s).replace(/[&<>"']|([\u202a-\u202e\u2066-\u2069])/g, (c, turns) => (turns ? "\ufffd" : `&#${c.charCodeAt(0)};`));
// Only html`...` makes markup. It escapes every value that is not markup itself.
class Markup { constructor(text) { this.text = text; } }
const shown = (value) => (value instanceof Markup ? value.text : Array.isArray(value) ? value.map(shown).join("") : escapeText(value ?? ""));
const html = (parts, ...values) => new Markup(parts.map((part, i) => (i ? shown(values[i - 1]) : "") + part).join(""));
const put = (element, markup) => { element.innerHTML = shown(markup); };

function short(v, digits = 3) {
  if (typeof v !== "number" || Number.isNaN(v)) return "–";
  const a = Math.abs(v);
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) return v.toExponential(digits - 2);
  if (a >= 1000) return v.toLocaleString("en", {maximumFractionDigits: Math.max(0, digits - 4)});
  return String(Number(v.toPrecision(digits)));
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), found = [];
  // Beyond 2 ** 53, counting on from ``first`` would never get any further.
  for (let i = 0; i < 4 * count && (first + i) * step <= high + step * 1e-9; i++) found.push(Number(((first + i) * step).toPrecision(12)));
  return found;
}

function extent(panel) {
  if (panel.limits) return panel.limits;
  let low = Infinity, high = -Infinity;
  for (const line of panel.lines) {
    // Not the band, which is wide over the first few steps and says little there.
    for (const v of (line.mean.length && panel.lines.length > 3 ? line.mean : line.y).filter((y) => y !== null)) { low = Math.min(low, v); high = Math.max(high, v); }
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low < high * 0.5 ? 0 : low - room, high + room];
}

function scales(panel) {
  const xs = panel.lines.map((l) => l.x);
  const x0 = Math.min(...xs.map((x) => x[0])), x1 = Math.max(...xs.map((x) => x[x.length - 1]));
  const [y0, y1] = extent(panel);
  const sx = (x) => PAD.left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (W - PAD.left - PAD.right);
  const sy = (y) => H - PAD.bottom - (Math.max(y0, Math.min(y1, y)) - y0) / (y1 - y0) * (H - PAD.top - PAD.bottom);
  return {sx, sy, x0, x1, y0, y1};
}

// Broken where there is no value; "h0" makes a dot of a value between two gaps.
const path = (xs, ys, s) => xs.map((x, i) => (ys[i] === null ? "" : `${(ys[i - 1] ?? null) === null ? "M" : "L"}${s.sx(x).toFixed(1)} ${s.sy(ys[i]).toFixed(1)}h0`)).join("");
function area(xs, low, high, s) {
  const at = xs.map((_, i) => i).filter((i) => high[i] !== null), of = (values) => at.map((i) => values[i]);
  return path(of(xs), of(high), s) + path(of(xs).reverse(), of(low).reverse(), s).replace("M", "L") + "Z";
}

function drawLine(line, panel, s) {
  const paint = html`stroke="${colour(line.colour)}" fill="none"`, dash = html`stroke-dasharray="${DASHES[line.dash % DASHES.length]}"`;
  const out = [];
  if (line.mean.length) {
    if (panel.lines.length <= 8) out.push(html`<path d="${area(line.x, line.low, line.high, s)}" fill="${colour(line.colour)}" opacity=".16"/>`);
    if (panel.lines.length <= 3) out.push(html`<path d="${path(line.x, line.y, s)}" ${paint} stroke-width=".8" opacity=".35"/>`);
  }
  const ys = line.mean.length ? line.mean : line.y;
  out.push(html`<path d="${path(line.x, ys, s)}" ${paint} ${dash} stroke-width="1.7" stroke-linejoin="round" stroke-linecap="round"/>`);
  if (panel.marks || line.x.length === 1) {
    out.push(line.x.map((x, i) => ys[i] === null ? "" : html`<circle cx="${s.sx(x)}" cy="${s.sy(ys[i])}" r="3" fill="${colour(line.colour)}"/>`));
  }
  return html`<g class="line">${out}</g>`;
}

function drawAxes(s, stages) {
  const out = [], ys = ticks(s.y0, s.y1, 5);
  const digits = [3, 4, 5, 6, 7].find((n) => new Set(ys.map((y) => short(y, n))).size === ys.length) ?? 8;
  for (const y of ys) {
    out.push(html`<line class="axis" x1="${PAD.left}" x2="${W - PAD.right}" y1="${s.sy(y)}" y2="${s.sy(y)}"/>`);
    out.push(html`<text x="${PAD.left - 6}" y="${s.sy(y) + 3.5}" text-anchor="end">${short(y, digits)}</text>`);
  }
  for (const x of ticks(s.x0, s.x1 > s.x0 ? s.x1 : s.x0 + 1, 5).filter((t) => t <= s.x1 && Number.isInteger(t))) {
    out.push(html`<text x="${s.sx(x)}" y="${H - 6}" text-anchor="middle">${short(x)}</text>`);
  }
  for (const [step, text] of stages.filter(([at]) => at >= s.x0 && at <= s.x1)) {
    out.push(html`<line class="stage" x1="${s.sx(step)}" x2="${s.sx(step)}" y1="${PAD.top}" y2="${H - PAD.bottom}"><title>${text}</title></line>`);
  }
  return out;
}

function legend(entries) {
  const key = (e) => html`<svg viewBox="0 0 22 8"><line x1="0" x2="22" y1="4" y2="4" stroke="${colour(e.colour)}" stroke-width="2.5" stroke-dasharray="${DASHES[e.dash % DASHES.length]}"/></svg>`;
  return entries.map((e, i) => html`<span data-line="${i}">${key(e)}${e.label}</span>`);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return x - xs[low] <= xs[high] - x ? low : high;
}

function readout(panel, x) {
  const steps = panel.lines.map((e) => e.x[nearest(e.x, x)]);
  const step = steps.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
  const value = (e) => (step < e.x[0] || step > e.x.at(-1) ? NaN : (e.mean.length ? e.mean : e.y)[nearest(e.x, step)]);
  const stages = new Map(panel.stages.filter(([from]) => from <= step).map(([, name, run]) => [run, name]));
  const lines = panel.lines.map((e) => html`<br>${legend([e])} <b>${short(value(e))}</b>`);
  return html`step ${step.toLocaleString("en")}${[...stages].map(([run, name]) => ` · ${run}${name}`)}${lines}`;
}

function chart(panel) {
  const box = document.createElement("div"), s = scales(panel);
  box.className = "chart";
  put(box, html`<h3>${panel.title} <small>${panel.unit || ""}</small></h3>
    <svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${panel.title}">
    ${drawAxes(s, panel.stages)}${panel.lines.map((l) => drawLine(l, panel, s))}
    <line class="stage cursor" y1="${PAD.top}" y2="${H - PAD.bottom}" visibility="hidden"/></svg>
    <div class="legend">${data.runs.length > 1 || panel.keys.length > 1 || panel.keys[0].endsWith("/") ? legend(panel.lines) : ""}</div><div class="tip" hidden></div>`);
  const svg = box.querySelector("svg"), tip = box.querySelector(".tip"), cursor = box.querySelector(".cursor");
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width * W;
    const share = Math.max(0, Math.min(1, (at - PAD.left) / (W - PAD.left - PAD.right)));
    const x = s.x0 + share * (s.x1 - s.x0);
    put(tip, readout(panel, x));
    tip.hidden = false;
    tip.style.left = share > 0.5 ? "54px" : "auto";
    tip.style.right = share > 0.5 ? "auto" : "16px";
    tip.style.top = "34px";
    cursor.setAttribute("x1", s.sx(x));
    cursor.setAttribute("x2", s.sx(x));
    cursor.setAttribute("visibility", "visible");
  });
  box.querySelector(".legend").addEventListener("pointerover", (event) => {
    const chosen = event.target.closest("[data-line]")?.dataset.line;
    svg.querySelectorAll(".line").forEach((g, i) => g.classList.toggle("dim", chosen !== undefined && String(i) !== chosen));
  });
  box.querySelector(".legend").addEventListener("pointerleave", () => svg.querySelectorAll(".dim").forEach((g) => g.classList.remove("dim")));
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  return box;
}
