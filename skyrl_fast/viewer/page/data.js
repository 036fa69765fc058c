// The run's data: the summary at the start; heads, items and previews of trajectories on request.
"use strict";

(function (SF) {
  const KEPT_LISTS = 32; // parsed; the least recently used is dropped first
  const waiting = new Map(); // name -> function to call with the data
  const lists = new Map(); // name -> promise, in order of use
  let previewsPerScript = 1;

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

  function loadList(name) {
    const found = lists.get(name) || SF.loadData(name);
    lists.delete(name);
    lists.set(name, found);
    found.catch(() => lists.delete(name));
    if (lists.size > KEPT_LISTS) lists.delete(lists.keys().next().value);
    return found;
  }

  /** Store the summary: the run's name and scales, and the columns. */
  SF.setSummary = function (summary) {
    const { columns, names } = summary;
    SF.run = {
      name: summary.name,
      path: summary.path,
      scales: summary.scales,
      longestResponse: summary.longest_response,
    };
    SF.columns = columns;
    SF.names = names;
    SF.total = columns.script.length;
    previewsPerScript = summary.previews_per_script;
  };

  /** Return a trajectory's value in a column of names. */
  SF.word = (name, index) => SF.names[name][SF.columns[name][index]];
  SF.value = (name, index) => SF.columns[name][index];

  /** Return a promise of a trajectory's head: its turns, with addresses of texts and tokens. */
  SF.loadHead = (index) =>
    loadList(`heads${SF.value("script", index)}`).then((heads) => heads[SF.value("place", index)]);

  /** Return a promise of a slice of a text, or of the tokens of a slice of a response. */
  SF.loadItem = ([script, place]) => loadList(`items${script}`).then((items) => items[place]);

  /** Return a promise of the first items of a turn's response and observation. */
  SF.loadTurn = async function (turn) {
    const first = (addresses) => (addresses.length ? SF.loadItem(addresses[0]) : null);
    const [response, observation] = await Promise.all([first(turn.tokens), first(turn.observation)]);
    return { response, observation };
  };

  /** Return a promise of the start of a trajectory's last response. */
  SF.loadPreview = (index) =>
    loadList(`previews${Math.floor(index / previewsPerScript)}`).then(
      (previews) => previews[index % previewsPerScript],
    );

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

  /** Return the place of the first trained trajectory among these, else 0. */
  SF.firstTrained = function (found) {
    const trained = (i) => SF.word("phase", i) !== "eval" && SF.value("trained_tokens", i) > 0;
    return Math.max(0, found.findIndex(trained));
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
