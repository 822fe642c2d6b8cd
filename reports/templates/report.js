"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, properties, ...inside) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...inside);
    return made;
  };

  // A click on a heading sorts by it, a second one the other way, a third as it was; folded rows are sorted too.
  const sortable = (tables) => {
    const bodies = tables.map((table) => table.tBodies[0]);
    const counts = bodies.map((body) => body.rows.length);
    const rows = bodies.flatMap((body) => [...body.rows]);
    let by = -1, down = false;
    const key = (row) => {
      const cell = row.cells[by];
      return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent.trim();
    };
    const order = (one, other) => {
      const [a, b] = [key(one), key(other)];
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1; // what has no number comes last
      const found = typeof a === "number" ? a - b : a.localeCompare(b, undefined, {numeric: true});
      return down ? -found : found;
    };
    const sort = (column) => {
      const numbers = rows.some((row) => "v" in row.cells[column].dataset);
      if (by !== column) [by, down] = [column, numbers];
      else if (down === numbers) down = !down;
      else by = -1;
      const sorted = by < 0 ? rows : [...rows].sort(order);
      let at = 0;
      bodies.forEach((body, i) => body.append(...sorted.slice(at, (at += counts[i]))));
      for (const table of tables)
        [...table.tHead.rows[0].cells].forEach((head, i) => {
          if (i === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
          else head.removeAttribute("aria-sort");
        });
    };
    for (const table of tables)
      [...table.tHead.rows[0].cells].forEach((head, i) => {
        const button = make("button", {type: "button", className: "sort"}, ...head.childNodes);
        button.addEventListener("click", () => sort(i));
        head.append(button);
      });
  };
  for (const data of all(".data")) {
    const tables = all("table[data-sorts]", data);
    if (tables.length) sortable(tables);
  }

  // What is to be typed elsewhere has a button that copies it.
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make("textarea", {value: text});
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const shown of all("[data-copy]")) {
    const button = make("button", {type: "button", className: "copy"}, "Copy");
    button.setAttribute("aria-label", `Copy the ${shown.dataset.copy || "text"}`);
    button.addEventListener("click", async () => {
      await copied(shown.textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    shown.after(button);
  }

  // Marks of figures say their values under the pointer, or where they are touched.
  const tip = make("div", {className: "tip", hidden: true});
  tip.setAttribute("aria-hidden", "true"); // the figure's description has all of it
  document.body.append(tip);
  const nearest = (figure, x) => {
    let best = null, least = Infinity;
    for (const mark of all("[data-near] [data-tip]", figure)) {
      const box = mark.getBoundingClientRect();
      const far = Math.abs(box.x + box.width / 2 - x);
      if (far < least) [best, least] = [mark, far];
    }
    return best;
  };
  const point = (event) => {
    const figure = event.target.closest?.("svg.figure");
    const mark = figure && (event.target.closest("[data-tip]") || nearest(figure, event.clientX));
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const wide = document.documentElement.clientWidth;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, wide - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 12)}px`;
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => (tip.hidden = true), {passive: true});

  // What was searched under other conditions, one at a time.
  for (const control of all(".whatif")) {
    const range = control.querySelector("input"), said = control.querySelector("output");
    const trials = JSON.parse(control.dataset.trials);
    const tell = () => {
      said.textContent = trials[range.value];
      range.setAttribute("aria-valuetext", trials[range.value]);
    };
    range.addEventListener("input", tell);
    tell();
    control.hidden = false;
  }
})();
