// The two special functions that expected losses need, to about twelve digits.

function erf(x) {
  const size = Math.abs(x);
  if (size > 2) return Math.sign(x) * (1 - erfcTail(size));
  let term = x,
    sum = x;
  for (let k = 1; Math.abs(term) > 1e-17 * Math.abs(sum); k++) {
    term *= (-x * x) / k;
    sum += term / (2 * k + 1);
  }
  return (2 / Math.sqrt(Math.PI)) * sum;
}

// 1 − erf(x) for x > 2, by its continued fraction, from the inside out.
function erfcTail(x) {
  let fraction = x;
  for (let k = 60; k > 0; k--) fraction = x + k / 2 / fraction;
  return Math.exp(-x * x) / (fraction * Math.sqrt(Math.PI));
}

function logNormalCdf(x) {
  const z = -x / Math.SQRT2;
  return Math.log((z > 2 ? erfcTail(z) : 1 - erf(z)) / 2);
}
