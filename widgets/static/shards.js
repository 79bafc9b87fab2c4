// A variable's tensors: a list that is filtered by name, one of them as a grid of its parts, and what each rank holds.

const ITEM = 24;  // px, as in view.css
const EXTRA = 6;  // rows made beyond what is seen
const NOTHING_CHOSEN = "Enter the name of a variable of the ranks: a model, an optimizer, a state dict or a tensor.";
const PANE = {width: 400, height: 260};

function drawShards(channel, root) {
  const id = newId();
  const title = make("h2", {});
  const said = make("p", {class: "rb-said", role: "status"});
  const name = make("input", {id: `${id}-name`, type: "text", size: "14", placeholder: "model"});
  const show = make("form", {class: "rb-line"}, make("label", {for: `${id}-name`}, "variable"), name,
    make("button", {type: "submit"}, "Show"));
  const search = make("input", {id: `${id}-search`, type: "search", size: "20"});
  const count = make("span", {class: "rb-faint", role: "status"});
  const list = tensorList(id, (key, again) => choose(key, again));
  const tensor = tensorPane(channel, id);
  const uneven = make("p", {});
  const totals = make("div", {class: "rb-totals", role: "img", tabindex: "0", "aria-label": "bytes per rank"});
  const columns = make("div", {class: "rb-columns"},
    make("div", {}, make("div", {class: "rb-line"}, make("label", {for: `${id}-search`}, "search"), search, count), list.element),
    tensor.element);
  const perRank = make("div", {}, make("h3", {}, "Bytes per rank"), uneven, totals);
  root.append(title, show, said, columns, perRank);
  let tensors = [], searched = false, wanted = null, picks = 0, shows = 0, showing = false;

  /** A tensor that is drawn is not asked for again, which would take away the answer that its reader waits for. */
  async function choose(key, again) {
    if (wanted === key && !again) return;
    wanted = key;
    const asked = ++picks;
    try {
      const found = await channel.ask("tensor", {key});
      if (asked === picks) tensor.draw(found);  // answers may overtake each other
    } catch (error) {
      if (asked !== picks) return;
      wanted = null;
      setText(said, error.message);
    }
  }

  function filter(again = false) {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = tensors.filter(([key]) => words.every((word) => key.toLowerCase().includes(word)));
    setText(count, `${found.length} of ${tensors.length}`);
    list.fill(found, wanted, again);
    if (!again || found.length) return;
    wanted = null;
    picks++;
    tensor.hide();  // it is of what was shown before
  }

  search.addEventListener("input", () => filter());
  show.addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = ++shows;
    showing = true;
    setText(said, "waiting for the ranks …");
    const words = await channel.ask("name", {name: name.value}).catch((error) => error.message);
    if (asked !== shows) return;
    showing = false;
    setText(said, words);
  });
  for (const input of [name, search]) input.addEventListener("keydown", (event) => event.stopPropagation());

  return {
    fixed(fixed) {
      tensors = fixed.tensors || [];
      if (fixed.name && document.activeElement !== name) name.value = fixed.name;
      if (!searched && fixed.search) search.value = fixed.search;
      searched = true;
      setText(title, fixed.kind ? `${fixed.name} (${fixed.kind}): ${many(tensors.length, "tensor")}` : "shards of a variable on the ranks");
      columns.hidden = perRank.hidden = !tensors.length;
      if (!showing) setText(said, fixed.trouble || (fixed.name || tensors.length ? "" : NOTHING_CHOSEN));
      filter(true);
      const amounts = fixed.totals || [];
      const most = Math.max(1, ...amounts.map(([, amount]) => amount));
      const mean = amounts.reduce((sum, [, amount]) => sum + amount, 0) / (amounts.length || 1);
      const [heavy] = amounts.filter(([, amount]) => amount === most);
      setText(uneven, !heavy ? "" : most <= 1.005 * mean ? `${size(mean)} per rank` :
        `rank ${heavy[0]} holds ${size(most)}, ${Math.round(100 * most / mean - 100)} % above the mean of ${size(mean)}`);
      totals.setAttribute("aria-label", amounts.map(([rank, amount]) => `rank ${rank}: ${size(amount)}`).join(", ") || "no bytes");
      totals.replaceChildren(...amounts.flatMap(([rank, amount]) => [make("span", {}, `rank ${rank}`),
        make("span", {}, make("i", {class: "rb-amount", style: `width:${(100 * amount / most).toFixed(1)}%`})),
        make("span", {}, size(amount))]));
    },
    state() {},
  };
}

