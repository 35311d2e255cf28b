"""Damaged or crafted model files and stored results are read correctly or rejected, without a crash."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from command import succeeds, vsgd
from fuzzing import cases, generator, mutated, no_hang
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from vsgd.disk import read_checked, write_checked
from vsgd.errors import UserError
from vsgd.files.storage import digest, load
from vsgd_bench import store
from vsgd_bench.results import RunFile

DATA = "1 1:1 3:2\n2 2:1\n3 3:1 1:-1\n" * 8


@pytest.fixture(scope="module")
def given_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "d.svm").write_text(DATA)
    succeeds("fit", folder / "d.svm", "--model", folder / "m.npz", "--passes", 1)
    return folder


def run_all(data, model):
    """Run every command that reads a model, and return the exit codes."""
    codes = []
    for words in (["predict", data], ["score", data], ["fit", data, "--resume", "--passes", 2]):
        with no_hang():
            outcome = vsgd(*words, "--model", model)
        assert outcome.code in (0, 2), outcome
        assert outcome.err.count("\n") == (outcome.code == 2), outcome
        codes.append(outcome.code)
    return codes


def test_damaged_models(given_model, tmp_path):
    rng, count, refused = generator("models"), cases(60, 600), 0
    whole = (given_model / "m.npz").read_bytes()
    told = succeeds("predict", given_model / "d.svm", "--model", given_model / "m.npz")
    for _ in range(count):
        model = tmp_path / "m.npz"
        model.write_bytes(mutated(whole, rng))
        outcome = vsgd("predict", given_model / "d.svm", "--model", model)
        if outcome.code == 0:
            assert outcome.out == told, "a damaged model was used"
        refused += run_all(given_model / "d.svm", model)[0] == 2
    print(f"models: {count} files, {refused} refused, {4 * count} runs")
    assert refused > count / 2


LEAF = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
LIST = st.lists(LEAF, max_size=3)
JSON = LEAF | LIST | st.lists(LIST, max_size=2) | st.dictionaries(st.text(max_size=5), LEAF | LIST, max_size=3)
ARRAYS = st.tuples(
    st.sampled_from(["<f8", ">f8", "<f4", "<i8", "<u1", "<c16", "S3", "?"]),
    st.lists(st.integers(0, 9), max_size=4),
    st.sampled_from([0, 1, -1, 1e308]),
)


@seed(0)
@settings(max_examples=cases(60, 1000), deadline=None, database=None)
@given(change=st.data())
def test_crafted_models(given_model, tmp_path_factory, change):
    """Replace one field or array, with a correct checksum."""
    with np.load(given_model / "m.npz") as file:
        arrays = dict(file)
    header = json.loads(arrays.pop("header").tobytes())
    del header["sha256"]
    what = change.draw(st.sampled_from(["field", "schema", "array"]))
    if what == "array":
        dtype, shape, value = change.draw(ARRAYS)
        with np.errstate(all="ignore"):
            arrays[change.draw(st.sampled_from(sorted(arrays)))] = np.full(shape, value).astype(dtype)
    else:
        fields = header if what == "field" else header["schema"]
        fields[change.draw(st.sampled_from(sorted(fields)))] = change.draw(JSON)
    text = json.dumps({**header, "sha256": digest(header, arrays)})
    model = tmp_path_factory.mktemp("crafted") / "m.npz"
    np.savez(model, header=np.frombuffer(text.encode(), np.uint8), **arrays)
    run_all(given_model / "d.svm", model)


def test_damaged_results(tmp_path, capsys):
    """Results of figures: the original arrays, or none."""
    rng, count = generator("results"), cases(200, 3000)
    arrays, origin = {"a": np.arange(5.0), "b": np.eye(3)}, {"figure": "3", "seconds": 1.5}
    store.save(tmp_path / "part", arrays, origin)
    files = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    for _ in range(count):
        damaged = rng.choice(sorted(files))
        damaged.write_bytes(mutated(files[damaged], rng))
        found = store.load(tmp_path / "part", {"figure": "3"})
        lines = capsys.readouterr().err.count("\n")
        if found is None:
            assert lines == 1
        else:
            assert lines == 0
            assert all(np.array_equal(found[0][name], arrays[name]) for name in arrays)
            assert found[1]["seconds"] == 1.5
        damaged.write_bytes(files[damaged])
    print(f"stored results: {count} files")


def test_damaged_records(tmp_path, capsys):
    """Records of results."""
    rng, path = generator("records"), tmp_path / "r.json"
    record = {"final": 0.0092, "curve": [1.5, 2.5], "name": "η"}
    write_checked(path, record)
    content = path.read_bytes()
    for _ in range(cases(200, 3000)):
        path.write_bytes(mutated(content, rng))
        assert read_checked(path) in (None, record)
        assert capsys.readouterr().err.count("\n") <= 1


def test_damaged_files_of_runs(tmp_path, capsys):
    rng, path = generator("runs"), tmp_path / "runs.jsonl.gz"
    for number in range(20):
        RunFile(path, ("seed",)).save({"seed": number, "final": 0.0092 * number, "name": "η"})
    content = path.read_bytes()
    expected = list(RunFile(path, ("seed",)))
    for _ in range(cases(200, 3000)):
        path.write_bytes(mutated(content, rng))
        try:
            found = list(RunFile(path, ("seed",)))
        except UserError:
            found = []
        assert all(record in expected for record in found)
        assert capsys.readouterr().err.count("\n") <= 1


def test_a_model_that_cannot_be_loaded_raises_user_errors_only(given_model, tmp_path):
    """Errors that the command line prints are exceptions of one type in the library."""
    rng = generator("load")
    whole = (given_model / "m.npz").read_bytes()
    for _ in range(cases(200, 5000)):
        (tmp_path / "m.npz").write_bytes(mutated(whole, rng))
        with contextlib.suppress(UserError):
            load(tmp_path / "m.npz")
