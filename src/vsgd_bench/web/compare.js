// The comparison. The selected workloads and optimizers are shown in curves, profiles and tables. DATA is written by
// `compare/curves.py`.

const chosen = { workloads: new Set(), methods: new Set(), axis: Object.keys(DATA.axes)[0] };

// Checkboxes for all items, and buttons for all and none of them.
function choices(heading, kind, items, extra = () => []) {
  const boxes = items.map((item) => {
    const box = make("input", {
      type: "checkbox",
      checked: true,
      onchange: () => {
        choose(item.name, box.checked);
        redraw();
      },
    });
    return box;
  });
  const choose = (name, on) => chosen[kind][on ? "add" : "delete"](name);
  const all = (on) => () => {
    boxes.forEach((box, i) => {
      box.checked = on;
      choose(items[i].name, on);
    });
    redraw();
  };
  items.forEach((item) => choose(item.name, true));
  const labels = items.map((item, i) => make("label", {}, boxes[i], ...extra(item), item.title));
  const button = (text, on) =>
    make("button", { class: "plain", type: "button", "aria-label": `${text} ${heading}`, onclick: all(on) }, text);
  return make(
    "fieldset",
    {},
    make("legend", {}, heading),
    make("div", { class: "choices" }, ...labels, button("All", true), button("None", false)),
  );
}

function axisChoice() {
  const labels = Object.entries(DATA.axes).map(([name, words]) =>
    make(
      "label",
      {},
      make("input", {
        type: "radio",
        name: "axis",
        checked: name === chosen.axis,
        onchange: () => {
          chosen.axis = name;
          redraw();
        },
      }),
      words,
    ),
  );
  return make("fieldset", {}, make("legend", {}, "Counted in"), make("div", { class: "choices" }, ...labels));
}

const lineOf = (method) => ({
  color: method.color,
  dash: method.dash,
  width: method.ours ? 3.4 : 1.6,
  label: method.title,
});
const methodsShown = () => DATA.methods.filter((method) => chosen.methods.has(method.name));

// The time of a method relative to the fastest selected one, on each workload and seed; as `judging.profiles`.
function ratiosOf(axis, methods, workloads) {
  const ratios = Object.fromEntries(methods.map((name) => [name, []]));
  for (const { workload, spent } of DATA.times[axis]) {
    if (!workloads.has(workload)) continue;
    const present = methods.filter((name) => name in spent);
    const fastest = Math.min(...present.map((name) => spent[name] ?? Infinity));
    for (const name of present) ratios[name].push(spent[name] === null ? Infinity : spent[name] / fastest);
  }
  for (const name of methods) ratios[name].sort((a, b) => a - b);
  return ratios;
}

function drawProfiles(area) {
  const shown = methodsShown(),
    ratios = ratiosOf(
      chosen.axis,
      shown.map((m) => m.name),
      chosen.workloads,
    );
  const series = shown
    .filter((method) => ratios[method.name].length)
    .map((method) => {
      const all = ratios[method.name],
        share = (limit) => all.filter((r) => r <= limit).length / all.length;
      const x = [1, ...all.filter((r) => r > 1 && r <= DATA.most), DATA.most];
      const solved = all.filter(Number.isFinite).length / all.length;
      return {
        ...lineOf(method),
        x,
        y: x.map(share),
        step: true,
        solved,
        label: `${method.title}: ${Math.round(100 * solved)} % solved`,
      };
    });
  series.sort((a, b) => b.solved - a.solved);
  if (!series.length)
    return area.replaceChildren(
      make(
        "p",
        { class: "note" },
        "Nothing to draw: there are no runs of the selected optimizers on selected workloads that have a target.",
      ),
    );
  plot(area, {
    title: `Fraction of workloads and seeds solved against ${DATA.axes[chosen.axis]}`,
    height: 340,
    series,
    x: {
      log: true,
      min: 1,
      max: DATA.most,
      ticks: [1, 2, 5, 10, 20, 50, 100],
      format: (v) => `${v}×`,
      label: `${DATA.axes[chosen.axis]} to the target, times those of the fastest`,
    },
    y: { min: 0, max: 1, ticks: [0, 0.25, 0.5, 0.75, 1], format: (v) => `${100 * v} %` },
  });
}

