"""Merging models that were trained on different rows: weights, statistics, errors, files and processes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from command import refuses, succeeds
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.exceptions import NotFittedError

from vsgd import COLUMNS, PAPER
from vsgd.files.passes import Passed, merged, one_pass, parts_of
from vsgd.files.reading import Source
from vsgd.files.storage import load
from vsgd.linear.centering import move_centers
from vsgd.linear.merging import merge
from vsgd.linear.model import (
    BATCHES,
    CENTER,
    COLUMN_FIELDS,
    COLUMN_MAX,
    CURV,
    FIELDS,
    OUTPUT_FIELDS,
    ROWS,
    SEEN,
    SUM,
    THETA,
    Model,
)
from vsgd.sklearn import VSGDClassifier, VSGDRegressor, fit_parts


def model_of(theta, seen, curvature, rows=10):
    """One column, one output."""
    table = np.zeros((1, FIELDS, 1))
    table[0, [THETA, SEEN, CURV], 0] = theta, seen, curvature
    return Model(
        table=table,
        average=np.zeros((0, 1)),
        columns=np.zeros((1, COLUMN_FIELDS)),
        sums=np.ones((OUTPUT_FIELDS, 1)),
        penalty=np.ones((2, 1)),
        residual=np.ones(1),
        progress=np.array([7, rows // 2, rows, rows]),
    )


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.model_, b.model_, strict=True))


def test_a_coordinate_is_weighted_by_count_and_curvature():
    found = merge([model_of(1.0, 3, 2.0), model_of(4.0, 1, 12.0)])
    assert found.table[0, THETA, 0] == pytest.approx((3 * 2 * 1 + 1 * 12 * 4) / (3 * 2 + 1 * 12))
    assert found.table[0, SEEN, 0] == 4
    assert found.table[0, CURV, 0] == pytest.approx((3 * 2 + 1 * 12) / 4)
    assert found.progress.tolist() == [7, 10, 20, 20]


def test_parabolas_merge_into_their_sum():
    """Least squares on one column: merging the minima of the parts gives the minimum of the whole."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=40), rng.normal(size=40)
    parts = [slice(0, 10), slice(10, 40)]
    solved = [model_of(x[p] @ y[p] / (x[p] @ x[p]), len(x[p]), np.mean(x[p] ** 2)) for p in parts]
    assert merge(solved).table[0, THETA, 0] == pytest.approx(x @ y / (x @ x))


def test_what_the_base_had_seen_counts_once():
    base = model_of(1.0, 100, 2.0, rows=100)
    found = merge([model_of(1.5, 110, 2.0, rows=110), model_of(1.0, 130, 2.0, rows=140)], base)
    assert found.table[0, SEEN, 0] == 140
    assert found.progress[ROWS] == 150
    assert found.table[0, THETA, 0] == pytest.approx(1.0 + 110 / 140 * 0.5)
    unchanged = merge([base, base, base], base)
    assert all(np.array_equal(a, b) for a, b in zip(unchanged, base, strict=True))


def test_a_column_that_one_part_alone_has_is_taken_over():
    rng = np.random.default_rng(0)
    X = sparse.random(400, 30, density=0.2, random_state=0, format="lil")
    X[:200, 5] = 0
    X = X.tocsr()
    y = rng.integers(0, 2, 400)
    first, second = (
        VSGDClassifier(random_state=0).partial_fit(X[p], y[p], [0, 1]) for p in np.split(np.arange(400), 2)
    )
    both = VSGDClassifier.merge([first, second])
    assert both.coef_[0, 5] == second.coef_[0, 5] != 0
    assert both.model_.table[5, :, 0].tolist() == second.model_.table[5, :, 0].tolist()


@pytest.mark.parametrize("average", [False, True])
def test_models_that_differ_in_their_centers_alone_predict_the_same_when_merged(average):
    X, y = load_breast_cancer(return_X_y=True)
    first = VSGDClassifier(random_state=0, average=average).partial_fit(X, y, [0, 1])
    other = copy.deepcopy(first)
    other.model_.columns[:-1, SUM] *= 1.2
    move_centers(other.model_, first._training().task._replace(center=True))
    merged = VSGDClassifier.merge([first, other])
    centers = [model.model_.columns[:-1, CENTER] for model in (first, merged, other)]
    assert (centers[0] < centers[1]).all()
    assert (centers[1] < centers[2]).all()
    np.testing.assert_allclose(merged.decision_function(X), first.decision_function(X), rtol=1e-8)


