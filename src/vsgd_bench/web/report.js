// The interactive figures of the report: 1, 2 and drift here, 6 in squares.js. DATA holds the data of each figure.

const percent = (p) => `${Number((100 * p).toPrecision(3))} %`;
const NOISE = { min: 0.01, max: 100, log: true };
const PRESENCE = { min: 0.001, max: 1, log: true, format: percent };
const RUNS = 25;

// A box with sliders and charts behind a figure's caption.
function panel(figure, heading, words, controls, charts) {
  const box = make("div", { class: "panel" }, make("h3", {}, heading), make("p", { class: "note" }, words));
  box.append(make("div", { class: "controls" }, ...controls), make("div", { class: "charts" }, ...charts));
  document.querySelector(`#figure-${figure} .try`).append(box);
  return box;
}

const chartBox = (title) => {
  const area = make("div");
  return { area, box: make("div", {}, make("h3", {}, title), area) };
};

function figure1({ noises, presences, sizes, colors }) {
  const noise = slider("noise σ²", { ...NOISE, value: 0.1 }, () => redraw());
  const presence = slider("gradients that are non-zero, p", { ...PRESENCE, value: presences[1] }, () => redraw());
  const chart = chartBox("Relative gain per sample gradient"),
    message = make("p", { class: "note", "aria-live": "polite" });
  const curve = (p, variance) => sizes.map((n) => relativeGain(n, p, variance, counted(variance)));
  const draw = () => {
    const [p, variance] = [presence.value, noise.value];
    const y = curve(p, variance);
    const others = noises.map((v, i) => ({
      x: sizes,
      y: curve(p, v),
      color: colors.grey,
      width: 1.5,
      dash: ["1 3", "3 3", "7 3", "12 3"][i],
      label: `σ² = ${v}`,
    }));
    plot(chart.area, {
      title: "Relative gain per sample against the size of the minibatch",
      height: 280,
      x: { label: "minibatch size n", log: true },
      y: { min: 0, max: 1.1 },
      series: [...others, { x: sizes, y, color: colors.blue, width: 3.2, label: `here: σ² = ${short(variance)}` }],
      marks: p < 1 && 1 / p <= sizes.at(-1) ? [{ x: 1 / p, label: "n = 1/p" }] : [],
    });
    const half = sizes.filter((_, i) => y[i] >= 0.5).at(-1);
    const more = half === sizes.at(-1) ? " and more" : "";
    const words = "the gain per sample is at least half of that of a single sample";
    message.textContent = `In minibatches of up to ${half}${more}, ${words}.`;
  };
  const redraw = atNextFrame(draw);
  panel(
    "1",
    "Try it",
    "The closed form for other noise and sparsity. Grey lines: the noise levels of the figure at this sparsity.",
    [noise, presence],
    [chart.box],
  ).append(message);
  drawn(draw);
}

function figure2({ settings, sizes, rates, colors }) {
  const presence = slider("gradients that are non-zero, p", { ...PRESENCE, value: settings[0][0] }, () => redraw());
  const noise = slider("noise σ²", { ...NOISE, value: settings[0][1] }, () => redraw());
  const chart = chartBox("Relative gain per sample gradient");
  const draw = () => {
    const [p, variance] = [presence.value, noise.value];
    const chances = sizes.map((n) => binomial(n, p));
    const gains = (stepOf) => sizes.map((n, i) => relativeGain(n, p, variance, stepOf(n), chances[i]));
    const dots = rates
      .flatMap((eta) => sizes.map((n, i) => [n, relativeGain(n, p, variance, fixedRate(eta, n), chances[i])]))
      .filter(([, y]) => y > 0);
    plot(chart.area, {
      title: "Relative gain per sample: counted, averaged and fixed rates",
      height: 280,
      x: { label: "minibatch size n", log: true },
      y: { min: 0, max: 1.1 },
      series: [
        {
          x: dots.map((d) => d[0]),
          y: dots.map((d) => d[1]),
          color: colors.orange,
          dots: true,
          label: `${rates.length} fixed rates`,
        },
        {
          x: sizes,
          y: gains((n) => averaged(variance, n, p)),
          color: colors.red,
          width: 2.5,
          label: "average sparsity",
        },
        {
          x: sizes,
          y: gains(() => counted(variance)),
          color: colors.green,
          width: 2.5,
          label: "count of this minibatch",
        },
      ],
      marks: p < 1 ? [{ x: 1 / p, label: "n = 1/p" }] : [],
    });
  };
  const redraw = atNextFrame(draw);
  panel(
    "2",
    "Try it",
    "Make gradients sparser: the dent of the red curve moves with n = 1/p. More noise fills it.",
    [presence, noise],
    [chart.box],
  );
  drawn(draw);
}

function figureDrift({ problem, jump, updates, algorithms }) {
  const size = slider("jump of the optimum", { min: 0.1, max: 50, log: true, value: jump }, () => redraw());
  const noise = slider("noise σ²", { ...NOISE, value: problem.noise }, () => redraw());
  const presence = slider("gradients that are non-zero, p", { ...PRESENCE, min: 0.05, value: 1 }, () => redraw());
  const loss = chartBox("Median excess loss"),
    rate = chartBox("Median learning rate");
  const times = Array.from({ length: 2 * updates + 1 }, (_, i) => i);
  const draw = () => {
    const here = { ...problem, noise: noise.value };
    const centers = times.map((t) => (t >= updates ? size.value : 0));
    const samples = drawNoise(1, RUNS, 2 * updates, 1, presence.value);
    const tracks = algorithms.map(([name, color]) => {
      const track = simulate(here, ALGORITHMS[name], samples, times, centers);
      const losses = track.theta.map((row) => row.map((theta, t) => excessLoss(here, theta - centers[t])));
      return { label: name, color, losses: quantileOf(losses, 0.5), rates: quantileOf(track.rate, 0.5) };
    });
    const options = { height: 250, marks: [{ x: updates, label: "jump" }] };
    plot(loss.area, {
      ...options,
      title: "Median excess loss of the algorithms",
      x: { label: "updates" },
      y: { log: true, min: 1e-4 },
      series: tracks.map(({ label, color, losses }) => ({ x: times, y: losses, label, color, width: 1.6 })),
    });
    plot(rate.area, {
      ...options,
      title: "Median learning rate of the algorithms",
      x: { label: "updates" },
      y: { log: true },
      legend: false,
      series: tracks.map(({ label, color, rates }) => ({
        x: times.slice(1),
        y: rates.slice(1),
        label,
        color,
        width: 1.6,
      })),
    });
  };
  const redraw = atNextFrame(draw);
  panel(
    "drift",
    "Try it",
    `Simulated in this page: ${RUNS} runs of each algorithm, with new samples.`,
    [size, noise, presence],
    [loss.box, rate.box],
  );
  drawn(draw);
}

for (const [name, draw] of Object.entries({ 1: figure1, 2: figure2, 6: figure6, drift: figureDrift }))
  if (DATA[name]) draw(DATA[name]);
