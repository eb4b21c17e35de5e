"use strict";
(() => {
  const root = document.documentElement;

  // Before the page is drawn: the theme that was chosen last, else the system's.  A browser may refuse its storage.
  const THEME = "attnbench-theme";
  const stored = (use) => {
    try {
      return use(localStorage);
    } catch {
      return null;
    }
  };
  const last = stored((storage) => storage.getItem(THEME));
  if (last === "light" || last === "dark") root.dataset.theme = last;

  const switchTheme = () => {
    const shown = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = shown === "dark" ? "light" : "dark";
    stored((storage) => storage.setItem(THEME, root.dataset.theme));
  };

  // A link to a closed case opens it.
  const openTarget = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target?.matches("details.case")) {
      target.open = true;
      target.scrollIntoView();
      target.querySelector("summary").focus({ preventScroll: true });
    }
  };

  // What a cell is sorted by, and null where it says nothing.  "infinite" is a number too.
  const valueOf = (cell, numeric) => {
    const text = cell.dataset.value ?? cell.textContent.trim();
    const value = numeric ? Number.parseFloat(text.replace("infinite", "Infinity")) : text;
    return value === "" || Number.isNaN(value) ? null : value;
  };

  // The heading of a column sorts its table: upwards, then downwards.  Rows without a value stay at the end.
  const sortBy = (heading) => {
    const body = heading.closest("table").tBodies[0];
    const column = heading.cellIndex;
    const numeric = heading.classList.contains("n");
    const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = order === "ascending" ? 1 : -1;
    const compare = ([, a], [, b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (numeric ? Number(a > b) - Number(a < b) : a.localeCompare(b));
    };
    const rows = [...body.rows].map((row) => [row, valueOf(row.cells[column], numeric)]);
    body.append(...rows.sort(compare).map(([row]) => row));
    for (const each of heading.parentElement.cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
  };

  const makeSortable = (table) => {
    const rows = [...table.tBodies[0].rows];
    for (const heading of table.tHead?.rows[0].cells ?? []) {
      const values = rows.map((row) => valueOf(row.cells[heading.cellIndex], heading.classList.contains("n")));
      if (new Set(values).size < 2) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => sortBy(heading));
      heading.append(button);
    }
  };

  const filterBy = (form, count) => {
    const cases = [...document.querySelectorAll("details.case")];
    const plansOf = new Map(
      cases.map((each) => [each, [...each.querySelectorAll("tr[data-plan]")].map((row) => row.dataset.plan)]),
    );
    const off = (element, hidden) => element.classList.toggle("off", hidden);

    const apply = () => {
      const wanted = Object.fromEntries(new FormData(form));
      const text = wanted.plan.trim().toLowerCase();
      const named = (plan) => plan.toLowerCase().includes(text);
      const fits = (data) =>
        ["machine", "direction", "mask", "dim"].every((key) => !wanted[key] || !(key in data) || data[key] === wanted[key]);
      root.dataset.budget = wanted.budget;

      const kept = new Set();
      for (const each of cases) {
        if (fits(each.dataset) && (!text || plansOf.get(each).some(named))) kept.add(each.dataset.case);
      }
      for (const element of document.querySelectorAll("[data-case]")) off(element, !kept.has(element.dataset.case));
      for (const row of document.querySelectorAll("tr[data-plan]")) off(row, !named(row.dataset.plan));
      for (const block of document.querySelectorAll(".scroll[data-direction], figure.scatter, h3[data-machine]")) {
        off(block, !fits(block.dataset));
      }
      for (const figure of document.querySelectorAll("figure.scatter")) {
        const plans = figure.dataset.plans.split(" ");
        for (const dots of figure.querySelectorAll("[data-plan]")) off(dots, !named(plans[Number(dots.dataset.plan)]));
      }
      for (const row of document.querySelectorAll(".map tbody tr")) {
        const cells = [...row.querySelectorAll("[data-case]")];
        off(row, cells.every((cell) => cell.classList.contains("off")));
      }
      for (const map of document.querySelectorAll(".map")) {
        off(map.closest(".scroll"), !map.querySelector("tbody tr:not(.off)"));
      }
      root.classList.toggle("filtered", kept.size < cases.length || text !== "");
      count.textContent = `${kept.size} of ${cases.length} shapes`;
    };
    form.addEventListener("input", apply);
    form.addEventListener("reset", () => setTimeout(apply));
    form.addEventListener("submit", (event) => event.preventDefault());
    apply();
  };

  // A plan's name puts it into the command of its case.
  const copyCommand = async (row, count) => {
    const code = row.closest("details.case")?.querySelector("code[data-plan]");
    if (!code) return;
    code.textContent = code.textContent.replace(`--backends '${code.dataset.plan}'`, `--backends '${row.dataset.plan}'`);
    code.dataset.plan = row.dataset.plan;
    try {
      await navigator.clipboard.writeText(code.textContent);
      count.textContent = `copied the command for ${row.dataset.plan}`;
    } catch {
      count.textContent = `the command below is for ${row.dataset.plan}`;
    }
  };

  document.addEventListener("DOMContentLoaded", () => {
    const form = document.getElementById("filters");
    const count = document.getElementById("count");
    document.getElementById("theme").addEventListener("click", switchTheme);
    for (const table of document.querySelectorAll("table.list")) makeSortable(table);
    if (form) filterBy(form, count);
    addEventListener("hashchange", openTarget);
    openTarget();
    document.addEventListener("click", (event) => {
      const row = event.target.closest("th button")?.closest("tr[data-plan]");
      if (row) copyCommand(row, count);
      // A second click on the same link changes no hash.  By then the browser has followed the link.
      if (event.target.closest("a[href^='#case-']")) setTimeout(openTarget);
    });
  });
})();
