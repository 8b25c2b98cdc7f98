// Parts of a page that opens from a file: cards, tables, lists, names with a meaning, links.
function card(name, value, note = "", title = "") {
  const content = make("dd", value);
  if (note) content.append(make("small", ` ${note}`));
  const node = box("div", "card", make("dt", name), content);
  node.title = title || `${name}: ${value} ${note}`;
  return node;
}
/** A table. heads: per column [text, class, tooltip]; rows: arrays of cells, which are text or nodes. */
function table(heads, rows) {
  const fill = (tag, cells) => box("tr", "", ...cells.map((cell, k) => {
    const node = cell instanceof Node ? box(tag, heads[k][1], cell) : make(tag, cell, heads[k][1]);
    if (tag === "th") Object.assign(node, { scope: "col", title: heads[k][2] || "" });
    return node;
  }));
  return box("div", "scroll", box("table", "", box("thead", "", fill("th", heads.map(([words]) => words))), box("tbody", "", ...rows.map(cells => fill("td", cells)))));
}
/** The text of a value in a list: numbers with seven digits, nested values as JSON. */
const valueText = value => typeof value === "string" ? value || "nothing" : JSON.stringify(value, (_, part) => isNumber(part) ? Number(part.toPrecision(7)) : part);
function listPanel(title, entries, open = entries.length <= 14) {
  const list = make("dl", "", "settings"), panel = box("details", "panel", make("summary", title), list);
  for (const [name, value] of entries) list.append(make("dt", name), make("dd", valueText(value)));
  panel.open = open;
  return panel;
}
/** A name with its meaning as a tooltip, if `words` (name -> meaning) has one. */
function named(name, words) {
  const node = make("span", name, words[name] ? "means" : "");
  if (words[name]) node.title = words[name];
  return node;
}
/** Links to the other pages in the folder, from the attribute that weft.reports.page writes into each page. */
function linksBeside() {
  const links = JSON.parse(document.querySelector('meta[name="weft-page"]').dataset.beside || "[]");
  return box("nav", "", ...links.map(([words, address]) => Object.assign(make("a", words), { href: address })));
}
