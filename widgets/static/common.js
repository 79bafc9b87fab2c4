// What all views share: the way to Python, elements, words. Joined with the views' own files into one ES module.

const RANK_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];
const DARK = new Set(["#0072B2"]);
const STATE_MARKS = {starting: "◌", idle: "○", running: "▶", waiting: "‖", unresponsive: "?", dead: "✕", stopped: "□"};
const LOOK_EVERY = 5000;  // ms; Python takes 15 s of silence for nobody looking
const SILENCE = 16000;  // ms without an answer to three looks, after which what stands here may be old
const GONE = "the kernel was restarted or has ended";
const HERE = Math.random().toString(36).slice(2, 8);  // each view on a page has a module of its own
let unique = 0;

/** An id that no other element of the page has. */
const newId = () => `rb-${HERE}-${++unique}`;
const rankColour = (rank) => RANK_COLOURS[rank % RANK_COLOURS.length];
const inkOn = (colour) => (DARK.has(colour) ? "#ffffff" : "#000000");

/** Three digits and no more, as Python's "%.3g" without its exponent. */
const digits = (value) => String(Number(value.toPrecision(3)));

/** Bytes with their unit, in thousands. */
function size(count) {
  let amount = count, unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (amount < 999.5) break;
    amount /= 1000;
    unit = larger;
  }
  return unit === "B" ? `${Math.round(amount)} B` : `${digits(amount)} ${unit}`;
}

/** So many of a thing. */
const many = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

/** Seconds in words. */
function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const shapeWords = (shape) => shape.join(" × ") || "scalar";

