// A cell's output by rank: fills the markup that Python has made, and tells what the reader has chosen.

let unique = 0;

function render({model, el}) {
  const view = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  const tell = (message) => {
    try {
      model.send({rankbook: `${view}-${++unique}`, view, ...message});
    } catch { /* JupyterLab's comms throw once their kernel has ended; what has come is shown all the same */ }
  };
  const name = model.get("name");
  el.innerHTML = model.get("skeleton").replaceAll(name, `${name}-${view}`);  // shown twice, it needs two names
  const head = el.querySelector(".rb-head"), pieces = el.querySelector(".rb-pieces");
  let number = -1;

  const find = (key) => pieces.querySelector(`:scope > [data-key="${key}"]`);
  const steps = {
    put(key, html) {
      const there = find(key);
      if (there) there.outerHTML = html;
      else pieces.insertAdjacentHTML("beforeend", html);
    },
    more(key, html) {
      const text = find(key)?.querySelector("pre");
      if (text) text.insertAdjacentHTML("beforeend", html);
    },
    drop(key, html) {
      find(key)?.remove();
      if (html && !pieces.querySelector(".rb-forgotten")) pieces.insertAdjacentHTML("afterbegin", html);
    },
    head(_, html) { head.innerHTML = html; },
  };

  /** The rows of a grid that breaks into bands; grid_rows in output_panel.py says how, and does it at the end. */
  function arrange() {
    if (!("bands" in pieces.dataset)) return;
    let top = 1, section = [], used = new Map();
    const put = (piece, row) => {
      if (piece.rbRow !== row) piece.style.setProperty("--rb-row", piece.rbRow = row);
    };
    const endSection = () => {
      const starts = new Map();
      for (const band of [...used.keys()].sort((one, other) => one - other)) {
        starts.set(band, top);
        top += Math.max(...used.get(band).values());
      }
      for (const [piece, band, row] of section) put(piece, starts.get(band) + row);
      section = [];
      used = new Map();
    };
    for (const piece of pieces.children) {
      if (!piece.dataset.place) {
        endSection();
        put(piece, top++);
        continue;
      }
      const [band, first, end] = piece.dataset.place.split(" ").map(Number);
      if (!used.has(band)) used.set(band, new Map());
      const columns = used.get(band);
      let row = 0;
      for (let column = first; column < end; column++) row = Math.max(row, columns.get(column) || 0);
      for (let column = first; column < end; column++) columns.set(column, row + 1);
      section.push([piece, band, row]);
    }
    endSection();
  }

  /** Whoever reads the end goes on reading the end; whoever reads above it is left there. */
  function keepingPlace(change) {
    const atEnd = pieces.scrollHeight - pieces.scrollTop - pieces.clientHeight < 24;
    change();
    arrange();
    if (atEnd) pieces.scrollTop = pieces.scrollHeight;
    pieces.dataset.number = number;
  }

  function changed(message) {
    if (!message || !("changes" in message) || message.number <= number) return;
    if (message.number > number + 1) return void tell({op: "all"});
    keepingPlace(() => {
      number = message.number;
      for (const [step, key, html] of message.changes) steps[step](key, html);
    });
  }

  function whole() {
    const all = JSON.parse(model.get("whole") || "{}");
    if (!("number" in all) || all.number <= number) return;
    keepingPlace(() => {
      number = all.number;
      head.innerHTML = all.head;
      pieces.innerHTML = all.pieces;
    });
  }

  el.addEventListener("change", (event) => tell({op: "choose", choice: event.target.value}));
  model.on("msg:custom", changed);
  model.on("change:whole", whole);
  whole();
  tell({op: "all"});
  return () => {
    model.off("msg:custom", changed);
    model.off("change:whole", whole);
  };
}

export default {render};
