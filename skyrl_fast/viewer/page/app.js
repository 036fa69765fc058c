// The page: state, addresses (#/17, #/charts), keys, theme.
"use strict";

(function (SF) {
  const byId = (id) => document.getElementById(id);
  const state = { index: -1, mode: "advantage", tab: "trajectories" };
  let list = null;
  let filters = null;
  let shown = null;
  let wanted = 0; // number of the latest request for a trajectory
  let charts = null;

  const HINT = "Point at a token to see its numbers; in a response the arrow keys move between tokens.";
  const KEYS = [
    ["j, k or ↓, ↑", "next, previous trajectory of the list"],
    ["], [", "next, previous trajectory of the group"],
    ["n, p", "next, previous turn"],
    ["→, ←", "in a response or a chart: next, previous token or step"],
    ["0 1 2 3 4", "colours: none, advantage, log-probability, trainer − engine, staleness"],
    ["/", "filter by uid"],
    ["x", "clear the filters"],
    ["c", "charts or trajectories"],
    ["t", "light or dark"],
    ["?", "this list of keys"],
  ];

  /** Announce text to a screen reader. */
  SF.say = (text) => {
    byId("spoken").textContent = text;
  };

  /** Show an error's message above the page. */
  SF.showProblem = function (error) {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
  };

  function open(index) {
    const number = ++wanted;
    state.index = index;
    list.mark(index);
    history.replaceState(null, "", `#/${index}`);
    return SF.loadTrajectory(index).then((details) => {
      if (number !== wanted) return; // superseded by a later request
      byId("problem").hidden = true;
      SF.followSummaries(details.turns);
      shown = SF.showTrajectory(byId("body"), index, details, state.mode, showToken);
      showForest(details);
      SF.showGroup(byId("group"), index, open);
    }, SF.showProblem);
  }

  /** Draw the calls, and mark the turn that is being read. */
  function showForest(details) {
    const mark = SF.showForest(byId("forest"), details, toTurn);
    let waits = false;
    byId("body").onscroll = () => {
      if (waits) return;
      waits = true;
      requestAnimationFrame(() => {
        waits = false;
        mark(currentTurn());
      });
    };
    mark(0);
  }

  function turnTops() {
    const turns = [...document.querySelectorAll("section.turn")];
    const top = byId("body").getBoundingClientRect().top;
    return [turns, turns.map((turn) => turn.getBoundingClientRect().top - top)];
  }

  /** Return the number of the last turn that begins in the upper part of the pane. */
  function currentTurn() {
    const limit = byId("body").clientHeight / 3;
    return Math.max(0, turnTops()[1].findLastIndex((y) => y < limit));
  }

  function toTurn(number) {
    const turn = document.querySelectorAll("section.turn")[number];
    turn.scrollIntoView({ block: "start" });
    turn.focus({ preventScroll: true });
  }

  function showToken(text, spoken) {
    byId("token").textContent = text || HINT;
    if (spoken) SF.say(text);
  }

  function setMode(mode) {
    state.mode = mode;
    for (const button of byId("modes").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    }
    byId("legend").replaceChildren(SF.legend(mode));
    if (shown) shown.paint(mode);
  }

  function makeReading() {
    const modes = SF.el(
      "div",
      { id: "modes", role: "group", "aria-label": "Colour of trained tokens" },
      SF.el("span", {}, "colour by"),
    );
    if (!SF.columns.staleness.some((age) => age > 0)) delete SF.MODES.age; // no stale tokens in this run
    for (const [mode, { key, name }] of Object.entries(SF.MODES)) {
      const button = SF.el(
        "button",
        { type: "button", "data-mode": mode, "aria-pressed": "false", title: `${name} (${key})` },
        name,
      );
      button.addEventListener("click", () => setMode(mode));
      modes.append(button);
    }
    byId("reading").append(
      SF.el("div", { class: "colours" }, modes, SF.el("div", { id: "legend" })),
      SF.el("div", { id: "forest", hidden: true }),
      SF.el("div", { id: "body", tabindex: "0", role: "document", "aria-label": "Turns" }),
      SF.el("p", { id: "token", class: "token" }, HINT),
    );
  }

  function showTab(tab) {
    state.tab = tab;
    for (const name of ["trajectories", "charts"]) {
      const chosen = name === tab;
      byId(`tab-${name}`).setAttribute("aria-selected", String(chosen));
      byId(`tab-${name}`).tabIndex = chosen ? 0 : -1;
      byId(`panel-${name}`).hidden = !chosen;
    }
    if (tab === "charts") {
      history.replaceState(null, "", "#/charts");
      charts =
        charts ||
        SF.loadData("metrics").then((metrics) =>
          SF.showCharts(byId("panel-charts"), metrics, pickStep),
        );
      charts.catch(SF.showProblem);
    } else if (state.index >= 0) history.replaceState(null, "", `#/${state.index}`);
  }

  function pickStep(step) {
    showTab("trajectories");
    filters.onlyStep(step, "train");
    byId("list").focus();
  }

  function applyFilter(filter) {
    const found = SF.select(filter);
    list.show(found, state.index);
    byId("found").textContent = `${SF.count(found.length)} of ${SF.count(SF.total)} trajectories`;
  }

  function moveInGroup(by) {
    if (state.index < 0) return;
    const [first, end] = SF.groupOf(state.index);
    const next = state.index + by;
    if (next >= first && next < end) open(next);
  }

  function moveToTurn(by) {
    const [turns, tops] = turnTops();
    const focused = turns.indexOf(document.activeElement);
    let at =
      focused >= 0
        ? focused + by
        : by > 0
          ? tops.findIndex((y) => y > 4)
          : tops.findLastIndex((y) => y < -4);
    at = Math.max(0, Math.min(turns.length - 1, at));
    if (turns[at]) toTurn(at);
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("skyrl_fast_theme", theme);
    } catch {
      // Not stored: some browsers have no storage for pages opened from disk.
    }
  }

  function toggleTheme() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
    setTheme(now === "dark" ? "light" : "dark");
  }

  function makeHelp() {
    const rows = KEYS.map(([keys, meaning]) =>
      SF.el("tr", {}, SF.el("th", { scope: "row" }, SF.el("kbd", {}, keys)), SF.el("td", {}, meaning)),
    );
    const close = SF.el("button", { type: "button" }, "Close");
    close.addEventListener("click", () => byId("keys").close());
    byId("keys").append(
      SF.el("h2", { id: "keys-title" }, "Keys"),
      SF.el("table", {}, SF.el("tbody", {}, ...rows)),
      close,
    );
  }

  const ACTIONS = {
    j: () => list.move(1),
    k: () => list.move(-1),
    ArrowDown: () => list.move(1),
    ArrowUp: () => list.move(-1),
    "]": () => moveInGroup(1),
    "[": () => moveInGroup(-1),
    n: () => moveToTurn(1),
    p: () => moveToTurn(-1),
    "/": () => filters.focus(),
    x: () => filters.clear(),
    c: () => showTab(state.tab === "charts" ? "trajectories" : "charts"),
    t: toggleTheme,
    "?": () => byId("keys").showModal(),
  };
  const ANYWHERE = new Set(["c", "t", "?"]);
  for (const [mode, { key }] of Object.entries(SF.MODES))
    ACTIONS[key] = () => SF.MODES[mode] && setMode(mode);

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || byId("keys").open) return;
    const typing = event.target.closest("input, select, textarea");
    if (typing) {
      if (event.key === "Escape") byId("list").focus();
      return;
    }
    const reading = event.target.closest("#body, summary, .scroll");
    if (reading && event.key.startsWith("Arrow")) return; // arrow keys scroll there
    const action = ACTIONS[event.key];
    if (!action || (state.tab === "charts" && !ANYWHERE.has(event.key))) return;
    event.preventDefault();
    action();
  }

  function openFromAddress() {
    const address = location.hash.slice(2);
    if (address === "charts") return showTab("charts");
    showTab("trajectories");
    const index = Number(address);
    if (address && Number.isInteger(index) && index >= 0 && index < SF.total) {
      if (index !== state.index) open(index);
    } else if (state.index < 0 && list.found.length) list.choose(SF.firstTrained(list.found));
  }

  function start(summary) {
    SF.setSummary(summary);
    const title = SF.inLine(SF.run.name, 80);
    document.title = `${title}: trajectories`;
    byId("run-name").textContent = title;
    byId("run-path").textContent = SF.inLine(SF.run.path, 120);
    makeReading();
    makeHelp();
    list = SF.makeList(open);
    filters = SF.makeFilters(applyFilter);
    setMode(state.mode);
    applyFilter(filters.read());
    byId("tab-trajectories").addEventListener("click", () => showTab("trajectories"));
    byId("tab-charts").addEventListener("click", () => showTab("charts"));
    document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      showTab(state.tab === "charts" ? "trajectories" : "charts");
      byId(`tab-${state.tab}`).focus();
    });
    byId("theme").addEventListener("click", toggleTheme);
    byId("help").addEventListener("click", () => byId("keys").showModal());
    document.addEventListener("keydown", onKey);
    addEventListener("hashchange", openFromAddress);
    openFromAddress();
    document.documentElement.dataset.ready = "true";
  }

  try {
    const theme = localStorage.getItem("skyrl_fast_theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // As above.
  }
  SF.loadData("summary").then(start).catch(SF.showProblem);
})(skyrlFastView);
