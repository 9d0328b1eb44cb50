"use strict";
// Puts the charts into their places, and again when the width, the colours or the chosen process change.

(() => {
  const found = JSON.parse(document.getElementById("data").textContent);
  const which = document.getElementById("which");
  const select = which.querySelector("select");
  let plots = [];

  const draw = (id, chart) => {
    const section = document.getElementById(id);
    section.hidden = false;
    const place = section.querySelector(".chart");
    const note = section.querySelector(".note");
    if (chart.note !== undefined) note.textContent = chart.note;
    const options = { ...chart.options, width: place.clientWidth || 320, cursor: { y: false } };
    plots.push({ plot: new uPlot(options, chart.data, place), place });
  };

  // What there was most of at a moment of the step.
  const tell = (at) => {
    const table = document.querySelector(".moment");
    table.hidden = false;
    table.caption.textContent = "After operator " + found.layers.operators[at];
    table.tBodies[0].replaceChildren(...found.layers.top[at].map(([place, bytes]) => {
      const row = document.createElement("tr");
      for (const [text, name] of [[found.layers.places[place], "name"], [dtrrunCharts.bytes(bytes), "n"]]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        cell.className = name;
        row.append(cell);
      }
      return row;
    }));
  };

  const drawAll = () => {
    for (const { plot } of plots) plot.destroy();
    plots = [];
    const process = found.processes[select.selectedIndex < 0 ? 0 : select.selectedIndex];
    if (process && process.samples.seconds.length > 1) draw("memory", dtrrunCharts.memory(process));
    if (process && process.steps.first.length > 0) draw("steps", dtrrunCharts.time(process));
    if (found.layers) draw("layers", dtrrunCharts.layers(found.layers, tell));
    if (found.curve.length > 1) draw("curve", dtrrunCharts.curve(found.curve, found.budget_bytes));
  };

  for (const process of found.processes) {
    const option = document.createElement("option");
    option.textContent = process.label;
    select.append(option);
  }
  which.hidden = found.processes.length < 2;
  select.addEventListener("change", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new ResizeObserver(() => {
    for (const { plot, place } of plots) {
      if (place.clientWidth && place.clientWidth !== plot.width) {
        plot.setSize({ width: place.clientWidth, height: plot.height });
      }
    }
  }).observe(document.body);
  drawAll();
})();
