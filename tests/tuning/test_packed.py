"""Weights in exactly the bits of their formats: sizes as promised, values as rounded, damage told."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import InputError, TuneError
from weft.models.classifiers import model_path
from weft_tune.network import Network, Target
from weft_tune.numbers.arrays import rounded
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import (
    BIN,
    EXP,
    FIXED,
    FLOAT,
    FLOAT16,
    FLOAT32,
    Format,
    TwosComplement,
)
from weft_tune.packed import MAGIC, read_packed, weights_of, write_packed

FORMS = [
    FIXED(2, 3), FIXED(3), FIXED(7, -4), FIXED(16), FIXED(32, 1), EXP(2), EXP(5, 9), EXP(9), FLOAT(5), FLOAT(8, 40),
    FLOAT16, FLOAT(20), FLOAT32, BIN(2), Format(0, 2, 3, 1), TwosComplement(5, 2),
]  # fmt: skip


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        f"layer{place}.weight": rng.standard_normal((5, 3, place + 1)).astype(np.float32) for place in range(len(FORMS))
    }


def test_every_format_comes_back_as_it_was_rounded(tmp_path, arrays):
    configuration = Configuration(dict(zip(arrays, FORMS, strict=True)))
    write_packed(tmp_path / "w.weft", arrays, configuration)
    found = read_packed(tmp_path / "w.weft")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == np.float32
        assert np.array_equal(found[name], rounded(array, configuration[name])), configuration[name]


def test_the_size_is_the_bits_and_a_header(tmp_path, arrays):
    configuration = Configuration(dict(zip(arrays, FORMS, strict=True)))
    packed = write_packed(tmp_path / "w.weft", arrays, configuration)
    assert packed.code_bytes == sum(-(-array.size * configuration[name].bits // 8) for name, array in arrays.items())
    assert packed.header_bytes < 150 * len(arrays) + 64
    assert (tmp_path / "w.weft").stat().st_size == packed.bytes


def test_a_real_network_shrinks_as_promised(tmp_path):
    network = Network("lenet", tuple(Target(name, 1, 1, 1.0, 1.0) for name in ("conv1", "conv2", "ip1")))
    arrays = weights_of(model_path("lenet"), network)
    values = sum(array.size for array in arrays.values())
    assert values == 500 + 25000 + 400000
    for bits in (2, 3, 5):
        packed = write_packed(tmp_path / "w.weft", arrays, Configuration({name: FIXED(bits) for name in arrays}))
        assert 4 * values / packed.bytes == pytest.approx(32 / bits, rel=0.01)


def test_a_layer_that_is_not_in_the_file_is_named():
    with pytest.raises(TuneError, match="unknown layer 'conv7'"):
        weights_of(model_path("lenet"), Network("lenet", (Target("conv7", 1, 1, 1.0, 1.0),)))


@pytest.fixture
def good(tmp_path):
    configuration = Configuration({"a.weight": FIXED(3), "b.weight": EXP(4)})
    arrays = {"a.weight": np.ones((4, 5), np.float32), "b.weight": np.ones(7, np.float32)}
    write_packed(tmp_path / "good.weft", arrays, configuration)
    return (tmp_path / "good.weft").read_bytes()


def read(folder, data):
    (folder / "some.weft").write_bytes(data)
    return read_packed(folder / "some.weft")


def with_header(good, change):
    (length,) = struct.unpack_from("<I", good, 8)
    header = json.loads(good[12 : 12 + length])
    change(header["tensors"])
    text = json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(text)) + text + good[12 + length :]


def test_a_file_cut_short_anywhere_is_refused(tmp_path, good):
    for length in range(len(good)):
        with pytest.raises(TuneError, match=r"some\.weft: "):
            read(tmp_path, good[:length])


def test_a_foreign_file_is_refused(tmp_path):
    with pytest.raises(TuneError, match="holds no packed weights"):
        read(tmp_path, b"PK\x03\x04 something else altogether")
    with pytest.raises(TuneError, match="cannot read"):
        read_packed(tmp_path / "none.weft")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[0].update(shape=[1 << 20, 1 << 20]), "needs bytes 0 to"),
        (lambda tensors: tensors[0].update(shape=[0, 1 << 39, 1 << 39]), "damaged"),
        (lambda tensors: tensors[0].update(shape=[-1]), "its header is damaged"),
        (lambda tensors: tensors[0].update(bits=4), "FIXED 3 0 has 3 bits, not 4"),
        (lambda tensors: tensors[0].update(format="FIXED 99"), "FIXED 99"),
        (lambda tensors: tensors[1].update(offset=1 << 39), "needs bytes"),
        (lambda tensors: tensors[1].update(name="a.weight"), "two tensors are called 'a.weight'"),
        (lambda tensors: tensors[1].pop("offset"), "offset is missing"),
        (lambda tensors: tensors[1].update(more=1), "unknown key"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, good, change, message):
    with pytest.raises(TuneError, match=message):
        read(tmp_path, with_header(good, change))


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    with pytest.raises(TuneError, match="claims a header of 4294967295 bytes"):
        read(tmp_path, MAGIC + b"\xff\xff\xff\xff{}")


@given(data=st.data())
def test_damaged_bytes_give_values_or_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    configuration = Configuration({"a.weight": FLOAT16, "b.weight": FLOAT(9, 200)})
    write_packed(folder / "w.weft", {name: np.ones(9, np.float32) for name in configuration}, configuration)
    spoiled = bytearray((folder / "w.weft").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(folder, bytes(spoiled))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all(array.dtype == np.float32 for array in found.values())
