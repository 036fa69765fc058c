// The filters and the list of trajectories; only the visible rows are in the page.
"use strict";

(function (SF) {
  const ROW = 46; // pixels
  const EXTRA = 6; // rows above and below the visible ones
  const TALLEST = 8e6; // pixels; browsers limit the height of an element
  const WAIT = 60; // milliseconds from a change of a filter to its effect

  const SORTS = [
    ["", "run order"],
    ["reward", "reward"],
    ["advantage", "advantage"],
    ["turns", "turns"],
    ["tokens", "tokens"],
    ["seconds", "seconds"],
    ["staleness", "staleness"],
  ];

  /** Create the list; `open(index)` is called when another trajectory is chosen. */
  SF.makeList = function (open) {
    const box = document.getElementById("list");
    const rows = box.querySelector(".rows");
    let found = [];
    let current = -1; // position in found
    let drawn = "";

    const height = () => Math.min(found.length * ROW, TALLEST);
    // If the list is taller than TALLEST, a pixel of the scroll bar is more than one of the list.
    const ratio = () =>
      Math.max(
        1,
        (found.length * ROW - box.clientHeight) / Math.max(1, height() - box.clientHeight),
      );

    function draw() {
      const top = box.scrollTop * ratio();
      const first = Math.max(0, Math.floor(top / ROW) - EXTRA);
      const end = Math.min(found.length, Math.ceil((top + box.clientHeight) / ROW) + EXTRA);
      const key = `${first} ${end} ${current} ${found.length} ${ratio() > 1 ? box.scrollTop : ""}`;
      if (key === drawn) return;
      drawn = key;
      rows.style.height = `${height()}px`;
      const shift = box.scrollTop - top;
      const fresh = [];
      for (let place = first; place < end; place++) {
        const row = SF.listRow(found[place], {
          position: place + 1,
          of: found.length,
          chosen: place === current,
        });
        row.style.transform = `translateY(${place * ROW + shift}px)`;
        fresh.push(row);
      }
      rows.replaceChildren(...fresh);
      if (current >= first && current < end)
        box.setAttribute("aria-activedescendant", `row-${found[current]}`);
      else box.removeAttribute("aria-activedescendant");
    }

    function reveal() {
      const above = current * ROW;
      const top = box.scrollTop * ratio();
      const below = top + box.clientHeight;
      if (above + 2 * ROW < top || above > below + ROW)
        box.scrollTop = (above - box.clientHeight / 2) / ratio();
      else if (above < top) box.scrollTop = above / ratio();
      else if (above + ROW > below) box.scrollTop = (above + ROW - box.clientHeight) / ratio();
      draw();
    }

    const list = {
      get found() {
        return found;
      },
      show(indices, keep) {
        found = indices;
        drawn = "";
        current = found.indexOf(keep);
        rows.style.height = `${height()}px`;
        if (current >= 0) reveal();
        else {
          box.scrollTop = 0;
          draw();
        }
      },
      choose(place) {
        if (!found.length) return;
        current = Math.max(0, Math.min(found.length - 1, place));
        reveal();
        open(found[current]);
      },
      move(by) {
        list.choose(current < 0 ? 0 : current + by);
      },
      mark(index) {
        current = found.indexOf(index);
        if (current >= 0) reveal();
        else draw();
      },
    };
    box.addEventListener("scroll", draw, { passive: true });
    new ResizeObserver(draw).observe(box);
    box.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) list.choose(found.indexOf(Number(row.dataset.index)));
    });
    box.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.floor(box.clientHeight / ROW) - 1);
      const moves = {
        ArrowDown: 1,
        ArrowUp: -1,
        PageDown: page,
        PageUp: -page,
        Home: -found.length,
        End: found.length,
      };
      if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      list.move(moves[event.key]);
    });
    return list;
  };

  /** Create a row: reward, identity and a summary of the trajectory. */
  SF.listRow = function (index, { position, of, chosen }) {
    const value = (name) => SF.value(name, index);
    const failure = SF.word("failure", index);
    const row = SF.el("div", {
      class: "row",
      role: "option",
      id: `row-${index}`,
      "aria-selected": chosen ? "true" : "false",
      "aria-setsize": of,
      "aria-posinset": position,
      "data-index": index,
    });
    const summary = [
      SF.word("stop_reason", index),
      plural(value("turns"), "turn"),
      plural(value("tokens"), "token"),
    ];
    if (value("staleness")) summary.push(`${plural(value("staleness"), "update")} old`);
    return SF.add(
      row,
      SF.el(
        "span",
        { class: `reward ${value("reward") > 0 ? "good" : "bad"}` },
        SF.number(value("reward")),
      ),
      SF.el(
        "span",
        { class: "who" },
        `${SF.inLine(SF.word("uid", index), 60)} `,
        SF.el("small", {}, `#${value("repetition_id")}`),
      ),
      SF.el(
        "span",
        { class: "when" },
        SF.word("phase", index) === "eval" ? `eval ${value("step")}` : `step ${value("step")}`,
      ),
      SF.el("span", { class: "how" }, SF.inLine(summary.join(" · "), 120)),
      failure ? SF.el("span", { class: "flag", title: SF.inLine(failure) }, "failed") : null,
      !failure && value("filtered") ? SF.el("span", { class: "flag" }, "filtered") : null,
    );
  };

  function plural(number, word) {
    return `${SF.count(number)} ${word}${number === 1 ? "" : "s"}`;
  }
  SF.plural = plural;

  /** Create the filter form; `changed(filter)` is called after each change, debounced. */
  SF.makeFilters = function (changed) {
    const form = document.getElementById("filters");
    const steps = SF.columns.step;
    const rewards = SF.columns.reward.filter((reward) => reward !== null);
    const bounds = { step: extent(steps), reward: extent(rewards) };
    const field = (name, label, input) => {
      input.name = name;
      input.id = `filter-${name}`;
      const kind = input.type === "number" ? "field narrow" : "field";
      form.append(SF.el("label", { for: input.id, class: kind }, SF.el("span", {}, label), input));
      return input;
    };
    const select = (options) => {
      const input = SF.el("select");
      input.append(...options.map(([value, text]) => SF.el("option", { value }, text)));
      return input;
    };
    const words = (name) => [
      ["-1", "all"],
      ...SF.names[name].map((word, i) => [String(i), SF.inLine(word, 40) || "(empty)"]),
    ];
    const numeric = (name, end) =>
      SF.el("input", {
        type: "number",
        step: "any",
        placeholder: SF.number(bounds[name][end]).replace("−", "-"),
      });
    const input = {
      uid: field(
        "uid",
        "uid",
        SF.el("input", { type: "search", placeholder: "part of it", spellcheck: "false" }),
      ),
      phase: field("phase", "phase", select(words("phase"))),
      stop: field("stop", "stop reason", select(words("stop_reason"))),
      failure: field(
        "failure",
        "failure",
        select([
          ["", "all"],
          ["failed", "failed"],
          ["fine", "not failed"],
          ["filtered", "filtered"],
        ]),
      ),
      stepFrom: field("stepFrom", "step ≥", numeric("step", 0)),
      stepTo: field("stepTo", "step ≤", numeric("step", 1)),
      rewardFrom: field("rewardFrom", "reward ≥", numeric("reward", 0)),
      rewardTo: field("rewardTo", "reward ≤", numeric("reward", 1)),
      sort: field("sort", "sort by", select(SORTS)),
    };
    const down = SF.el(
      "button",
      { type: "button", "aria-pressed": "false", title: "Largest first" },
      "↓",
    );
    const clear = SF.el("button", { type: "button", title: "Clear the filters (x)" }, "clear");
    form.append(SF.el("span", { class: "field buttons" }, down, clear));

    const bound = (element, otherwise) =>
      element.value === "" ? otherwise : Number(element.value);
    const read = () => ({
      uid: input.uid.value,
      phase: Number(input.phase.value),
      stop: Number(input.stop.value),
      failure: input.failure.value,
      stepFrom: bound(input.stepFrom, -Infinity),
      stepTo: bound(input.stepTo, Infinity),
      hasReward: input.rewardFrom.value !== "" || input.rewardTo.value !== "",
      rewardFrom: bound(input.rewardFrom, -Infinity),
      rewardTo: bound(input.rewardTo, Infinity),
      sort: input.sort.value,
      down: down.getAttribute("aria-pressed") === "true",
    });
    let timer = 0;
    const changedLater = () => {
      clearTimeout(timer);
      timer = setTimeout(() => changed(read()), WAIT);
    };
    form.addEventListener("input", changedLater);
    form.addEventListener("submit", (event) => event.preventDefault());
    down.addEventListener("click", () => {
      down.setAttribute("aria-pressed", String(down.getAttribute("aria-pressed") !== "true"));
      changed(read());
    });
    const filters = {
      read,
      clear() {
        form.reset();
        down.setAttribute("aria-pressed", "false");
        changed(read());
      },
      onlyStep(step, phase) {
        form.reset();
        input.stepFrom.value = input.stepTo.value = step;
        const number = SF.names.phase.indexOf(phase);
        if (number >= 0) input.phase.value = String(number);
        changed(read());
      },
      focus() {
        input.uid.focus();
        input.uid.select();
      },
    };
    clear.addEventListener("click", filters.clear);
    return filters;
  };

  function extent(numbers) {
    let least = Infinity;
    let most = -Infinity;
    for (const number of numbers) {
      if (number < least) least = number;
      if (number > most) most = number;
    }
    return numbers.length ? [least, most] : [0, 0];
  }
})(skyrlFastView);
