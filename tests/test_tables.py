"""CSV, Parquet and svmlight files with missing cells, unusual names and labels, and any width and length."""

from __future__ import annotations

import csv
import datetime
import gzip
import inspect
import io
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command import refuses, scores, succeeds, vsgd

from vsgd.files import cells, svmlight
from vsgd.files.settings import DEFAULT, PENALTY_OF
from vsgd.files.storage import load
from vsgd.linear.penalties import PENALTIES
from vsgd.linear.training import coefficients
from vsgd.sklearn import VSGDClassifier


def write_csv(path, names, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
    return path


def two_columns(rows, seed=0):
    """Write numbers, and a label that depends on their sum."""
    X = np.random.default_rng(seed).standard_normal((rows, 2)).round(3)
    return [[a, b, "yes" if a + b > 0 else "no"] for a, b in X.tolist()]


def fit(data, folder, *words):
    return succeeds("fit", data, "--target", "y", "--model", folder / "m.npz", *words)


class TestSchema:
    def test_is_printed(self, tmp_path):
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], two_columns(50))
        assert "2 numbers (a, b); target y" in fit(data, tmp_path)

    def test_many_names_are_cut_short(self, tmp_path):
        names = [f"x{i}" for i in range(300)]
        data = write_csv(tmp_path / "d.csv", [*names, "y"], [[*range(300), "a"], [*range(300), "b"]])
        first = fit(data, tmp_path).splitlines()[0]
        assert "300 numbers (x0, x1," in first
        assert len(first) < 200

    @pytest.mark.parametrize("cell", ["NA", "nan", "NaN", "", "null", " NA "])
    @pytest.mark.parametrize("row", [3, 1500])
    def test_a_missing_cell_does_not_change_the_kind_of_a_column(self, tmp_path, cell, row):
        """An NA among the first rows must not turn numbers into categories, and a later one is not an error."""
        rows = two_columns(2000)
        rows[row][0] = cell
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], rows)
        assert "2 numbers (a, b)" in fit(data, tmp_path)
        held_out = write_csv(tmp_path / "e.csv", ["a", "b", "y"], two_columns(500, seed=1))
        assert scores(held_out, "--model", tmp_path / "m.npz")["accuracy"] > 0.97

    def test_an_odd_cell_does_not_change_the_kind_of_a_column_either(self, tmp_path):
        rows = two_columns(100)
        rows[7][1] = "many"
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], rows)
        line = refuses("fit", data, "--target", "y", "--model", tmp_path / "m.npz", saying="line 9: 'many'")
        assert "--columns" in line
        assert "2 numbers" in fit(data, tmp_path, "--skip-bad-lines")
        assert "1 number (a), 1 category (b)" in fit(data, tmp_path, "--columns", "b=category")

    def test_a_missing_number_is_the_mean_of_its_column(self, tmp_path):
        rows = [[1000 + i, i % 7, 3.0 * i] for i in range(200)]
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], rows)
        fit(data, tmp_path, "--loss", "squared_error")
        asked = write_csv(tmp_path / "p.csv", ["a", "b"], [["", 1], [1099.5, 1], ["NA", 1]])
        missing, mean, other = succeeds("predict", asked, "--model", tmp_path / "m.npz").split()
        assert float(missing) == pytest.approx(float(mean))
        assert missing == other

    def test_can_be_overridden(self, tmp_path):
        rows = [[i % 3, i, "a b c d e", i, "x" if i % 3 else "z"] for i in range(30)]
        data = write_csv(tmp_path / "d.csv", ["code", "n", "words", "id, old", "y"], rows)
        printed = fit(data, tmp_path, "--columns", 'code=category,"id, old"=ignore', "--columns", "words=category")
        assert "1 number (n), 2 categories (code, words), 1 ignored (id, old); target y" in printed
        less = write_csv(tmp_path / "e.csv", ["code", "n", "words"], [[0, 1, "a b c d e"]])
        assert succeeds("predict", less, "--model", tmp_path / "m.npz") == "z\n"

    @pytest.mark.parametrize(
        ("columns", "saying"),
        [("a", "NAME=KIND"), ("a=numbers", "numbers"), ("z=number", "no column 'z'"), ("y=number", "target")],
    )
    def test_a_mistaken_override_is_one_line(self, tmp_path, columns, saying):
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], two_columns(10))
        words = ["--target", "y", "--model", tmp_path / "m.npz", "--columns", columns]
        refuses("fit", data, *words, saying=saying)

    def test_underscores_are_not_part_of_a_number(self, tmp_path):
        data = write_csv(tmp_path / "d.csv", ["month", "y"], [["2020_01", 1], ["2020_02", 0]] * 10)
        assert "1 category (month)" in fit(data, tmp_path)


