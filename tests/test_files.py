"""`vsgd fit`, `predict` and `score` on valid and invalid files."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pytest
from command import refuses, scores, succeeds
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_diabetes, load_digits

from vsgd.files import svmlight
from vsgd.files.cells import BadRow
from vsgd.files.storage import load

SVMLIGHT_PIECES = (
    " | | |\t|\r|1|+1|spam|é|#|qid:3|7:|:|x|-|e|.|_|0|3:1| 4:0.25| 5:-2.5e-3| 6:1E5| 7:.5| 8:5.| 9:+0| 10:-0.0| 11:nan"
    "| 12:inf| 13:1e999| 14:0.1234567890123456789| 15:9007199254740993| 16:123456789012345678901e-30| 17:4e-320| 18:0x1"
    "| 12345678901234567890123:1| 9007199254740993:1| 19:1e| 20:1e+| 21:--1| 22:1:1| -3:1| 23:1e23| 24:1e71| 25:1_0|1:2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Typical files: svmlight, and CSV with numbers, names and text, gzipped or not."""
    folder = tmp_path_factory.mktemp("files")
    dump_svmlight_file(*load_digits(return_X_y=True), str(folder / "digits.svm"), zero_based=False)
    with gzip.open(folder / "digits.svm.gz", "wb") as file:
        file.write((folder / "digits.svm").read_bytes())
    X, y = load_diabetes(return_X_y=True)
    with (folder / "diabetes.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{i}" for i in range(10)), "y"])
        writer.writerows([*row, t] for row, t in zip(X.tolist(), y.tolist(), strict=True))
    rng = np.random.default_rng(0)
    with (folder / "reviews.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["stars", "city", "review", "liked"])
        for _ in range(600):
            liked = rng.random() < 0.5
            words = rng.choice(["good", "fine", "nice", "food"] if liked else ["bad", "poor", "cold", "food"], 6)
            city = rng.choice(["Oslo", "Rome"])
            writer.writerow([int(rng.integers(1, 6)), city, " ".join(words), "yes" if liked else "no"])
    return folder


@pytest.mark.parametrize("name", ["digits.svm", "digits.svm.gz"])
def test_fit_score_and_predict_svmlight(folder, tmp_path, name):
    succeeds("fit", folder / name, "--model", tmp_path / "m.npz")
    assert scores(folder / name, "--model", tmp_path / "m.npz")["accuracy"] > 0.94
    succeeds("predict", folder / name, "--model", tmp_path / "m.npz", "--out", tmp_path / "labels")
    labels = (tmp_path / "labels").read_text().split()
    assert np.mean(np.array(labels, float) == load_digits().target) > 0.94


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(SVMLIGHT_PIECES.split("|")), max_size=12).map("".join), max_size=8),
    st.integers(1, 40),
)
def test_compiled_code_reads_lines_as_python_does(lines, block):
    """Lines with numbers of any length, all kinds of blanks, comments and errors, in blocks of any size."""
    text = "\n".join(lines)
    expected = []
    for i, line in enumerate(text.split("\n"), start=1):
        if line.partition("#")[0].strip():
            try:
                expected.append((i, *map(list, svmlight.line_of(line))))
            except BadRow as bad:
                expected.append((i, str(bad)))
    content = text.encode()
    pieces = [content[at : at + block] for at in range(0, len(content), block)]
    found = [(i, str(row)) if isinstance(row, BadRow) else (i, *map(list, row)) for i, row in svmlight.lines_of(pieces)]
    assert found == expected


def test_names_text_and_numbers_in_a_table(folder, tmp_path):
    succeeds("fit", folder / "reviews.csv", "--target", "liked", "--model", tmp_path / "m.npz")
    schema = load(tmp_path / "m.npz").schema
    assert (schema.numbers, schema.categories, schema.texts) == (["stars"], ["city"], ["review"])
    assert scores(folder / "reviews.csv", "--model", tmp_path / "m.npz")["accuracy"] > 0.98


def test_regression(folder, tmp_path):
    data = folder / "diabetes.csv"
    succeeds("fit", data, "--target", "y", "--loss", "squared_error", "--model", tmp_path / "m.npz", "--passes", 60)
    assert scores(data, "--model", tmp_path / "m.npz")["R2"] > 0.4


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    X, y = load_breast_cancer(return_X_y=True)
    table = pyarrow.table({**{f"x{i}": column for i, column in enumerate(X.T)}, "y": y})
    parquet.write_table(table, tmp_path / "cancer.parquet")
    succeeds("fit", tmp_path / "cancer.parquet", "--target", "y", "--model", tmp_path / "m.npz", "--passes", 20)
    assert scores(tmp_path / "cancer.parquet", "--model", tmp_path / "m.npz")["accuracy"] > 0.9