function drawCurves(grid) {
  const boxes = DATA.workloads
    .filter((w) => chosen.workloads.has(w.name))
    .map((workload) => {
      const area = make("div"),
        found = DATA.curves[workload.name] ?? {};
      const series = methodsShown()
        .filter((method) => method.name in found)
        .map((method) => {
          const { mean, low, high, ...axes } = found[method.name];
          return {
            ...lineOf(method),
            x: axes[chosen.axis],
            y: mean.map((v) => v ?? Infinity),
            band: [low, high.map((v) => v ?? Infinity)],
          };
        });
      return { workload, area, series, box: make("div", {}, make("h3", {}, workload.title), area) };
    });
  grid.replaceChildren(...boxes.map(({ box }) => box));
  for (const { workload, area, series } of boxes) {
    if (!series.length) {
      area.append(make("p", { class: "note" }, "not run"));
      continue;
    }
    const finite = series.map((s) => s.y.filter(Number.isFinite)).filter((y) => y.length);
    plot(area, {
      title: `Held-out loss on ${workload.title} against ${DATA.axes[chosen.axis]}`,
      legend: false,
      series,
      height: 210,
      x: { min: 0, label: DATA.axes[chosen.axis] },
      // diverging curves leave the plot
      y: { log: true, min: 0.9 * Math.min(...finite.flat()), max: 1.1 * Math.max(...finite.map((y) => y[0])) },
      marks: workload.target ? [{ y: workload.target }] : [],
    });
  }
}

// The number at the start of a cell, for sorting. Signs of comparisons are numbers too; diverged runs are last.
function valueOf(text) {
  const signs = { "+": 1, "=": 0, "−": -1, "·": NaN };
  if (text in signs) return signs[text];
  if (/^(diverged|never)/.test(text)) return Infinity;
  return /^[-−]?[\d.]/.test(text) ? parseFloat(text) : NaN;
}

function compareCells(a, b) {
  const [x, y] = [valueOf(a), valueOf(b)];
  if (Number.isNaN(x) && Number.isNaN(y)) return a.localeCompare(b);
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
  return x === y ? 0 : x - y;
}

// A click on a heading sorts by its column: ascending, descending, original order.
function makeSortable(table) {
  const body = table.tBodies[0],
    rows = [...body.rows],
    heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = make("button", { type: "button" }, ...head.childNodes);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[head.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (order) head.setAttribute("aria-sort", order);
      const text = (row) => row.cells[column].textContent.trim();
      const sign = order === "descending" ? -1 : 1;
      body.append(...(order ? [...rows].sort((a, b) => sign * compareCells(text(a), text(b))) : rows));
    });
    head.append(button);
  });
}

// Rows and columns of workloads and optimizers that are not selected are hidden.
const hidden = new Map([
  ...DATA.workloads.flatMap((w) => [
    [w.title, ["workloads", w.name]],
    [w.name, ["workloads", w.name]],
  ]),
  ...DATA.methods.map((m) => [m.title, ["methods", m.name]]),
]);
const isHidden = (text) => {
  const found = hidden.get(text.trim());
  return found !== undefined && !chosen[found[0]].has(found[1]);
};

function filterTable(table) {
  const heads = [...table.tHead.rows[0].cells],
    gone = heads.map((head) => isHidden(head.textContent));
  heads.forEach((head, i) => {
    head.hidden = gone[i];
  });
  for (const row of table.tBodies[0].rows) {
    row.hidden = [...row.cells].slice(0, 2).some((cell) => isHidden(cell.textContent));
    [...row.cells].forEach((cell, i) => {
      cell.hidden = gone[i];
    });
  }
}

const tables = [...document.querySelectorAll("table.sortable")];
tables.forEach(makeSortable);
const draw = () => {
  drawProfiles(document.querySelector("#profiles"));
  drawCurves(document.querySelector("#curves"));
  tables.forEach(filterTable);
};
const redraw = atNextFrame(draw);
document.querySelector("#choose").append(
  axisChoice(),
  choices("Optimizers", "methods", DATA.methods, (method) => [swatchOf(lineOf(method))]),
  choices("Workloads", "workloads", DATA.workloads),
);
drawn(draw);
