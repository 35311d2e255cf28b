// Runs on the test problems. The algorithms, the problems and the loop are translated from Python; see translate.py.

// Uniform numbers in [0, 1) from a seed (mulberry32).
function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const normal = (random) => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

// As `vsgd_bench.simulate.draw_noise`: runs × minibatches × n, including those before the first update.
function drawNoise(seed, runs, updates, n, presence = 1) {
  const lead = Math.ceil(BOOTSTRAP / n),
    random = uniform(seed);
  const each = (value) => {
    const all = Array.from({ length: runs }, () =>
      Array.from({ length: lead + updates }, () => Array.from({ length: n }, value)),
    );
    all.shape = [runs, lead + updates, n];
    return all;
  };
  return { normal: each(() => normal(random)), present: each(() => presence >= 1 || random() < presence), lead };
}

// As `vsgd_bench.simulate.simulate`: {theta, rate}, runs × checkpoints. A problem is {shape, scale, noise}.
function simulate(problem, algorithm, noise, checkpoints, centers = null) {
  const [runs, batches] = noise.normal.shape;
  const empty = () => Array.from({ length: runs }, () => new Array(checkpoints.length).fill(Infinity));
  const track = { theta: empty(), rate: empty() };
  const padded = Array.from({ length: batches }, (_, i) => (centers ? centers[Math.max(0, i - noise.lead)] : 0));
  simulate_fused_runs(
    algorithm.init,
    algorithm.update,
    algorithm.probe,
    algorithm.evaluation_point,
    algorithm.params,
    algorithm.curvature,
    simulate_first_minibatch(algorithm, noise),
    SHAPES.indexOf(problem.shape),
    problem.scale,
    Math.sqrt(problem.noise),
    noise.normal,
    noise.present,
    noise.lead,
    padded,
    checkpoints,
    track.theta,
    track.rate,
  );
  return track;
}

const excessLoss = (problem, offset) =>
  problems_excess_loss(SHAPES.indexOf(problem.shape), problem.scale, Math.sqrt(problem.noise), offset);

// A quantile over the runs (rows) of each column.
function quantileOf(rows, share) {
  return rows[0].map((_, i) => {
    const column = rows.map((row) => row[i]).sort((a, b) => a - b);
    return column[Math.round(share * (column.length - 1))];
  });
}