def test_a_fit_is_repeatable_and_sees_every_row_once_a_pass(folder, tmp_path):
    common = ["--model", tmp_path / "m.npz", "--passes", 1, "--batch-size", 10, "--chunk-rows", 100]
    tables = []
    for seed in (0, 0, 1):
        succeeds("fit", folder / "digits.svm", *common, "--seed", seed)
        assert load(tmp_path / "m.npz").model.progress.tolist() == [seed, 180, 1797, 1797]
        tables.append(load(tmp_path / "m.npz").model.table)
    np.testing.assert_array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[0], tables[2])


def test_resuming_is_not_stopping(folder, tmp_path):
    data, first, second = folder / "digits.svm", tmp_path / "1.npz", tmp_path / "2.npz"
    succeeds("fit", data, "--model", first, "--passes", 3)
    succeeds("fit", data, "--model", second, "--passes", 1)
    succeeds("fit", data, "--model", second, "--passes", 3, "--resume")
    np.testing.assert_array_equal(load(first).model.table, load(second).model.table)
    refuses("fit", folder / "reviews.csv", "--target", "liked", "--model", second, "--resume", saying="svmlight")
    succeeds("fit", folder / "reviews.csv", "--target", "liked", "--model", second)
    refuses("fit", data, "--model", second, "--resume", saying="tables")


class TestBadInput:
    @pytest.mark.parametrize("bad", ["1 3:x", "1 nonsense", "2 4:nan", "1 7:inf", "1 -3:1"])
    def test_a_malformed_line_is_named_or_skipped(self, tmp_path, bad):
        data, model = tmp_path / "d.svm", tmp_path / "m.npz"
        data.write_text("1 1:1\n2 2:1\n" * 10 + bad + "\n1 1:2\n")
        refuses("fit", data, "--model", model, saying="line 21")
        assert not model.exists()
        assert "1 bad line skipped" in succeeds("fit", data, "--model", model, "--skip-bad-lines")

    def test_a_short_row_of_a_table(self, tmp_path):
        (tmp_path / "d.csv").write_text("a,y\n1,0\n2,1\n3\n")
        refuses("fit", tmp_path / "d.csv", "--target", "y", "--model", tmp_path / "m.npz", saying="line 4: 1 cells")

    def test_a_truncated_gzip(self, folder, tmp_path):
        whole = (folder / "digits.svm.gz").read_bytes()
        (tmp_path / "cut.svm.gz").write_bytes(whole[: len(whole) // 2])
        refuses("fit", tmp_path / "cut.svm.gz", "--model", tmp_path / "m.npz", saying="cut short")
        assert not (tmp_path / "m.npz").exists()

    def test_no_such_file_or_target(self, folder, tmp_path):
        refuses("fit", tmp_path / "none.svm", "--model", tmp_path / "m.npz", saying="cannot read")
        refuses("fit", folder / "reviews.csv", "--model", tmp_path / "m.npz", saying="--target")
        refuses("fit", folder / "reviews.csv", "--target", "z", "--model", tmp_path / "m.npz", saying="no column 'z'")

    def test_one_class(self, tmp_path):
        (tmp_path / "d.svm").write_text("1 1:1\n1 2:1\n")
        refuses("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="at least two")

    def test_a_column_missing_at_predict_time(self, folder, tmp_path):
        succeeds("fit", folder / "reviews.csv", "--target", "liked", "--model", tmp_path / "m.npz", "--passes", 1)
        (tmp_path / "less.csv").write_text("stars,review\n3,good\n")
        out = tmp_path / "out"
        refuses(
            "predict",
            tmp_path / "less.csv",
            "--model",
            tmp_path / "m.npz",
            "--out",
            out,
            saying="lacks the column 'city'",
        )
        assert list(tmp_path.glob("*out*")) == []

    def test_a_damaged_model(self, folder, tmp_path):
        model = tmp_path / "m.npz"
        succeeds("fit", folder / "digits.svm", "--model", model, "--passes", 1)
        content = bytearray(model.read_bytes())
        content[len(content) // 2] ^= 1
        model.write_bytes(content)
        refuses("score", folder / "digits.svm", "--model", model, saying="damaged")
        model.write_bytes(b"nothing")
        refuses("score", folder / "digits.svm", "--model", model, saying="damaged")

    def test_a_model_of_another_version(self, folder, tmp_path):
        header = np.frombuffer(json.dumps({"vsgd": 99}).encode(), np.uint8)
        np.savez(tmp_path / "m.npz", header=header)
        refuses("score", folder / "digits.svm", "--model", tmp_path / "m.npz", saying="version 99")


def test_model_that_cannot_be_written_gives_one_line(tmp_path):
    data = tmp_path / "data.csv"
    data.write_text("x,y\n1,a\n2,b\n3,a\n")
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for model in (in_the_way / "m.npz", tmp_path / "missing" / "m.npz"):
        refuses("fit", data, "--target", "y", "--model", model, saying="cannot write")
        assert not model.exists()