class TestNames:
    def test_a_byte_order_mark_is_not_part_of_the_first_name(self, tmp_path):
        data = tmp_path / "d.csv"
        data.write_text("a,y\n1,0\n2,1\n3,1\n", encoding="utf-8-sig")
        assert "1 number (a)" in fit(data, tmp_path)

    def test_a_byte_order_mark_makes_no_class(self, tmp_path):
        (tmp_path / "d.svm").write_text("1 1:1\n-1 2:1\n", encoding="utf-8-sig")
        succeeds("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz")
        assert load(tmp_path / "m.npz").classes == ["-1", "1"]

    def test_a_name_that_stands_twice(self, tmp_path):
        """The last column must not silently replace the others."""
        data = write_csv(tmp_path / "d.csv", ["a", "a", "y"], [[1, 2, 0], [2, 3, 1]])
        refuses("fit", data, "--target", "y", "--model", tmp_path / "m.npz", saying="two columns named 'a'")
        arrays = [pyarrow.array([1, 2])] * 3
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, ["a", "a", "y"]), tmp_path / "d.parquet")
        words = ["--target", "y", "--model", tmp_path / "m.npz"]
        refuses("fit", tmp_path / "d.parquet", *words, saying="two columns named 'a'")

    def test_utf_8_in_any_locale(self, tmp_path, monkeypatch):
        monkeypatch.setattr("locale.getencoding", lambda: "ISO-8859-1")
        data = write_csv(tmp_path / "d.csv", ["größe", "y"], [[1, "ü"], [2, "é"]] * 5)
        fit(data, tmp_path)
        assert load(tmp_path / "m.npz").classes == ["é", "ü"]


class TestTargets:
    @pytest.mark.parametrize("bad", ["nan", "inf", "1e160", "", "NA", "six"])
    def test_a_target_that_is_no_usable_number_is_a_bad_row(self, tmp_path, bad):
        """A model with NaN must not be saved."""
        rows = [[i, 2 * i] for i in range(20)]
        rows[4][1] = bad
        data = write_csv(tmp_path / "d.csv", ["a", "y"], rows)
        model = tmp_path / "m.npz"
        words = ["fit", data, "--target", "y", "--loss", "squared_error", "--model", model]
        refuses(*words, saying="line 6")
        assert not model.exists()
        assert "1 bad line skipped" in succeeds(*words, "--skip-bad-lines")
        assert np.isfinite(load(model).model.table).all()

    def test_counts_below_zero(self, tmp_path):
        data = write_csv(tmp_path / "d.csv", ["a", "y"], [[1, 2], [2, -1]])
        words = ["--target", "y", "--loss", "poisson", "--model", tmp_path / "m.npz"]
        refuses("fit", data, *words, saying="line 3")

    @pytest.mark.parametrize("name", ["d.csv", "d.svm", "d.parquet"])
    @pytest.mark.parametrize("bad", [1e160, -1e300])
    def test_a_value_whose_square_overflows_is_a_bad_row(self, tmp_path, name, bad):
        data, model = tmp_path / name, tmp_path / "m.npz"
        columns = {"a": [1.0, 2.0, bad, 4.0] * 5, "y": [0, 1] * 10}
        if name == "d.csv":
            write_csv(data, columns, zip(*columns.values(), strict=True))
        elif name == "d.svm":
            data.write_text("".join(f"{y} 1:{x}\n" for x, y in zip(*columns.values(), strict=True)))
        else:
            pyarrow.parquet.write_table(pyarrow.table(columns), data)
        words = ["fit", data, "--model", model, *(["--target", "y"] if name != "d.svm" else [])]
        refuses(*words, saying="too large")
        assert not model.exists()
        assert "5 bad lines skipped" in succeeds(*words, "--skip-bad-lines")
        assert np.isfinite(load(model).model.table).all()

    def test_spellings_of_a_number_are_one_class(self, tmp_path):
        (tmp_path / "d.svm").write_text("1 1:1\n+1 1:2\n1.0 1:1\n-1 2:1\n-1.0 2:1\n")
        succeeds("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz")
        assert load(tmp_path / "m.npz").classes == ["-1", "1"]
        assert scores(tmp_path / "d.svm", "--model", tmp_path / "m.npz")["accuracy"] == 1

    def test_labels_keep_their_spelling(self, tmp_path):
        data = write_csv(tmp_path / "d.csv", ["a", "y"], [[1, "007"], [-1, "010"]] * 10)
        fit(data, tmp_path)
        assert succeeds("predict", data, "--model", tmp_path / "m.npz").split()[:2] == ["007", "010"]

    def test_a_label_with_a_newline_is_quoted(self, tmp_path):
        """The predictions must be valid CSV with one record per row."""
        rows = [[1, "two\nlines"], [-1, 'a "quoted", one']] * 20
        data = write_csv(tmp_path / "d.csv", ["a", "y"], rows)
        fit(data, tmp_path)
        printed = succeeds("predict", data, "--model", tmp_path / "m.npz")
        assert [row for (row,) in csv.reader(io.StringIO(printed))] == [label for _, label in rows]

    def test_a_class_that_the_model_does_not_know_is_a_bad_row(self, tmp_path):
        data = write_csv(tmp_path / "d.csv", ["a", "y"], [[1, "p"], [-1, "q"]] * 5)
        fit(data, tmp_path)
        other = write_csv(tmp_path / "e.csv", ["a", "y"], [[1, "p"], [1, "r"]])
        refuses("score", other, "--model", tmp_path / "m.npz", saying="line 3: class 'r'")


