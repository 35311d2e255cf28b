"""Damaged, crafted or incompatible model files are rejected with one line."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
from command import refuses, scores, succeeds

from vsgd.errors import UserError
from vsgd.files import storage
from vsgd.files.storage import load, save
from vsgd.linear.model import THETA


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    (folder / "d.svm").write_text("1 1:1 3:2\n2 2:1\n3 3:1\n" * 20)
    succeeds("fit", folder / "d.svm", "--model", folder / "m.npz", "--passes", 1)
    return folder


def unpacked(path):
    """Return header and arrays of a model file."""
    with np.load(path) as file:
        arrays = dict(file)
    return json.loads(arrays.pop("header").tobytes()), arrays


def pack(path, header, arrays):
    """Write a model file with a correct checksum and any content."""
    header = {name: value for name, value in header.items() if name != "sha256"}
    digest = storage.digest(header, arrays)
    text = np.frombuffer(json.dumps({**header, "sha256": digest}).encode(), np.uint8)
    np.savez(path, header=text, **arrays)


def refused(given, path, saying=""):
    """Check that every command that reads a model rejects it."""
    content = path.read_bytes()
    refuses("predict", given / "d.svm", "--model", path, saying=saying)
    refuses("score", given / "d.svm", "--model", path, saying=saying)
    refuses("fit", given / "d.svm", "--model", path, "--resume", saying=saying)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("table", lambda a: a[:2]),
        ("table", lambda a: a[:0]),
        ("table", lambda a: a[:, :3]),
        ("table", lambda a: a[:, :, :1]),
        ("table", lambda a: a.astype(">f8")),
        ("table", lambda a: a.astype("f4")),
        ("table", lambda a: np.asfortranarray(a)),
        ("table", lambda a: a.reshape(-1)),
        ("sums", lambda a: np.zeros((0, 0))),
        ("sums", lambda a: a[:, :0]),
        ("columns", lambda a: a[:2]),
        ("penalty", lambda a: a[:1]),
        ("progress", lambda a: a[:1]),
        ("progress", lambda a: a[:0]),
        ("progress", lambda a: -a - 1),
        ("residual", lambda a: np.zeros(())),
        ("average", lambda a: np.zeros((4, 3))),
        ("table", lambda a: np.where(np.arange(a.size).reshape(a.shape) == 3, np.nan, a)),
    ],
)
def test_an_array_of_another_shape_or_type(given, tmp_path, key, change):
    """`--resume` must not write out of bounds."""
    header, arrays = unpacked(given / "m.npz")
    arrays[key] = change(arrays[key])
    pack(tmp_path / "m.npz", header, arrays)
    refused(given, tmp_path / "m.npz", saying=key)


def test_a_refusal_names_both_shapes(given, tmp_path):
    header, arrays = unpacked(given / "m.npz")
    arrays["table"] = arrays["table"][:2]
    pack(tmp_path / "m.npz", header, arrays)
    with pytest.raises(UserError, match=r"table.*\(2, 8, 3\).*\(5, 8, 3\)"):
        load(tmp_path / "m.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "nothing"),
        ("loss", 3),
        ("loss", ["log_loss"]),
        ("classes", "abc"),
        ("classes", [1, 2, 3]),
        ("classes", ["a", "b"]),
        ("classes", ["1", "1.0", "2"]),
        ("classes", None),
        ("passes", -1),
        ("passes", "1"),
        ("passes", 1.5),
        ("passes", True),
        ("batch_size", 0),
        ("batch_size", [16]),
        ("seed", -1),
        ("chunk_rows", 2**70),
        ("schema", []),
        ("schema", {}),
        ("schema.columns", 10**15),
        ("schema.columns", "4"),
        ("schema.format", "other"),
        ("schema.numbers", "abc"),
        ("schema.numbers", [["a"]]),
        ("schema.means", [1.0]),
        ("schema.hash_bits", 60),
        ("schema.target", 3),
        ("schema.more", 1),
        ("more", 1),
    ],
)
def test_a_header_of_other_types(given, tmp_path, name, value):
    header, arrays = unpacked(given / "m.npz")
    inside = header
    *path, last = name.split(".")
    for part in path:
        inside = inside[part]
    inside[last] = value
    pack(tmp_path / "m.npz", header, arrays)
    refused(given, tmp_path / "m.npz", saying="m.npz")


@pytest.mark.parametrize("missing", ["header", "table", "progress"])
def test_a_missing_member(given, tmp_path, missing):
    with np.load(given / "m.npz") as file:
        np.savez(tmp_path / "m.npz", **{name: file[name] for name in file if name != missing})
    refused(given, tmp_path / "m.npz")


def rewritten(given, path, compression=zipfile.ZIP_STORED, change=lambda name, data: data):
    with zipfile.ZipFile(given / "m.npz") as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


class TestHostileArchives:
    def test_compressed(self, given, tmp_path):
        """A compressed megabyte may contain a gigabyte of zeros. Model files are not compressed."""

        def change(name, data):
            return data + bytes(50_000_000) if name == "table.npy" else data

        rewritten(given, tmp_path / "m.npz", zipfile.ZIP_DEFLATED, change)
        refused(given, tmp_path / "m.npz")

    def test_encrypted_or_of_another_version(self, given, tmp_path):
        content = (given / "m.npz").read_bytes()
        for offset, value in ((6, 1), (4, 99)):  # in the local headers, and two bytes later in the central directory
            damaged = bytearray(content)
            at = -1
            while (at := damaged.find(b"PK\x03\x04", at + 1)) >= 0:
                damaged[at + offset] = value
            while (at := damaged.find(b"PK\x01\x02", at + 1)) >= 0:
                damaged[at + offset + 2] = value
            (tmp_path / "m.npz").write_bytes(damaged)
            refused(given, tmp_path / "m.npz")

    @pytest.mark.parametrize(
        "header", ["{" + "'a':(" * 3000, "(" * 9000, "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", ""]
    )
    def test_headers_of_arrays(self, given, tmp_path, header):
        text = header.encode().ljust(60) + b"\n"
        array = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text

        rewritten(given, tmp_path / "m.npz", change=lambda name, data: array if name == "table.npy" else data)
        refused(given, tmp_path / "m.npz")

    def test_a_deeply_nested_header(self, given, tmp_path):
        buffer = io.BytesIO()
        np.save(buffer, np.frombuffer(b"[" * 200_000, np.uint8))
        rewritten(given, tmp_path / "m.npz", change=lambda n, data: buffer.getvalue() if n == "header.npy" else data)
        refused(given, tmp_path / "m.npz")

    def test_a_member_twice(self, given, tmp_path):
        rewritten(given, tmp_path / "m.npz")
        with zipfile.ZipFile(tmp_path / "m.npz", "a") as file, pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("table.npy", b"")
        refused(given, tmp_path / "m.npz")

    @pytest.mark.parametrize("content", [b"", b"PK", b"nothing", b"\x93NUMPY", b"PK\x05\x06" + bytes(18)])
    def test_something_else(self, given, tmp_path, content):
        (tmp_path / "m.npz").write_bytes(content)
        refused(given, tmp_path / "m.npz", saying="is not a model")

    def test_a_folder_or_nothing(self, given, tmp_path):
        refuses("score", given / "d.svm", "--model", tmp_path, saying="cannot read")
        refuses("score", given / "d.svm", "--model", tmp_path / "none", saying="cannot read")


def test_a_model_with_a_number_that_is_not_finite_is_never_saved(given, tmp_path):
    trained = load(given / "m.npz")
    for field in range(THETA, 8):
        trained.model.table[1, field, 0] = np.inf
        with pytest.raises(UserError, match="not finite"):
            save(tmp_path / "m.npz", trained)
        trained.model.table[1, field, 0] = 0
    assert not list(tmp_path.iterdir())


class TestResume:
    def begun(self, folder, *words):
        (folder / "d.csv").write_text("a,b,y\n" + "1,x,p\n-1,z,q\n" * 20)
        begin = ["fit", folder / "d.csv", "--target", "y", "--model", folder / "m.npz"]
        succeeds(*begin, "--passes", 1, *words)
        return [*begin, "--resume", "--passes", 2]

    @pytest.mark.parametrize(
        ("option", "value", "saying"),
        [
            ("--batch-size", "3", "--batch-size 3"),
            ("--seed", "7", "--seed 7"),
            ("--chunk-rows", "9", "--chunk-rows 9"),
            ("--loss", "hinge", "--loss hinge"),
            ("--hash-bits", "4", "--hash-bits 4"),
            ("--columns", "b=ignore", "b"),
            ("--category", "a", "a"),
        ],
    )
    def test_another_setting_is_refused_by_name(self, tmp_path, option, value, saying):
        again = self.begun(tmp_path)
        refuses(*again, option, value, saying=saying)
        assert load(tmp_path / "m.npz").passes == 1

    def test_all_of_them_are_named(self, tmp_path):
        line = refuses(*self.begun(tmp_path), "--batch-size", 3, "--seed", 7)
        assert "--batch-size 3 instead of 16" in line
        assert "--seed 7 instead of 0" in line

    def test_resume_keeps_settings_that_are_not_given(self, tmp_path):
        own = ["--batch-size", 3, "--seed", 7, "--loss", "hinge", "--columns", "a=category", "--hash-bits", 9]
        again = self.begun(tmp_path, *own)
        succeeds(*again)
        trained = load(tmp_path / "m.npz")
        assert (trained.passes, trained.batch_size, trained.seed, trained.loss) == (2, 3, 7, "hinge")
        data = tmp_path / "d.csv"
        succeeds("fit", data, "--target", "y", "--model", tmp_path / "n.npz", *own, "--passes", 2)
        assert (tmp_path / "n.npz").read_bytes() == (tmp_path / "m.npz").read_bytes()

    def test_same_command_with_resume_continues(self, given, tmp_path):
        """Options that do not apply to svmlight are included."""
        words = ["fit", given / "d.svm", "--model", tmp_path / "m.npz", "--hash-bits", 9, "--target", "y", "--seed", 3]
        succeeds(*words, "--passes", 1)
        succeeds(*words, "--passes", 2, "--resume")
        assert "nothing to do" in succeeds(*words, "--passes", 2, "--resume")

    def test_other_classes(self, tmp_path):
        again = self.begun(tmp_path)
        (tmp_path / "d.csv").write_text("a,b,y\n" + "1,x,p\n-1,z,q\n1,1,r\n" * 20)
        refuses(*again, saying="classes")


class TestScore:
    @pytest.mark.parametrize("centre", [0.0, 1e8, 1e9, -1e12])
    def test_r2_far_from_zero(self, tmp_path, centre):
        rng = np.random.default_rng(0)
        x = rng.integers(-3, 4, 3000)
        y = centre + x + 0.1 * rng.standard_normal(3000)
        data, model = tmp_path / "d.csv", tmp_path / "m.npz"
        data.write_text("x,y\n" + "".join(f"{a},{b!r}\n" for a, b in zip(x.tolist(), y.tolist(), strict=True)))
        words = ["--model", model, "--chunk-rows", 700]
        succeeds("fit", data, "--target", "y", "--loss", "squared_error", *words)
        from sklearn.metrics import r2_score

        predictions = [float(line) for line in succeeds("predict", data, *words).split()]
        assert scores(data, *words)["R2"] == pytest.approx(r2_score(y, predictions), rel=1e-4)

    def test_a_constant_target(self, tmp_path):
        data, model = tmp_path / "d.csv", tmp_path / "m.npz"
        data.write_text("x,y\n" + "1,0.1\n2,0.1\n" * 300)
        succeeds("fit", data, "--target", "y", "--loss", "squared_error", "--model", model, "--passes", 1)
        assert scores(data, "--model", model)["R2"] == 0
        trained = load(model)
        trained.model.table[:, THETA] = 0
        save(model, trained)
        data.write_text("x,y\n" + "1,0\n2,0\n" * 300)
        assert scores(data, "--model", model)["R2"] == 1
