"""A plan as one HTML file: its report, with sorting and filtering by a script.

The script sorts and filters tables, says which can be scrolled, and copies paths.
Notebooks get none: they store outputs of others for years, and show them untrusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhino_jax.explain.report.html import page, to_html


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData


SCRIPT = """
(() => {
  const units = {k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, KiB: 2 ** 10, MiB: 2 ** 20,
    GiB: 2 ** 30, TiB: 2 ** 40, ns: 1e-9, "µs": 1e-6, ms: 1e-3, s: 1, B: 1, "%": 1};
  const value = (text) => {
    const found = /^(?:< )?([\\d,.]+) ?(\\S*)/.exec(text.trim());
    if (!found) return null;
    const unit = found[2].replace(/^([kMGTP])(FLOP.*|B)?$/, "$1");
    return parseFloat(found[1].replaceAll(",", "")) * (units[unit] ?? 1);
  };
  const sort = (table, column) => {
    const body = table.tBodies[0];
    const down = table.dataset.sorted !== `${column} down`;
    table.dataset.sorted = down ? `${column} down` : `${column} up`;
    const rows = [...body.rows].map((row) => {
      const text = row.cells[column]?.textContent ?? "";
      return {row, text, number: value(text)};
    });
    rows.sort((a, b) => {
      const both = a.number !== null && b.number !== null;
      const order = both ? a.number - b.number : a.text.localeCompare(b.text);
      return down ? -order : order;
    });
    body.append(...rows.map((r) => r.row));
  };
  for (const report of document.querySelectorAll(".rhino-report")) {
    for (const table of report.querySelectorAll("table")) {
      [...(table.tHead?.rows[0].cells ?? [])].forEach((cell, i) => {
        cell.style.cursor = "pointer";
        cell.title = "sort";
        cell.addEventListener("click", () => sort(table, i));
      });
    }
    const boxes = [...report.querySelectorAll(".scroll")];
    const hint = () => {
      for (const box of boxes) {
        const end = box.scrollLeft + box.clientWidth;
        box.classList.toggle("more", end < box.scrollWidth - 2);
      }
    };
    for (const box of boxes) box.addEventListener("scroll", hint);
    report.addEventListener("toggle", hint, true);
    addEventListener("resize", hint);
    hint();
    const filter = document.createElement("input");
    filter.type = "search";
    filter.className = "filter";
    filter.placeholder = "filter rows and lines: a path, a spec, a file";
    filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      const all = "table:has(thead) tbody tr, .program > details";
      for (const row of report.querySelectorAll(all)) {
        const is = row.textContent.toLowerCase().includes(wanted);
        row.style.display = is ? "" : "none";
      }
      if (wanted) for (const d of report.querySelectorAll(".rest")) d.open = true;
    });
    report.querySelector("h3").after(filter);
    report.addEventListener("click", (event) => {
      const code = event.target.closest("td code");
      if (!code || getSelection().toString()) return;
      navigator.clipboard?.writeText(code.textContent);
      code.classList.add("copied");
      setTimeout(() => code.classList.remove("copied"), 600);
    });
  }
})();
"""
"""Constant: nothing of it comes from a plan, so that nothing in it needs escaping."""


def plan_page(plan: PlanData) -> str:
    """Return the HTML page of a plan; it needs no network."""
    body = f"{to_html(plan)}\n<script>{SCRIPT}</script>"
    return page(body, title=f"plan of {plan.program_name}")
