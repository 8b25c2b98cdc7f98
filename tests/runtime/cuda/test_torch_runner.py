"""Packages through their C interface; a small library in C stands for a compiled model."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from weft.runtime.cuda.torch_runner import PackageRunner

CODE = """
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#define API(name) int AOTInductorModelContainer##name
typedef struct { const char *name; void *tensor; } Named;
static Named weight;
API(CreateWithDevice)(void **made, size_t models, const char *device, const char *folder) {
    *made = &weight;
    return models != 1 || strcmp(device, "cpu") || !strstr(folder, "package");
}
API(Delete)(void *made) { return 0; }
API(GetNumOutputs)(void *made, size_t *count) { *count = 2; return 0; }
API(GetNumConstants)(void *made, size_t *count) { *count = 1; return 0; }
API(GetConstantName)(void *made, size_t index, const char **name) { *name = "inner"; return 0; }
API(GetConstantOriginalFQN)(void *made, size_t index, const char **name) { *name = "outer"; return 0; }
API(UpdateUserManagedConstantBufferPairs)(void *made, const Named *given, size_t count, _Bool inactive, _Bool all) {
    weight = *given;
    return count != 1 || inactive || !all || strcmp(given->name, "inner");
}
int aoti_torch_new_tensor_handle(void *, void **);
API(RunSingleThreaded)(void *made, void **in, size_t ins, void **out, size_t outs, void *stream, void *proxy) {
    if (ins != 1 || outs != 2 || stream || proxy) return 1;
    struct pollfd pipe = {atoi(getenv("WEFT_TEST_PIPE")), POLLIN};
    if (poll(&pipe, 1, 30000) != 1) return 2;  /* until another thread of Python has written */
    out[0] = in[0];
    return aoti_torch_new_tensor_handle(weight.tensor, &out[1]);
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to compile the library")
def test_a_run_leaves_pythons_lock_to_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "code.c").write_text(CODE)
    libraries = ["-L", Path(torch.__file__).parent / "lib", "-ltorch_cpu", "-Wl,--unresolved-symbols=ignore-all"]
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", folder / "code.so", folder / "code.c", *libraries]
    subprocess.run(command, check=True)
    read_end, write_end = os.pipe()
    monkeypatch.setenv("WEFT_TEST_PIPE", str(read_end))
    runner = PackageRunner(folder / "code.so", "cpu")
    assert runner.weight_names() == {"inner": "outer"}
    weight, given, running = torch.full((3,), 2.0), torch.ones(2), threading.Event()
    runner.use_weights({"inner": weight})

    def write() -> None:  # the run waits for this, and would fail if it held the lock
        running.wait()
        os.write(write_end, b".")

    other = threading.Thread(target=write)
    other.start()
    running.set()
    outputs = runner.run([given])
    other.join()
    assert outputs[0].data_ptr() == given.data_ptr() and outputs[1].data_ptr() == weight.data_ptr()
    with pytest.raises(RuntimeError, match="RunSingleThreaded of its package failed"):
        runner.run([given, given])
    del runner, outputs
    assert given.tolist() == [1, 1] and weight.tolist() == [2, 2, 2]
