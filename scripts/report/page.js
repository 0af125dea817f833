// Assembles the page from the embedded data and runs the replay viewer.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const percent = (v) => (v === null || v === undefined ? "–" : `${(100 * v).toFixed(0)} %`);

function setTheme(theme) { document.documentElement.dataset.theme = theme; }
const preferred = matchMedia("(prefers-color-scheme: dark)");
setTheme(preferred.matches ? "dark" : "light");
preferred.addEventListener("change", () => setTheme(preferred.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

function tiles() {
  const tile = (value, label) => html`<div class="tile"><b>${value}</b><span>${label}</span></div>`;
  const heading = (run) => (data.runs.length > 1 ? html`<h3>${run.name}</h3>` : "");
  return data.runs.map((run) => {
    const last = run.last, out = [tile(short(run.steps), "steps")];
    if (typeof last.success_rate === "number") out.push(tile(percent(last.window_success ?? last.success_rate), "success, last window"));
    if (typeof last.score_mean === "number") out.push(tile(short(last.score_mean), "score, last step"));
    if (typeof run.summary.mean_share_of_ceiling === "number") out.push(tile(percent(run.summary.mean_share_of_ceiling), "mean share of ceiling"));
    if (last.stage) out.push(tile(last.stage, "stage"));
    return html`<div class="tiles">${heading(run)}${out}</div>`;
  });
}

function evaluation(run) {
  const games = Object.entries(run.summary.games || {});
  if (!games.length) return html`<p class="note">${run.name}: no summary.json, so the run was not evaluated.</p>`;
  const number = (v) => (typeof v === "number" ? v.toFixed(3) : "–");
  const free = games.some(([, g]) => g.free_play), freely = (f) => (f ? `${number(f.value)}, ${percent(f.legal_rate)} legal` : "–");
  const rows = games.map(([name, g]) => html`<tr><td>${name}</td><td>${number(g.before)}</td><td>${number(g.after)}</td>
    <td>${Array.isArray(g.interval) ? g.interval.map(number).join(" to ") : "–"}</td><td>${number(g.ceiling)}</td>
    <td class="wide">${typeof g.share === "number" ? html`<span class="share"><i style="width:${Math.max(0, Math.min(1, g.share)) * 100}%"></i></span>${percent(g.share)}` : "–"}</td>
    <td>${typeof g.exact_after === "number" ? number(g.exact_after) : g.exact ? "yes" : "–"}</td>${free ? html`<td>${freely(g.free_play_before)}</td><td>${freely(g.free_play)}</td>` : ""}</tr>`);
  const heading = data.runs.length > 1 ? html`<h3>${run.name}</h3>` : "";
  return html`${heading}<table><thead><tr><th>Game</th><th>Before</th><th>After</th><th>95 % interval</th><th>Ceiling</th><th class="wide">Share of ceiling</th><th>Exact value</th>${free ? html`<th>Free play before</th><th>after</th>` : ""}</tr></thead><tbody>${rows}</tbody></table>${english(run)}`;
}

function english(run) {
  const found = run.summary.english;
  if (!found || !Array.isArray(found.answers)) return "";
  const rows = found.answers.map(([question, before, after]) => html`<tr><td>${question}</td><td>${before}</td><td>${after === before ? "the same" : after}</td></tr>`);
  return html`<details><summary>English: perplexity ${short(found.perplexity_before)} before, ${short(found.perplexity)} after; ${found.answers.length} answers</summary>
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
  const rows = keys.map((key) => html`<tr class="${differs(key) ? "differs" : ""}"><td>${key}</td>${flat.map((f) => html`<td>${f[key] ?? "–"}</td>`)}</tr>`);
  const heads = data.runs.map((run) => html`<th style="text-align:left">${run.name}</th>`);
  return html`<details ${data.runs.length > 1 ? "open" : ""}><summary>${keys.length} settings</summary><table><thead><tr><th>Setting</th>${heads}</tr></thead><tbody>${rows}</tbody></table></details>`;
}

// --- Replay -----------------------------------------------------------------------------------------------------

const view = {run: 0, episode: null, frame: 0};
const fill = (select, options) => { put(select, options.map(([value, text]) => html`<option value="${value}">${text}</option>`)); };

function verdict(episode) {
  if (episode.outcome && episode.outcome !== "finished") return [episode.outcome, "loss"];
  if (typeof episode.score !== "number" || (episode.seat ?? null) === null) return ["finished", ""];
  return episode.score > 0.5 ? ["won", "win"] : episode.score < 0.5 ? ["lost", "loss"] : ["drawn", ""];
}

function episodeLabel(episode) {
  const step = episode.step === undefined ? "" : `step ${episode.step} · `;
  const score = typeof episode.score === "number" ? ` (${episode.score.toFixed(2)})` : "";
  return `${step}${episode.game} · against ${episode.opponent ?? "?"} · ${verdict(episode)[0]}${score}`;
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

// Backgammon's names begin with the action's number.
const named = (id, name) => (name.startsWith(`${id} - `) ? name.slice(`${id} - `.length) : name);

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
  const value = typeof turn.value === "number" ? html`<p class="note">Value: ${turn.value.toFixed(3)} (expected outcome, −1 to 1)</p>` : "";
  const lost = turn.action === null ? html`<p class="note loss">This answer was not a legal action.</p>` : "";
  const answer = taken in legal ? html`<p class="note">Answer: <b>${option(taken)}</b> ${share(probs[taken])}</p>` : "";
  return html`${answer}${value}${lost}<div class="scroll"><div class="choice">${rows}</div></div>`;
}

function conversation(upTo, seat) {
  const said = (role, text, now) => html`<div class="said ${role} ${now ? "now" : ""}"><b>${role}</b><pre>${text}</pre></div>`;
  return (view.episode.turns || []).slice(0, upTo + 1).map((turn, i) => {
    if (turn.seat !== seat) return "";
    const now = i === upTo;
    return [turn.system ? said("system", turn.system, false) : "", said("user", turn.user, now), said("assistant", turn.answer, now)];
  });
}

function showTurn(frame) {
  const turns = view.episode.turns || [], own = frame.turns || [];
  const at = own.length ? own[own.length - 1] : turns.length && view.frame === view.episode.frames.length - 1 ? turns.length - 1 : -1;
  const mover = frame.moves.length ? `To move: ${who(frame.moves[0].player)}` : "The game is over";
  $("choice-title").textContent = own.length ? "What the model chose from" : mover;
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
  const returns = Array.isArray(view.episode.returns) ? ` · returns ${view.episode.returns.map(short).join(" / ")}` : "";
  const seat = (view.episode.seat ?? null) === null ? "" : ` · the model is Player ${view.episode.seat}`;
  put($("outcome"), html`<span class="${tone}">${word}</span>${returns + seat}`);
  put($("board"), drawPosition(view.episode.game, frame.state, before));
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
    put($("viewer"), html`<p class="note">No episodes.jsonl, or it is empty: there is nothing to replay.</p>`);
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
$("title").textContent = names;
put($("tiles"), tiles());
put($("tables"), data.runs.map(evaluation));
const stages = data.runs.flatMap((run) => run.stages);
$("curves-note").textContent = `Bold: mean of the last ${data.runs.map((r) => r.window).join(" / ")} steps, with its 95 % band (1.96 standard errors).${stages.length ? ` Dotted: stage changes (${stages.map(([step, text]) => `${step}: ${text}`).join(", ")}).` : ""}`;
for (const panel of data.panels) $("charts").append(chart({...panel, stages}));
put($("config"), configuration());
startReplay();
