// The three views as tabs; only the one that is seen is kept up to date.

function tabs(root, names, shown) {
  const id = newId();
  const places = {}, buttons = {};
  const list = make("div", {role: "tablist", "aria-label": "views"});
  root.append(list);

  function choose(name, focus) {
    for (const each of names) {
      const chosen = each === name;
      setAttribute(buttons[each], "aria-selected", String(chosen));
      buttons[each].tabIndex = chosen ? 0 : -1;
      places[each].hidden = !chosen;
    }
    if (focus) buttons[name].focus();
    shown([name]);
  }

  for (const name of names) {
    places[name] = make("div", {role: "tabpanel", id: `${id}-${name}`, "aria-labelledby": `${id}-tab-${name}`});
    buttons[name] = make("button", {type: "button", role: "tab", id: `${id}-tab-${name}`, "aria-controls": `${id}-${name}`,
      "data-lm-suppress-shortcuts": "true",  // JupyterLab folds headings at the arrow keys
      onclick: () => choose(name, true)}, name);
    list.append(buttons[name]);
    root.append(places[name]);
  }
  list.addEventListener("keydown", (event) => {
    const at = names.findIndex((name) => buttons[name] === document.activeElement);
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1}[event.key];
    if (to === undefined) return;
    choose(names[(to + names.length) % names.length], true);
    event.preventDefault();
    event.stopPropagation();
  });
  choose(names[0], false);
  return places;
}
