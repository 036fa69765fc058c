// Tokens and their colours: by advantage, probability, mismatch or age.
"use strict";

(function (SF) {
  const LEVELS = 5; // shades on each side of the scale
  const NEUTRAL = 0.004; // of the scale: less is no colour
  const FIRST_TOKENS = 3000; // of a response are shown at once
  // Borders between the shades of surprise: probability under the policy that sampled.
  const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01];

  SF.MODES = {
    none: { key: "0", name: "none" },
    advantage: { key: "1", name: "advantage" },
    logprob: { key: "2", name: "log-probability" },
    mismatch: { key: "3", name: "trainer − engine" },
    age: { key: "4", name: "staleness" },
  };

  /** All that is known of a token. */
  SF.tokenFacts = function (turn, i) {
    const at = (list) => (list.length ? list[i] : null);
    const engine = at(turn.engine);
    const trainer = at(turn.trainer);
    return {
      id: turn.ids[i],
      text: turn.pieces[i],
      trained: turn.mask[i] === 1,
      engine,
      trainer,
      advantage: at(turn.advantages),
      mismatch: engine === null || trainer === null ? null : trainer - engine,
      version: turn.versions.length ? turn.versions[i] : turn.policy_version,
    };
  };

  /** The shade grows with the root: small values differ too where a few are large. */
  function diverging(value, scale) {
    if (value === null || !scale || Math.abs(value) < NEUTRAL * scale) return "";
    const level = Math.max(
      1,
      Math.min(LEVELS, Math.round(Math.sqrt(Math.abs(value) / scale) * LEVELS)),
    );
    return (value > 0 ? "pos" : "neg") + level;
  }

  function surprise(logprob) {
    if (logprob === null) return "";
    const probability = Math.exp(logprob);
    const level = PROBABILITIES.filter((border) => probability < border).length;
    return level ? `odd${level}` : "";
  }

  function shade(mode, facts, trainedVersion) {
    if (!facts.trained) return "";
    if (mode === "advantage") return diverging(facts.advantage, SF.run.scales.advantage);
    if (mode === "mismatch") return diverging(facts.mismatch, SF.run.scales.mismatch);
    if (mode === "logprob") return surprise(facts.engine ?? facts.trainer);
    if (mode === "age" && trainedVersion !== null && facts.version !== null) {
      const age = Math.min(LEVELS, trainedVersion - facts.version);
      return age > 0 ? `odd${age}` : "";
    }
    return "";
  }

  /** What a reader is told of a token, in one line. */
  SF.tokenLine = function (facts, trainedVersion) {
    const parts = [`“${SF.inLine(facts.text, 40)}”`, `id ${facts.id}`];
    parts.push(facts.trained ? "trained" : "not trained");
    if (facts.advantage !== null) parts.push(`advantage ${SF.number(facts.advantage)}`);
    if (facts.engine !== null) {
      parts.push(`engine ${SF.number(facts.engine)} (p ${SF.number(Math.exp(facts.engine), 2)})`);
    }
    if (facts.trainer !== null) parts.push(`trainer ${SF.number(facts.trainer)}`);
    if (facts.mismatch !== null) parts.push(`difference ${SF.number(facts.mismatch)}`);
    if (facts.version !== null) parts.push(`policy ${facts.version}`);
    if (trainedVersion !== null && facts.version !== null && trainedVersion > facts.version) {
      parts.push(`${SF.plural(trainedVersion - facts.version, "update")} old`);
    }
    return parts.join(" · ");
  };

  /** The response of a turn as tokens; arrow keys walk through them when it has the focus. */
  SF.tokenBlock = function (turn, number, trainedVersion, tell) {
    const block = SF.el("div", {
      class: "text tokens",
      dir: "auto",
      tabindex: "0",
      role: "group",
      "aria-label": `Response of turn ${number + 1}: ${turn.ids.length} tokens; left and right go through them`,
    });
    const spans = [];
    const facts = (i) => SF.tokenFacts(turn, i);
    let here = -1;
    const go = (i, spoken) => {
      if (here >= 0 && spans[here]) spans[here].classList.remove("here");
      here = i;
      if (i < 0 || !spans[i]) return tell("", false);
      spans[i].classList.add("here");
      tell(SF.tokenLine(facts(i), trainedVersion), spoken);
      if (spoken) spans[i].scrollIntoView({ block: "nearest" });
    };
    const add = (from) => {
      const end = Math.min(turn.ids.length, from + FIRST_TOKENS);
      for (let i = from; i < end; i++) {
        const span = SF.el("span", { class: turn.mask[i] ? "tok" : "tok plain" });
        span.dataset.i = i;
        spans.push(SF.addText(span, turn.pieces[i], { newlines: true }));
        block.append(span);
      }
      if (end === turn.ids.length) return;
      const more = SF.el(
        "button",
        { class: "more", type: "button" },
        `${SF.count(turn.ids.length - end)} more tokens`,
      );
      more.addEventListener("click", () => {
        more.remove();
        add(end);
        paint(block.dataset.mode);
      });
      block.append(more);
    };
    const paint = (mode) => {
      block.dataset.mode = mode;
      spans.forEach((span, i) => {
        const level = shade(mode, facts(i), trainedVersion);
        const base = turn.mask[i] ? "tok" : "tok plain";
        span.className = base + (level ? ` ${level}` : "") + (i === here ? " here" : "");
      });
    };
    add(0);
    block.addEventListener("mouseover", (event) => {
      const span = event.target.closest(".tok");
      if (span) tell(SF.tokenLine(facts(Number(span.dataset.i)), trainedVersion), false);
    });
    block.addEventListener("click", (event) => {
      const span = event.target.closest(".tok");
      if (span) go(Number(span.dataset.i), false);
    });
    block.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      go(Math.max(0, Math.min(spans.length - 1, here + move)), true);
    });
    block.addEventListener("blur", () => go(-1, false));
    block.paint = paint;
    return block;
  };

  /** What the colours of a mode mean. */
  SF.legend = function (mode) {
    const legend = SF.el("div", { class: "legend", role: "img" });
    const border = (scale, level) =>
      `from ${SF.number((level > 1 ? ((level - 0.5) / LEVELS) ** 2 : NEUTRAL) * scale)} on`;
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
          ...steps.map((i) => swatch(`neg${LEVELS - i}`, "", border(scale, LEVELS - i))),
          swatch("", "0"),
          ...steps.map((i) => swatch(`pos${i + 1}`, "", border(scale, i + 1))),
          SF.el("span", {}, `+${SF.number(scale)}`),
        );
        words =
          mode === "advantage"
            ? "orange, dotted: less likely from now on; blue: more likely"
            : "orange, dotted: the trainer finds it less likely than the engine; blue: more";
      }
    } else if (mode === "logprob") {
      legend.append(
        ...["p ≥ 0.9", "< 0.9", "< 0.5", "< 0.2", "< 0.05", "< 0.01"].map((text, i) =>
          swatch(i ? `odd${i}` : "", text),
        ),
      );
      words = "the stronger, the less likely the token was";
    } else if (mode === "age") {
      legend.append(
        ...["0", "1", "2", "3", "4", "5+"].map((text, i) => swatch(i ? `odd${i}` : "", text)),
      );
      words = "updates between sampling and training";
    }
    if (words) legend.append(SF.el("span", { class: "words" }, words));
    legend.setAttribute("aria-label", words || "no colours");
    return legend;
  };
})(skyrlFastView);
