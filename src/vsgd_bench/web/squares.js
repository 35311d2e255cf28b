// Figure 6: its squares, the learning curves behind each, and a problem to explore.

const problemName = ({ shape, scale, noise }) => `${shape}, A = ${short(scale)}, σ² = ${short(noise)}`;
const timesWords = (ratio) => (ratio <= 1 ? `÷ ${short(1 / ratio)}` : `× ${short(ratio)}`);

function figure6(data) {
  const explorer = explore(data);
  const holder = document.querySelector("#figure-6 .squares"),
    scroll = holder.parentElement;
  const { tops, lefts, cell, width, height, box } = data.layout;
  const here = make("div", { class: "here", hidden: true }),
    peek = make("div", { class: "peek", hidden: true });
  const message = make("p", { class: "note", "aria-live": "polite" }, "No square chosen.");
  holder.append(here);
  scroll.append(peek);
  scroll.after(message);
  let at = { row: data.rows.length - 2, column: 0 };

  // Fractions of the picture that a square covers.
  const place = ({ row, column }) => ({
    left: box.left + (lefts[column] / width) * box.width,
    top: box.top + (tops[row] / height) * box.height,
    width: (cell / width) * box.width,
    height: (cell / height) * box.height,
  });
  const nearest = (event) => {
    const frame = holder.getBoundingClientRect();
    const x = (((event.clientX - frame.left) / frame.width - box.left) / box.width) * width;
    const y = (((event.clientY - frame.top) / frame.height - box.top) / box.height) * height;
    const find = (starts, v) => starts.findIndex((start) => v >= start - 1 && v <= start + cell + 1);
    const [row, column] = [find(tops, y), find(lefts, x)];
    return row < 0 || column < 0 ? null : { row, column };
  };
  const curve = (row, column, q) => data.quantiles[row][column][q].map((v) => 10 ** (v / 100));
  const final = (row, column) => data.quantiles[row][column][1].at(-1);
  const bestOf = (column) =>
    data.rows.map((_, row) => row).reduce((a, b) => (final(b, column) < final(a, column) ? b : a));
  const nameOf = (row) => `${data.rows[row].algorithm}, n = ${data.rows[row].n}`;

  const show = (square) => {
    at = square;
    const { row, column } = square,
      best = bestOf(column),
      frame = place(square);
    for (const [key, value] of Object.entries(frame)) here.style[key] = `${100 * value}%`;
    here.hidden = peek.hidden = false;
    const finalWords = (r) => timesWords(10 ** (final(r, column) / 100));
    const result = `median loss ${finalWords(row)} after ${data.checkpoints.at(-1)} updates.`;
    const comparison =
      best === row ? "The best of its column." : `Best of the column: ${nameOf(best)}, ${finalWords(best)}.`;
    const words = `${nameOf(row)} on ${problemName(data.columns[column])}: ${result} ${comparison}`;
    message.textContent = words;
    const area = make("div");
    peek.replaceChildren(make("p", {}, words), area);
    const size = holder.getBoundingClientRect(),
      wide = peek.offsetWidth;
    const left = frame.left * size.width,
      right = left + frame.width * size.width + 10;
    const fits = right + wide < scroll.scrollLeft + scroll.clientWidth;
    peek.style.left = `${fits ? right : Math.max(scroll.scrollLeft, left - wide - 10)}px`;
    const x = data.checkpoints.slice(1),
      line = (r, q) => curve(r, column, q).slice(1);
    plot(area, {
      title: words,
      height: 170,
      x: { label: "updates", log: true, base: 2 },
      y: { log: true },
      series: [
        { x, y: line(best, 1), color: data.colors.grey, dash: "5 3", width: 2.5, label: `best: ${nameOf(best)}` },
        {
          x,
          y: line(row, 1),
          band: [line(row, 0), line(row, 2)],
          color: data.colors.blue,
          width: 2.8,
          label: nameOf(row),
        },
      ],
      marks: [{ y: 1 }],
    });
    peek.style.top = `${Math.max(0, Math.min(size.height - peek.offsetHeight, frame.top * size.height - 60))}px`;
  };
  const hide = () => {
    peek.hidden = true;
  };
  const open = ({ row, column }) => {
    hide();
    explorer.open(data.rows[row], data.columns[column], data.rows[bestOf(column)]);
  };

  holder.addEventListener("pointermove", (event) => {
    const square = event.pointerType === "touch" ? null : nearest(event);
    if (square && (peek.hidden || square.row !== at.row || square.column !== at.column)) show(square);
    else if (!square) hide();
  });
  holder.addEventListener("pointerleave", hide);
  holder.addEventListener("blur", hide);
  holder.addEventListener("focus", () => holder.matches(":focus-visible") && show(at));
  holder.addEventListener("click", (event) => {
    const square = nearest(event);
    if (!square) return;
    show(square);
    open(square);
  });
  holder.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move) {
      const within = (v, list) => Math.max(0, Math.min(list.length - 1, v));
      show({ row: within(at.row + move[0], tops), column: within(at.column + move[1], lefts) });
      here.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else if (event.key === "Enter" || event.key === " ") open(at);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
}

