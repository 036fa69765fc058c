// The calls of a trajectory as a forest: how each follows from the calls before it.
"use strict";

(function (SF) {
  const STEP = 24; // pixels from call to call, and from lane to lane
  const RADIUS = 7;

  const CALLS = { act: "", summarise: "summary", other: "not used later" };

  const { svg } = SF;

  SF.callName = (turn) => CALLS[turn.call];

  function callClass(turn) {
    const trained = turn.trained_tokens ? " trained" : "";
    const summary = turn.call === "summarise" ? " summary" : "";
    return `call${trained}${summary}`;
  }

  /** Return how a turn follows from an earlier one, in words. */
  SF.relation = function (turn, number) {
    const parent = turn.parent === null ? "" : `turn ${turn.parent + 1}`;
    if (turn.after !== undefined) return `begins with the summary of turn ${turn.after + 1}`;
    return {
      starts: number ? "new conversation" : "",
      continues: turn.parent === number - 1 ? "" : `continues ${parent}`,
      forks: `goes back into the answer of ${parent}`,
      rewrites: `replaces the answer of ${parent}`,
      repeats: `another answer to the prompt of ${parent}`,
    }[turn.kind];
  };

  /** Let each turn that begins a context after a summary know that summary's number. */
  SF.followSummaries = function (turns) {
    let summary; // the last one that no context has begun with
    turns.forEach((turn, number) => {
      if (summary !== undefined && turn.kind !== "continues") {
        turn.after = summary;
        summary = undefined;
      }
      if (turn.call === "summarise") summary = number;
    });
  };

  /** Return the lane of each turn: a conversation that only grows stays in one, and a context that
   * begins with a summary gets one of its own.
   */
  SF.lanes = function (turns) {
    const next = turns.map(() => null); // the turn that continues in the same lane
    turns.forEach(({ kind, parent }, number) => {
      if (kind === "continues" && next[parent] === null) next[parent] = number;
    });
    const tips = []; // the last turn of each lane
    const lanes = [];
    turns.forEach(({ kind, parent, after }, number) => {
      let lane = kind === "continues" && next[parent] === number ? lanes[parent] : -1;
      const above = parent === null ? -1 : lanes[parent]; // a branch is below its parent
      if (after !== undefined) lane = tips.length;
      if (lane < 0) lane = tips.findIndex((tip, at) => at > above && next[tip] === null);
      if (lane < 0) lane = tips.length;
      tips[lane] = number;
      lanes.push(lane);
    });
    return lanes;
  };

  /** Show the forest; `choose(number)` is called with a turn that was pointed at.
   * Returns a function that marks a turn as the current one.
   */
  SF.showForest = function (pane, details, choose) {
    const { turns, other_calls: others } = details;
    const plain = turns.every((turn, n) => (n ? turn.parent === n - 1 && turn.kind === "continues" : true));
    pane.hidden = turns.length < 2 && !others.length;
    if (pane.hidden) return () => {};
    const lanes = SF.lanes(turns);
    const rows = Math.max(...lanes, 0) + 1 + (others.length ? 1 : 0);
    const xs = []; // of turns
    const marks = [];
    const picture = svg("svg", { role: "img", height: rows * STEP });
    let at = STEP / 2;
    const place = (x, lane) => ({ x, y: STEP / 2 + lane * STEP });
    const drawOthers = (number) =>
      others
        .filter((call) => call.before_step === number)
        .forEach((call) => {
          const { x, y } = place(at, rows - 1);
          const square = { class: "other", x: x - RADIUS + 1, y: y - RADIUS + 1 };
          const size = { width: 2 * RADIUS - 2, height: 2 * RADIUS - 2 };
          const name = svg("title", {}, `not trained: ${SF.inLine(call.model, 60)}`);
          picture.append(svg("rect", { ...square, ...size }, name));
          at += STEP;
        });
    turns.forEach((turn, number) => {
      drawOthers(number);
      const { x, y } = place(at, lanes[number]);
      xs.push(x);
      at += STEP;
      if (turn.parent !== null)
        picture.prepend(edge(turn, place(xs[turn.parent], lanes[turn.parent]), { x, y }));
      if (turn.after !== undefined)
        picture.prepend(edge({ kind: "replaces" }, place(xs[turn.after], lanes[turn.after]), { x, y }));
      const words = [
        `turn ${number + 1}`,
        CALLS[turn.call],
        SF.relation(turn, number),
        turn.trained_tokens ? `${SF.plural(turn.trained_tokens, "trained token")}` : "nothing trained",
      ];
      const title = svg("title", {}, words.filter(Boolean).join(", "));
      const mark = svg(
        "circle",
        { class: callClass(turn), cx: x, cy: y, r: RADIUS },
        title,
      );
      mark.addEventListener("click", () => choose(number));
      marks.push(mark);
      picture.append(mark);
    });
    drawOthers(turns.length);
    picture.setAttribute("width", at - STEP / 2);
    const summary = description(turns, others, plain);
    picture.setAttribute("aria-label", summary);
    const trees = SF.el("div", { class: "trees" }, picture);
    pane.replaceChildren(trees, legend(turns, others, summary));
    return (number) => {
      marks.forEach((mark, n) => mark.classList.toggle("here", n === number));
      const left = Math.min(trees.scrollLeft, xs[number] - STEP);
      trees.scrollLeft = Math.max(left, xs[number] + STEP - trees.clientWidth);
    };
  };

  function edge(turn, from, to) {
    const middle = (from.x + to.x) / 2;
    const line =
      from.y === to.y && turn.kind === "continues"
        ? `M ${from.x} ${from.y} H ${to.x}`
        : `M ${from.x} ${from.y} C ${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
    return svg("path", { class: `edge ${turn.kind}`, d: line });
  }

  function description(turns, others, plain) {
    const calls = SF.plural(turns.length, "call");
    const after = (turn) => turn.after !== undefined;
    const count = (kind) => turns.filter((turn, n) => n && turn.kind === kind && !after(turn)).length;
    const seen = new Set();
    const branches = turns.filter(({ kind, parent }) => {
      const again = kind === "continues" && seen.has(parent);
      if (kind === "continues") seen.add(parent);
      return again;
    }).length;
    const forks = branches + count("forks") + count("rewrites") + count("repeats");
    const parts = [plain ? `${calls} in a line` : calls];
    if (forks) parts.push(SF.plural(forks, "fork"));
    if (count("starts")) parts.push(SF.plural(count("starts"), "new conversation"));
    if (turns.some(after)) parts.push(SF.plural(turns.filter(after).length, "replaced context"));
    if (others.length) parts.push(`${SF.plural(others.length, "call")} of other models`);
    return parts.join(", ");
  }

  function legend(turns, others, summary) {
    const sample = (kind, text) => {
      const shape =
        kind === "other"
          ? svg("rect", { class: kind, x: 2, y: 2, width: 10, height: 10 })
          : svg("circle", { class: kind, cx: 7, cy: 7, r: 5 });
      const picture = svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, shape);
      return SF.el("span", {}, picture, ` ${text}`);
    };
    const shown = SF.el("p", { class: "note" }, SF.el("span", {}, summary));
    if (turns.some((turn) => turn.trained_tokens)) shown.append(sample("call trained", "trained"));
    if (turns.some((turn) => !turn.trained_tokens)) shown.append(sample("call", "nothing trained"));
    if (turns.some((turn) => turn.call === "summarise"))
      shown.append(sample("call summary", "summary, with which the next context begins"));
    if (others.length) shown.append(sample("other", "other model, not trained"));
    return shown;
  }
})(skyrlFastView);