@pytest.mark.parametrize("options", [COLUMNS, PAPER])
@pytest.mark.parametrize("average", [False, True])
def test_merged_model_is_complete_and_can_be_trained(options, average):
    X, y = load_breast_cancer(return_X_y=True)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    parts = [(X[i::3], y[i::3]) for i in range(3)]
    start = VSGDClassifier(random_state=0, options=options, average=average)
    fitted = fit_parts(start, parts, rounds=3)
    assert not hasattr(start, "model_")
    assert fitted.score(X, y) > 0.95
    assert fitted.loss_curve_[-1] < fitted.loss_curve_[0]
    assert fitted.model_.progress[ROWS] == 3 * len(y)
    assert fitted.random_state == 0
    before = fitted.coef_.copy()
    fitted.partial_fit(X, y)
    assert fitted.score(X, y) > 0.95
    assert (fitted.coef_ != before).all()


def test_a_power_of_two_in_a_column_changes_nothing():
    X, y = load_diabetes(return_X_y=True)
    scale = 2.0 ** np.arange(-5, 5)

    def coefficients(X):
        return fit_parts(VSGDRegressor(random_state=0), [(X[i::2], y[i::2]) for i in range(2)]).coef_

    assert np.array_equal(coefficients(X), coefficients(X * scale) * scale)


