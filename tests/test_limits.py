"""Endless inputs, and inputs that are small on disk and large in memory, are rejected or read in bounded memory."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command import refuses, succeeds, vsgd
from limits import measured, refused

from vsgd.algorithms.columns import COLUMNS
from vsgd.errors import UserError
from vsgd.files import parquet, sources, storage, svmlight
from vsgd.files.cells import BadRow
from vsgd.files.tables import open_table
from vsgd.files.targets import MAX_CLASSES, classes_of
from vsgd.linear import CLASSIFICATION, Task, new_model

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    (folder / "d.svm").write_text("1 1:1\n2 2:1\n" * 20)
    succeeds("fit", folder / "d.svm", "--model", folder / "m.npz", "--passes", 1)
    return folder


@pytest.fixture
def short_lines(monkeypatch):
    """Lines of at most 100 characters."""
    for module in (sources, svmlight, parquet):
        monkeypatch.setattr(module, "MAX_LINE", 100)


class TestKindsOfInput:
    @pytest.mark.parametrize("kind", ["zero", "urandom", "null", "folder", "socket", "link to zero"])
    def test_only_regular_files_and_pipes_are_read(self, given, tmp_path, kind):
        path, model = tmp_path / "input", given / "m.npz"
        with socket.socket(socket.AF_UNIX) as server:
            if kind == "folder":
                path.mkdir()
            elif kind == "socket":
                server.bind(str(path))
            else:
                path.symlink_to(f"/dev/{kind.removeprefix('link to ')}")
            for words in (
                ["fit", path, "--target", "y", "--model", tmp_path / "new.npz"],
                ["predict", path, "--model", model],
                ["score", path, "--model", model],
                ["predict", given / "d.svm", "--model", path],
                ["merge", model, path, "--model", tmp_path / "new.npz"],
                ["watch", path],
            ):
                refuses(*words)
            path.rename(tmp_path / "d.parquet")
            refuses(
                "fit", tmp_path / "d.parquet", "--target", "y", "--model", tmp_path / "new.npz", saying="cannot read"
            )
        assert [entry.name for entry in tmp_path.iterdir()] == ["d.parquet"]

    def test_standard_input_without_end(self, given):
        with open("/dev/zero", "rb") as zeros:
            refused("predict", "-", "--model", given / "m.npz", stdin=zeros, saying="it is a device")

    def test_a_model_through_a_pipe(self, given):
        command = [sys.executable, "-m", "vsgd", "predict", str(given / "d.svm"), "--model", "/dev/stdin"]
        model = subprocess.Popen(["cat", given / "m.npz"], stdout=subprocess.PIPE)
        done = subprocess.run(command, stdin=model.stdout, capture_output=True, timeout=300)
        model.stdout.close()
        assert model.wait() == 0
        assert done.returncode == 0, done.stderr
        zeros = subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE)
        refused("predict", given / "d.svm", "--model", "/dev/stdin", stdin=zeros.stdout, saying="not a model")
        zeros.stdout.close()
        zeros.wait()


class TestLongLines:
    @pytest.mark.parametrize("name", ["d.csv", "d.csv.gz"])
    def test_a_long_line_of_csv_is_a_bad_row(self, tmp_path, short_lines, name):
        content = b"a,y\n1,p\n" + b"x" * 5000 + b"\n2,q\n" + b'"' + b"\n" * 200 + b'z",p\n3,p\n'
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        rows = list(open_table(tmp_path / name).rows)
        assert rows[0] == (2, ["1", "p"])
        assert rows[1][0] == 3
        assert "longer than 100" in str(rows[1][1])
        assert rows[2] == (4, ["2", "q"])
        assert rows[3][0] == 5
        assert "longer than 100" in str(rows[3][1]), "a record over many lines has the same limit"
        assert rows[-1] == (206, ["3", "p"])
        words = ["fit", tmp_path / name, "--target", "y", "--model", tmp_path / "m.npz", "--passes", 1]
        refuses(*words, saying="line 3: longer than")

    @pytest.mark.parametrize("block", [1, 7, 64, 100])
    def test_a_long_line_of_svmlight_is_a_bad_row(self, short_lines, block):
        content = b"1 1:1\n" + b"2 " + b"1:1 " * 500 + b"\n3 3:1\n" + b"#" * 100 + b"\n4 4:1\n" + b"9" * 101
        pieces = [content[at : at + block] for at in range(0, len(content), block)]
        found = [(number, row if isinstance(row, BadRow) else row.target) for number, row in svmlight.lines_of(pieces)]
        assert [(n, "bad" if isinstance(row, BadRow) else row) for n, row in found] == [
            (1, "1"),
            (2, "bad"),
            (3, "3"),
            (5, "4"),
            (6, "bad"),
        ]

    def test_a_table_without_a_good_row_names_the_first_bad_one(self, tmp_path):
        (tmp_path / "d.csv").write_text("x,y\n1\n2\n")
        words = ["fit", tmp_path / "d.csv", "--target", "y", "--model", tmp_path / "m.npz"]
        refuses(*words, saying="d.csv, line 2: ")
        refuses(*words, "--skip-bad-lines", saying="no rows that can be used for training")

    def test_a_long_header(self, tmp_path, short_lines):
        (tmp_path / "d.csv").write_text("a" * 200 + ",y\n1,2\n")
        refuses("fit", tmp_path / "d.csv", "--target", "y", "--model", tmp_path / "m", saying="line 1: longer than")

    def test_long_names_and_targets(self, tmp_path):
        (tmp_path / "d.csv").write_text("a" * 2000 + ",y\n1,2\n")
        words = ["--target", "y", "--model", tmp_path / "m"]
        refuses("fit", tmp_path / "d.csv", *words, saying="a name of 2000 characters")
        (tmp_path / "d.csv").write_text("a,y\n1,p\n2,q\n3," + "x" * 2000 + "\n")
        refuses("fit", tmp_path / "d.csv", *words, saying="line 4: a target of 2000 characters")

    def test_decompression_bombs(self, given, tmp_path):
        """Gzipped files with one line of a quarter of a gigabyte."""
        for name, start, piece in (("d.csv.gz", b"a,y\n1,p\n", b"a"), ("d.svm.gz", b"1 1:1\n2 2:1\n", b"1:1 ")):
            with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
                file.write(start)
                for _ in range(256):
                    file.write(piece * (MEGABYTE // len(piece)))
            refused(
                "fit", tmp_path / name, "--target", "y", "--model", tmp_path / "m.npz", saying="line 3: longer than"
            )


class TestParquetBombs:
    def write(self, path, cells, **options):
        table = pyarrow.table({"a": cells, "y": [0, 1] * (len(cells) // 2)})
        pyarrow.parquet.write_table(table, path, compression="zstd", **options)
        assert path.stat().st_size < MEGABYTE
        return ["fit", path, "--target", "y", "--model", path.with_suffix(".npz"), "--passes", 1]

    def test_a_cell_larger_than_the_limit_of_a_page(self, tmp_path):
        words = self.write(tmp_path / "d.parquet", ["x" * 300_000_000, "b"])
        refused(*words, saying="pages of 300 MB")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"use_dictionary": False, "write_batch_size": 1},
            {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}},
        ],
    )
    def test_a_long_cell_in_every_row(self, tmp_path, options):
        """Less than a megabyte on disk, 800 MB if all cells are in memory at once."""
        words = self.write(tmp_path / "d.parquet", ["x" * 4_000_000] * 200, **options)
        result = measured(*words)
        assert result.code == 0, result
        assert "200 rows" in result.out
        assert 0 < result.megabytes < 800, result

    def test_a_long_row_is_a_bad_row(self, tmp_path, short_lines):
        words = self.write(tmp_path / "d.parquet", ["x" * 200, "b"])
        refuses(*words, saying="row 1: longer than 100")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"data_page_version": "2.0"},
            {"use_dictionary": False},
            {"use_dictionary": False, "column_encoding": {"b": "DELTA_LENGTH_BYTE_ARRAY"}},
            {"use_dictionary": ["a"], "column_encoding": {"b": "DELTA_BYTE_ARRAY"}},
        ],
    )
    @pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
    def test_pages_are_those_that_pyarrow_wrote(self, tmp_path, options, compression):
        numbers = np.random.default_rng(0).standard_normal(30_000)
        table = pyarrow.table({"a": numbers, "b": [f"name {x:.3f}" if x > -2 else None for x in numbers]})
        path = tmp_path / "d.parquet"
        pyarrow.parquet.write_table(table, path, compression=compression, data_page_size=4096, **options)
        metadata = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
        with path.open("rb") as raw:
            (chunks,) = parquet.row_groups_of(raw)
            for index, chunk in enumerate(chunks):
                column = metadata.column(index)
                assert (chunk.path, chunk.values) == (column.path_in_schema, column.num_values)
                pages = list(parquet.pages_of(raw, chunk))
                assert sum(page.values for page in pages) == 30_000
                assert len(pages) > 3
                assert sum(page.size for page in pages) < column.total_uncompressed_size
        rows = [row for _, row in open_table(path).rows]
        assert [row[0] for row in rows] == [str(x) for x in table["a"].cast(pyarrow.string()).to_pylist()]
        assert [row[1] for row in rows] == [x or "" for x in table["b"].to_pylist()]

    def test_a_damaged_footer_is_an_error(self, tmp_path):
        """pyarrow crashes on the metadata of some of these files."""
        path = tmp_path / "d.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"a": ["x", "y"], "b": [1.0, 2.0]}), path)
        content = path.read_bytes()
        refused_bytes = 0
        for at in range(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
            try:
                assert len(list(itertools.islice(open_table(path).rows, 100))) <= 100
            except UserError:
                refused_bytes += 1
        assert refused_bytes > 20

    def test_nested_columns_are_ignored(self, tmp_path):
        table = pyarrow.table({"a": [1.0, 2.0] * 5, "tags": [["x"], ["y", "z"]] * 5, "y": [0, 1] * 5})
        path, model = tmp_path / "d.parquet", tmp_path / "m.npz"
        pyarrow.parquet.write_table(table, path)
        words = ["fit", path, "--target", "y", "--model", model, "--passes", 1]
        assert "1 number (a), 1 ignored (tags)" in succeeds(*words)
        assert len(succeeds("predict", path, "--model", model).split()) == 10
        refuses(*words, "--columns", "tags=category", saying="'tags' holds lists")
        refuses("fit", path, "--target", "tags", "--model", model, saying="'tags' holds lists")


class TestModelFiles:
    def unpacked(self, path):
        with np.load(path) as file:
            arrays = dict(file)
        return json.loads(arrays.pop("header").tobytes()), arrays

    def pack(self, path, header, arrays):
        header = {name: value for name, value in header.items() if name != "sha256"}
        text = json.dumps({**header, "sha256": storage.digest(header, arrays)})
        np.savez(path, header=np.frombuffer(text.encode(), np.uint8), **arrays)
        return path

    def test_a_header_with_a_million_classes(self, given, tmp_path):
        header, arrays = self.unpacked(given / "m.npz")
        header["classes"] = [str(i) for i in range(1_000_000)]
        model = self.pack(tmp_path / "m.npz", header, arrays)
        refuses("predict", given / "d.svm", "--model", model, saying="as classes")

    def test_classes_are_compared_in_linear_time(self):
        """A search in quadratic time would take minutes."""
        assert classes_of(map(str, range(100_000))) == [*map(str, range(100_000))]

    @pytest.mark.parametrize("columns", [10**8, 2**32 - 2])
    def test_a_header_with_an_absurd_width(self, given, tmp_path, columns):
        header, arrays = self.unpacked(given / "m.npz")
        header["schema"]["columns"] = columns
        model = self.pack(tmp_path / "m.npz", header, arrays)
        refuses("predict", given / "d.svm", "--model", model, saying=f"{columns + 1:,} columns")

    def test_a_header_that_is_too_long(self, given, tmp_path, monkeypatch):
        monkeypatch.setattr(storage, "MAX_HEADER", 200)
        refuses("predict", given / "d.svm", "--model", given / "m.npz", saying="its header has")
        refuses("fit", given / "d.svm", "--model", tmp_path / "m.npz", saying="too long for a model file")
        assert not list(tmp_path.iterdir())

    def test_an_archive_with_a_huge_directory(self, given, tmp_path, monkeypatch):
        monkeypatch.setattr(storage, "MAX_READ", 100)
        refuses("predict", given / "d.svm", "--model", given / "m.npz", saying="not a model")

    def test_a_pipe_without_end(self, given, monkeypatch):
        monkeypatch.setattr(storage, "MAX_PIPE", 100)
        with (given / "m.npz").open("rb") as file, pytest.raises(storage.Refused, match="came out of a pipe"):
            storage._content(file)

    def test_a_model_is_limited_in_size(self, tmp_path):
        (tmp_path / "d.svm").write_text("1 1:1\n2 99999999:1\n")
        words = ["fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz"]
        assert "100,000,001 columns" in refuses(*words, saying="takes 12 GB, and 4 GB is the limit (--max-model-gb)")
        (tmp_path / "d.svm").write_text("1 1:1\n2 999:1\n")
        refuses(*words, "--max-model-gb", 1e-5, saying="the limit")
        refuses(*words, "--max-model-gb", 1e-4, saying="takes 0.00012 GB")
        succeeds(*words, "--max-model-gb", 1.3e-4, "--passes", 1)

    @pytest.mark.parametrize("outputs", [1, 3])
    def test_the_size_of_a_model_is_that_of_its_arrays(self, outputs):
        task = Task(CLASSIFICATION["log_loss"])
        model = new_model(1000, outputs, task, COLUMNS, seed=0)
        assert storage.model_bytes(1000, outputs) == sum(array.nbytes for array in model)

    def test_more_classes_than_the_limit(self, tmp_path):
        (tmp_path / "d.svm").write_text("".join(f"{i} 1:1\n" for i in range(MAX_CLASSES + 1)))
        refuses("fit", tmp_path / "d.svm", "--model", tmp_path / "m.npz", saying="more than 1000 classes")


OUT_OF_MEMORY = """
import resource, sys
from vsgd.cli import main
code = main(["fit", sys.argv[1], "--model", sys.argv[2], "--passes", "1"])  # loads and compiles all that it takes
assert code == 0
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[5])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main(sys.argv[6:] or ["fit", sys.argv[3], "--model", sys.argv[4], "--passes", "1"]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_out_of_memory_is_one_line(given, tmp_path):
    """A model of 480 MB with 128 MB of memory left."""
    (tmp_path / "wide.svm").write_text("1 1:1\n2 3999999:1\n")
    words = [given / "d.svm", tmp_path / "small.npz", tmp_path / "wide.svm", tmp_path / "large.npz", 1 << 27]
    result = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, *map(str, words)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("vsgd: not enough memory")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.npz", "wide.svm"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("vsgd.files.passes.train_on", ["fit", "d.svm", "--model", "new.npz"]),
        ("vsgd.files.storage.digest", ["fit", "d.svm", "--model", "new.npz"]),
        ("numpy.lib.format.write_array", ["fit", "d.svm", "--model", "new.npz"]),
        ("vsgd.files.storage.aligned_zeros", ["predict", "d.svm", "--model", "m.npz", "--out", "new"]),
        ("vsgd.files.reading.assemble", ["predict", "d.svm", "--model", "m.npz", "--out", "new"]),
        ("vsgd.files.svmlight.parsed", ["score", "d.svm", "--model", "m.npz"]),
        ("pyarrow.parquet.ParquetFile", ["fit", "d.parquet", "--target", "y", "--model", "new.npz"]),
    ],
)
def test_out_of_memory_anywhere_leaves_nothing(given, tmp_path, monkeypatch, place, words):
    def fail(*arguments, **options):
        raise MemoryError

    for name in ("d.svm", "m.npz"):
        (tmp_path / name).write_bytes((given / name).read_bytes())
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0, 2.0], "y": [0, 1]}), tmp_path / "d.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, fail)
    outcome = vsgd(*words)
    assert outcome.code == 2
    assert outcome.err.startswith("vsgd: not enough memory")
    assert outcome.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.parquet", "d.svm", "m.npz"]
    assert (tmp_path / "m.npz").read_bytes() == (given / "m.npz").read_bytes()
