"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const form = document.getElementById("filters");

  theme?.addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // A link into a closed case opens it.
  const openTarget = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target?.matches("details.case")) {
      target.open = true;
      target.scrollIntoView();
      target.querySelector("summary").focus({ preventScroll: true });
    }
  };
  addEventListener("hashchange", openTarget);
  openTarget();

  if (!form) return;
  const cases = [...document.querySelectorAll("details.case")];
  const plansOf = new Map(
    cases.map((each) => [each, [...each.querySelectorAll("tr[data-plan]")].map((row) => row.dataset.plan)]),
  );
  const count = document.getElementById("count");
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

  // A plan's name puts it into the command of its case.
  document.addEventListener("click", async (event) => {
    const row = event.target.closest("th button")?.closest("tr[data-plan]");
    const code = row?.closest("details.case")?.querySelector("code[data-plan]");
    if (!code) return;
    code.textContent = code.textContent.replace(`--backends '${code.dataset.plan}'`, `--backends '${row.dataset.plan}'`);
    code.dataset.plan = row.dataset.plan;
    try {
      await navigator.clipboard.writeText(code.textContent);
      count.textContent = `copied the command for ${row.dataset.plan}`;
    } catch {
      count.textContent = `the command below is for ${row.dataset.plan}`;
    }
  });
})();
