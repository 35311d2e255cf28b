// Sliders and lists. Each is a <label> with the current value in `.value`.

function slider(name, { min, max, value, log = false, steps = 60, whole = false, format = short }, changed) {
  const forth = log ? Math.log : (v) => v,
    back = log ? Math.exp : (v) => v;
  const a = forth(min),
    b = forth(max);
  const input = make("input", { type: "range", min: 0, max: steps, step: 1 });
  const output = make("output");
  // the input comes first, since a label is that of the first control in it and an output is one
  const label = make("label", {}, make("span", {}, name), input, output);
  const read = () => {
    const at = back(a + ((b - a) * input.value) / steps);
    return whole ? Math.round(at) : Number(at.toPrecision(3));
  };
  label.show = () => {
    output.textContent = format(label.value);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  label.set = (wanted) => {
    input.value = Math.round(((forth(wanted) - a) / (b - a)) * steps);
    label.value = wanted;
    label.show();
  };
  input.addEventListener("input", () => {
    label.value = read();
    label.show();
    changed();
  });
  label.set(value);
  return label;
}

function chooser(name, options, value, changed) {
  const select = make(
    "select",
    {
      onchange: () => {
        label.value = select.value;
        changed();
      },
    },
    ...options.map((o) => make("option", { value: o }, o)),
  );
  const label = make("label", {}, make("span", {}, name), select);
  label.set = (wanted) => {
    select.value = label.value = wanted;
  };
  label.set(value);
  return label;
}

// Several changes in quick succession, as by a slider, cause one drawing.
function atNextFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}
