// The ranks: a grid with a row for each, walked with the arrow keys; Enter or a click shows a rank from near.

const MEMORY = ["parameters", "gradients", "optimizer", "other"];
const COLUMNS = ["rank", "state", "device", "memory", "used", "busy", "steps"];
const AGAIN = 2000;  // ms between two looks at a rank from near
const SAMPLE_INTERVAL = 2, MAX_SAMPLES = 90;  // seconds, and how many: placement.py has the same
const SHORTEST = 30;  // seconds that the whole width of a course stands for at least
const COURSE = {width: 48, height: 14};
const CPU_SCALE = "The bars of CPU ranks are scaled to the largest rank; the thin bars show the part of the machine's memory.";

function drawPlacement(channel, root) {
  const title = make("h2", {});
  const late = make("p", {role: "status"});
  const protection = make("p", {});
  const legend = make("p", {class: "rb-line rb-faint"}, "memory:", ...MEMORY.map((part) =>
    make("span", {}, make("span", {class: `rb-swatch rb-${part}`, "aria-hidden": "true"}),
      part === "other" ? "activations and other" : part)), make("span", {},
    make("span", {class: "rb-swatch", "aria-hidden": "true"}), "free"));
  const scaled = make("p", {class: "rb-faint", hidden: ""}, CPU_SCALE);
  const grid = make("div", {class: "rb-ranks", role: "grid", "aria-label": "ranks", "aria-readonly": "true"});
  const near = nearPanel(channel, (focus) => {
    if (rows.has(opened)) setAttribute(rows.get(opened).element, "aria-selected", "false");
    opened = null;
    if (focus) focusRow(current);
  });
  const gradients = gradientsPanel();
  root.append(title, late, protection, grid, legend, scaled, gradients.element, near.element);
  const rows = new Map();
  const courses = new Map();  // of each rank: [time, used bytes, steps per second], oldest first
  let sampled = -Infinity;
  let order = [], current = null, opened = null, cluster = "", drawn = "";

  function focusRow(rank, options) {
    const row = rows.get(rank);
    if (!row) return;
    if (rows.has(current)) rows.get(current).element.tabIndex = -1;
    current = rank;
    row.element.tabIndex = 0;
    row.element.focus(options);
  }

  function open(rank) {
    opened = rank;
    for (const [each, row] of rows) setAttribute(row.element, "aria-selected", String(each === rank));
    focusRow(rank);
    near.open(rank);
  }

  /** What Python has seen before this page did. */
  channel.ask("history").then((history) => {
    for (const [rank, samples] of Object.entries(history || {})) {
      const later = courses.get(Number(rank)) || [];
      const before = samples.filter(([at]) => !later.length || at < later[0][0]);
      courses.set(Number(rank), [...before, ...later].slice(-MAX_SAMPLES));
    }
    for (const [rank, row] of rows) row.course(courses.get(rank) || []);
  }).catch(() => {});  // the kernel has ended, or is of another version: the course begins here

  function sample(state) {
    const passed = state.at - sampled;
    if (!(passed >= SAMPLE_INTERVAL || passed < 0)) return;  // below 0 if the clock was set back
    sampled = state.at;
    for (const [rank, , , , , , rate, bytes] of state.ranks) {
      const before = (courses.get(rank) || []).filter(([at]) => at < state.at);
      const samples = [...before, [state.at, bytes ? bytes[0] - bytes[5] : 0, rate || 0]].slice(-MAX_SAMPLES);
      courses.set(rank, samples);
      if (rows.has(rank)) rows.get(rank).course(samples);
    }
  }

  /** The bytes that the whole bar of a rank stands for: the device's, or the most that a CPU rank of its host uses. */
  function scales(states) {
    const most = new Map(), found = new Map();
    for (const [rank, , , , , , , bytes] of states) {
      const row = rows.get(rank);
      if (row && bytes && row.onCpu) most.set(row.host, Math.max(most.get(row.host) || 1, bytes[0] - bytes[5]));
    }
    for (const [rank, row] of rows) found.set(rank, row.onCpu ? most.get(row.host) : null);
    return found;
  }

  grid.addEventListener("keydown", (event) => {
    const at = order.indexOf(current);
    const steps = {ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: order.length - 1, PageDown: at + 10, PageUp: at - 10};
    if (event.key in steps) focusRow(order[Math.max(0, Math.min(order.length - 1, steps[event.key]))]);
    else if (event.key === "Enter" || event.key === " ") open(current);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  grid.addEventListener("click", (event) => {
    const row = event.target.closest("[data-rank]");
    if (row) open(Number(row.dataset.rank));
  });

  return {
    fixed(fixed) {
      cluster = fixed.cluster || "";
      near.fixed(fixed.ranks || []);
      // A row that is replaced during a click does not get the click, so that new objects leave the rows as they are.
      const shown = JSON.stringify((fixed.ranks || []).map(({rank, host, device, model}) => [rank, host, device, model]));
      if (shown === drawn) return;
      drawn = shown;
      const focused = grid.contains(document.activeElement);
      rows.clear();
      grid.replaceChildren(make("div", {class: "rb-row rb-head", role: "row"},
        ...COLUMNS.map((name) => make("div", {role: "columnheader"}, name))));
      let host = null;
      for (const rank of fixed.ranks || []) {
        if (rank.host !== host) {
          host = rank.host;
          grid.append(make("div", {role: "row", class: "rb-host"}, make("div", {role: "gridcell"}, host)));
        }
        const row = rankRow(rank);
        rows.set(rank.rank, row);
        row.course(courses.get(rank.rank) || []);
        grid.append(row.element);
      }
      order = [...rows.keys()];
      grid.hidden = legend.hidden = !order.length;
      scaled.hidden = ![...rows.values()].some((row) => row.onCpu);
      if (!rows.has(current)) current = order.length ? order[0] : null;
      if (current !== null) rows.get(current).element.tabIndex = 0;
      if (rows.has(opened)) setAttribute(rows.get(opened).element, "aria-selected", "true");
      if (focused) focusRow(current, {preventScroll: true});
    },
    state(state) {
      const states = state.ranks || [];
      const lagging = [], counts = {}, scale = scales(states);
      if (states.length) sample(state);
      for (const each of states) {
        counts[each[1]] = (counts[each[1]] || 0) + 1;
        if (each[3]) lagging.push(each[0]);
        const row = rows.get(each[0]);
        if (row) row.update(each, scale.get(each[0]));
      }
      setText(title, states.length ? `${many(states.length, "rank")}${cluster && ` of ${cluster}`}: ` +
        Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ") : "no rank has replied yet");
      setText(late, !lagging.length ? "" : lagging.length === 1 ? `▲ rank ${lagging[0]} lags its peers` :
        `▲ ranks ${lagging.join(", ")} lag their peers`);
      setText(protection, state.protection || "");
      protection.hidden = !state.protection;
      gradients.state(state.gradients || []);
      near.state(states);
    },
    close: () => near.close(),
  };
}

/** The gradient norms of the models: a line for each, with its course, and below it a table of the modules. */
function gradientsPanel() {
  const element = make("section", {"aria-label": "gradient norms", hidden: ""});
  const panels = new Map();

  function panel(model) {
    const words = make("span", {}), note = make("span", {}), rest = make("p", {class: "rb-faint"});
    const body = make("tbody", {}), line = course(`gradient norm of ${model}`), samples = [];
    const table = make("table", {}, make("thead", {}, make("tr", {},
      ...["module", "gradient", "of all"].map((name) => make("th", {scope: "col"}, name)))), body);
    const details = make("details", {}, make("summary", {},
      make("span", {class: "rb-course", style: "display: inline-flex"}, words, line.element, note)),
      make("div", {class: "rb-scroll", tabindex: "0", role: "region", "aria-label": `gradients of ${model}`}, table), rest);
    let last = "";
    return {element: details, update([, step, norm, number, trouble, rows, more]) {
      setText(words, `gradients of ${model}${step === null ? "" : ` at step ${step}`}: norm ${norm} `);
      setText(note, trouble ? `▲ ${trouble}` : "");
      setText(rest, more ? `and ${many(more, "module")} with smaller gradients` : "");
      // Without a step, as between two cells, a norm counts if it is another one.
      const [before, norm_before] = samples.length ? samples[samples.length - 1] : [-1, null];
      const at = step === null ? before + 1 : step;
      if (number !== null && (step === null ? number !== norm_before : at !== before)) {
        if (before > at) samples.length = 0;  // another training
        samples.push([at, number]);
        if (samples.length > MAX_SAMPLES) samples.shift();
        line.draw(samples, digits, "steps");
      }
      const text = JSON.stringify(rows);
      if (text === last) return;
      last = text;
      body.replaceChildren(...rows.map((row) =>
        make("tr", {}, ...row.map((value, index) => make(index ? "td" : "th", index ? {} : {scope: "row"}, value)))));
    }};
  }

  return {element, state(models) {
    element.hidden = !models.length;
    for (const [name, shown] of panels) {
      if (models.some(([model]) => model === name)) continue;
      shown.element.remove();
      panels.delete(name);
    }
    for (const model of models) {
      if (!panels.has(model[0])) {
        panels.set(model[0], panel(model[0]));
        element.append(panels.get(model[0]).element);
      }
      panels.get(model[0]).update(model);
    }
  }};
}

/** One rank's row; the cells that never change are written once. */
function rankRow(rank) {
  const cell = () => make("div", {role: "gridcell"});
  const [state, memory, used, busy, steps] = [cell(), cell(), cell(), cell(), cell()];
  const parts = MEMORY.map((part) => make("i", {class: `rb-${part}`}));
  const bar = make("div", {class: "rb-bar", role: "img", "aria-label": "memory unknown"}, ...parts);
  const onCpu = rank.device.split(":")[0] === "cpu";
  const machine = make("i", {}), thin = make("div", {class: "rb-bar rb-thin", "aria-hidden": "true"}, machine);
  const bars = make("div", {}, bar, ...(onCpu ? [thin] : []));
  const usedCourse = course("memory"), rateCourse = course("steps per second");
  const speed = make("span", {});
  memory.classList.add("rb-course");
  steps.classList.add("rb-course");
  steps.append(speed, rateCourse.element);
  const device = make("div", {role: "gridcell", title: `${rank.device} ${rank.model}`.trim()}, `${rank.device} ${rank.model}`.trim());
  const element = make("div", {class: "rb-row", role: "row", tabindex: "-1", "data-rank": rank.rank, "aria-selected": "false"},
    make("div", {role: "gridcell"}, String(rank.rank)), state, device, memory, used, busy, steps);
  const widths = [];
  return {element, onCpu, host: rank.host, course(samples) {
    usedCourse.draw(samples.map(([at, used]) => [at, used]), size);
    rateCourse.draw(samples.some(([, , rate]) => rate) ? samples.map(([at, , rate]) => [at, rate]) : [], (rate) => `${digits(rate)}/s`);
  }, update([, name, words, lags, utilisation, count, rate, bytes], scale) {
    setText(state, `${STATE_MARKS[name] || ""} ${lags ? "▲ lags, " : ""}${words}`);
    if (state.title !== words) state.title = words;
    setAttribute(element, "data-state", name);
    setAttribute(element, "data-lags", String(lags));
    setText(busy, utilisation === null ? "" : `${utilisation} %`);
    setText(speed, [count || null, rate === null ? null : `${rate}/s`].filter((each) => each !== null).join(" · "));
    if (!bytes) {
      bars.remove();
      usedCourse.element.remove();
      setText(used, "");
      return;
    }
    if (!bars.parentNode) memory.append(bars, usedCourse.element);
    const [total, ...rest] = bytes;
    MEMORY.forEach((part, index) => {
      const width = `${(100 * rest[index] / (scale || total || 1)).toFixed(1)}%`;
      if (widths[index] !== width) parts[index].style.width = widths[index] = width;
    });
    const share = `${(100 * (total - rest[4]) / (total || 1)).toFixed(1)}%`;
    if (onCpu && machine.style.width !== share) machine.style.width = share;
    setText(used, `${size(total - rest[4])} of ${size(total)}`);
    setAttribute(bar, "aria-label", memoryWords(bytes));
    if (bar.title !== bar.getAttribute("aria-label")) bar.title = bar.getAttribute("aria-label");
  }};
}

/** The course of a number over the last minutes, or steps, as a small line, from 0 to its largest value. */
function course(what) {
  const line = makeSvg("polyline", {});
  const element = makeSvg("svg", {viewBox: `0 0 ${COURSE.width} ${COURSE.height}`, preserveAspectRatio: "none", "aria-hidden": "true"});
  element.append(line);
  return {element, draw(samples, words, unit = "seconds") {
    element.style.visibility = samples.length > 1 ? "" : "hidden";
    if (samples.length < 2) return;
    const values = samples.map(([, value]) => value), top = Math.max(...values), most = top || 1;
    const end = samples[samples.length - 1][0], seconds = Math.max(unit === "seconds" ? SHORTEST : 1, end - samples[0][0]);
    setAttribute(line, "points", samples.map(([at, value]) => {
      const x = COURSE.width * Math.max(0, 1 - (end - at) / seconds), y = 1 + (COURSE.height - 2) * (1 - value / most);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    }).join(" "));
    const span = end - samples[0][0], past = unit === "seconds" ? duration(span) : `${span} ${unit}`;
    const told = `${what}, last ${past}: ${words(Math.min(...values))} to ${words(top)}`;
    if (element.rbTold === told) return;
    element.rbTold = told;
    element.replaceChildren(makeSvg("title", {}, told), line);
  }};
}

function memoryWords([, parameters, gradients, optimizer, other, free, shared]) {
  const parts = {parameters, gradients, optimizer, "activations and other": other, free, "shared with others": shared};
  return Object.entries(parts).filter(([, amount]) => amount).map(([name, amount]) => `${name} ${size(amount)}`).join(", ");
}

/** A rank from near: what it holds, its stack, its last lines, its variables, and what can be done to it. */
function nearPanel(channel, back) {
  const heading = make("h3", {});
  const said = make("p", {class: "rb-said", role: "status"});
  const memory = make("p", {});
  const holdings = make("div", {class: "rb-scroll", tabindex: "0", role: "region", "aria-label": "objects on the rank"});
  const pre = (label) => make("pre", {tabindex: "0", role: "region", "aria-label": label});
  const stack = pre("stack"), output = pre("last lines of output");
  const body = make("tbody", {});
  const names = ["name", "type", "shape", "dtype", "device", "bytes", "value"];
  const variables = make("div", {class: "rb-scroll", tabindex: "0", role: "region", "aria-label": "variables"},
    make("table", {}, make("thead", {}, make("tr", {}, ...names.map((name) => make("th", {scope: "col"}, name)))), body));
  let rank = null, fixed = [], states = [], every = 0, last = "", asking = false;

  async function act(kind) {
    setText(said, `${kind}: waiting for the ranks …`);
    try {
      setText(said, await channel.ask("act", {kind, rank}));
    } catch (error) {
      setText(said, error.message);
    }
  }

  const interrupt = make("button", {type: "button", onclick: () => act("interrupt")}, "Interrupt");
  const restart = make("button", {type: "button", onclick: () => sure(true)}, "Restart …");
  const yes = make("button", {type: "button", hidden: "", onclick: () => { sure(false); act("restart"); }}, "Yes, restart");
  const no = make("button", {type: "button", hidden: "", onclick: () => sure(false)}, "No");
  const away = make("button", {type: "button", onclick: () => close()}, "Close");

  function sure(asked) {
    restart.hidden = asked;
    yes.hidden = no.hidden = !asked;
    setText(said, asked ? "A restart deletes the rank's variables. Restart?" : "");
    (asked ? no : restart).focus();
  }

  async function refresh() {
    const seen = document.visibilityState !== "hidden" && element.getClientRects().length;  // and no other tab is
    if (rank === null || asking || !seen) return;
    asking = true;
    const asked = rank;
    try {
      const detail = await channel.ask("detail", {rank});
      if (asked === rank) show(detail);
    } catch (error) {
      if (asked === rank) setText(stack, error.message);
    } finally {
      asking = false;
      if (asked !== rank) refresh();
    }
  }

  function show(detail) {
    setText(stack, detail.stack.join("\n") || "no stack frames of a cell");
    setText(output, detail.output.join("\n") || "no output");
    const text = JSON.stringify(detail.variables);
    if (text === last) return;  // a row that is being copied stays
    last = text;
    body.replaceChildren(...detail.variables.map((row) =>
      make("tr", {}, ...row.map((value, index) => make(index ? "td" : "th", index ? {} : {scope: "row"}, value)))));
  }

  function close(focus = true) {
    clearInterval(every);
    rank = null;
    element.hidden = true;
    back(focus);
  }

  const element = make("section", {class: "rb-near", hidden: "", "aria-label": "details of one rank",
    onkeydown: (event) => { if (event.key === "Escape") { close(); event.stopPropagation(); } }},
  make("div", {class: "rb-line"}, heading, interrupt, restart, yes, no, away), said, memory,
  make("h3", {}, "Objects"), holdings, make("h3", {}, "Stack"), stack, make("h3", {}, "Last lines of output"), output,
  make("h3", {}, "Variables"), variables);

  function holds() {
    const found = fixed.find((each) => each.rank === rank);
    if (!found) return;
    setText(heading, `rank ${rank} on ${found.host}, process ${found.pid}, ${found.device} ${found.model}`);
    const lines = found.holdings.map(([kind, name, what, facts]) => `${kind} ${name}: ${what}${facts ? ` (${facts})` : ""}`);
    holdings.replaceChildren(...(lines.length ? lines : ["no objects found"]).map((line) => make("p", {}, line)));
  }

  return {
    element,
    open(wanted) {
      rank = wanted;
      last = "";
      element.hidden = false;
      setText(said, "");
      setText(stack, "waiting for the rank …");
      setText(output, "");
      body.replaceChildren();
      sureQuietly();
      holds();
      now();
      clearInterval(every);
      every = setInterval(refresh, AGAIN);
      refresh();
    },
    fixed(ranks) {
      fixed = ranks;
      if (rank === null) return;
      if (ranks.length && !ranks.some((each) => each.rank === rank)) close(element.contains(document.activeElement));
      else holds();
    },
    state(found) {
      states = found;
      now();
    },
    close() { clearInterval(every); },
  };

  function now() {
    const found = rank !== null && states.find((each) => each[0] === rank);
    if (!found) return;
    const loaders = found[8].length ? `. loader: ${found[8].join("; ")}` : "";
    setText(memory, `${found[2]}. ${found[7] ? memoryWords(found[7]) : ""}${loaders}`);
  }

  function sureQuietly() {
    restart.hidden = false;
    yes.hidden = no.hidden = true;
  }
}
