// The gain of a minibatch, as in `vsgd_bench.gain`. The rate of the paper is translated from Python.

function truth(noise) {
  return { grad: 1, grad_sq: 1 + noise, curv: 1, curv_sq: 1 };
}

const counted = (noise) => (k) => paper_rate(truth(noise), k, EXACT);

function averaged(noise, n, presence) {
  const usual = Math.max(1, n * presence),
    rate = paper_rate(truth(noise), usual, EXACT);
  return (k) => (rate * k) / usual;
}

const fixedRate = (eta, n) => (k) => (eta * k) / n;

// The probabilities of k = 0 … n for k ~ Binomial(n, p), from the logarithms of factorials.
function binomial(n, p) {
  if (p >= 1) return Array.from({ length: n + 1 }, (_, k) => Number(k === n));
  const logFactorial = [0];
  for (let k = 1; k <= n; k++) logFactorial.push(logFactorial[k - 1] + Math.log(k));
  return logFactorial.map((f, k) =>
    Math.exp(logFactorial[n] - f - logFactorial[n - k] + k * Math.log(p) + (n - k) * Math.log1p(-p)),
  );
}

function gain(noise, step, probabilities) {
  let loss = probabilities[0];
  for (let k = 1; k < probabilities.length; k++) {
    if (probabilities[k] < 1e-18) continue;
    const c = step(k);
    loss += probabilities[k] * ((1 - c) ** 2 + (c * c * noise) / k);
  }
  return -Math.log(loss);
}

// The gain per sample gradient, divided by that of minibatches of one sample.
function relativeGain(n, presence, noise, step, probabilities = binomial(n, presence)) {
  return gain(noise, step, probabilities) / (n * gain(noise, counted(noise), binomial(1, presence)));
}
