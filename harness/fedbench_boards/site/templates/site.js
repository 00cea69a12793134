"use strict";
(() => {
  const MOST = 40;
  const entries = JSON.parse(document.getElementById("entries").textContent);
  const form = document.querySelector("#search form");
  const query = document.getElementById("query");
  const status = form.querySelector("output");
  const list = document.querySelector(".found");
  for (const one of entries) one.text = `${one.kind} ${one.name} ${one.about}`.toLowerCase();

  // Names come before what is said of them, and the beginning of a name before its middle.
  const place = (one, words) => {
    const at = one.name.toLowerCase().indexOf(words[0]);
    return at === 0 ? 0 : at > 0 ? 1 : 2;
  };

  const search = () => {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? entries.filter((one) => words.every((word) => one.text.includes(word))) : [];
    found.sort((a, b) => place(a, words) - place(b, words));
    list.replaceChildren(...found.slice(0, MOST).map((one) => {
      const item = document.createElement("li");
      const link = document.createElement("a");
      link.href = one.url;
      link.textContent = one.name;
      const about = document.createElement("small");
      about.textContent = `${one.kind}: ${one.about}`.slice(0, 220);
      item.append(link, about);
      return item;
    }));
    list.hidden = !found.length;
    status.textContent = words.length ? `${found.length} found${found.length > MOST ? `, ${MOST} shown` : ""}` : "";
  };

  const advise = () => {
    const { answers, pages } = JSON.parse(document.getElementById("answers").textContent);
    const section = document.getElementById("try");
    const picks = [...section.querySelectorAll("select")];
    const body = section.querySelector("tbody");
    const pattern = body.rows[0];
    const show = () => {
      const answer = answers[picks.map((pick) => pick.value).join("|")];
      const { rows, said } = answer ?? { rows: [], said: "The map has no such setting." };
      section.querySelector(".said").textContent = said;
      body.replaceChildren(...rows.map(([label, ...texts]) => {
        const row = pattern.cloneNode(true);
        Object.assign(row.querySelector("a"), { href: pages[label], textContent: label });
        row.querySelectorAll("td > *").forEach((part, at) => { part.textContent = texts[at]; });
        return row;
      }));
    };
    section.querySelector("form").hidden = false;
    section.addEventListener("change", show);
    show(); // a page that is gone back to keeps what was chosen
  };
  if (document.getElementById("answers")) advise();

  form.hidden = false;
  query.addEventListener("input", search);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    list.querySelector("a")?.click();
  });
  search();
})();