class TestSvmlight:
    def test_targets_may_be_left_out_at_predict(self, tmp_path):
        """The first element must not be read as the target."""
        rng = np.random.default_rng(0)
        X = rng.standard_normal((200, 3)).round(4).tolist()
        elements = [" ".join(f"{j}:{x}" for j, x in enumerate(row, start=1)) for row in X]
        labels = [1 if row[0] > 0.1 else 2 for row in X]
        with_targets, without, model = tmp_path / "d.svm", tmp_path / "e.svm", tmp_path / "m.npz"
        with_targets.write_text("".join(f"{y} {e}\n" for y, e in zip(labels, elements, strict=True)))
        without.write_text("".join(f"{e}\n" for e in elements))
        succeeds("fit", with_targets, "--model", model)
        told = succeeds("predict", with_targets, "--model", model)
        assert succeeds("predict", without, "--model", model) == told
        refuses("score", without, "--model", model, saying="line 1: no target")
        refuses("fit", without, "--model", tmp_path / "n.npz", saying="line 1: no target")

    def test_a_table_given_to_a_model_of_svmlight(self, tmp_path):
        """Files of the wrong format must not give predictions."""
        (tmp_path / "d.svm").write_text("1 1:1\n2 2:1\n")
        succeeds("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz")
        (tmp_path / "d.csv").write_text("a,b\n1,2\n3,4\n")
        refuses("predict", tmp_path / "d.csv", "--model", tmp_path / "m.npz", saying="svmlight")
        (tmp_path / "t.csv").write_text("a,y\n1,2\n3,4\n")
        fit(tmp_path / "t.csv", tmp_path)
        refuses("predict", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="svmlight")

    def test_an_index_of_thousands_of_digits(self, tmp_path):
        (tmp_path / "d.svm").write_text(f"1 1:1\n2 {'9' * 5000}:1\n")
        refuses("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="line 2")

    @pytest.mark.parametrize("index", ["99999999999", "4294967295", "9007199254740992"])
    def test_more_columns_than_memory_has_room_for(self, tmp_path, index):
        (tmp_path / "d.svm").write_text(f"1 1:1\n2 {index}:1\n")
        refuses("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="GB")

    def test_a_long_line_is_not_copied_for_every_block(self):
        """A line of 400 MB must be read in linear time. Copying it for every block would copy 60 GB."""
        line = b"1 1:1 " * 250_000 + b"\n"
        blocks = [line[i : i + 16] for i in range(0, len(line), 16)]
        assert list(svmlight.whole_lines([*blocks, b"2 2:1"])) == [line, b"2 2:1\n"]


class TestParquet:
    def table(self, folder, rows=100):
        path = folder / "d.parquet"
        X = np.random.default_rng(0).standard_normal((rows, 2))
        pyarrow.parquet.write_table(pyarrow.table({"a": X[:, 0], "b": X[:, 1], "y": X.sum(axis=1) > 0}), path)
        return path

    def test_missing_empty_or_a_folder(self, tmp_path):
        words = ["--target", "y", "--model", tmp_path / "m.npz"]
        refuses("fit", tmp_path / "none.parquet", *words, saying="cannot read")
        (tmp_path / "empty.parquet").write_bytes(b"")
        refuses("fit", tmp_path / "empty.parquet", *words, saying="empty.parquet")
        (tmp_path / "folder.parquet").mkdir()
        refuses("fit", tmp_path / "folder.parquet", *words, saying="folder.parquet")

    def test_gzipped(self, tmp_path):
        path = tmp_path / "d.parquet.gz"
        path.write_bytes(gzip.compress(self.table(tmp_path).read_bytes()))
        refuses("fit", path, "--target", "y", "--model", tmp_path / "m.npz", saying="gunzip")

    @pytest.mark.parametrize("at", [0, 4, 100, 700, -6, -20])
    def test_damage(self, tmp_path, at):
        path = self.table(tmp_path)
        content = bytearray(path.read_bytes())
        content[at] ^= 0x55
        path.write_bytes(content)
        outcome = vsgd("fit", path, "--target", "y", "--model", tmp_path / "m.npz", "--passes", 1)
        assert outcome.code in (0, 2)
        if outcome.code:
            assert outcome.err.count("\n") == 1

    def test_dates_that_python_does_not_have(self, tmp_path):
        """Years beyond 9999, and nanoseconds."""
        when = pyarrow.array([2**50, 0, 1, 2] * 5, pyarrow.timestamp("ms"))
        at = pyarrow.array([1, 2, 3, 4] * 5, pyarrow.timestamp("ns"))
        pyarrow.parquet.write_table(pyarrow.table({"when": when, "at": at, "y": [0, 1] * 10}), tmp_path / "d.parquet")
        words = ["--target", "y", "--model", tmp_path / "m.npz"]
        refuses("fit", tmp_path / "d.parquet", *words, saying="row 1: '<value out of range")
        printed = fit(tmp_path / "d.parquet", tmp_path, "--skip-bad-lines")
        assert "2 dates (when, at)" in printed
        assert "5 bad lines skipped" in printed

    def test_missing_values_and_kinds(self, tmp_path):
        table = pyarrow.table(
            {
                "n": [1.0, None, float("nan"), 4.0] * 5,
                "b": [b"x", b"y", None, b"x"] * 5,
                "yes": [True, False, None, True] * 5,
                "y": ["p", "q"] * 10,
            }
        )
        pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
        assert "1 number (n), 2 categories (b, yes)" in fit(tmp_path / "d.parquet", tmp_path)

    def test_a_bad_row_is_named_by_its_row(self, tmp_path):
        pyarrow.parquet.write_table(pyarrow.table({"a": [1.0, np.inf], "y": [0, 1]}), tmp_path / "d.parquet")
        words = ["--target", "y", "--model", tmp_path / "m.npz"]
        refuses("fit", tmp_path / "d.parquet", *words, saying="row 2: 'inf' in column 'a' is not finite")


class TestAnyLengthAndWidth:
    def test_a_cell_of_a_million_characters(self, tmp_path):
        rows = [["good " * 200_000, 1], ["bad bad bad bad", 0]] * 2
        data = write_csv(tmp_path / "d.csv", ["a", "y"], rows)
        assert "1 text (a)" in fit(data, tmp_path)
        assert scores(data, "--model", tmp_path / "m.npz")["accuracy"] == 1

    def test_work_is_linear_in_cells(self, tmp_path):
        """Names must not be searched once per column and row. The test counts function calls and lines of Python."""

        def lines_run(columns, rows):
            cells = np.random.default_rng(0).integers(0, 9, (rows, columns)).tolist()
            labelled = [[*row, i % 2] for i, row in enumerate(cells)]
            data = write_csv(tmp_path / f"{columns}.csv", [*(f"x{i}" for i in range(columns)), "y"], labelled)
            count = 0

            def trace(frame, event, argument):
                nonlocal count
                count += "vsgd/files" in frame.f_code.co_filename or event == "call"
                return trace if "vsgd/files" in frame.f_code.co_filename else None

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                fit(data, tmp_path, "--passes", 1)
            finally:
                sys.settrace(before)
            return count

        fit(write_csv(tmp_path / "w.csv", ["x", "y"], [[1, 0], [2, 1]]), tmp_path)
        assert lines_run(2000, 20) < 3 * lines_run(20, 2000)

    def test_a_hundred_thousand_columns(self, tmp_path):
        names = [f"x{i}" for i in range(100_000)]
        rows = [[*((i * j) % 10 for j in range(100_000)), "ab"[i % 2]] for i in range(4)]
        data = write_csv(tmp_path / "d.csv", [*names, "y"], rows)
        assert "100000 numbers" in fit(data, tmp_path, "--passes", 1)
        assert len(succeeds("predict", data, "--model", tmp_path / "m.npz").split()) == 4


def test_an_open_quote_is_a_bad_row(tmp_path):
    """An open quote must not hide the rest of the file."""
    (tmp_path / "d.csv").write_text('a,y\n1,p\n2,q\n3,"p\n' + "1,p\n2,q\n" * 50)
    refuses("fit", tmp_path / "d.csv", "--target", "y", "--model", tmp_path / "m.npz", saying="line 4")


def test_a_skipped_row_leaves_an_empty_prediction(tmp_path):
    """Predictions and rows have the same numbers."""
    data = write_csv(tmp_path / "d.csv", ["a", "y"], [[1, "p"], [-1, "q"]] * 10)
    fit(data, tmp_path)
    asked = write_csv(tmp_path / "e.csv", ["a"], [[1], ["x"], [-1]])
    outcome = vsgd("predict", asked, "--model", tmp_path / "m.npz", "--skip-bad-lines")
    assert outcome.out.splitlines() == ["p", "", "q"]
    assert "1 bad line" in outcome.err


class TestDelimiters:
    ROWS = (("1.5", "x, z", "p"), ("-2", "b; c|d", "q")) * 10

    def write(self, path, delimiter):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerows([("a", "b", "y"), *self.ROWS])
        return path

    @pytest.mark.parametrize(
        ("delimiter", "name"), [(",", ""), (";", "a semicolon"), ("\t", "a tab"), ("|", "a vertical bar")]
    )
    def test_is_detected_and_named(self, tmp_path, delimiter, name):
        data = self.write(tmp_path / "d.csv", delimiter)
        printed = fit(data, tmp_path)
        assert "1 number (a), 1 category (b); target y" in printed
        assert (f"cells separated by {name} (detected" in printed) == bool(name)
        assert ("(detected" in printed) == bool(name)
        assert scores(data, "--model", tmp_path / "m.npz")["accuracy"] == 1
        other = self.write(tmp_path / "e.csv", ",")
        assert succeeds("predict", other, "--model", tmp_path / "m.npz").split() == ["p", "q"] * 10

    def test_decimal_commas_do_not_hide_a_semicolon(self, tmp_path):
        (tmp_path / "d.csv").write_text("a;y\n1,5;p\n2,5;q\n" * 1)
        assert "1 category (a)" in fit(tmp_path / "d.csv", tmp_path)

    def test_a_comma_is_preferred(self, tmp_path):
        (tmp_path / "d.csv").write_text("a|b|c,y\n1|2|3,p\n4|5|6,q\n")
        assert "1 category (a|b|c); target y" in fit(tmp_path / "d.csv", tmp_path)

    @pytest.mark.parametrize(("option", "delimiter"), [(":", ":"), ("tab", "\t"), ("\\t", "\t"), (";", ";")])
    def test_can_be_given(self, tmp_path, option, delimiter):
        data = self.write(tmp_path / "d.csv", delimiter)
        printed = fit(data, tmp_path, "--delimiter", option)
        assert "target y" in printed
        assert "(detected" not in printed
        words = ["--model", tmp_path / "m.npz", "--delimiter", option]
        assert scores(data, *words)["accuracy"] == 1

    @pytest.mark.parametrize("option", ["", ",,", "é", '"', " ", "\n"])
    def test_that_cannot_be(self, tmp_path, option):
        words = ["--target", "y", "--model", tmp_path / "m.npz", "--delimiter", option]
        refuses("fit", tmp_path / "d.csv", *words, saying="is not a single character")

    def test_a_missing_column_says_what_separates_cells(self, tmp_path):
        data = self.write(tmp_path / "d.csv", ";")
        words = ["--target", "y", "--model", tmp_path / "m.npz", "--delimiter", ","]
        refuses("fit", data, *words, saying="there is no column 'y'; there are a;b;y (cells are separated by a comma")
        (tmp_path / "d.svm").write_text("1 1:1\n2 2:1\n")
        refuses("fit", tmp_path / "d.svm", *words, saying="--delimiter is for CSV")


class TestDates:
    DAYS = ("2024-01-01", "2024-01-02", "", "1969-12-31")

    @pytest.mark.parametrize(
        ("text", "days"),
        [
            ("1970-01-01", 0.0),
            ("1970-01-02T12:00", 1.5),
            ("1970-01-02 06:00:00", 1.25),
            ("1970-01-01T00:00:00.500Z", 0.5 / 86_400),
            ("1970-01-01T02:00:00+02:00", 0.0),
            ("1970-01-01T00:00-0600", 0.25),
            ("1969-12-31", -1.0),
            ("2024-02-29", 19_782.0),
        ],
    )
    def test_are_days_since_1970(self, text, days):
        assert cells.days_since_1970(text) == pytest.approx(days, abs=1e-12)

    @pytest.mark.parametrize(
        "text", ["", "20240101", "2024-13-01", "2023-02-29", "2024-1-1", "01/02/2024", "2024-01-01T25:00", "0000-01-01"]
    )
    def test_that_are_none(self, text):
        assert cells.days_since_1970(text) is None

    def test_are_the_same_in_csv_and_parquet(self, tmp_path):
        days = [*self.DAYS] * 5
        times = [f"2024-05-{1 + i:02d} 0{i % 10}:30:00" for i in range(20)]
        targets = [i % 2 for i in range(20)]
        write_csv(tmp_path / "d.csv", ["day", "at", "y"], zip(days, times, targets, strict=True))
        table = pyarrow.table(
            {
                "day": pyarrow.array([datetime.date.fromisoformat(day) if day else None for day in days]),
                "at": pyarrow.array([datetime.datetime.fromisoformat(at) for at in times], pyarrow.timestamp("us")),
                "y": targets,
            }
        )
        pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
        models = []
        for name in ("d.csv", "d.parquet"):
            assert "2 dates (day, at); target y" in fit(tmp_path / name, tmp_path, "--passes", 1)
            models.append(load(tmp_path / "m.npz"))
        assert models[0].schema == models[1].schema
        assert models[0].schema.means[0] == pytest.approx((19723 + 19724 - 1) / 3)
        np.testing.assert_array_equal(models[0].model.table, models[1].model.table)

    def test_a_cell_that_is_no_date_is_a_bad_row(self, tmp_path):
        rows = [[day or "2020-01-01", i % 2] for i, day in enumerate(self.DAYS * 5)]
        rows[3][0] = "soon"
        data = write_csv(tmp_path / "d.csv", ["day", "y"], rows)
        words = ["--target", "y", "--model", tmp_path / "m.npz"]
        line = refuses("fit", data, *words, saying="line 5: 'soon' in column 'day' is not a date")
        assert "--columns day=category" in line
        assert "1 category (day)" in fit(data, tmp_path, "--columns", "day=category")


class TestProbabilities:
    @pytest.mark.parametrize("classes", [2, 3])
    @pytest.mark.parametrize("loss", ["log_loss", "modified_huber"])
    def test_are_those_of_the_estimator(self, tmp_path, classes, loss):
        rng = np.random.default_rng(0)
        X = rng.standard_normal((40, 2)).round(3)
        rows = [[*row, f"c{i % classes}"] for i, row in enumerate(X.tolist())]
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], rows)
        fit(data, tmp_path, "--loss", loss)
        header, *lines = succeeds("predict", data, "--model", tmp_path / "m.npz", "--probabilities").splitlines()
        assert header.split(",") == [f"c{k}" for k in range(classes)]
        found = np.array([[float(cell) for cell in line.split(",")] for line in lines])
        estimator = VSGDClassifier(loss=loss).fit(X, np.arange(40) % classes)
        trained = load(tmp_path / "m.npz")
        theta = coefficients(trained.model, trained.task)
        estimator.coef_, estimator.intercept_ = theta[:-1].T.copy(), theta[-1].copy()
        np.testing.assert_allclose(found, estimator.predict_proba(X), rtol=1e-12)
        np.testing.assert_allclose(found.sum(axis=1), 1)
        labels = succeeds("predict", data, "--model", tmp_path / "m.npz").split()
        assert [f"c{k}" for k in found.argmax(axis=1)] == labels

    @pytest.mark.parametrize("loss", ["hinge", "squared_error"])
    def test_need_a_loss_that_has_them(self, tmp_path, loss):
        data = write_csv(tmp_path / "d.csv", ["a", "y"], [[1, 0], [2, 1]] * 5)
        fit(data, tmp_path, "--loss", loss, "--passes", 1)
        words = ["--model", tmp_path / "m.npz", "--probabilities", "--out", tmp_path / "out"]
        refuses("predict", data, *words, saying=f"has {loss}")
        assert not (tmp_path / "out").exists()