/** A listbox of any length: only the rows that are seen are there. */
function tensorList(id, chosen) {
  const space = make("div", {role: "presentation"});
  const element = make("div", {class: "rb-list", role: "listbox", tabindex: "0", "aria-label": "tensors"}, space);
  let items = [], current = -1, made = new Map(), wait = 0;

  function draw() {
    const first = Math.max(0, Math.floor(element.scrollTop / ITEM) - EXTRA);
    const last = Math.min(items.length, Math.ceil((element.scrollTop + (element.clientHeight || 300)) / ITEM) + EXTRA);
    const kept = new Map();
    for (let index = first; index < last; index++) {
      const [key, dtype, shape] = items[index];
      const row = made.get(index) || make("div", {class: "rb-item", role: "option", id: `${id}-${index}`,
        title: `${key}  ${shapeWords(shape)}  ${dtype}`, style: `top:${index * ITEM}px`, "aria-posinset": index + 1, "aria-setsize": items.length, "data-index": index},
      `${key}  ${shapeWords(shape)}  ${dtype}`);
      setAttribute(row, "aria-selected", String(index === current));
      if (!row.parentNode) space.append(row);
      made.delete(index);
      kept.set(index, row);
    }
    for (const row of made.values()) row.remove();
    made = kept;
    if (kept.has(current)) setAttribute(element, "aria-activedescendant", `${id}-${current}`);
    else element.removeAttribute("aria-activedescendant");
  }

  function select(index, again = false) {
    if (!items.length) return;
    current = Math.max(0, Math.min(items.length - 1, index));
    const top = current * ITEM;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + ITEM > element.scrollTop + element.clientHeight) element.scrollTop = top + ITEM - element.clientHeight;
    draw();
    clearTimeout(wait);
    const key = items[current][0];
    if (again) chosen(key, again);
    else wait = setTimeout(() => chosen(key), 60);  // a key that is held walks faster than Python answers
  }

  element.addEventListener("scroll", () => requestAnimationFrame(draw));
  element.addEventListener("click", (event) => {
    const row = event.target.closest("[data-index]");
    if (row) select(Number(row.dataset.index));
  });
  element.addEventListener("keydown", (event) => {
    const to = {ArrowDown: current + 1, ArrowUp: current - 1, Home: 0, End: items.length - 1,
      PageDown: current + 10, PageUp: current - 10}[event.key];
    if (to === undefined) return;
    select(to);
    event.preventDefault();
    event.stopPropagation();
  });
  return {element, fill(found, wanted, again) {
    clearTimeout(wait);
    items = found;
    current = -1;
    for (const row of made.values()) row.remove();
    made = new Map();
    space.style.height = `${items.length * ITEM}px`;
    element.scrollTop = 0;
    draw();
    if (items.length) select(Math.max(0, items.findIndex(([key]) => key === wanted)), again);
  }};
}

