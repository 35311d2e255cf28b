"""Damaged data files in `vsgd fit`, `predict` and `score`: the result is correct, or one line describes the error."""

from __future__ import annotations

import csv
import gzip
import io
from codecs import BOM_UTF8

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command import vsgd
from fuzzing import cases, generator, mutated, no_hang
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from vsgd.files.cells import BadRow
from vsgd.files.storage import load
from vsgd.files.svmlight import line_of, lines_of

RNG = np.random.default_rng(0)
ROWS = 40
COLUMNS = {
    "n": RNG.standard_normal(ROWS).round(3).tolist(),
    "m": [str(x) if x else "NA" for x in RNG.integers(0, 5, ROWS).tolist()],
    "city": RNG.choice(["Oslo", "Rome", "Łódź"], ROWS).tolist(),
    "words": [" ".join(RNG.choice(["good", "bad", "food", "a, b", 'the "one"'], 6)) for _ in range(ROWS)],
    "y": RNG.choice(["1", "2"], ROWS).tolist(),
}


def csv_content() -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows(zip(*COLUMNS.values(), strict=True))
    return text.getvalue().encode()


def svmlight_content() -> bytes:
    lines = []
    for i in range(ROWS):
        elements = " ".join(f"{j}:{RNG.standard_normal():.4g}" for j in sorted(RNG.choice(30, 5, replace=False)))
        lines.append(f"{i % 3} {elements}" + (" # a comment" if i % 9 == 0 else ""))
    return "\n".join(lines).encode()


def parquet_content() -> bytes:
    sink = io.BytesIO()
    table = pyarrow.table(
        {**COLUMNS, "flag": [i % 2 == 0 for i in range(ROWS)], "day": pyarrow.array(range(ROWS), "date32")}
    )
    pyarrow.parquet.write_table(table, sink, row_group_size=15)
    return sink.getvalue()


CONTENTS = {
    "d.csv": csv_content(),
    "d.svm": svmlight_content(),
    "d.csv.gz": gzip.compress(csv_content(), mtime=0),
    "d.svm.gz": gzip.compress(svmlight_content(), mtime=0),
    "d.parquet": parquet_content(),
}


def damaged(name, rng):
    """Return the damaged content of a file. A gzipped file is damaged before or after compression."""
    if name.endswith(".gz") and rng.random() < 0.5:
        return gzip.compress(mutated(CONTENTS[name.removesuffix(".gz")], rng), mtime=0)
    return mutated(CONTENTS[name], rng)


def run(*words):
    """Check that the outcome is a success or a complete error message."""
    with no_hang():
        outcome = vsgd(*words)
    assert outcome.code in (0, 2), outcome
    assert outcome.err.count("\n") == (1 if outcome.code else outcome.err.startswith("vsgd: ")), outcome
    return outcome


@pytest.mark.parametrize("name", CONTENTS)
def test_damaged_data(tmp_path, name):
    rng, count, refused = generator(name), cases(35, 600), 0
    data, model, out = tmp_path / name, tmp_path / "m.npz", tmp_path / "out"
    target = [] if ".svm" in name else ["--target", "y"]
    for case in range(count):
        data.write_bytes(damaged(name, rng))
        skip = ["--skip-bad-lines"] if case % 3 == 0 else []
        loss = ["--loss", "squared_error"] if case % 4 == 0 else []
        fitted = run("fit", data, "--model", model, "--passes", 1, "--hash-bits", 6, *target, *skip, *loss)
        if fitted.code:
            refused += 1
            assert sorted(path.name for path in tmp_path.iterdir()) == [name], fitted
            continue
        trained = load(model)
        assert all(np.isfinite(array).all() for array in trained.model)
        scored = run("score", data, "--model", model, *skip)
        assert scored.code == 0, scored
        predicted = run("predict", data, "--model", model, "--out", out, *skip)
        assert predicted.code == 0, predicted
        labels = [row[0] if row else "" for row in csv.reader(io.StringIO(out.read_text(encoding="utf-8"), newline=""))]
        assert sum(map(bool, labels)) == int(scored.out.split()[1]) or skip
        assert all(label in {*trained.classes, ""} for label in labels) or loss
        model.unlink()
        out.unlink()
    print(f"{name}: {count} files, {refused} refused, {3 * (count - refused) + refused} runs")
    assert refused > 0


@pytest.mark.parametrize("name", CONTENTS)
def test_damaged_data_at_predict(tmp_path, name):
    """The model is of the undamaged file."""
    rng, count = generator(f"predict {name}"), cases(25, 600)
    data, model = tmp_path / name, tmp_path / "m.npz"
    data.write_bytes(CONTENTS[name])
    target = [] if ".svm" in name else ["--target", "y"]
    assert run("fit", data, "--model", model, "--passes", 1, "--hash-bits", 6, *target).code == 0
    for _ in range(count):
        data.write_bytes(damaged(name, rng))
        run("predict", data, "--model", model, "--out", tmp_path / "out")
        run("score", data, "--model", model)
        (tmp_path / "out").unlink(missing_ok=True)
        assert len(list(tmp_path.iterdir())) == 2
    print(f"{name}: {count} files, {2 * count} runs")


def by_python(content: bytes):
    """Return the result of the Python reader for every line."""
    found = []
    for number, line in enumerate(content.removeprefix(BOM_UTF8).split(b"\n"), start=1):
        try:
            text = line.decode()
            if text.partition("#")[0].strip():
                found.append((number, *map(list, line_of(text))))
        except UnicodeDecodeError:
            found.append((number, "not UTF-8 text"))
        except BadRow as bad:
            found.append((number, str(bad)))
    return found


def by_compiled_code(content: bytes, block: int):
    pieces = [content[at : at + block] for at in range(0, len(content), block)]
    return [
        (number, str(line)) if isinstance(line, BadRow) else (number, *map(list, line))
        for number, line in lines_of(pieces)
    ]


def test_compiled_code_reads_damaged_lines_as_python_does():
    rng, count = generator("svmlight"), cases(500, 470_000)
    whole = svmlight_content().splitlines()
    for _ in range(count):
        content = mutated(b"\n".join(rng.sample(whole, 4)), rng)
        assert by_compiled_code(content, rng.choice([7, 40, 10_000])) == by_python(content), content
    print(f"svmlight reader: {count} blocks")


@seed(0)
@settings(max_examples=cases(200, 70_000), deadline=None, database=None)
@given(st.binary(max_size=60), st.integers(1, 70))
def test_compiled_code_reads_any_bytes_as_python_does(content, block):
    assert by_compiled_code(content, block) == by_python(content)