class TestPenalties:
    def test_choices_and_default_are_those_of_the_estimator(self):
        signature = inspect.signature(VSGDClassifier)
        assert PENALTY_OF[DEFAULT.penalty] == signature.parameters["penalty"].default
        assert DEFAULT.alpha == signature.parameters["alpha"].default
        assert DEFAULT.l1_ratio == signature.parameters["l1_ratio"].default
        assert [*PENALTY_OF.values()] == [*PENALTIES]

    @pytest.mark.parametrize("penalty", [*PENALTY_OF])
    def test_is_that_of_the_estimator(self, tmp_path, penalty):
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], two_columns(60))
        words = ["--penalty", penalty, "--alpha", 0.1, "--l1-ratio", 0.3, "--passes", 2]
        fit(data, tmp_path, *words)
        estimator = VSGDClassifier(penalty=PENALTY_OF[penalty], alpha=0.1, l1_ratio=0.3)
        estimator.classes_ = [0, 1]
        assert load(tmp_path / "m.npz").task._replace(parameter=0) == estimator._training().task._replace(parameter=0)

    def test_shrinks_coefficients(self, tmp_path):
        data = write_csv(tmp_path / "d.csv", ["a", "b", "y"], two_columns(200))
        fit(data, tmp_path, "--penalty", "none")
        free = load(tmp_path / "m.npz").model.table[:-1, 0]
        fit(data, tmp_path, "--penalty", "l2", "--alpha", 0.1)
        assert (np.abs(load(tmp_path / "m.npz").model.table[:-1, 0]) < np.abs(free)).all()

    @pytest.mark.parametrize("words", [["--penalty", "l3"], ["--alpha", "-1"], ["--alpha", "nan"], ["--l1-ratio", "2"]])
    def test_that_cannot_be(self, tmp_path, words):
        refuses("fit", tmp_path / "d.csv", "--target", "y", "--model", tmp_path / "m.npz", *words)


def test_merging_counts_rows_and_passes_apart(tmp_path):
    for name in ("1", "2"):
        data = write_csv(tmp_path / f"{name}.csv", ["a", "b", "y"], two_columns(30, seed=int(name)))
        succeeds("fit", data, "--target", "y", "--model", tmp_path / f"{name}.npz", "--passes", 5)
    merged = succeeds("merge", tmp_path / "1.npz", tmp_path / "2.npz", "--model", tmp_path / "m.npz")
    assert "2 models, 60 rows, 5 passes, 300 row visits" in merged
