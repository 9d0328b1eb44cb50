"use strict";
// The charts of a dtrrun report, on uPlot. Colours are the page's CSS variables: they follow light and dark.

const dtrrunCharts = (() => {
  const PARTS = ["operators", "rematerialization", "scoring", "search", "bookkeeping", "allocator", "host", "other"];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  const scaled = (value, units, base) => {
    if (value == null) return "–";
    let place = 0;
    while (Math.abs(value) >= base && place < units.length - 1) { value /= base; place += 1; }
    return Number(value.toPrecision(3)) + " " + units[place];
  };
  const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
  const seconds = (value) =>
    value == null ? "–" : value >= 1 || value === 0 ? Number(value.toPrecision(3)) + " s"
      : value >= 1e-3 ? Number((value * 1e3).toPrecision(3)) + " ms" : Number((value * 1e6).toPrecision(3)) + " µs";

  const axes = (left, bottom, size, upright = true) => {
    const common = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
    return [
      { ...common, grid: { ...common.grid, show: upright }, values: (_, found) => found.map((value) => (value == null ? "" : bottom(value))) },
      { ...common, size, values: (_, found) => found.map((value) => (value == null ? "" : left(value))) },
    ];
  };

  const vertical = (plot, at, stroke, dash) => {
    const { ctx, bbox } = plot;
    const x = Math.round(plot.valToPos(at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.save();
    ctx.strokeStyle = stroke;
    ctx.setLineDash(dash);
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(x + 0.5, bbox.top);
    ctx.lineTo(x + 0.5, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  };

  function memory(process) {
    const { samples, steps } = process;
    const at = samples.seconds;
    const line = (label, name, extra) => ({
      label, stroke: colour(name), width: 1.5, points: { show: false }, value: (_, v) => bytes(v), ...extra,
    });
    const mark = (label, name) => ({
      label, scale: "count", stroke: colour(name), fill: colour(name), width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.8, 12] }), value: (_, v) => (v == null ? "–" : String(v)),
    });
    const series = [
      { label: "time", value: (_, v) => seconds(v) },
      mark("evictions", "eviction"),
      mark("rematerializations", "rematerialization"),
      line("in memory, most", "resident"),
      line("in memory, least", "resident", { width: 0.75 }),
      line("evictable", "evictable"),
      line("pinned", "pinned"),
      line("with what is evicted", "evicted", { dash: [3, 3], show: false }),
    ];
    const both = samples.evicted_bytes.map((value, place) => value + samples.resident_most_bytes[place]);
    const data = [at, samples.evictions, samples.rematerializations, samples.resident_most_bytes,
      samples.resident_least_bytes, samples.evictable_bytes, samples.pinned_bytes, both];
    if (process.budgets.length) {
      series.push(line("budget", "budget", { dash: [8, 5], paths: uPlot.paths.stepped({ align: 1 }) }));
      data.push(at.map((moment) => process.budgets.findLast(([since], place) => !place || since <= moment)[1]));
    }
    const boundaries = (plot) => {
      const least = 6 * devicePixelRatio;
      let before = -Infinity;
      for (const end of steps.ended) {
        const x = plot.valToPos(end, "x", true);
        if (x - before >= least) { vertical(plot, end, colour("pinned"), [1, 3]); before = x; }
      }
    };
    return {
      data,
      options: {
        height: 320,
        scales: {
          x: { time: false },
          y: { range: (_, low, high) => [0, (high || 1) * 1.08] },
          count: { range: (_, low, high) => [0, (high || 1) * 5] },
        },
        axes: axes(bytes, (v) => v + " s", 70, false),
        series,
        bands: [{ series: [3, 4], fill: colour("resident") + "33" }],
        hooks: { drawAxes: [boundaries] },
      },
    };
  }

  function time(process) {
    const { steps } = process;
    const per = (name) => steps[name].map((value, place) => value / steps.count[place]);
    const rare = ["allocator", "host"];
    const parts = PARTS.filter((name) => !rare.includes(name) || (steps[name] || []).some(Boolean));
    const own = parts.map(per);
    const stacked = [];
    own.forEach((values, place) => {
      stacked.push(values.map((value, step) => value + (place ? stacked[place - 1][step] : 0)));
    });
    const order = parts.map((_, place) => parts.length - 1 - place); // the highest first, the others before it
    const total = stacked[parts.length - 1];
    const sorted = [...total].sort((a, b) => b - a);
    const cut = sorted.length > 3 && sorted[0] > 2.5 * sorted[1]; // the first step, as a rule
    const top = cut ? sorted[1] * 1.3 : sorted[0] * 1.08;
    const middle = steps.first.map((first, place) => (first + steps.last[place]) / 2);
    const seen = steps.count.reduce((sum, count) => sum + count, 0);
    const all = steps.last[steps.last.length - 1];
    const each = steps.count.length > 1 ? Math.max(...steps.count) : 1;
    return {
      note: (seen < all ? `Of ${all} steps ${seen} were seen. ` : "") + (each > 1 ? `A bar is the mean of up to ${each} steps. ` : "")
        + (cut ? `Step ${steps.first[total.indexOf(sorted[0])]} took ${seconds(sorted[0])}; its bar is cut.` : ""),
      data: [middle, ...order.map((place) => stacked[place])],
      options: {
        height: 260,
        scales: {
          x: { time: false, range: () => [steps.first[0] - 0.5, steps.last[steps.last.length - 1] + 0.5] },
          y: { range: () => [0, top || 1] },
        },
        axes: axes(seconds, (v) => (Number.isInteger(v) ? String(v) : ""), 70),
        series: [
          { label: "step", value: (_, v, __, place) => (place == null ? "–" : steps.first[place] === steps.last[place]
            ? String(steps.first[place]) : `${steps.first[place]} to ${steps.last[place]}`) },
          ...order.map((part) => ({
            label: parts[part], stroke: colour(parts[part]), fill: colour(parts[part]), width: 0, points: { show: false },
            paths: uPlot.paths.bars({ size: [0.85, 48] }),
            value: (_, v, __, place) => (place == null ? "–" : seconds(own[part][place])),
          })),
        ],
      },
    };
  }

  function curve(points, budget) {
    const least = Math.min(1, ...points.flatMap((p) => [p.predicted, p.measured].filter((v) => v != null)));
    const value = (_, v) => (v == null ? "–" : Number(v.toPrecision(3)) + " ×");
    const dots = (label, name, more) => ({
      label, stroke: colour(name), value, paths: () => null, points: { show: true, size: 9, fill: colour(name), ...more },
    });
    return {
      data: [
        points.map((p) => p.budget_bytes), points.map((p) => p.predicted), points.map((p) => p.measured),
        points.map((p) => (p.failed ? least : null)),
      ],
      options: {
        height: 260,
        scales: { x: { time: false, range: (_, low, high) => [low - (high - low) / 30, high + (high - low) / 30] }, y: { range: (_, low, high) => [Math.min(low, least) - 0.05, Math.max(high, 1.1) + 0.05] } },
        axes: axes((v) => v + " ×", bytes, 60),
        series: [
          { label: "budget", value: (_, v) => bytes(v) },
          { label: "predicted", stroke: colour("resident"), width: 1.5, spanGaps: true, value },
          dots("measured", "evictable"),
          { ...dots("did not work", "budget", { fill: colour("page") }), value: (_, v) => (v == null ? "–" : "here") },
        ],
        hooks: budget == null ? {} : { drawAxes: [(plot) => vertical(plot, budget, colour("budget"), [8, 5])] },
      },
    };
  }

  // clicked: called with the place of the moment that was clicked on.
  function layers(found, clicked) {
    const stacked = [];
    found.classes.forEach(({ bytes: values }, place) => {
      stacked.push(values.map((value, at) => value + (place ? stacked[place - 1][at] : 0)));
    });
    const order = found.classes.map((_, place) => found.classes.length - 1 - place); // the highest first
    const marks = (plot) => {
      for (const at of [found.backward, found.optimizer]) if (at != null) vertical(plot, at, colour("dim"), [2, 4]);
      vertical(plot, found.peak, colour("budget"), [8, 5]);
    };
    return {
      data: [found.operators, ...order.map((place) => stacked[place])],
      options: {
        height: 320,
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, (high || 1) * 1.08] } },
        axes: axes(bytes, (v) => (Number.isInteger(v) ? String(v) : ""), 70, false),
        series: [
          { label: "operator", value: (_, v) => (v == null ? "–" : String(v)) },
          ...order.map((place) => ({
            label: found.classes[place].name, stroke: colour(found.classes[place].key), fill: colour(found.classes[place].key),
            width: 0, points: { show: false },
            value: (_, v, __, at) => (at == null ? "–" : bytes(found.classes[place].bytes[at])),
          })),
        ],
        hooks: {
          draw: [marks],
          ready: [(plot) => plot.over.addEventListener("click", () => { if (plot.cursor.idx != null) clicked(plot.cursor.idx); })],
        },
      },
    };
  }

  return { memory, time, curve, layers, bytes };
})();
