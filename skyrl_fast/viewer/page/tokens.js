// Tokens and their colours: by advantage, probability, mismatch or staleness.
"use strict";

(function (SF) {
  const LEVELS = 5; // shades on each side of the scale
  const NEUTRAL = 0.004; // of the scale; smaller values have no colour
  // Thresholds between the shades: the token's probability when it was sampled.
  const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01];

  SF.MODES = {
    none: { key: "0", name: "none" },
    advantage: { key: "1", name: "advantage" },
    logprob: { key: "2", name: "log-probability" },
    mismatch: { key: "3", name: "trainer − engine" },
    age: { key: "4", name: "staleness" },
  };

  /** Return all values of token `i` of an item; `version` is the turn's policy version. */
  function tokenValues(item, i, version) {
    const at = (list) => (list.length ? list[i] : null);
    const engine = at(item.engine);
    const trainer = at(item.trainer);
    return {
      id: item.ids[i],
      text: item.pieces[i],
      trained: item.mask[i] === 1,
      engine,
      trainer,
      advantage: at(item.advantages),
      mismatch: engine === null || trainer === null ? null : trainer - engine,
      version: item.versions.length ? item.versions[i] : version,
    };
  }

  /** Return the shade of a signed value; it grows with the root, so that small values differ too. */
  function diverging(value, scale) {
    if (value === null || !scale || Math.abs(value) < NEUTRAL * scale) return "";
    const level = Math.max(
      1,
      Math.min(LEVELS, Math.round(Math.sqrt(Math.abs(value) / scale) * LEVELS)),
    );
    return (value > 0 ? "pos" : "neg") + level;
  }

  function improbability(logprob) {
    if (logprob === null) return "";
    const probability = Math.exp(logprob);
    const level = PROBABILITIES.filter((threshold) => probability < threshold).length;
    return level ? `odd${level}` : "";
  }

  function shade(mode, values, trainedVersion) {
    if (!values.trained) return "";
    if (mode === "advantage") return diverging(values.advantage, SF.run.scales.advantage);
    if (mode === "mismatch") return diverging(values.mismatch, SF.run.scales.mismatch);
    if (mode === "logprob") return improbability(values.engine ?? values.trainer);
    if (mode === "age" && trainedVersion !== null && values.version !== null) {
      const age = Math.min(LEVELS, trainedVersion - values.version);
      return age > 0 ? `odd${age}` : "";
    }
    return "";
  }

  /** Describe a token in one line. */
  SF.tokenLine = function (values, trainedVersion) {
    const parts = [`“${SF.inLine(values.text, 40)}”`, `id ${values.id}`];
    parts.push(values.trained ? "trained" : "not trained");
    if (values.advantage !== null) parts.push(`advantage ${SF.number(values.advantage)}`);
    if (values.engine !== null) {
      parts.push(`engine ${SF.number(values.engine)} (p ${SF.number(Math.exp(values.engine), 2)})`);
    }
    if (values.trainer !== null) parts.push(`trainer ${SF.number(values.trainer)}`);
    if (values.mismatch !== null) parts.push(`difference ${SF.number(values.mismatch)}`);
    if (values.version !== null) parts.push(`policy ${values.version}`);
    if (trainedVersion !== null && values.version !== null && trainedVersion > values.version) {
      parts.push(`${SF.plural(trainedVersion - values.version, "update")} old`);
    }
    return parts.join(" · ");
  };

  /** Create the response of a turn as tokens, the first item's and others on request; arrow keys
   * move between them.
   */
  SF.tokenBlock = function (turn, first, number, trainedVersion, showToken) {
    const block = SF.el("div", {
      class: "text tokens",
      dir: "auto",
      tabindex: "0",
      role: "group",
      "aria-label": `Response of turn ${number + 1}: ${turn.response_tokens} tokens; left and right arrow keys move between them`,
    });
    const spans = [];
    const places = []; // of each token that is shown: its item, and where in it
    const values = (i) => tokenValues(...places[i], turn.policy_version);
    let here = -1;
    const select = (i, spoken) => {
      if (here >= 0 && spans[here]) spans[here].classList.remove("here");
      here = i;
      if (i < 0 || !spans[i]) return showToken("", false);
      spans[i].classList.add("here");
      showToken(SF.tokenLine(values(i), trainedVersion), spoken);
      if (spoken) spans[i].scrollIntoView({ block: "nearest" });
    };
    const add = (item, next) => {
      item.pieces.forEach((piece, i) => {
        const span = SF.el("span", { class: "tok" });
        span.dataset.i = spans.length;
        places.push([item, i]);
        spans.push(SF.addText(span, piece, { newlines: true }));
        block.append(span);
      });
      if (next >= turn.tokens.length) return;
      const left = turn.tokens.slice(next).reduce((sum, [, , tokens]) => sum + tokens, 0);
      const more = SF.el(
        "button",
        { class: "more", type: "button" },
        `${SF.count(left)} more tokens`,
      );
      more.addEventListener("click", () => {
        more.disabled = true;
        SF.loadItem(turn.tokens[next]).then(
          (found) => {
            more.remove();
            add(found, next + 1);
            paint(block.dataset.mode);
          },
          (error) => {
            more.disabled = false;
            SF.showProblem(error);
          },
        );
      });
      block.append(more);
    };
    const paint = (mode) => {
      block.dataset.mode = mode;
      spans.forEach((span, i) => {
        const token = values(i);
        const level = shade(mode, token, trainedVersion);
        const base = token.trained ? "tok" : "tok plain";
        span.className = base + (level ? ` ${level}` : "") + (i === here ? " here" : "");
      });
    };
    if (first) add(first, 1);
    block.addEventListener("mouseover", (event) => {
      const span = event.target.closest(".tok");
      if (span) showToken(SF.tokenLine(values(Number(span.dataset.i)), trainedVersion), false);
    });
    block.addEventListener("click", (event) => {
      const span = event.target.closest(".tok");
      if (span) select(Number(span.dataset.i), false);
    });
    block.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      select(Math.max(0, Math.min(spans.length - 1, here + move)), true);
    });
    block.addEventListener("blur", () => select(-1, false));
    block.paint = paint;
    return block;
  };

  /** Create the legend of a mode. */
  SF.legend = function (mode) {
    const legend = SF.el("div", { class: "legend", role: "img" });
    const threshold = (scale, level) =>
      `from ${SF.number((level > 1 ? ((level - 0.5) / LEVELS) ** 2 : NEUTRAL) * scale)}`;
    const swatch = (level, text, title) =>
      SF.el("span", { class: `swatch tok ${level}`, title }, text);
    const scale = SF.run.scales[mode];
    let words = "";
    if (mode === "advantage" || mode === "mismatch") {
      if (!scale) words = "this run has no such values";
      else {
        const steps = [...Array(LEVELS).keys()];
        legend.append(
          SF.el("span", {}, SF.number(-scale)),
          ...steps.map((i) => swatch(`neg${LEVELS - i}`, "", threshold(scale, LEVELS - i))),
          swatch("", "0"),
          ...steps.map((i) => swatch(`pos${i + 1}`, "", threshold(scale, i + 1))),
          SF.el("span", {}, `+${SF.number(scale)}`),
        );
        words =
          mode === "advantage"
            ? "orange, dotted: made less likely; blue: made more likely"
            : "orange, dotted: less likely by the trainer than by the engine; blue: more likely";
      }
    } else if (mode === "logprob") {
      legend.append(
        ...["p ≥ 0.9", "< 0.9", "< 0.5", "< 0.2", "< 0.05", "< 0.01"].map((text, i) =>
          swatch(i ? `odd${i}` : "", text),
        ),
      );
      words = "stronger: less likely when sampled";
    } else if (mode === "age") {
      legend.append(
        ...["0", "1", "2", "3", "4", "5+"].map((text, i) => swatch(i ? `odd${i}` : "", text)),
      );
      words = "policy updates between sampling and training";
    }
    if (words) legend.append(SF.el("span", { class: "words" }, words));
    legend.setAttribute("aria-label", words || "no colours");
    return legend;
  };
})(skyrlFastView);
