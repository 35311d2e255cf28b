"""CSV, Parquet and svmlight as users have them: missing cells, odd names, odd labels, any width and length."""

from __future__ import annotations

import csv
import gzip
import io
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command import refuses, scores, succeeds, vsgd

from vsgd.files import svmlight
from vsgd.files.storage import load


def write_csv(path, names, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
    return path


def two_columns(rows, seed=0):
    """Numbers whose sum decides between two labels."""
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
        """W6: one NA among the first rows turned numbers into categories, and after them was an error."""
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
        """W3."""
        data = tmp_path / "d.csv"
        data.write_text("a,y\n1,0\n2,1\n3,1\n", encoding="utf-8-sig")
        assert "1 number (a)" in fit(data, tmp_path)

    def test_a_byte_order_mark_makes_no_class(self, tmp_path):
        """W3."""
        (tmp_path / "d.svm").write_text("1 1:1\n-1 2:1\n", encoding="utf-8-sig")
        succeeds("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz")
        assert load(tmp_path / "m.npz").classes == ["-1", "1"]

    def test_a_name_that_stands_twice(self, tmp_path):
        """W5: the last one won, silently."""
        data = write_csv(tmp_path / "d.csv", ["a", "a", "y"], [[1, 2, 0], [2, 3, 1]])
        refuses("fit", data, "--target", "y", "--model", tmp_path / "m.npz", saying="two columns named 'a'")
        arrays = [pyarrow.array([1, 2])] * 3
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, ["a", "a", "y"]), tmp_path / "d.parquet")
        words = ["--target", "y", "--model", tmp_path / "m.npz"]
        refuses("fit", tmp_path / "d.parquet", *words, saying="two columns named 'a'")

    def test_utf_8_whatever_the_locale(self, tmp_path, monkeypatch):
        monkeypatch.setattr("locale.getencoding", lambda: "ISO-8859-1")
        data = write_csv(tmp_path / "d.csv", ["größe", "y"], [[1, "ü"], [2, "é"]] * 5)
        fit(data, tmp_path)
        assert load(tmp_path / "m.npz").classes == ["é", "ü"]


class TestTargets:
    @pytest.mark.parametrize("bad", ["nan", "inf", "1e160", "", "NA", "six"])
    def test_a_target_that_is_no_usable_number_is_a_bad_row(self, tmp_path, bad):
        """W2: the model was NaN, and saved."""
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
        """W2."""
        data = write_csv(tmp_path / "d.csv", ["a", "y"], [[1, 2], [2, -1]])
        words = ["--target", "y", "--loss", "poisson", "--model", tmp_path / "m.npz"]
        refuses("fit", data, *words, saying="line 3")

    @pytest.mark.parametrize("name", ["d.csv", "d.svm", "d.parquet"])
    @pytest.mark.parametrize("bad", [1e160, -1e300])
    def test_a_value_whose_square_overflows_is_a_bad_row(self, tmp_path, name, bad):
        """W2."""
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
        """W7: 308 lines for 200 rows."""
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
        """W4: the first element was taken for the target."""
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
        """W4: three predictions for two rows."""
        (tmp_path / "d.svm").write_text("1 1:1\n2 2:1\n")
        succeeds("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz")
        (tmp_path / "d.csv").write_text("a,b\n1,2\n3,4\n")
        refuses("predict", tmp_path / "d.csv", "--model", tmp_path / "m.npz", saying="svmlight")
        (tmp_path / "t.csv").write_text("a,y\n1,2\n3,4\n")
        fit(tmp_path / "t.csv", tmp_path)
        refuses("predict", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="svmlight")

    def test_an_index_of_thousands_of_digits(self, tmp_path):
        """T3."""
        (tmp_path / "d.svm").write_text(f"1 1:1\n2 {'9' * 5000}:1\n")
        refuses("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="line 2")

    @pytest.mark.parametrize("index", ["99999999999", "4294967295", "9007199254740992"])
    def test_more_columns_than_memory_has_room_for(self, tmp_path, index):
        """T4."""
        (tmp_path / "d.svm").write_text(f"1 1:1\n2 {index}:1\n")
        refuses("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="GB")

    def test_a_long_line_is_not_copied_for_every_block(self):
        """H3: 400 MB in one line had not been read after two minutes. Copied for every block, these are 60 GB."""
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
        """T1."""
        words = ["--target", "y", "--model", tmp_path / "m.npz"]
        refuses("fit", tmp_path / "none.parquet", *words, saying="cannot read")
        (tmp_path / "empty.parquet").write_bytes(b"")
        refuses("fit", tmp_path / "empty.parquet", *words, saying="empty.parquet")
        (tmp_path / "folder.parquet").mkdir()
        refuses("fit", tmp_path / "folder.parquet", *words, saying="folder.parquet")

    def test_gzipped(self, tmp_path):
        """T1."""
        path = tmp_path / "d.parquet.gz"
        path.write_bytes(gzip.compress(self.table(tmp_path).read_bytes()))
        refuses("fit", path, "--target", "y", "--model", tmp_path / "m.npz", saying="gunzip")

    @pytest.mark.parametrize("at", [0, 4, 100, 700, -6, -20])
    def test_damage(self, tmp_path, at):
        """T1."""
        path = self.table(tmp_path)
        content = bytearray(path.read_bytes())
        content[at] ^= 0x55
        path.write_bytes(content)
        outcome = vsgd("fit", path, "--target", "y", "--model", tmp_path / "m.npz", "--passes", 1)
        assert outcome.code in (0, 2)
        if outcome.code:
            assert outcome.err.count("\n") == 1

    def test_dates_that_python_does_not_have(self, tmp_path):
        """T1: years beyond 9999, and nanoseconds."""
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
        """T2."""
        rows = [["good " * 200_000, 1], ["bad bad bad bad", 0]] * 2
        data = write_csv(tmp_path / "d.csv", ["a", "y"], rows)
        assert "1 text (a)" in fit(data, tmp_path)
        assert scores(data, "--model", tmp_path / "m.npz")["accuracy"] == 1

    def test_work_is_linear_in_cells(self, tmp_path):
        """H1: the names were gone through once per column and row. Counted in function calls and lines of Python."""

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
    """It swallowed the rest of the file."""
    (tmp_path / "d.csv").write_text('a,y\n1,p\n2,q\n3,"p\n' + "1,p\n2,q\n" * 50)
    refuses("fit", tmp_path / "d.csv", "--target", "y", "--model", tmp_path / "m.npz", saying="line 4")


def test_a_skipped_row_leaves_an_empty_prediction(tmp_path):
    """So that prediction and row have the same number."""
    data = write_csv(tmp_path / "d.csv", ["a", "y"], [[1, "p"], [-1, "q"]] * 10)
    fit(data, tmp_path)
    asked = write_csv(tmp_path / "e.csv", ["a"], [[1], ["x"], [-1]])
    outcome = vsgd("predict", asked, "--model", tmp_path / "m.npz", "--skip-bad-lines")
    assert outcome.out.splitlines() == ["p", "", "q"]
    assert "1 bad line" in outcome.err
