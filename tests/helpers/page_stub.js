// Runs a report's script where there is no browser: prints the markup and text given to each element, as JSON.
// node page_stub.js REPORT.html  (its policy, its data and its script are taken from the page)
const page = require("fs").readFileSync(process.argv[2], "utf8");
const between = (start, stop) => page.split(start)[1].split(stop)[0];
const said = [];
function element(name) {
  const known = {dataset: {}, style: {}, children: [], classList: {add() {}, remove() {}, toggle() {}}};
  return new Proxy(known, {
    get(_, key) {
      if (key === "textContent" && name === "data") return between('id="data">', "</script>");
      if (key === "children") return new Proxy([], {get: () => element(`${name} child`)});
      if (key === "querySelectorAll") return () => [];
      if (key === "querySelector") return () => element(`${name} part`);
      if (key === "value") return known.value ?? "0";
      if (key === "append") return () => {};
      return key in known ? known[key] : () => element(name);
    },
    set(_, key, value) {
      if (key === "innerHTML") said.push([name, value]);
      known[key] = value;
      return true;
    },
  });
}
const elements = {};
globalThis.document = {documentElement: element("root"), getElementById: (id) => (elements[id] ??= element(id)),
  createElement: element, addEventListener() {}};
globalThis.matchMedia = () => ({matches: false, addEventListener() {}});
const script = between("<script>", "</script>");
new Function(`${script}
  pickGame = () => data.runs.forEach((run, r) => run.episodes.forEach((_, e) => {
    view.run = r; $("pick-episode").value = e; pickEpisode();
    for (const i of view.episode.frames.keys()) show(i);
  }));
  pickGame();`)();
console.log(JSON.stringify(said));
