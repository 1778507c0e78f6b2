// Makes elements. Text never becomes HTML: names come from workers, and so from tenants.

export const byId = (id) => document.getElementById(id);

export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  const { className, ...attributes } = options;
  if (className) made.className = className;
  set(made, attributes);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  set(made, attributes);
  made.append(...children);
  return made;
}

function set(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
}

// A part of a bar, by the share of it. The style is set by script: the page's policy allows no style in markup.
export function part(className, share) {
  const made = element("span", { className });
  made.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return made;
}

// Only changes are written: a screen reader repeats every write.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Rows of a table with roles, since a narrow screen shows them as blocks. Columns: [label, alignment].
export function tableHead(table, columns) {
  table.tHead.replaceChildren(
    element(
      "tr",
      { role: "row" },
      ...columns.map(([label, kind]) =>
        element("th", { scope: "col", role: "columnheader", className: kind === "name" ? "" : kind }, label),
      ),
    ),
  );
}

export function tableRow(columns, cells) {
  const made = columns.map(([label, kind], place) => {
    const content = cells[place];
    const children = Array.isArray(content) ? content : [content];
    if (place === 0) return element("th", { scope: "row", role: "rowheader", className: "name" }, ...children);
    return element("td", { role: "cell", className: kind || "", "data-label": label }, element("div", {}, ...children));
  });
  return element("tr", { role: "row" }, ...made);
}