// One problem with sliders, and runs of two algorithms on it.
function explore({ rows, checkpoints, colors, limits }) {
  const names = [...new Set(rows.map((row) => row.algorithm))];
  const algorithm = chooser("algorithm", names, names.at(-1), () => redraw());
  const other = chooser("next to", names, names[0], () => redraw());
  const shape = chooser("shape of the loss", SHAPES, SHAPES[0], () => redraw());
  const scale = slider("curvature setting A", { min: 0.01, max: 100, log: true, value: 1 }, () => redraw());
  const noise = slider("noise σ²", { ...NOISE, value: 1 }, () => redraw());
  const n = slider("minibatch size n", { min: 1, max: limits.n, value: 1, steps: limits.n - 1, whole: true }, () =>
    redraw(),
  );
  let seed = 1;
  const again = make(
    "button",
    {
      class: "plain",
      type: "button",
      onclick: () => {
        seed += 1;
        redraw();
      },
    },
    "Draw other samples",
  );
  const loss = chartBox("Samples and their expectation"),
    curves = chartBox("Excess loss / initial"),
    rates = chartBox("Median learning rate");
  const message = make("p", { class: "note", "aria-live": "polite" });

  const drawProblem = (problem) => {
    const theta = Array.from({ length: 161 }, (_, i) => -4 + i / 20),
      random = uniform(seed),
      code = SHAPES.indexOf(problem.shape);
    const samples = Array.from({ length: 6 }, () => {
      const xi = Math.sqrt(problem.noise) * normal(random);
      return {
        x: theta,
        y: theta.map((t) => problems_sample_loss(code, problem.scale, t - xi)),
        color: colors.blue,
        width: 1,
        dash: "2 3",
      };
    });
    samples[0].label = "samples";
    const expected = theta.map((t) => excessLoss(problem, t));
    plot(loss.area, {
      title: "Losses of samples and the excess of the expected loss",
      x: { label: "θ" },
      y: { min: 0, max: 1.5 * Math.max(...expected) },
      series: [
        ...samples,
        { x: theta, y: expected, color: colors.purple, width: 3, label: "expected, less its infimum" },
      ],
      marks: [{ x: 1, label: "start" }],
    });
  };
  const draw = () => {
    const problem = { shape: shape.value, scale: scale.value, noise: noise.value };
    drawProblem(problem);
    const samples = drawNoise(seed, RUNS, checkpoints.at(-1), n.value),
      start = excessLoss(problem, 1);
    const shown = [
      [algorithm.value, colors.blue],
      ...(other.value === algorithm.value ? [] : [[other.value, colors.orange]]),
    ];
    const tracks = shown.map(([label, color]) => {
      const track = simulate(problem, ALGORITHMS[label], samples, checkpoints);
      return {
        label,
        color,
        ratios: track.theta.map((row) => row.map((theta) => excessLoss(problem, theta) / start)),
        rate: quantileOf(track.rate, 0.5),
      };
    });
    const x = checkpoints.slice(1),
      from1 = (values) => values.slice(1);
    plot(curves.area, {
      title: "Median excess loss over the initial one, and nine runs in ten",
      x: { label: "updates", log: true, base: 2 },
      y: { log: true },
      marks: [{ y: 1 }],
      series: tracks.map(({ label, color, ratios }) => ({
        x,
        y: from1(quantileOf(ratios, 0.5)),
        band: [from1(quantileOf(ratios, 0.05)), from1(quantileOf(ratios, 0.95))],
        color,
        label,
        width: 2.6,
      })),
    });
    plot(rates.area, {
      title: "Median learning rate",
      x: { label: "updates", log: true, base: 2 },
      y: { log: true },
      legend: false,
      series: tracks.map(({ label, color, rate }) => ({ x, y: from1(rate), color, label, width: 2.6 })),
    });
    message.textContent =
      tracks
        .map(({ label, ratios }) => `${label}: median loss ${timesWords(quantileOf(ratios, 0.5).at(-1))}`)
        .join("; ") + ` after ${checkpoints.at(-1)} updates on ${problemName(problem)}, n = ${n.value}.`;
  };
  const redraw = atNextFrame(draw);
  const words =
    `Any problem of this family, simulated in this page: ${RUNS} runs of each algorithm on the same samples. ` +
    "Choose a square above to start from it.";
  const box = panel(
    "6",
    "Explore a square",
    words,
    [algorithm, other, shape, scale, noise, n],
    [loss.box, curves.box, rates.box],
  );
  box.tabIndex = -1;
  box.append(message, again);
  drawn(draw);
  return {
    open(row, problem, best) {
      algorithm.set(row.algorithm);
      other.set(best.algorithm === row.algorithm ? names.at(-1) : best.algorithm);
      shape.set(problem.shape);
      scale.set(problem.scale);
      noise.set(problem.noise);
      n.set(row.n);
      draw();
      box.focus({ preventScroll: true });
      box.scrollIntoView({ block: "start", behavior: "instant" });
    },
  };
}
