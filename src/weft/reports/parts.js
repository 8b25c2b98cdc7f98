// Parts of a page that opens from a file: cards, tables, lists, names with a meaning, links.
function card(name, value, note = "", title = "") {
  const shown = make("dd", value);
  if (note) shown.append(make("small", ` ${note}`));
  const made = box("div", "card", make("dt", name), shown);
  made.title = title || `${name}: ${value} ${note}`;
  return made;
}
/** heads: [words, class, what they mean]; cells: text or nodes. */
function table(heads, rows) {
  const fill = (tag, cells) => box("tr", "", ...cells.map((cell, k) => {
    const node = cell instanceof Node ? box(tag, heads[k][1], cell) : make(tag, cell, heads[k][1]);
    if (tag === "th") Object.assign(node, { scope: "col", title: heads[k][2] || "" });
    return node;
  }));
  return box("div", "scroll", box("table", "", box("thead", "", fill("th", heads.map(([words]) => words))), box("tbody", "", ...rows.map(cells => fill("td", cells)))));
}
/** A value as a list has it: text as it is, numbers with seven digits. */
const spelled = value => typeof value === "string" ? value || "nothing" : JSON.stringify(value, (_, part) => isNumber(part) ? Number(part.toPrecision(7)) : part);
function listPanel(title, entries, open = entries.length <= 14) {
  const list = make("dl", "", "settings"), panel = box("details", "panel", make("summary", title), list);
  for (const [name, value] of entries) list.append(make("dt", name), make("dd", spelled(value)));
  panel.open = open;
  return panel;
}
/** A name with its meaning on hover, where there is one among `words`. */
function named(name, words) {
  const node = make("span", name, words[name] ? "means" : "");
  if (words[name]) node.title = words[name];
  return node;
}
/** Links to the pages that lie beside this one; whoever wrote the last of them put them into its head. */
function linksBeside() {
  const found = JSON.parse(document.querySelector('meta[name="weft-page"]').dataset.beside || "[]");
  return box("nav", "", ...found.map(([words, address]) => Object.assign(make("a", words), { href: address })));
}