/** One tensor: two of its dims drawn, a slider for each other one; its parts walked with the arrow keys. */
function tensorPane(channel, id) {
  const heading = make("h3", {});
  const dims = make("div", {class: "rb-line"});
  const svg = makeSvg("svg", {viewBox: `0 0 ${PANE.width} ${PANE.height}`, role: "presentation"});
  const box = make("div", {class: "rb-tensor", role: "listbox", tabindex: "0", "aria-label": "shards of the tensor",
    "aria-orientation": "horizontal"}, svg);
  const told = make("p", {role: "status"});
  const statistic = make("button", {type: "button", onclick: () => ask()}, "Statistic");
  const values = make("span", {role: "status"});
  const element = make("div", {hidden: ""}, heading, dims, box, told, make("div", {class: "rb-line"}, statistic, values));
  let tensor = null, across = null, down = null, at = [], shown = [], current = 0;

  async function ask() {
    const asked = shown[current];
    if (!asked) return;
    setText(values, "waiting for the ranks …");
    const lines = [];
    try {
      for (const [rank] of asked.holders.slice(0, 4)) {
        lines.push(`rank ${rank}: ${await channel.ask("statistic", {key: tensor.key, rank})}`);
        if (shown[current] !== asked) return;
      }
    } catch (error) {
      lines.push(error.message);
    }
    if (shown[current] === asked) setText(values, lines.join("; "));
  }

  function point(index, hover = false) {
    const each = shown[index];
    if (!each) return;
    if (!hover) {
      if (shown[current]) setAttribute(shown[current].element, "aria-selected", "false");
      current = index;
      setAttribute(each.element, "aria-selected", "true");
      setAttribute(box, "aria-activedescendant", each.element.id);
      setText(values, "");
    }
    setText(told, each.words);
  }

  function cut() {
    const {shape, chunks} = tensor;
    svg.replaceChildren();
    shown = chunks.filter(([offset, local]) => shape.every((_, dim) =>
      dim === across || dim === down || (offset[dim] <= at[dim] && at[dim] < offset[dim] + local[dim])))
      .map(([offset, local, holders], index) => part(offset, local, holders, index));
    current = 0;
    setText(told, "no elements");
    box.removeAttribute("aria-activedescendant");
    point(0);
    if (tensor.left) setText(told, `${tensor.left} shards are not drawn`);
  }

  function part(offset, local, holders, index) {
    const extent = (dim, pixels) => (dim === null || !tensor.shape[dim] ? [0, pixels] :
      [pixels * offset[dim] / tensor.shape[dim], pixels * local[dim] / tensor.shape[dim]]);
    const [x, width] = extent(across, PANE.width), [y, height] = extent(down, PANE.height);
    const colour = rankColour(holders[0][0]);
    const ranks = holders.map(([rank, replica, device, bytes]) =>
      `rank ${rank}${holders.length > 1 ? ` replica ${replica}` : ""} on ${device}, ${size(bytes)}`);
    const most = ranks.length > 6 ? [...ranks.slice(0, 6), `and ${ranks.length - 6} more`] : ranks;
    const words = `offset [${offset.join(", ")}], shape ${shapeWords(local)}: ${most.join("; ")}`;
    const element = makeSvg("rect", {x, y, width, height, fill: colour, role: "option", id: `${id}-part-${index}`,
      "aria-label": words, "aria-selected": "false", "data-part": index,
      ...(holders.length > 1 ? {"stroke-dasharray": "6 4"} : {})});
    svg.append(element);
    const label = `${holders[0][0]}${holders.length > 1 ? ` ×${holders.length} replicas` : ""}`;
    const text = width > 7 * label.length + 6 ? label : width > 22 ? label.split(" ").slice(0, 2).join(" ") : "";
    if (text && height > 16) svg.append(makeSvg("text", {x: x + 4, y: y + 14, fill: inkOn(colour), "aria-hidden": "true"}, text));
    return {element, words, holders, x, y, width, height};
  }

  /** The nearest part in the arrow's direction. */
  function next(dx, dy) {
    const from = shown[current];
    const middle = (each) => [each.x + each.width / 2, each.y + each.height / 2];
    let best = -1, least = Infinity;
    shown.forEach((each, index) => {
      const [x, y] = middle(each), [x0, y0] = middle(from);
      const ahead = (x - x0) * dx + (y - y0) * dy, aside = Math.abs((x - x0) * dy) + Math.abs((y - y0) * dx);
      if (ahead > 0.01 && ahead + 3 * aside < least) [best, least] = [index, ahead + 3 * aside];
    });
    return best < 0 ? current : best;
  }

  box.addEventListener("keydown", (event) => {
    const moves = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]};
    if (event.key in moves && shown.length) point(next(...moves[event.key]));
    else if (event.key === "Home") point(0);
    else if (event.key === "End") point(shown.length - 1);
    else if (event.key === "Enter" || event.key === " ") ask();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  box.addEventListener("mouseover", (event) => {
    if (event.target.dataset.part) point(Number(event.target.dataset.part), true);
  });
  box.addEventListener("mouseleave", () => point(current, true));
  box.addEventListener("click", (event) => {
    if (event.target.dataset.part) point(Number(event.target.dataset.part));
  });

  function chooseDims() {
    const {shape} = tensor;
    const options = (chosen) => shape.map((length, dim) => {
      const option = make("option", {value: dim}, `dim ${dim} (${length})`);
      option.selected = dim === chosen;
      return option;
    });
    const pick = (words, chosen, set) => {
      const changed = () => {
        set(Number(select.value));
        chooseDims();
        cut();
        dims.querySelector(`#${select.id}`).focus();  // the one in its place
      };
      const select = make("select", {id: `${id}-${words}`, onchange: changed}, ...options(chosen));
      return [make("label", {for: `${id}-${words}`}, words), select];
    };
    dims.replaceChildren();
    if (shape.length > 1) {
      dims.append(...pick("down", down, (dim) => { if (dim === across) across = down; down = dim; }),
        ...pick("across", across, (dim) => { if (dim === across) return; if (dim === down) down = across; across = dim; }));
    }
    shape.forEach((length, dim) => {
      if (dim === down || dim === across) return;
      const value = make("output", {}, String(at[dim]));
      const slider = make("input", {type: "range", id: `${id}-dim-${dim}`, min: 0, max: Math.max(0, length - 1), value: at[dim],
        oninput: () => { at[dim] = Number(slider.value); setText(value, slider.value); cut(); }});
      dims.append(make("label", {for: `${id}-dim-${dim}`}, `dim ${dim} at`), slider, value);
    });
  }

  return {element, draw(found) {
    tensor = found;
    element.hidden = false;
    const largest = found.shape.map((length, dim) => [length, dim]).sort((a, b) => b[0] - a[0] || a[1] - b[1])
      .slice(0, 2).map(([, dim]) => dim).sort((a, b) => a - b);
    [down, across] = [largest[0] ?? null, largest[1] ?? null];
    at = found.shape.map(() => 0);
    setText(heading, `${found.key}: ${shapeWords(found.shape)}, ${found.dtype}`);
    setText(values, "");
    chooseDims();
    cut();
  }, hide() {
    element.hidden = true;
  }};
}