def test_values_much_larger_in_one_part_decide():
    """A constant column after a running scaler is rounding noise at first. Its coefficient gets almost no weight."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 1)), rng.normal(size=200)
    noise = VSGDRegressor(random_state=0).partial_fit(x * 1e-12, y)
    real = VSGDRegressor(random_state=0).partial_fit(x, 3 * x[:, 0])
    found = VSGDRegressor.merge([noise, real])
    assert abs(noise.coef_[0, 0]) > 1e3
    assert found.coef_[0, 0] == pytest.approx(real.coef_[0, 0], rel=1e-6)
    assert found.model_.table[0, COLUMN_MAX, 0] == real.model_.table[0, COLUMN_MAX, 0]


def test_rounds_do_not_depend_on_other_random_numbers():
    X, y = load_diabetes(return_X_y=True)
    parts = [(X[i::3], y[i::3]) for i in range(3)]
    first = fit_parts(VSGDRegressor(random_state=1), parts)
    np.random.default_rng().random()
    assert same(first, fit_parts(VSGDRegressor(random_state=1), parts))
    assert not same(first, fit_parts(VSGDRegressor(random_state=2), parts))
    twice = fit_parts(fit_parts(VSGDRegressor(random_state=1), parts, rounds=2), parts, rounds=1)
    assert twice.model_.progress[ROWS] == first.model_.progress[ROWS]
    assert len(twice.loss_curve_) == 3


def test_a_part_of_rows_without_weight_is_passed_over():
    X, y = load_breast_cancer(return_X_y=True)
    estimator = VSGDClassifier(class_weight={0: 0.0, 1: 1.0}, random_state=0)
    model = fit_parts(estimator, [(X[y == 0], y[y == 0]), (X[y == 1], y[y == 1])], rounds=2)
    assert len(model.loss_curve_) == 2
    with pytest.raises(ValueError, match="no part has any rows with a weight"):
        fit_parts(estimator, [(X[y == 0], y[y == 0])], classes=[0, 1])


def test_labels_keep_their_type_with_empty_parts():
    X, y = load_breast_cancer(return_X_y=True)
    model = fit_parts(VSGDClassifier(random_state=0), [(X.tolist(), y.tolist()), (X[:0], [])])
    assert model.predict(X[:2]).dtype == y.dtype
    with pytest.raises(ValueError, match="no part has any rows"):
        fit_parts(VSGDClassifier(), [])


def test_a_part_without_rows_is_passed_over():
    X, y = load_diabetes(return_X_y=True)
    some = fit_parts(VSGDRegressor(random_state=0), [(X[:200], y[:200]), (X[200:], y[200:])])
    assert same(
        some, fit_parts(VSGDRegressor(random_state=0), [(X[:200], y[:200]), (X[200:], y[200:]), (X[:0], y[:0])])
    )
    with pytest.raises(ValueError, match="no part has any rows"):
        fit_parts(VSGDRegressor(), [(X[:0], y[:0])])


def fitted(columns=3, classes=(0, 1), **parameters):
    X = np.arange(20.0 * columns).reshape(20, columns) % 7
    return VSGDClassifier(random_state=0, **parameters).partial_fit(X, np.resize(classes, 20), classes)


@pytest.mark.parametrize(
    ("other", "saying"),
    [
        ({"columns": 4}, "number of features differ: 4 instead of 3"),
        ({"classes": (0, 2)}, r"classes differ: \[.*2.*\] instead of"),
        ({"classes": (0, 1, 2)}, "classes differ"),
        ({"loss": "hinge"}, "loss differ: hinge instead of log_loss"),
        ({"options": PAPER}, "options differ"),
        ({"penalty": "l2"}, "penalty differ"),
        ({"batch_size": 4}, "batch_size differ"),
        ({"fit_intercept": False}, "fit_intercept differ"),
        ({"average": True}, "average differ"),
    ],
)
def test_models_that_do_not_belong_together_are_refused(other, saying):
    first, second = fitted(), fitted(**other)
    before = [array.copy() for array in first.model_]
    with pytest.raises(ValueError, match=f"model 2 cannot be merged with the first, its {saying}"):
        VSGDClassifier.merge([first, second])
    assert all(np.array_equal(a, b) for a, b in zip(first.model_, before, strict=True))


def test_what_is_no_model_to_merge_is_refused():
    with pytest.raises(ValueError, match="no model to merge"):
        VSGDClassifier.merge([])
    with pytest.raises(ValueError, match="model 2 is a VSGDRegressor, not a VSGDClassifier"):
        VSGDClassifier.merge([fitted(), VSGDRegressor()])
    with pytest.raises(NotFittedError):
        VSGDClassifier.merge([fitted(), VSGDClassifier()])
    longer = fitted().partial_fit(np.ones((5, 3)), [0, 1, 0, 1, 0])
    with pytest.raises(ValueError, match="model 2 has seen fewer samples than the base"):
        VSGDClassifier.merge([longer, fitted()], base=longer)
    with pytest.raises(ValueError, match="rounds == 0"):
        fit_parts(VSGDClassifier(), [], rounds=0)


def write_parts(folder, count=4, suffix="csv"):
    """Parts of a table with numbers, some missing, categories and words."""
    rng = np.random.default_rng(0)
    paths = []
    for part in range(count):
        lines = ["size,city,note,liked"]
        for _ in range(60):
            size, city = rng.normal(), rng.integers(0, 3)
            word = rng.choice(["good", "bad", "fine"])
            liked = int(size + (word == "good") - (word == "bad") > 0)
            lines.append(f"{'' if rng.random() < 0.1 else f'{size:.3f}'},c{city},it is {word} so far,{liked}")
        paths.append(folder / f"part-{part}.{suffix}")
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


def write_svmlight(folder, count=2):
    paths = []
    for part in range(count):
        paths.append(folder / f"part-{part}.svm")
        paths[-1].write_text("".join(f"{i % 3} {i % 5 + 1}:{i % 4} {6 + part}:1\n" for i in range(40)))
    return paths


FIT = ("--target", "liked", "--hash-bits", 8)


def arrays_of(path):
    return load(path).model


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_merged_files_score_better_than_each_and_go_on(tmp_path):
    paths = write_parts(tmp_path)
    models = [tmp_path / f"{i}.npz" for i in range(4)]
    for path, model in zip(paths, models, strict=True):
        succeeds("fit", path, "--model", model, "--passes", 1, *FIT)
    out = tmp_path / "merged.npz"
    assert "4 models, 240 rows" in succeeds("merge", *models, "--model", out)
    found, parts = load(out), [load(model) for model in models]
    assert equal(found.model, merge([part.model for part in parts]))
    assert found.schema.means == pytest.approx(np.mean([part.schema.means for part in parts], axis=0))
    assert found.passes == 1
    # the second round: each continues from the merged model, whose rows are counted once
    content = out.read_bytes()
    for path, model in zip(paths, models, strict=True):
        model.write_bytes(content)
        succeeds("fit", path, "--model", model, "--passes", 2, "--resume")
    again = tmp_path / "again.npz"
    assert "240 rows, 2 passes, 480 row visits" in succeeds("merge", *models, "--base", out, "--model", again)
    assert load(again).model.progress[ROWS] == 480
    refuses(
        "merge", out, "--base", again, "--model", tmp_path / "no.npz", saying="has seen fewer samples than the base"
    )


def test_models_of_other_files_are_refused_and_nothing_is_written(tmp_path):
    paths = write_parts(tmp_path, 2)
    first, out = tmp_path / "first.npz", tmp_path / "out.npz"
    succeeds("fit", paths[0], "--model", first, "--passes", 1, *FIT)
    others = {
        "loss": ("--loss", "hinge"),
        "hash bits": ("--hash-bits", 9),
        "batch size": ("--batch-size", 4),
        "category columns": ("--columns", "city=ignore"),
        "target": ("--target", "city"),
    }
    for name, words in others.items():
        other = tmp_path / f"{name}.npz"
        succeeds("fit", paths[1], "--model", other, "--passes", 1, *FIT, *words)
        refuses("merge", first, other, "--model", out, saying=f"cannot be merged with {first}, its")
    svm = tmp_path / "d.svm"
    for name, text in {"a": "1 1:1\n2 2:1\n", "b": "1 1:1\n3 2:1\n", "c": "1 1:1\n2 5:1\n"}.items():
        svm.write_text(text)
        succeeds("fit", svm, "--model", tmp_path / f"{name}.npz", "--passes", 1)
    refuses("merge", tmp_path / "a.npz", tmp_path / "b.npz", "--model", out, saying="its classes differ")
    refuses(
        "merge", tmp_path / "a.npz", tmp_path / "c.npz", "--model", out, saying="its columns differ: 6 instead of 3"
    )
    refuses("merge", first, tmp_path / "absent.npz", "--model", out, saying="absent.npz")
    refuses("merge", first, paths[0], "--model", out, saying="not a model")
    refuses("merge", first, "--model", first, saying="would be overwritten")
    assert not out.exists()


def by_hand(sources, start, jobs, passes):
    """Run the rounds one part after the other in this process."""
    trained = start
    for _ in range(passes):
        learned: list[Passed] = []
        for number, part in enumerate(parts_of(sources, jobs)):
            copy = trained._replace(model=Model(*(array.copy() for array in trained.model)))
            learned.append(one_pass(part, copy, (number,), 0))
        trained = merged(trained, learned).trained
    return trained


@pytest.mark.parametrize("write", [write_parts, write_svmlight])
def test_jobs_learn_side_by_side_as_they_would_one_after_the_other(tmp_path, write):
    paths = write(tmp_path)
    out, words = tmp_path / "out.npz", FIT if write is write_parts else ()
    said = succeeds("fit", *paths, "--model", out, "--passes", 2, "--jobs", 2, *words)
    found = load(out)
    assert said.count("pass ") == 2
    assert found.passes == 2
    start = found._replace(passes=0, model=load_untrained(found))
    assert equal(found.model, by_hand([Source(path, False) for path in paths], start, 2, 2).model)
    if write is write_parts:  # a new process compiles again, so one case is enough
        succeeds("fit", *paths, "--model", out, "--passes", 3, "--jobs", 2, "--resume")
        assert equal(arrays_of(out), by_hand([Source(path, False) for path in paths], start, 2, 3).model)


def load_untrained(trained):
    from vsgd.linear import new_model

    columns, _, outputs = trained.model.table.shape
    return new_model(columns, outputs, trained.task, COLUMNS, trained.seed)


def test_several_files_and_one_job_are_one_long_file(tmp_path):
    paths = write_parts(tmp_path, 3)
    header, *_ = paths[0].read_text().splitlines()
    whole = tmp_path / "whole.csv"
    whole.write_text("\n".join([header, *(line for path in paths for line in path.read_text().splitlines()[1:])]))
    chunk = ("--chunk-rows", 60)
    succeeds("fit", whole, "--model", tmp_path / "whole.npz", "--passes", 2, *FIT, *chunk)
    succeeds("fit", *paths, "--model", tmp_path / "parts.npz", "--passes", 2, *FIT, *chunk)
    assert equal(arrays_of(tmp_path / "whole.npz"), arrays_of(tmp_path / "parts.npz"))


def test_parquet_parts(tmp_path):
    import pyarrow.csv
    import pyarrow.parquet

    paths = write_parts(tmp_path, 2)
    parquet = []
    for path in paths:
        parquet.append(path.with_suffix(".parquet"))
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(path), parquet[-1])
    succeeds("fit", *parquet, "--model", tmp_path / "a.npz", "--passes", 1, "--jobs", 2, *FIT)
    assert load(tmp_path / "a.npz").model.progress[[BATCHES, ROWS]].tolist() == [8, 120]


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    paths = [*write_parts(tmp_path, 2), *write_svmlight(tmp_path, 1)]
    out = ("--model", tmp_path / "out.npz", "--jobs", 2)
    refuses("fit", paths[0], paths[2], *out, *FIT, saying="one is svmlight, the other is a table")
    other = tmp_path / "other.csv"
    other.write_text("size,town,note,liked\n1,c1,good,1\n")
    refuses("fit", paths[0], other, *out, *FIT, saying="differ in their columns: 'city', 'town'")
    refuses("fit", paths[0], tmp_path / "absent.csv", *out, *FIT, saying="absent.csv")
    paths[1].write_text(paths[1].read_text() + "x,y\n")
    refuses("fit", *paths[:2], *out, *FIT, saying="part-1.csv, line 62")
    assert not out[1].exists()


def test_an_error_in_a_process_ends_them_all(tmp_path, monkeypatch):
    """A part that changes after the scan: no file is written, and no process remains."""
    import multiprocessing

    from vsgd.files import commands

    paths = write_parts(tmp_path, 2)
    scanned = commands.scan

    def scan_and_damage(*arguments):
        found = scanned(*arguments)
        paths[1].write_text(paths[1].read_text().replace(",c1,", ",c1"))
        return found

    monkeypatch.setattr(commands, "scan", scan_and_damage)
    out = tmp_path / "out.npz"
    refuses("fit", *paths, "--model", out, "--jobs", 2, *FIT, saying="part-1.csv, line")
    assert not out.exists()
    assert multiprocessing.active_children() == []