/** An element with attributes and children; text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

/** Writes only what differs, so that the browser lays out only what changed. */
function setText(element, text) {
  if (element.rbText === text) return;
  element.rbText = text;
  if (element.firstChild && element.firstChild.nodeType === 3 && !element.firstChild.nextSibling) {
    element.firstChild.data = text;
  } else element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** One part's way to Python: its two traits, and questions. */
class Channel {
  constructor(link, part) {
    this.link = link;
    this.part = part;
  }

  read(kind) {
    return JSON.parse(this.link.model.get(`${this.part}_${kind}`) || "{}");
  }

  ask(op, options = {}) {
    return this.link.ask(this.part, op, options);
  }
}

/** The comm of one rendering of a view; `heard` is called at each word from the kernel. */
class Link {
  constructor(model, heard) {
    this.model = model;
    this.lives = () => {
      this.heardAt = performance.now();
      heard();
    };
    this.view = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
    this.waiting = new Map();
    this.heardAt = performance.now();
    this.heard = (message) => {
      this.lives();
      const waits = message && this.waiting.get(message.reply);
      if (!waits) return;
      this.waiting.delete(message.reply);
      if ("error" in message) waits.reject(new Error(message.error));
      else waits.resolve(message.answer);
    };
    model.on("msg:custom", this.heard);
  }

  /** The message's id; nothing where it cannot be sent: JupyterLab's comms throw once their kernel has ended. */
  tell(message) {
    const id = `${this.view}-${++unique}`;
    try {
      this.model.send({rankbook: id, view: this.view, ...message});
    } catch {
      this.fail(GONE);
      return null;
    }
    return id;
  }

  ask(part, op, options) {
    return new Promise((resolve, reject) => {
      const id = this.tell({part, op, ...options});
      if (id) this.waiting.set(id, {resolve, reject});
      else reject(new Error(GONE));
    });
  }

  /** No question is answered any more. */
  fail(words) {
    for (const {reject} of this.waiting.values()) reject(new Error(words));
    this.waiting.clear();
  }

  close() {
    this.tell({op: "away"});
    this.model.off("msg:custom", this.heard);
    this.fail("the view was closed");
  }
}

const hidings = new WeakMap();  // outputs, with how many renderings of the view hide each

/** Hides the HTML that stands in for the live view, wherever it is, until what is returned is called. */
function hideStill(model, el) {
  const area = el.closest(".jp-OutputArea");
  if (!area) {  // VS Code and others: whatever comes there, and comes again, is hidden by its class
    const style = make("style", {}, `.${model.get("still")} { display: none !important; }`);
    document.head.append(style);
    return () => style.remove();
  }
  const mine = new Set();
  const hide = () => {
    for (const still of document.getElementsByClassName(model.get("still"))) {
      const output = still.closest(".jp-OutputArea-child") || still;
      if (output.contains(el) || mine.has(output)) continue;
      output.style.display = "none";
      mine.add(output);
      hidings.set(output, (hidings.get(output) || 0) + 1);
    }
  };
  hide();
  const observer = new MutationObserver(hide);
  observer.observe(area, {childList: true, subtree: true});
  const later = setTimeout(hide, 1000);
  return () => {
    observer.disconnect();
    clearTimeout(later);
    for (const output of mine) {
      const left = hidings.get(output) - 1;
      hidings.set(output, left);
      if (!left) output.style.display = "";
    }
  };
}

/** Draws one part now and after each change of its traits, at most once a frame; what is returned ends that. */
function follow(link, part, draw, root) {
  const channel = new Channel(link, part);
  const drawn = draw(channel, root);
  let wanted = 0;
  const due = {fixed: true, state: true};
  const redraw = () => {
    wanted = 0;
    const began = performance.now();
    if (due.fixed) drawn.fixed(channel.read("fixed"));
    if (due.fixed || due.state) drawn.state(channel.read("state"));
    due.fixed = due.state = false;
    root.dataset.updates = Number(root.dataset.updates || 0) + 1;
    root.dataset.milliseconds = (performance.now() - began).toFixed(1);
  };
  const note = (kind) => () => {
    link.lives();
    due[kind] = true;
    if (!wanted) wanted = requestAnimationFrame(redraw);
  };
  const listeners = ["fixed", "state"].map((kind) => [`change:${part}_${kind}`, note(kind)]);
  for (const [event, callback] of listeners) link.model.on(event, callback);
  redraw();
  return () => {
    for (const [event, callback] of listeners) link.model.off(event, callback);
    cancelAnimationFrame(wanted);
    if (drawn.close) drawn.close();
  };
}

/** The anywidget of a view: `frame` may add more than the parts, and says which of them are looked at. */
function mount(name, parts, frame = null) {
  return {
    render({model, el}) {
      const old = make("p", {class: "rb-old", role: "status"});
      const link = new Link(model, () => setText(old, ""));
      const root = make("section", {class: `rankbook-view rankbook-${name}`, "aria-label": `Rankbook ${name}`});
      root.append(old);
      let looking = Object.keys(parts);
      const look = () => {
        const hidden = document.visibilityState === "hidden";
        if (!link.tell(hidden ? {op: "away"} : {op: "look", parts: looking})) setText(old, `This view is out of date: ${GONE}.`);
        else if (!hidden && performance.now() - link.heardAt > SILENCE) {
          setText(old, "This view may be out of date: the kernel does not respond. It is busy, was restarted or has ended.");
        }
      };
      const seen = () => {
        link.heardAt = performance.now();  // a page that was hidden has asked nothing
        look();
      };
      const places = frame ? frame(root, Object.keys(parts), (shown) => { looking = shown; look(); }) : {};
      const ends = Object.entries(parts).map(([part, draw]) => {
        const place = places[part] || make("div", {});
        place.classList.add(`rankbook-part-${part}`);
        if (!place.parentNode) root.append(place);
        return follow(link, part, draw, place);
      });
      el.append(root);
      look();
      const every = setInterval(look, LOOK_EVERY);
      document.addEventListener("visibilitychange", seen);
      const leave = () => link.tell({op: "away"});
      window.addEventListener("pagehide", leave);
      const still = requestAnimationFrame(() => { ends.push(hideStill(model, el)); });
      return () => {
        clearInterval(every);
        cancelAnimationFrame(still);
        document.removeEventListener("visibilitychange", seen);
        window.removeEventListener("pagehide", leave);
        for (const end of ends) end();
        link.close();
      };
    },
  };
}
