// Assembles the page from the embedded data and runs the replay viewer.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const percent = (v, digits = 0) => (v === null || v === undefined ? "–" : `${Number((100 * v).toFixed(digits))} %`);

function setTheme(theme) { document.documentElement.dataset.theme = theme; }
const preferred = matchMedia("(prefers-color-scheme: dark)");
setTheme(preferred.matches ? "dark" : "light");
preferred.addEventListener("change", () => setTheme(preferred.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

function tiles() {
  const tile = (value, label) => html`<div class="tile"><b>${value}</b><span>${label}</span></div>`;
  const title = (run) => (data.runs.length > 1 ? html`<h3>${run.name}</h3>` : "");
  return data.runs.map((run) => {
    const last = run.last, out = [tile(short(run.steps), run.total > run.steps ? `of ${short(run.total)} steps` : "steps")];
    const nash = Object.entries(run.summary.games || {}).filter(([, g]) => typeof g.nash_conv === "number");
    for (const [game, g] of nash) out.push(tile(short(g.nash_conv), nash.length > 1 ? `NashConv, ${game}` : "NashConv"));
    const games = Object.values(run.summary.games || {}), known = games.filter((g) => typeof g.share === "number").length;
    const some = known < games.length ? `, ${known} of ${games.length} games` : "";
    if (typeof run.summary.mean_share_of_ceiling === "number") out.push(tile(percent(run.summary.mean_share_of_ceiling), `mean share of ceiling${spread(run.summary.mean_share_interval)}${some}`));
    if (typeof last.success_rate === "number") out.push(tile(percent(last.window_success ?? last.success_rate), `success, last ${(last.window_success ?? null) === null ? "step" : "window"}`));
    if (typeof last.score_mean === "number") out.push(tile(short(last.score_mean), "score, last step"));
    if (last.stage) out.push(tile(last.stage, "stage"));
    const facts = run.heading.map(([head, fact]) => html`<span><b>${head}</b> ${fact}</span>`);
    return html`<div class="tiles">${title(run)}${out}</div><p class="facts">${facts}</p>`;
  });
}

const number = (v) => (typeof v === "number" ? v.toFixed(3) : "–");
const interval = (g) => (Array.isArray(g.interval) ? g.interval.map(number).join(" to ") : "–");
const freely = (f) => (f ? `${number(f.value)}, ${(f.legal_rate ?? null) === null ? "no answers" : `${percent(f.legal_rate < 1 ? Math.min(f.legal_rate, 0.999) : f.legal_rate, 1)} legal`}` : "–");
const spread = (ends) => (Array.isArray(ends) ? ` (${ends.map((end) => percent(end)).join(" to ")})` : "");
const within = (v) => Math.max(0, Math.min(1, v)) * 100; // per cent of a bar
function bar(g) {
  if (typeof g.share !== "number") return "–";
  const sampled = Array.isArray(g.share_interval), [low, high] = sampled ? g.share_interval.map(within) : [0, 0];
  const ends = html`<i class="ends" style="left:${low}%;width:${high - low}%"></i>`;
  return html`<span class="share" title="${sampled ? `95 %${spread(g.share_interval)}` : "exact"}"><i style="width:${within(g.share)}%"></i>${sampled ? ends : ""}</span>${percent(g.share).padStart(5, "\u2007")}`;
}
// Head, meaning and cell of each column; columns that are unknown for every game are left out.
const MEASURES = [
  ["Before", "mean value of sampled play before training, on the deals of After", (g) => number(g.before)],
  ["After", "mean value of sampled play after training", (g) => number(g.after)],
  ["95 % interval", "of After", interval],
  ["Less luck", "After without the luck of the deals and of the opponent's random moves, with its 95 % interval", (g) => (typeof g.adjusted === "number" && typeof g.exact_after !== "number" && Array.isArray(g.adjusted_interval) ? `${number(g.adjusted)}, ${g.adjusted_interval.map(number).join(" to ")}` : "–")],
  ["Exact value", "expected value after training, computed at every position", (g) => number(g.exact_after)],
  ["Ceiling", "value of the best response to uniform random play", (g) => number(g.ceiling)],
  ["Share of ceiling", "where the exact value lies between random play (0 %) and the ceiling (100 %), or that of sampled play (less luck where that is known), with a line for its 95 % interval", bar],
  ["NashConv before", "NashConv before training", (g) => number(g.nash_conv_before)],
  ["NashConv", "what both seats together could gain by playing their best against the policy, in the game's own units (chips); 0 at an equilibrium", (g) => number(g.nash_conv)],
  ["Free play before", "Free play before training", (g) => freely(g.free_play_before)],
  ["Free play", "the same games with answers that nothing constrains", (g) => freely(g.free_play)],
  ["Failed", "games lost to infrastructure, which nothing else counts", (g) => g.failed || "–"],
];

function evaluation() {
  const runs = data.runs.filter((run) => run.games.length);
  const without = data.runs.filter((run) => !runs.includes(run)).map((run) => html`<p class="note">${run.name}: ${"outdated" in run.summary ? `has gone on since it was evaluated at step ${short(run.summary.outdated)}` : "no summary.json"}; a run is evaluated at its end.</p>`);
  const games = [...new Set(runs.flatMap((run) => run.games))], many = runs.length > 1;
  const programs = runs.every((run) => (run.config.env || {}).env_type === "trace");
  const of = (run, game) => run.summary.games[game] || {};
  const known = MEASURES.filter(([head, , cell]) => (!many || !["Before", "Less luck", "Ceiling", "NashConv before", "Free play before"].includes(head))
    && runs.some((run) => games.some((game) => shown(cell(of(run, game))) !== "–")));
  const above = many ? html`<tr><th></th>${runs.map((run) => html`<th colspan="${known.length}" class="of">${run.name}</th>`)}</tr>` : "";
  const heads = runs.map(() => known.map(([head, meaning]) => html`<th title="${meaning}">${head}</th>`));
  const rows = games.map((game) => html`<tr><td>${game}</td>${runs.map((run) => known.map(([, , cell]) => html`<td>${cell(of(run, game))}</td>`))}</tr>`);
  const legend = html`<p class="note">Values are 2 × score − 1${programs ? ": −1 wrong, 1 right." : " against uniform random play: from −1, the greatest loss, to 1, the greatest win."} ${known.map(([head, meaning]) => html`<b>${head}</b>: ${meaning}. `)}</p>`;
  const table = games.length ? html`<div class="sheet"><table><thead>${above}<tr><th>Game</th>${heads}</tr></thead><tbody>${rows}</tbody></table></div>${legend}` : "";
  return [table, without, runs.map(english)];
}

function english(run) {
  const found = run.summary.english;
  if (!found || !Array.isArray(found.answers)) return "";
  const rows = found.answers.map(([question, before, after]) => html`<tr><td>${question}</td><td>${before}</td><td>${after === before ? "the same" : after}</td></tr>`);
  const whose = data.runs.length > 1 ? `${run.name}: ` : "";
  return html`<details><summary>${whose}English: perplexity ${short(found.perplexity_before)} before, ${short(found.perplexity)} after; ${found.answers.length} answers</summary>
    <table class="answers"><thead><tr><th>Question</th><th>Before</th><th>After</th></tr></thead><tbody>${rows}</tbody></table></details>`;
}

function flatten(value, prefix, into) {
  for (const [key, item] of Object.entries(value)) {
    const name = prefix ? `${prefix}.${key}` : key;
    if (item && typeof item === "object" && !Array.isArray(item) && Object.keys(item).length) flatten(item, name, into);
    else into[name] = JSON.stringify(item);
  }
  return into;
}

function configuration() {
  const flat = data.runs.map((run) => flatten(run.config, "", {}));
  const keys = [...new Set(flat.flatMap(Object.keys))];
  if (!keys.length) return html`<p class="note">No run_config.json.</p>`;
  const differs = (key) => new Set(flat.map((f) => f[key])).size > 1;
  const told = flat.length > 1 ? keys.filter(differs) : keys;
  const rows = told.map((key) => html`<tr><td>${key.split(".").map((part, i) => [i ? html`.<wbr>` : "", part])}</td>${flat.map((f) => html`<td>${f[key] ?? "–"}</td>`)}</tr>`);
  const heads = data.runs.map((run) => html`<th style="text-align:left">${run.name}</th>`);
  const title = flat.length > 1 ? `${told.length} settings differ, ${keys.length - told.length} are the same` : `${keys.length} settings`;
  return html`<details ${flat.length > 1 ? "open" : ""}><summary>${title}</summary><div class="sheet"><table><thead><tr><th>Setting</th>${heads}</tr></thead><tbody>${rows}</tbody></table></div></details>`;
}

// --- Replay -----------------------------------------------------------------------------------------------------

const view = {run: 0, episode: null, frame: 0};
const fill = (select, options) => { put(select, options.map(([value, text]) => html`<option value="${value}">${text}</option>`)); };

function verdict(episode) {
  if (episode.outcome && episode.outcome !== "finished") return [episode.outcome, "loss"];
  const {score, seat, returns} = episode;
  if (typeof score !== "number" || (seat ?? null) === null) return ["finished", ""];
  // With three players a score of 0.5 is not a draw: what counts is who gained from the others.
  const zeroSum = Array.isArray(returns) && returns.length > 1 && Math.abs(returns.reduce((a, b) => a + b, 0)) < 1e-6;
  const ahead = zeroSum ? returns[seat] : score - 0.5;
  return ahead > 0 ? ["won", "win"] : ahead < 0 ? ["lost", "loss"] : ["drawn", ""];
}

function episodeLabel(episode) {
  const step = episode.step === undefined ? "" : `step ${episode.step} · `;
  const score = typeof episode.score === "number" ? ` (${episode.score.toFixed(2)})` : "";
  return `${step}${episode.game} · ${episode.opponent ? `against ${episode.opponent} · ` : ""}${verdict(episode)[0]}${score}`;
}

function pickRun() {
  view.run = Number($("pick-run").value);
  const games = [...new Set(data.runs[view.run].episodes.map((e) => e.game))].sort();
  fill($("pick-game"), [["", `all ${games.length}`], ...games.map((g) => [g, g])]);
  pickGame();
}

function pickGame() {
  const game = $("pick-game").value, all = data.runs[view.run].episodes;
  const shown = all.map((e, i) => [i, e]).filter(([, e]) => !game || e.game === game);
  fill($("pick-episode"), shown.map(([i, e]) => [i, episodeLabel(e)]));
  pickEpisode();
}

function pickEpisode() {
  view.episode = data.runs[view.run].episodes[Number($("pick-episode").value)];
  const {frames} = view.episode;
  $("slider").max = frames.length - 1;
  put($("moves"), frames.map((frame, i) => html`<li data-frame="${i}">${moveText(frame, i)}</li>`));
  show(0);
}

// Backgammon's action names begin with the action's id.
const named = (id, name) => String(name).startsWith(`${id} - `) ? name.slice(`${id} - `.length) : name;

function moveText(frame, index) {
  const players = [...new Set(frame.moves.map((m) => m.player))];
  const made = (player) => frame.moves.filter((m) => m.player === player).map((m) => named(m.action, m.name)).join(", ");
  if (players.length) return players.map((p) => html`<div><span class="who">${who(p)}</span><span>${made(p)}</span></div>`);
  return frame.turns?.length ? `turn ${index + 1}` : "end";
}

function who(player) {
  if (player === -1) return "chance";
  const seats = new Set((view.episode.turns || []).map((t) => t.seat));
  const role = player === view.episode.seat ? "model" : seats.has(player) ? "model too" : view.episode.opponent ?? "opponent";
  return `${role} (${player})`;
}

function bars(turn) {
  const probs = turn.probs || {}, taken = String(turn.action), legal = turn.legal || {};
  const option = (id) => `${id} · ${named(id, legal[id])}`, share = (p) => (typeof p === "number" ? `${(100 * p).toFixed(1)} %` : "");
  const rows = Object.keys(legal).sort((a, b) => (probs[b] ?? 0) - (probs[a] ?? 0)).map((id) => {
    const mark = id === taken ? "taken" : "", p = probs[id], width = typeof p === "number" ? p * 100 : 0;
    return html`<span class="${mark}">${option(id)}</span><span class="track ${mark}"><i style="width:${width}%"></i></span><span class="p ${mark}">${share(p)}</span>`;
  });
  const value = typeof turn.value === "number" ? html`<p class="note">Value: ${turn.value.toFixed(3)} (what the critic expects; 0 is as usual in this game and seat, in standard deviations)</p>` : "";
  const why = turn.truncated ? "The prompt left no room for an answer, so the game was cut off here." : "This answer was not a legal action.";
  const lost = turn.action === null && (turn.truncated || Object.keys(legal).length) ? html`<p class="note loss">${why}</p>` : "";
  const answer = taken in legal ? html`<p class="note">Answer: <b>${option(taken)}</b> ${share(probs[taken])}</p>` : "";
  return html`${answer}${value}${lost}<div class="scroll"><div class="choice">${rows}</div></div>`;
}

function conversation(upTo, seat) {
  const said = (role, text, now) => html`<div class="said ${role} ${now ? "now" : ""}"><b>${role}</b><pre>${text}</pre></div>`;
  const turns = (view.episode.turns || []).slice(0, upTo + 1).filter((turn) => turn.seat === seat);
  const read = turns.at(-1)?.past ?? turns.length - 1;  // earlier turns that the prompt held; unknown of older runs
  const title = (i) => (i === turns.length - 1 - read && i > 0 ? html`<p class="note">The turns above are no longer shown to the model (the system message is)</p>` : "");
  return turns.map((turn, i) => {
    const now = i === turns.length - 1;
    return [title(i), turn.system ? said("system", turn.system, false) : "", said("user", turn.user, now), said("assistant", turn.answer, now)];
  });
}

function showTurn(frame) {
  const turns = view.episode.turns || [], own = frame.turns || [];
  const at = own.length ? own[own.length - 1] : turns.length && view.frame === view.episode.frames.length - 1 ? turns.length - 1 : -1;
  const mover = frame.moves.length ? `To move: ${who(frame.moves[0].player)}` : "The game is over";
  put($("choice-title"), own.length ? "What the model chose from" : mover);
  put($("choice"), own.map((i) => [own.length > 1 ? html`<h3>Player ${turns[i].seat}</h3>` : "", bars(turns[i])]));
  const earlier = Math.max(at, ...view.episode.frames.slice(0, view.frame).flatMap((f) => f.turns || []));
  put($("conversation"), earlier < 0 ? html`<p class="note">Nothing said yet.</p>` : conversation(earlier, turns[earlier].seat));
  const now = $("conversation").querySelector(".now");
  $("conversation").scrollTop = now ? now.offsetTop - $("conversation").offsetTop : 0;
}

function show(index) {
  const {frames} = view.episode;
  view.frame = Math.max(0, Math.min(frames.length - 1, index));
  const frame = frames[view.frame], before = view.frame ? frames[view.frame - 1].state : null, [word, tone] = verdict(view.episode);
  const returns = Array.isArray(view.episode.returns) ? ` · returns ${view.episode.returns.map((v) => short(v)).join(" / ")}` : "";
  const seat = (view.episode.seat ?? null) === null ? "" : ` · the model is Player ${view.episode.seat}`;
  const trouble = view.episode.error ?? (view.episode.lost ? `turn by turn, as it cannot be replayed: ${view.episode.lost}` : "");
  const error = trouble ? ` · ${trouble}` : "";
  put($("outcome"), html`<span class="${tone}">${word}</span>${returns + seat + error}`);
  put($("board"), frame.words ? html`<pre>${frame.state}</pre>` : drawPosition(view.episode.game, frame.text ?? frame.state, before));
  $("moves").querySelector(".now")?.classList.remove("now");
  $("moves").children[view.frame].classList.add("now");
  const current = $("moves").querySelector(".now");
  $("moves").scrollTop = current.offsetTop - $("moves").offsetTop - 70;
  $("slider").value = view.frame;
  $("where").textContent = `${view.frame + 1} / ${frames.length}`;
  showTurn(frame);
}

function startReplay() {
  if (!data.runs.some((run) => run.episodes.length)) {
    put($("viewer"), html`<p class="note">No games to replay yet: they are recorded at the end of a run.</p>`);
    return;
  }
  const runs = data.runs.map((run, i) => [i, run.name]).filter(([i]) => data.runs[i].episodes.length);
  fill($("pick-run"), runs);
  $("pick-run").addEventListener("change", pickRun);
  $("pick-game").addEventListener("change", pickGame);
  $("pick-episode").addEventListener("change", pickEpisode);
  const step = {first: () => 0, back: () => view.frame - 1, next: () => view.frame + 1, last: () => Infinity};
  for (const [id, where] of Object.entries(step)) $(id).addEventListener("click", () => show(where()));
  $("slider").addEventListener("input", () => show(Number($("slider").value)));
  $("moves").addEventListener("click", (event) => { const item = event.target.closest("li"); if (item) show(Number(item.dataset.frame)); });
  const keys = {Home: "first", ArrowLeft: "back", ArrowRight: "next", End: "last"};
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    show(step[keys[event.key]]());
  });
  pickRun();
}

const names = data.runs.map((run) => run.name).join(" · ");
document.title = `${names}: run report`;
put($("title"), names + (data.seen ? ` · going on, as of ${data.seen}` : ""));
put($("tiles"), tiles());
put($("tables"), evaluation());
const stages = data.runs.flatMap((run) => run.stages.map(([step, text]) => [step, text, data.runs.length > 1 ? `${run.name}: ` : ""]));
put($("curves-note"), `Bold: mean of the last ${data.runs.map((r) => r.window).join(" / ")} steps that have a value, with its 95 % band (Student's t).${stages.length ? ` Dotted: stage changes (${stages.map(([step, text, run]) => `${step}: ${run}${text}`).join(", ")}).` : ""}`);
const drawn = data.panels.some((panel) => panel.first) ? (panel) => panel.first : () => true;
for (const panel of data.panels) $(drawn(panel) ? "charts" : "others").append(chart({...panel, stages}));
$("more").textContent = `${data.panels.filter((panel) => !drawn(panel)).length} more charts`;
put($("config"), configuration());
startReplay();
