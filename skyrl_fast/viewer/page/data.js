// The run's data: the summary at the start, the trajectories in chunks on request.
"use strict";

(function (SF) {
  const KEPT_CHUNKS = 16; // parsed; the least recently used is dropped first
  const waiting = new Map(); // name -> function to call with the data
  const chunks = new Map(); // number -> promise, in order of use

  /** Called by every data file; the text is parsed as JSON, never run. */
  SF.receive = function (name, text) {
    const resolve = waiting.get(JSON.parse(name));
    waiting.delete(JSON.parse(name));
    if (resolve) resolve(JSON.parse(text));
  };

  SF.loadData = function (name) {
    return new Promise((resolve, reject) => {
      waiting.set(name, resolve);
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onload = () => {
        script.remove();
        if (waiting.delete(name)) reject(new Error(`data/${name}.js is damaged`));
      };
      script.onerror = () => {
        script.remove();
        waiting.delete(name);
        reject(new Error(`data/${name}.js cannot be loaded: is the folder complete?`));
      };
      document.head.append(script);
    });
  };

  function chunk(number) {
    const found = chunks.get(number) || SF.loadData(`chunk${number}`);
    chunks.delete(number);
    chunks.set(number, found);
    found.catch(() => chunks.delete(number));
    if (chunks.size > KEPT_CHUNKS) chunks.delete(chunks.keys().next().value);
    return found;
  }

  /** Store the summary: the columns, and each trajectory's position in its chunk. */
  SF.setSummary = function (summary) {
    const { columns, names } = summary;
    SF.run = { name: summary.name, path: summary.path, scales: summary.scales };
    SF.columns = columns;
    SF.names = names;
    SF.total = columns.chunk.length;
    const place = new Int32Array(SF.total);
    for (let i = 1; i < SF.total; i++) {
      place[i] = columns.chunk[i] === columns.chunk[i - 1] ? place[i - 1] + 1 : 0;
    }
    SF.place = place;
  };

  /** Return a trajectory's value in a column of names. */
  SF.word = (name, index) => SF.names[name][SF.columns[name][index]];
  SF.value = (name, index) => SF.columns[name][index];

  /** Return a promise of a trajectory's details: texts and tokens. */
  SF.loadTrajectory = (index) =>
    chunk(SF.columns.chunk[index]).then((details) => details[SF.place[index]]);

  /** Return the first trajectory of a group, and the end; members are adjacent. */
  SF.groupOf = function (index) {
    const { uid, phase, step } = SF.columns;
    const same = (i) =>
      uid[i] === uid[index] && phase[i] === phase[index] && step[i] === step[index];
    let first = index;
    let end = index + 1;
    while (first > 0 && same(first - 1)) first--;
    while (end < SF.total && same(end)) end++;
    return [first, end];
  };

  /** Return the trajectories that pass a filter, sorted as it says. */
  SF.select = function (filter) {
    const { step, reward, phase, stop_reason: stop, failure, uid } = SF.columns;
    const noFailure = SF.names.failure.indexOf("");
    const wanted = filter.uid.trim().toLowerCase();
    const uids = wanted
      ? new Set(SF.names.uid.map((name, i) => (name.toLowerCase().includes(wanted) ? i : -1)))
      : null;
    const found = [];
    for (let i = 0; i < SF.total; i++) {
      if (filter.phase >= 0 && phase[i] !== filter.phase) continue;
      if (filter.stop >= 0 && stop[i] !== filter.stop) continue;
      if (step[i] < filter.stepFrom || step[i] > filter.stepTo) continue;
      if (filter.hasReward && !(reward[i] >= filter.rewardFrom && reward[i] <= filter.rewardTo))
        continue;
      if (filter.failure === "failed" && failure[i] === noFailure) continue;
      if (filter.failure === "fine" && failure[i] !== noFailure) continue;
      if (filter.failure === "filtered" && !SF.columns.filtered[i]) continue;
      if (uids && !uids.has(uid[i])) continue;
      found.push(i);
    }
    const key = SF.columns[filter.sort];
    if (key) {
      const sign = filter.down ? -1 : 1;
      found.sort((a, b) => sign * ((key[a] ?? -Infinity) - (key[b] ?? -Infinity)) || a - b);
    } else if (filter.down) {
      found.reverse();
    }
    return found;
  };
})(skyrlFastView);
