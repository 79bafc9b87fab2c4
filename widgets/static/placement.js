// The ranks: a grid with a row for each, walked with the arrow keys; Enter or a click shows a rank from near.

const MEMORY = ["parameters", "gradients", "optimizer", "other"];
const COLUMNS = ["rank", "state", "device", "memory", "used", "busy", "steps"];
const AGAIN = 2000;  // ms between two looks at a rank from near

function drawPlacement(channel, root) {
  const title = make("h2", {});
  const late = make("p", {role: "status"});
  const legend = make("p", {class: "rb-line rb-faint"}, "memory:", ...MEMORY.map((part) =>
    make("span", {}, make("span", {class: `rb-swatch rb-${part}`, "aria-hidden": "true"}),
      part === "other" ? "activations and other" : part)), make("span", {},
    make("span", {class: "rb-swatch", "aria-hidden": "true"}), "free"));
  const grid = make("div", {class: "rb-ranks", role: "grid", "aria-label": "ranks", "aria-readonly": "true"});
  const near = nearPanel(channel, () => focusRow(current));
  root.append(title, late, grid, legend, near.element);
  const rows = new Map();
  let order = [], current = null, opened = null, cluster = "";

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
        grid.append(row.element);
      }
      order = [...rows.keys()];
      if (!rows.has(current)) current = order.length ? order[0] : null;
      if (current !== null) rows.get(current).element.tabIndex = 0;
      if (rows.has(opened)) setAttribute(rows.get(opened).element, "aria-selected", "true");
      if (focused) focusRow(current, {preventScroll: true});
      near.fixed(fixed.ranks || []);
    },
    state(state) {
      const states = state.ranks || [];
      const lagging = [], counts = {};
      for (const each of states) {
        counts[each[1]] = (counts[each[1]] || 0) + 1;
        if (each[3]) lagging.push(each[0]);
        const row = rows.get(each[0]);
        if (row) row.update(each);
      }
      setText(title, states.length ? `${many(states.length, "rank")}${cluster && ` of ${cluster}`}: ` +
        Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ") : "no rank has answered yet");
      setText(late, !lagging.length ? "" : lagging.length === 1 ? `▲ rank ${lagging[0]} lags its peers` :
        `▲ ranks ${lagging.join(", ")} lag their peers`);
      near.state(states);
    },
    close: () => near.close(),
  };
}

/** One rank's row; the cells that never change are written once. */
function rankRow(rank) {
  const cell = () => make("div", {role: "gridcell"});
  const [state, memory, used, busy, steps] = [cell(), cell(), cell(), cell(), cell()];
  const parts = MEMORY.map((part) => make("i", {class: `rb-${part}`}));
  const bar = make("div", {class: "rb-bar", role: "img", "aria-label": "memory unknown"}, ...parts);
  const device = make("div", {role: "gridcell", title: rank.model}, `${rank.device} ${rank.model}`.trim());
  const element = make("div", {class: "rb-row", role: "row", tabindex: "-1", "data-rank": rank.rank, "aria-selected": "false"},
    make("div", {role: "gridcell"}, String(rank.rank)), state, device, memory, used, busy, steps);
  const widths = [];
  return {element, update([, name, words, lags, utilisation, count, rate, bytes]) {
    setText(state, `${STATE_MARKS[name] || ""} ${lags ? "▲ lags, " : ""}${words}`);
    if (state.title !== words) state.title = words;
    setAttribute(element, "data-state", name);
    setAttribute(element, "data-lags", String(lags));
    setText(busy, utilisation === null ? "" : `${utilisation} %`);
    setText(steps, [count || null, rate === null ? null : `${rate}/s`].filter((each) => each !== null).join(" · "));
    if (!bytes) {
      bar.remove();
      setText(used, "");
      return;
    }
    if (!bar.parentNode) memory.append(bar);
    const [total, ...rest] = bytes;
    MEMORY.forEach((part, index) => {
      const width = `${(100 * rest[index] / (total || 1)).toFixed(1)}%`;
      if (widths[index] !== width) parts[index].style.width = widths[index] = width;
    });
    setText(used, `${size(total - rest[4])} of ${size(total)}`);
    setAttribute(bar, "aria-label", memoryWords(bytes));
    if (bar.title !== bar.getAttribute("aria-label")) bar.title = bar.getAttribute("aria-label");
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
  const holdings = make("div", {class: "rb-scroll", tabindex: "0", role: "region", "aria-label": "what lives there"});
  const pre = (label) => make("pre", {tabindex: "0", role: "region", "aria-label": label});
  const stack = pre("stack"), output = pre("last lines of output");
  const body = make("tbody", {});
  const names = ["name", "type", "shape", "dtype", "device", "bytes", "value"];
  const variables = make("div", {class: "rb-scroll", tabindex: "0", role: "region", "aria-label": "variables"},
    make("table", {}, make("thead", {}, make("tr", {}, ...names.map((name) => make("th", {scope: "col"}, name)))), body));
  let rank = null, fixed = [], states = [], every = 0, last = "", asking = false;

  async function act(kind) {
    setText(said, `${kind}: asking …`);
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
    setText(said, asked ? "A restart loses the variables. Restart?" : "");
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
    setText(stack, detail.stack.join("\n") || "no frame of a cell");
    setText(output, detail.output.join("\n") || "nothing printed");
    const text = JSON.stringify(detail.variables);
    if (text === last) return;  // a row that is being copied stays
    last = text;
    body.replaceChildren(...detail.variables.map((row) =>
      make("tr", {}, ...row.map((value, index) => make(index ? "td" : "th", index ? {} : {scope: "row"}, value)))));
  }

  function close() {
    clearInterval(every);
    rank = null;
    element.hidden = true;
    back();
  }

  const element = make("section", {class: "rb-near", hidden: "", "aria-label": "one rank",
    onkeydown: (event) => { if (event.key === "Escape") { close(); event.stopPropagation(); } }},
  make("div", {class: "rb-line"}, heading, interrupt, restart, yes, no, away), said, memory,
  make("h3", {}, "Lives there"), holdings, make("h3", {}, "Stack"), stack, make("h3", {}, "Last lines"), output,
  make("h3", {}, "Variables"), variables);

  function holds() {
    const found = fixed.find((each) => each.rank === rank);
    if (!found) return;
    setText(heading, `rank ${rank} on ${found.host}, process ${found.pid}, ${found.device} ${found.model}`);
    const lines = found.holdings.map(([kind, name, what, facts]) => `${kind} ${name}: ${what}${facts ? ` (${facts})` : ""}`);
    holdings.replaceChildren(...(lines.length ? lines : ["nothing that was found"]).map((line) => make("p", {}, line)));
  }

  return {
    element,
    open(wanted) {
      rank = wanted;
      last = "";
      element.hidden = false;
      setText(said, "");
      setText(stack, "asking …");
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
      if (rank !== null) holds();
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
