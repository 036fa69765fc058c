// The charts of a run: curves, times, stop reasons, staleness, rewards, any metric.
"use strict";

(function (SF) {
  const TIMES = [
    ["timing/generate", "generate"],
    ["timing/environment", "environment"],
    ["timing/wait", "wait for rollouts"],
    ["timing/forward_backward", "forward, backward"],
    ["timing/sync", "weights"],
    ["timing/batch", "batch"],
    ["timing/advantages", "advantages"],
  ];
  const MAX_REASONS = 6;
  const MAX_LINES = 6;
  const BINS = 24;
  const MAX_BARS = 8; // one per distinct value

  /** Fill the pane; `pick(step)` shows the trajectories of a step. */
  SF.showCharts = function (pane, metrics, pick) {
    const { steps, series } = metrics;
    const line = (title, names, more) => {
      const found = names.filter(([name]) => series[name]);
      return SF.chart({
        title,
        kind: "line",
        ...only(
          steps,
          found.map(([name, label]) => ({ name: label, ys: series[name] })),
        ),
        pick,
        ...more,
      });
    };
    const passed = Object.keys(series).find((name) => /^reward\/avg_pass_at_\d+$/.test(name));
    const grid = SF.el(
      "div",
      { class: "charts" },
      line(
        "Reward",
        [
          ["reward/avg_raw_reward", "training"],
          ["eval/all/avg_score", "evaluation"],
          ...(passed ? [[passed, passed.replace("reward/avg_pass_at_", "pass@")]] : []),
        ],
        { yName: "mean per trajectory" },
      ),
      timesChart(steps, series, pick),
      endsChart(pick),
      stalenessChart(),
      line(
        "Staleness by step",
        [
          ["async/staleness_mean", "groups, mean"],
          ["async/staleness_max", "groups, max"],
          ["async/token_staleness_mean", "tokens, mean"],
          ["async/token_staleness_max", "tokens, max"],
        ],
        { yName: "updates" },
      ),
      line("Faults", faults(series), {
        yName: "total since the start",
        note: "Only faults that occurred; all are under faults/.",
      }),
      line("Turns", [["generate/avg_num_turns", "turns"]], { yName: "mean per trajectory" }),
      line(
        "Tokens",
        [
          ["generate/avg_num_tokens", "sampled"],
          ["generate/avg_final_context_length", "final context"],
        ],
        { yName: "mean per trajectory" },
      ),
      line(
        "Trainer against engine",
        [
          ["policy/rollout_train_logprobs_abs_diff_mean", "mean"],
          ["policy/rollout_train_logprobs_abs_diff_max", "largest"],
        ],
        { note: "Absolute difference between their log-probabilities of the same tokens." },
      ),
      rewardsChart(),
    );
    pane.replaceChildren(
      SF.el("h2", {}, "Charts"),
      SF.el(
        "p",
        { class: "note" },
        "Arrow keys move through a chart that has the focus; Enter or a click shows the trajectories of that step.",
      ),
      grid,
      anyMetric(steps, series, pick),
    );
  };

  /** Return the faults that occurred, the most frequent first. */
  function faults(series) {
    const most = (name) => series[name].reduce((a, b) => Math.max(a, b ?? 0), 0);
    return Object.keys(series)
      .filter((name) => name.startsWith("faults/") && most(name) > 0)
      .sort((a, b) => most(b) - most(a))
      .slice(0, MAX_LINES)
      .map((name) => [name, SF.inLine(name.replace("faults/", "").replaceAll("_", " "), 40)]);
  }

  /** Drop the steps at which no series has a value. */
  function only(xs, series) {
    const kept = xs.map((_, i) => i).filter((i) => series.some(({ ys }) => ys[i] !== null));
    return {
      xs: kept.map((i) => xs[i]),
      series: series.map(({ name, ys }) => ({ name, ys: kept.map((i) => ys[i]) })),
    };
  }

  function timesChart(steps, series, pick) {
    const found = TIMES.filter(([name]) => series[name]).map(([name, label]) => ({
      name: label,
      ys: series[name],
    }));
    return SF.chart({
      title: "Where the time went",
      kind: "area",
      yName: "seconds per step",
      ...only(steps, found),
      pick,
    });
  }

  function trained() {
    const train = SF.names.phase.indexOf("train");
    return [...Array(SF.total).keys()].filter((i) => SF.columns.phase[i] === train);
  }

  /** Create the chart of each stop reason's share, by step. */
  function endsChart(pick) {
    const rows = trained();
    const steps = [...new Set(rows.map((i) => SF.columns.step[i]))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, i) => [step, i]));
    const counts = SF.names.stop_reason.map(() => new Float64Array(steps.length));
    const all = new Float64Array(steps.length);
    for (const i of rows) {
      const at = place.get(SF.columns.step[i]);
      counts[SF.columns.stop_reason[i]][at]++;
      all[at]++;
    }
    const series = counts
      .map((count, i) => ({
        name: SF.inLine(SF.names.stop_reason[i], 30),
        ys: Array.from(count, (n, at) => n / all[at]),
      }))
      .filter(({ ys }) => ys.some((share) => share > 0))
      .slice(0, MAX_REASONS);
    return SF.chart({
      title: "How trajectories ended",
      kind: "area",
      yName: "share",
      xs: steps,
      series,
      pick,
    });
  }

  function stalenessChart() {
    const ages = trained()
      .map((i) => SF.columns.staleness[i])
      .filter((age) => age !== null);
    const most = ages.reduce((a, b) => Math.max(a, b), 0);
    const counts = Array(most + 1).fill(0);
    for (const age of ages) counts[Math.max(0, age)]++;
    const note = most ? null : "Every trajectory was sampled by the policy version that was trained on it.";
    return SF.chart({
      title: "Staleness",
      note,
      kind: "bar",
      xName: "updates",
      yName: "trajectories",
      xs: counts.map((_, i) => i),
      series: ages.length ? [{ name: "trajectories", ys: counts }] : [],
    });
  }

  /** Create the histogram of the training rewards. */
  function rewardsChart() {
    const rewards = trained()
      .map((i) => SF.columns.reward[i])
      .filter((reward) => reward !== null);
    const least = rewards.reduce((a, b) => Math.min(a, b), 0);
    const most = rewards.reduce((a, b) => Math.max(a, b), 0);
    const width = (most - least) / BINS || 1;
    const distinct = [...new Set(rewards)].sort((a, b) => a - b);
    if (distinct.length <= MAX_BARS) {
      const counts = distinct.map((value) => rewards.filter((reward) => reward === value).length);
      return SF.chart({
        title: "Rewards",
        kind: "bar",
        xName: "reward",
        yName: "trajectories",
        xs: distinct.map((_, i) => i),
        xWords: distinct.map((value) => SF.number(value)),
        series: [{ name: "trajectories", ys: counts }],
      });
    }
    const counts = Array(BINS).fill(0);
    for (const reward of rewards)
      counts[Math.min(BINS - 1, Math.floor((reward - least) / width))]++;
    return SF.chart({
      title: "Rewards",
      note: `${BINS} equal bins from ${SF.number(least)} to ${SF.number(most)}.`,
      kind: "bar",
      xName: "bin",
      yName: "trajectories",
      xs: counts.map((_, i) => i + 1),
      series: [{ name: "trajectories", ys: counts }],
    });
  }

  /** Create the chart of any metric, one at a time. */
  function anyMetric(steps, series, pick) {
    const names = Object.keys(series);
    const select = SF.el("select", { id: "any-metric" });
    select.append(...names.map((name) => SF.el("option", { value: name }, SF.inLine(name, 90))));
    const place = SF.el("div", { class: "charts" });
    const show = () => {
      const label = SF.inLine(select.value, 90);
      const ys = series[select.value] || [];
      const chart = SF.chart({
        title: label,
        kind: "line",
        ...only(steps, [{ name: label, ys }]),
        pick,
      });
      place.replaceChildren(chart || SF.el("p", { class: "note" }, "No values."));
    };
    select.addEventListener("input", show);
    show();
    return SF.el(
      "section",
      { class: "any" },
      SF.el("h2", {}, "Any metric"),
      SF.el("label", { for: "any-metric" }, "metric "),
      select,
      place,
    );
  }
})(skyrlFastView);
