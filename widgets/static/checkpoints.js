// Saves as they happen, a bar for each rank, and the checkpoints in a folder with what can be done with them.

function drawCheckpoints(channel, root) {
  const title = make("h2", {});
  const said = make("p", {class: "rb-said", role: "status"});
  const saves = make("div", {});
  const none = make("p", {class: "rb-faint"}, "no save in progress");
  const body = make("tbody", {});
  const names = ["", "checkpoint", "step", "saved", "size", "ranks", "state", "actions"];
  const head = make("tr", {}, ...names.map((name) => (name ? make("th", {scope: "col"}, name) : make("td", {}))));
  const scroll = make("div", {class: "rb-scroll", tabindex: "0", role: "region", "aria-label": "checkpoints in the folder"},
    make("table", {}, make("thead", {}, head), body));
  const heading = make("h3", {}, "In the folder");
  const empty = make("p", {class: "rb-faint"}, "There is no checkpoint yet. accelerator.save_state() and rankbook.checkpoint.save() make one.");
  root.append(title, make("h3", {}, "Saves"), none, saves, heading, empty, scroll, said);
  const drawn = new Map(), rows = new Map();

  async function act(op, name) {
    setText(said, `${op} ${name} …`);
    try {
      setText(said, await channel.ask(op, {name}));
    } catch (error) {
      setText(said, error.message);
    }
  }

  return {
    fixed(fixed) {
      const checkpoints = fixed.checkpoints || [];
      setText(title, fixed.trouble || (fixed.folder ? `${many(checkpoints.length, "checkpoint")} in ${fixed.folder}` : "saves of all cells"));
      heading.hidden = !fixed.folder;
      empty.hidden = heading.hidden || checkpoints.length > 0 || Boolean(fixed.trouble);
      scroll.hidden = !checkpoints.length;
      const seen = new Set();
      for (const [name, latest, step, saved, bytes, ranks, state, can] of checkpoints) {
        seen.add(name);
        if (!rows.has(name)) rows.set(name, checkpointRow(name, act));
        rows.get(name).update([latest, name, step, saved, bytes, ranks, state], can);
      }
      let had = null;
      for (const [name, row] of rows) {
        if (seen.has(name)) continue;
        if (row.element.contains(document.activeElement)) had = true;
        row.element.remove();
        rows.delete(name);
      }
      checkpoints.forEach(([name], index) => {
        const {element} = rows.get(name);
        if (body.children[index] !== element) body.insertBefore(element, body.children[index] || null);
      });
      if (had) scroll.focus();
    },
    state(state) {
      const found = state.saves || [];
      none.hidden = found.length > 0;
      const seen = new Set();
      for (const save of found) {
        seen.add(save.what);
        if (!drawn.has(save.what)) {
          drawn.set(save.what, saveBox(save.what));
          saves.append(drawn.get(save.what).element);
        }
        drawn.get(save.what).update(save);
      }
      found.forEach(({what}, index) => {
        const {element} = drawn.get(what);
        if (saves.children[index] !== element) saves.insertBefore(element, saves.children[index] || null);
      });
      for (const [what, box] of drawn) {
        if (seen.has(what)) continue;
        box.element.remove();
        drawn.delete(what);
      }
    },
  };
}

function saveBox(what) {
  const words = make("p", {}), wrong = make("p", {role: "alert"});
  const whole = make("progress", {max: "1", value: "0", "aria-label": what});
  const ranks = make("div", {class: "rb-totals", tabindex: "0", role: "group", "aria-label": `ranks of ${what}`});
  const bars = new Map();
  return {element: make("div", {}, words, whole, ranks, wrong), update(save) {
    setText(words, `${what}: ${save.words}`);
    whole.value = save.total ? save.written / save.total : save.phase === "done" ? 1 : 0;
    setText(wrong, save.error);
    whole.hidden = ranks.hidden = save.phase === "done";  // full bars say nothing more
    for (const [rank, {cells}] of bars) {
      if (save.ranks.some(([present]) => present === rank)) continue;
      cells.forEach((cell) => cell.remove());
      bars.delete(rank);
    }
    for (const [rank, phase, written, total] of save.ranks) {
      if (!bars.has(rank)) {
        const bar = make("i", {class: "rb-amount"}), told = make("span", {});
        const cells = [make("span", {}, `rank ${rank}`), make("span", {class: "rb-bar"}, bar), told];
        const after = [...bars.keys()].filter((other) => other > rank).sort((one, other) => one - other)[0];
        if (after === undefined) ranks.append(...cells);
        else bars.get(after).cells[0].before(...cells);  // a rank may report later than a higher one
        bars.set(rank, {bar, told, cells});
      }
      const {bar, told} = bars.get(rank);
      const width = `${total ? (100 * written / total).toFixed(1) : 0}%`;
      if (bar.style.width !== width) bar.style.width = width;
      setText(told, phase === "failed" ? "failed" : `${size(written)} of ${size(total)}`);
    }
  }};
}

/** One checkpoint. Asked once before it is loaded, for that changes the ranks' model; twice before it is deleted. */
function checkpointRow(name, act) {
  const cells = ["td", "th", "td", "td", "td", "td", "td"].map((tag) => make(tag, tag === "th" ? {scope: "row"} : {}));
  const place = make("td", {});
  const questions = {
    load: [`Load ${name}? This replaces the current values on the ranks.`],
    delete: [`Delete ${name}?`, `A deleted checkpoint cannot be restored. Delete ${name} permanently?`],
  };
  const answers = {load: ["Cancel", "Yes, load"], delete: ["Keep", "Yes, delete"]};
  const button = (words, does) => make("button", {type: "button", onclick: does, "aria-label": `${words} ${name}`}, words);

  let can = [], buttons = [], asked = null;

  function usual(focus) {
    asked = null;
    buttons = can.map((op) => button({load: "Load …", verify: "Verify", delete: "Delete …"}[op],
      op in questions ? () => ask(op, 0) : () => act(op, name)));
    place.replaceChildren(make("span", {class: "rb-line"}, ...buttons));
    if (can.includes(focus)) buttons[can.indexOf(focus)].focus();
  }

  function ask(op, stage) {
    const question = questions[op][stage], [keep, go] = answers[op];
    asked = op;
    const no = button(keep, () => usual(op));
    const yes = button(go, () => {
      if (stage + 1 < questions[op].length) ask(op, stage + 1);
      else { usual(op); act(op, name); }
    });
    place.replaceChildren(make("span", {class: "rb-line", role: "group", "aria-label": question}, question, no, yes));
    no.focus();
  }

  return {element: make("tr", {}, ...cells, place), update(values, able) {
    values.forEach((value, index) => setText(cells[index], value));
    if (able.join() === can.join()) return;
    const focused = can[buttons.indexOf(document.activeElement)], inside = place.contains(document.activeElement);
    can = able;
    if (can.includes(asked)) return;  // the question stays
    usual(can.includes(focused) ? focused : inside ? can[0] : null);
  }};
}
