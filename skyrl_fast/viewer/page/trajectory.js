// One trajectory, turn by turn, and its group next to it.
"use strict";

(function (SF) {
  const PREVIEW = 160; // characters of another trajectory's last response

  let observer = null; // of the turns that are loaded when they become visible

  /** Return a promise of a trajectory's head, and of the turns whose items are in its first script. */
  SF.loadTrajectory = async function (index) {
    const head = await SF.loadHead(index);
    const start = head.turns.map(firstScript).find((script) => script !== null);
    const near = head.turns.filter((turn) => (firstScript(turn) ?? start) === start);
    const loaded = await Promise.all(near.map(SF.loadTurn));
    return { ...head, loaded: new Map(near.map((turn, i) => [turn, loaded[i]])) };
  };

  function firstScript(turn) {
    const address = turn.tokens[0] || turn.observation[0];
    return address ? address[0] : null;
  }

  /** Fill the reading pane. `showToken(text, spoken)` is called with a token's description. */
  SF.showTrajectory = function (pane, index, details, mode, showToken) {
    const phase = SF.word("phase", index);
    const version =
      SF.value("staleness", index) === null
        ? null
        : SF.value("policy_version", index) + SF.value("staleness", index);
    const blocks = [];
    const heading = SF.el(
      "h2",
      { tabindex: "-1" },
      SF.inLine(SF.word("uid", index), 120),
      SF.el("small", {}, ` #${SF.value("repetition_id", index)}`),
    );
    const reason = promptWasTooLong(index, details.turns)
      ? "length: prompt too long (generator.max_input_length)"
      : SF.inLine(SF.word("stop_reason", index), 60);
    pane.replaceChildren(SF.el("div", { class: "head" }, heading, attributes(index, phase, reason)));
    if (details.failure) {
      pane.append(
        SF.el(
          "div",
          { class: "failure", role: "note" },
          SF.el("strong", {}, "Failed. "),
          SF.textBlock(details.failure),
          details.failure_trace ? traceback(details.failure_trace) : null,
        ),
      );
    } else if (SF.value("filtered", index)) {
      pane.append(
        SF.el("p", { class: "note" }, "A filter excluded this trajectory's tokens from training."),
      );
    }
    if (!details.turns.length) {
      const why = details.failure
        ? "No turn was completed."
        : "No turns: the first prompt was too long.";
      pane.append(SF.el("p", { class: "note" }, why));
    }
    const longest = Math.max(
      1e-9,
      ...details.turns.map((turn) => turn.llm_seconds + turn.env_seconds),
    );
    const pending = new Map(); // section -> how to fill it
    if (observer) observer.disconnect();
    observer = new IntersectionObserver(
      (entries) => entries.filter((one) => one.isIntersecting).forEach((one) => load(one.target)),
      { root: pane, rootMargin: "100% 0%" },
    );
    const load = (section) => {
      observer.unobserve(section);
      const { turn, fill } = pending.get(section);
      SF.loadTurn(turn).then(fill, SF.showProblem);
    };
    const others = (number) =>
      details.other_calls.filter((call) => call.before_step === number).map(otherCall);
    details.turns.forEach((turn, number) => {
      pane.append(...others(number));
      const before = number ? details.turns[number - 1] : null;
      const section = turnSection(turn, number, details.turns.length, before, longest);
      const fill = ({ response, observation }) => {
        const block = SF.tokenBlock(turn, response, number, version, showToken);
        blocks.push(block);
        block.paint(mode);
        fillTurn(section, turn, block, observation);
      };
      pane.append(section);
      if (details.loaded.has(turn)) fill(details.loaded.get(turn));
      else {
        section.classList.add("pending");
        pending.set(section, { turn, fill });
        observer.observe(section);
      }
    });
    pane.append(...others(details.turns.length));
    const metrics = Object.entries(details.env_metrics);
    if (metrics.length) {
      const list = SF.el("dl", { class: "metrics" });
      for (const [name, value] of metrics) {
        const text =
          typeof value === "number"
            ? SF.number(value, 4)
            : typeof value === "string"
              ? value
              : JSON.stringify(value);
        list.append(
          SF.addText(SF.el("dt"), SF.inLine(name)),
          SF.addText(SF.el("dd", { dir: "auto" }), SF.inLine(text, 400)),
        );
      }
      pane.append(
        SF.el(
          "section",
          { "aria-label": "Environment metrics" },
          SF.el("h3", {}, "Environment metrics"),
          list,
        ),
      );
    }
    const paint = (next) => {
      mode = next;
      blocks.forEach((block) => block.paint(mode));
    };
    pane.scrollTop = 0;
    return { paint };
  };

  /** Return whether it ended by a prompt that was too long, and not by a response that was cut. */
  function promptWasTooLong(index, turns) {
    if (SF.word("stop_reason", index) !== "length") return false;
    const last = turns[turns.length - 1];
    return !last || last.response_tokens < (SF.run.longestResponse ?? 0);
  }

  function attributes(index, phase, reason) {
    const value = (name) => SF.value(name, index);
    const list = SF.el("dl", { class: "attributes" });
    const attribute = (name, text, kind) =>
      list.append(
        SF.el("div", { class: kind || "" }, SF.el("dt", {}, name), SF.el("dd", {}, text)),
      );
    attribute("reward", SF.number(value("reward")), value("reward") > 0 ? "good" : "bad");
    if (phase !== "eval") attribute("advantage", SF.number(value("advantage")));
    attribute("ended by", reason);
    attribute(phase === "eval" ? "evaluation" : "step", String(value("step")));
    if (value("policy_version") !== null) attribute("policy", String(value("policy_version")));
    if (value("staleness") !== null) attribute("staleness", SF.plural(value("staleness"), "update"));
    attribute(
      "tokens",
      `${SF.count(value("tokens"))}${phase === "eval" ? "" : `, ${SF.count(value("trained_tokens"))} trained`}`,
    );
    attribute("time", SF.seconds(value("seconds")));
    attribute("environment", SF.inLine(SF.word("env_class", index), 60));
    if (SF.word("data_source", index)) attribute("data", SF.inLine(SF.word("data_source", index), 60));
    return list;
  }

  function turnSection(turn, number, total, before, longest) {
    const section = SF.el("section", {
      class: "turn",
      tabindex: "-1",
      "aria-label": `Turn ${number + 1} of ${total}`,
    });
    const bits = [
      `reward ${SF.number(turn.reward)}`,
      SF.inLine(turn.stop_reason, 40),
      `${SF.plural(turn.response_tokens, "token")}, ${SF.count(turn.trained_tokens)} trained`,
    ];
    bits.push(...[SF.callName(turn), SF.relation(turn, number)].filter(Boolean));
    const policy = turn.policy ? `policy ${SF.inLine(turn.policy, 40)}` : "policy";
    if (turn.policy_version !== null) bits.push(`${policy} ${turn.policy_version}`);
    section.append(
      SF.el(
        "header",
        {},
        SF.el("h3", {}, `Turn ${number + 1}`),
        SF.el("span", { class: "bits" }, bits.join(" · ")),
        times(turn, longest),
      ),
      context(turn, number, before),
    );
    return section;
  }

  function fillTurn(section, turn, block, observation) {
    section.classList.remove("pending");
    section.append(SF.el("div", { class: "said agent" }, SF.el("h4", {}, "agent"), block));
    if (turn.observation.length) {
      section.append(
        SF.el(
          "div",
          { class: "said env" },
          SF.el("h4", {}, "environment"),
          SF.textBlock(observation, turn.observation.slice(1)),
        ),
      );
    }
  }

  /** Create the context of a turn: open in the first turn, marked where it was rewritten. */
  function context(turn, number, before) {
    const seen = before ? before.prompt_tokens + before.response_tokens : 0;
    const rewritten = before !== null && turn.prompt_shared < seen;
    const fresh = turn.prompt_tokens - turn.prompt_shared;
    let title = `prompt: ${SF.plural(turn.prompt_tokens, "token")}`;
    if (before) {
      title = `context: ${SF.count(turn.prompt_shared)} tokens as before, ${SF.count(fresh)} new`;
      if (rewritten) title += `; ${SF.count(seen - turn.prompt_shared)} were dropped or rewritten`;
    }
    const details = SF.el(
      "details",
      { class: `said context${rewritten ? " rewritten" : ""}` },
      SF.el("summary", {}, title),
    );
    let filled = false;
    const fill = () => {
      if (!details.open || filled) return;
      filled = true;
      if (!turn.context.length) return details.append(SF.textBlock(""));
      SF.loadItem(turn.context[0]).then(
        (text) => details.append(SF.textBlock(text, turn.context.slice(1))),
        (error) => {
          filled = false;
          SF.showProblem(error);
        },
      );
    };
    details.addEventListener("toggle", fill);
    details.open = number === 0;
    fill();
    return details;
  }

  /** Create the folded calls in the user's code that ended in a failure. */
  function traceback(text) {
    return SF.el(
      "details",
      { class: "traceback" },
      SF.el("summary", {}, "traceback, innermost call last"),
      SF.textBlock(text),
    );
  }

  /** Create the folded text of a call that is not trained: of another model. */
  function otherCall(call) {
    const details = SF.el(
      "details",
      { class: "said other" },
      SF.el("summary", {}, "not trained: ", SF.inLine(call.model, 60), ` · ${SF.seconds(call.seconds)}`),
    );
    let filled = false;
    details.addEventListener("toggle", () => {
      if (!details.open || filled) return;
      filled = true;
      for (const [title, addresses] of [["request", call.request], ["response", call.response]]) {
        const block = SF.el("div", {}, SF.el("h4", {}, title));
        details.append(block);
        if (!addresses.length) block.append(SF.textBlock(""));
        else
          SF.loadItem(addresses[0]).then(
            (text) => block.append(SF.textBlock(text, addresses.slice(1))),
            SF.showProblem,
          );
      }
    });
    return details;
  }

  /** Create bars of model and environment time, scaled to the slowest turn. */
  function times(turn, longest) {
    const bar = (kind, seconds) => {
      const part = SF.el("span", { class: kind });
      part.style.width = `${(100 * seconds) / longest}%`;
      return part;
    };
    const label = `model ${SF.seconds(turn.llm_seconds)}, environment ${SF.seconds(turn.env_seconds)}`;
    return SF.el(
      "span",
      { class: "times", title: label, role: "img", "aria-label": label },
      bar("llm", turn.llm_seconds),
      bar("env", turn.env_seconds),
    );
  }

  /** Scroll the pane to a part of it, and never the page, which a narrow screen shows in one column. */
  function reveal(pane, part) {
    const around = pane.getBoundingClientRect();
    const place = part.getBoundingClientRect();
    if (place.top < around.top) pane.scrollTop += place.top - around.top;
    else if (place.bottom > around.bottom) pane.scrollTop += place.bottom - around.bottom;
  }

  /** List the group's trajectories, each with its last response; `open(index)` shows one. */
  SF.showGroup = function (pane, index, open) {
    const [first, end] = SF.groupOf(index);
    const members = [...Array(end - first).keys()].map((i) => first + i);
    const complete = members.filter((i) => !SF.word("failure", i) && SF.value("reward", i) !== null);
    const rewards = complete.map((i) => SF.value("reward", i));
    const failed = members.filter((i) => SF.word("failure", i)).length;
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / Math.max(1, rewards.length);
    const spread = Math.sqrt(
      rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) /
        Math.max(1, rewards.length - 1),
    );
    const items = SF.el("ul");
    pane.replaceChildren(
      SF.el("h2", {}, "Group"),
      SF.el(
        "p",
        { class: "note" },
        `${SF.plural(end - first, "trajectory").replace("trajectorys", "trajectories")} of this prompt; rewards ${SF.number(mean)} ± ${SF.number(spread)}${failed ? ` without ${failed} failed` : ""}`,
      ),
      items,
    );
    for (let i = first; i < end; i++) {
      const summary = [
        SF.word("stop_reason", i),
        SF.plural(SF.value("turns", i), "turn"),
        SF.plural(SF.value("tokens", i), "token"),
      ];
      const advantage = SF.value("advantage", i);
      const preview = SF.el("span", { class: "preview", dir: "auto" });
      const button = SF.el(
        "button",
        { type: "button", "aria-current": i === index ? "true" : null, "data-index": i },
        SF.el(
          "span",
          { class: `reward ${SF.value("reward", i) > 0 ? "good" : "bad"}` },
          SF.number(SF.value("reward", i)),
        ),
        SF.el("span", { class: "who" }, `#${SF.value("repetition_id", i)}`),
        SF.el(
          "span",
          { class: "when" },
          advantage === null ? "" : `advantage ${SF.number(advantage)}`,
        ),
        SF.el("span", { class: "how" }, SF.inLine(summary.join(" · "), 100)),
        SF.word("failure", i) ? SF.el("span", { class: "flag" }, "failed") : null,
        preview,
      );
      button.addEventListener("click", () => open(i));
      items.append(SF.el("li", {}, button));
      if (i === index) requestAnimationFrame(() => reveal(pane, button));
      SF.loadPreview(i).then((text) => preview.append(SF.inLine(text, PREVIEW)), SF.showProblem);
    }
  };
})(skyrlFastView);
