"""Programs of torch at the server: allowed or not, with and without a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runtime.cuda.test_programs import drawn, wanted
from tests.runtime.cuda.torch_nets import images
from tests.serving import live
from tests.serving.test_serve_device import asked
from weft.base.errors import InputError
from weft.runtime.cuda.twins import TWIN
from weft.serving.repository import Repository


def test_a_program_is_served_on_a_device_where_that_is_allowed(tmp_path: Path) -> None:
    path, net = images(tmp_path / "images" / "1" / "model.pt2")
    path.with_name("weft.toml").write_text('rows = "independent"\nmax_batch = 2\n')
    with live.running(tmp_path, device=TWIN, allow_programs=True) as server:
        for rows in (1, 2, 3):
            right = wanted(net, drawn(rows))
            np.testing.assert_allclose(asked(server, "images", drawn(rows)), right, rtol=1e-4, atol=1e-5)
    with live.running(tmp_path, allow_programs=True) as server:
        assert (
            "programs of torch run on a GPU: serve with --device (docs/gpu.md)" in server.server.service.why_not_ready()
        )


def test_a_program_is_not_loaded_unless_somebody_allows_it(tmp_path: Path) -> None:
    (tmp_path / "flat.pt2").write_bytes(b"code")
    (tmp_path / "flat.toml").write_text("max_batch = 2\n")
    folder = tmp_path / "folder" / "1"
    folder.mkdir(parents=True)
    (folder / "model.pt2").write_bytes(b"code")
    found = Repository([tmp_path], tmp_path / "scratch")
    assert found.names() == [] and not found.remarks
    for name in ("flat", "folder"):
        assert "may run code that lies in it; allow_programs = true" in found.problems[name]
    allowed = Repository([tmp_path], tmp_path / "scratch", programs=True)
    assert allowed.names() == ["flat", "folder"] and allowed.entry("flat").config.max_batch == 2
    assert Repository([tmp_path / "flat.pt2"], tmp_path / "scratch", programs=True).names() == ["flat"]
    with pytest.raises(InputError, match=r"'none\.pt2' is not there"):
        Repository(["none.pt2"], tmp_path / "scratch", programs=True)
    (tmp_path / "flat.txt").write_bytes(b"")
    with pytest.raises(InputError, match="is not a model"):
        Repository([tmp_path / "flat.txt"], tmp_path / "scratch", programs=True)
