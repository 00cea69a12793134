"use strict";
(() => {
  const all = (where, what) => [...where.querySelectorAll(what)];
  const button = (label, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.append(...label);
    made.addEventListener("click", act);
    return made;
  };

  // Sorting: a table's bodies are its rows. Equal values keep their order, missing ones come last either way.
  const sort = (head) => {
    const table = head.closest("table");
    const position = head.cellIndex;
    const now = head.getAttribute("aria-sort");
    const up = now ? now === "descending" : head.dataset.first === "ascending";
    const text = !head.classList.contains("number");
    const keyed = [...table.tBodies].map((body) => {
      const value = body.rows[0].cells[position].dataset.value;
      return { body, key: text ? value : value === "" ? NaN : Number(value) };
    });
    const missing = (key) => !text && Number.isNaN(key);
    keyed.sort((a, b) => {
      if (missing(a.key) || missing(b.key)) return missing(a.key) - missing(b.key);
      const order = a.key < b.key ? -1 : a.key > b.key ? 1 : 0;
      return up ? order : -order;
    });
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    table.append(...keyed.map((row) => row.body));
  };
  for (const head of all(document, "table.sortable thead th")) {
    head.append(button(head.childNodes, () => sort(head)));
  }

  // A row's details open under it.
  for (const more of all(document, "tr.more")) {
    const name = more.previousElementSibling.querySelector(".name > span");
    more.hidden = true;
    const toggle = button(name.childNodes, () => {
      more.hidden = !more.hidden;
      toggle.setAttribute("aria-expanded", String(!more.hidden));
    });
    toggle.setAttribute("aria-expanded", "false");
    toggle.setAttribute("aria-controls", more.id);
    toggle.title = "settings, tuning, run ids";
    name.append(toggle);
  }

  // Filters hold for the tables with a heading of their own, not for the overview; one without a row left goes away.
  const form = document.querySelector(".filters");
  if (form) {
    const rows = all(document, ".board tbody");
    const filter = () => {
      const wanted = new FormData(form);
      const words = String(wanted.get("text")).toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = (row, name) => !wanted.get(name) || row.dataset[name] === wanted.get(name);
      for (const row of rows) {
        const found = words.every((word) => row.dataset.search.includes(word));
        row.hidden = !(found && chosen(row, "tuned") && chosen(row, "setting"));
      }
      for (const board of all(document, ".board")) board.hidden = !board.querySelector("tbody:not([hidden])");
      const shown = rows.filter((row) => !row.hidden).length;
      form.querySelector("output").value = `${shown} of ${rows.length} rows`;
    };
    form.hidden = false;
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    filter();
  }

  // The legend hides and shows a row in the charts of its table, and lifts it out while pointed at.
  for (const entry of all(document, ".legend li")) {
    const charts = entry.closest(".charts");
    const drawn = all(charts, `.series[data-series="${entry.dataset.series}"]`);
    const toggle = button(entry.childNodes, () => {
      const off = entry.classList.toggle("off");
      for (const one of drawn) one.classList.toggle("off", off);
      toggle.setAttribute("aria-pressed", String(!off));
    });
    const lift = (on) => {
      charts.classList.toggle("focused", on && !entry.classList.contains("off"));
      for (const one of drawn) one.classList.toggle("on", on);
    };
    toggle.setAttribute("aria-pressed", String(!entry.classList.contains("off")));
    toggle.title = "show or hide in the charts";
    for (const event of ["mouseenter", "focus"]) toggle.addEventListener(event, () => lift(true));
    for (const event of ["mouseleave", "blur", "click"]) toggle.addEventListener(event, () => lift(false));
    entry.append(toggle);
  }

  const command = document.querySelector(".command");
  if (command) {
    const copy = button(["Copy"], async () => {
      const code = command.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        copy.textContent = "Copied";
      } catch {
        // without permission the text is selected, ready for the keyboard
        getSelection().selectAllChildren(code);
        copy.textContent = "Selected";
      }
    });
    command.append(copy);
  }

  // Paper shows what is folded away.
  addEventListener("beforeprint", () => all(document, "details").forEach((one) => { one.open = true; }));
})();
