// A small chart: lines, stacked areas or bars as SVG, with a readout for pointer and keys.
"use strict";

(function (SF) {
  const WIDTH = 560;
  const HEIGHT = 240;
  const EDGE = { left: 54, right: 12, top: 12, bottom: 30 };
  const MAX_POINTS = 2000; // drawn per line; more would not be visible
  const TABLE_ROWS = 400;
  const COLOURS = 6; // classes c0 to c5 of style.css, each with its own dash

  const { svg } = SF;

  /** Return about five round numbers in the range. */
  function ticks(least, most, integers) {
    const range = most - least || Math.abs(most) || 1;
    const rough = range / 6;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
    if (integers) step = Math.max(1, Math.round(step));
    const result = [];
    for (let tick = Math.ceil(least / step) * step; tick <= most + step * 1e-9; tick += step)
      result.push(Number(tick.toPrecision(12)));
    return result;
  }

  /** Create a chart.
   * kind: "line", "area" (stacked) or "bar". xs: numbers. series: {name, ys}, null where missing.
   * pick: called with a chosen x, or null. xName, yName: axis labels. xWords: labels of the xs.
   * Returns null if there is nothing to draw.
   */
  SF.chart = function ({ title, note, kind, xs, series, xName, yName, xWords, pick }) {
    const drawn = series.filter((one) => one.ys.some((y) => y !== null));
    if (!drawn.length || !xs.length) return null;
    const figure = SF.el(
      "figure",
      { class: "chart" },
      SF.el("figcaption", {}, SF.el("h3", {}, title), note ? SF.el("p", {}, note) : null),
    );
    const layers = kind === "area" ? stack(drawn) : drawn.map(({ ys }) => ys);
    const flat = layers.flat().filter((y) => y !== null);
    const from0 = kind !== "line";
    let low = flat.reduce((a, b) => Math.min(a, b), from0 ? 0 : Infinity);
    let high = flat.reduce((a, b) => Math.max(a, b), from0 ? 0 : -Infinity);
    if (low === high)
      [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
    const pad = kind === "line" ? (high - low) * 0.05 : 0;
    low -= pad;
    high += (high - low) * 0.04;
    const bars = kind === "bar";
    const xLow = xs[0] - (bars ? 0.5 : 0);
    const xHigh =
      (xs[xs.length - 1] === xs[0] && !bars ? xs[0] + 1 : xs[xs.length - 1]) + (bars ? 0.5 : 0);
    const x = (value) =>
      EDGE.left + ((value - xLow) / (xHigh - xLow)) * (WIDTH - EDGE.left - EDGE.right);
    const y = (value) =>
      HEIGHT - EDGE.bottom - ((value - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);

    const label = `${title}. ${drawn.map((one) => `${one.name}: ${brief(one.ys)}`).join("; ")}`;
    const picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      tabindex: "0",
      "aria-label": label,
    });
    for (const tick of ticks(low, high, false)) {
      picture.append(
        svg("line", {
          class: "grid",
          x1: EDGE.left,
          x2: WIDTH - EDGE.right,
          y1: y(tick),
          y2: y(tick),
        }),
        svg(
          "text",
          { class: "tick", x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end" },
          SF.number(tick),
        ),
      );
    }
    const word = (value) => (xWords ? xWords[xs.indexOf(value)] : String(value));
    for (const tick of xWords ? xs : ticks(xs[0], xs[xs.length - 1], true)) {
      picture.append(
        svg(
          "text",
          { class: "tick", x: x(tick), y: HEIGHT - EDGE.bottom + 16, "text-anchor": "middle" },
          word(tick),
        ),
      );
    }
    picture.append(
      svg(
        "text",
        { class: "axis", x: WIDTH - EDGE.right, y: HEIGHT - 4, "text-anchor": "end" },
        xName || "step",
      ),
      svg("text", { class: "axis", x: EDGE.left, y: EDGE.top - 2 }, yName || ""),
    );
    layers.forEach((ys, number) => {
      const colour = `c${number % COLOURS}`;
      if (kind === "line") picture.append(...line(xs, ys, x, y, colour));
      else if (kind === "area")
        picture.append(area(xs, ys, number ? layers[number - 1] : null, x, y, colour));
      else picture.append(...bar(xs, ys, x, y, colour));
    });
    const cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
    cursor.style.display = "none";
    picture.append(cursor);
    const readout = SF.el("p", { class: "readout" });
    const key = SF.el("ul", { class: "key" });
    drawn.forEach((one, number) =>
      key.append(
        SF.el(
          "li",
          {},
          SF.el("span", { class: `mark ${kind} c${number % COLOURS}`, "aria-hidden": "true" }),
          one.name,
        ),
      ),
    );
    if (drawn.length === 1) key.hidden = true; // the title names it
    figure.append(picture, key, readout, table(xs.map(word), drawn, xName || "step"));
    follow({ picture, cursor, readout, xs, drawn, x, word, xName: xName || "step", pick });
    return figure;
  };

  function stack(series) {
    let below = null;
    return series.map(({ ys }) => {
      const base = below;
      below = ys.map((value, i) => (value ?? 0) + (base ? base[i] : 0));
      return below;
    });
  }

  /** Create a line; a long one is reduced to the extremes of each interval. */
  function line(xs, ys, x, y, colour) {
    const parts = [];
    const every = Math.max(1, Math.ceil(xs.length / MAX_POINTS));
    let points = [];
    const known = ys.map((value, i) => [xs[i], value]).filter(([, value]) => value !== null);
    const sparse = known.length <= 30;
    for (let i = 0; i < known.length; i += every) {
      const stretch = known.slice(i, i + every);
      const least = stretch.reduce((a, b) => (b[1] < a[1] ? b : a));
      const most = stretch.reduce((a, b) => (b[1] > a[1] ? b : a));
      for (const [px, py] of least[0] <= most[0] ? [least, most] : [most, least])
        points.push(`${x(px).toFixed(1)},${y(py).toFixed(1)}`);
    }
    parts.push(svg("polyline", { class: `line ${colour}`, points: points.join(" ") }));
    if (sparse)
      for (const [px, py] of known)
        parts.push(svg("circle", { class: `dot ${colour}`, cx: x(px), cy: y(py), r: 3 }));
    return parts;
  }

  function area(xs, ys, below, x, y, colour) {
    const over = ys.map((value, i) => `${x(xs[i]).toFixed(1)},${y(value).toFixed(1)}`);
    const under = ys
      .map((_, i) => `${x(xs[i]).toFixed(1)},${y(below ? below[i] : 0).toFixed(1)}`)
      .reverse();
    return svg("polygon", { class: `area ${colour}`, points: [...over, ...under].join(" ") });
  }

  function bar(xs, ys, x, y, colour) {
    return ys.map((value, i) => {
      const half = Math.min(0.4, 0.08 * xs.length); // a few bars stay narrow
      const [left, right] = [x(xs[i] - half), x(xs[i] + half)];
      return svg("rect", {
        class: `area ${colour}`,
        x: left,
        width: right - left,
        y: y(value || 0),
        height: y(0) - y(value || 0),
      });
    });
  }

  function brief(ys) {
    const known = ys.filter((value) => value !== null);
    return `from ${SF.number(known[0])} to ${SF.number(known[known.length - 1])}`;
  }

  /** Show the values at the nearest x on pointer moves or arrow keys; Enter or a click picks it. */
  function follow({ picture, cursor, readout, xs, drawn, x, word, xName, pick }) {
    let here = -1;
    const show = (i) => {
      here = Math.max(0, Math.min(xs.length - 1, i));
      cursor.style.display = "";
      cursor.setAttribute("x1", x(xs[here]));
      cursor.setAttribute("x2", x(xs[here]));
      const values = drawn.map((one) => `${one.name} ${SF.number(one.ys[here])}`);
      readout.textContent = `${xName} ${word(xs[here])}: ${values.join(", ")}`;
    };
    const nearest = (event) => {
      const box = picture.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * WIDTH;
      let best = 0;
      xs.forEach((value, i) => {
        if (Math.abs(x(value) - at) < Math.abs(x(xs[best]) - at)) best = i;
      });
      return best;
    };
    picture.addEventListener("pointermove", (event) => show(nearest(event)));
    picture.addEventListener("pointerleave", () => {
      cursor.style.display = "none";
      readout.textContent = "";
    });
    picture.addEventListener("keydown", (event) => {
      const moves = {
        ArrowRight: 1,
        ArrowLeft: -1,
        PageDown: 10,
        PageUp: -10,
        Home: -xs.length,
        End: xs.length,
      };
      if (event.key in moves) {
        event.preventDefault();
        event.stopPropagation();
        show(here + moves[event.key]);
        SF.say(readout.textContent);
      } else if (event.key === "Enter" && pick && here >= 0) pick(xs[here]);
    });
    if (pick) {
      picture.classList.add("pickable");
      picture.addEventListener("click", (event) => pick(xs[nearest(event)]));
    }
  }

  function table(xs, drawn, xName) {
    const details = SF.el("details", { class: "table" }, SF.el("summary", {}, "as a table"));
    details.addEventListener("toggle", () => {
      if (details.children.length > 1) return;
      const head = SF.el(
        "tr",
        {},
        SF.el("th", { scope: "col" }, xName),
        ...drawn.map((one) => SF.el("th", { scope: "col" }, one.name)),
      );
      const body = xs
        .slice(0, TABLE_ROWS)
        .map((value, i) =>
          SF.el(
            "tr",
            {},
            SF.el("th", { scope: "row" }, String(value)),
            ...drawn.map((one) => SF.el("td", {}, SF.number(one.ys[i]))),
          ),
        );
      details.append(
        SF.el(
          "div",
          { class: "scroll", tabindex: "0" },
          SF.el("table", {}, SF.el("thead", {}, head), SF.el("tbody", {}, ...body)),
        ),
      );
      if (xs.length > TABLE_ROWS)
        details.append(
          SF.el(
            "p",
            { class: "note" },
            `${xs.length - TABLE_ROWS} further rows are in metrics.jsonl`,
          ),
        );
    });
    return details;
  }
})(skyrlFastView);
