"""Files of ``weft stitch`` on a GPU: registered as kinds of models, opened by the core's engine for CUDA.

``StitchedFile`` opens stitched networks: by torch in the form fused, with one kernel for each layer of all models
(``fused_file``), or by ONNX Runtime, whichever is faster. ``body_file`` opens encoders with one body (backbone). A
*blueprint* says how a prepared file is cut into segments; an *allowance* is the time that preparing may take.
"""

from __future__ import annotations

from weft.runtime.cuda.model_files import Blueprint, DeviceModel, ModelPreparation, OnnxFile, OutOfTime, first_line


class StitchedFile(OnnxFile):
    """A stitched file that is being prepared for a GPU."""

    def choose_preparation(self, blueprint: Blueprint) -> ModelPreparation:
        """Prepare the faster of the form fused and ONNX Runtime, by the time for one row of each model.

        A remark says how long both take, or why one of them is not possible.
        """
        try:
            fused = self._fused_preparation()
            fused_s = fused.round_s(blueprint)
        except OutOfTime:
            raise
        except Exception as error:  # torch and the kernels' compiler raise types of their own
            plain = self.onnx_preparation(blueprint)
            plain.remarks.append(f"not in the form fused: {first_line(error)}")
            return plain
        if self.allowance.is_half_used():
            fused.remarks.append("in the form fused: there was no time to try ONNX Runtime; raise learn_s to have it")
            return fused
        try:
            plain = self.onnx_preparation(blueprint)
            plain_s = plain.round_s(blueprint)
        except OutOfTime:
            raise
        except Exception as error:  # ONNX Runtime cannot run it, but the form fused can
            fused.remarks.append(f"in the form fused: ONNX Runtime cannot run it ({first_line(error)})")
            return fused
        times = f"a row of each model takes {1e3 * fused_s:.3g} ms fused, {1e3 * plain_s:.3g} ms with ONNX Runtime"
        if fused_s > plain_s:
            plain.remarks.append(f"not in the form fused: {times}")
            return plain
        fused.remarks.append(f"in the form fused: {times}")
        self.forget_graph()  # only ONNX Runtime needs it
        return fused

    def _fused_preparation(self) -> ModelPreparation:
        """The preparation of the file in the form fused."""
        from weft_stitch.on_device.fused_file import FusedFile  # torch is an extra, and takes long to import

        file = FusedFile(self.device, self.path, self.options, self.allowance, self.folder)
        return ModelPreparation(self.device, file, self.options, self.allowance)

    def reopened(self, blueprint: Blueprint) -> DeviceModel:
        """Open a file that an earlier run has prepared."""
        if blueprint.segments[0].nodes is None:  # prepared with ONNX Runtime
            return super().reopened(blueprint)
        from weft_stitch.on_device.fused_file import FusedFile

        free = self.device.memory()[0]
        file = FusedFile(self.device, self.path, self.options, self.allowance, self.folder)
        return file.opened(blueprint).assembled(free)
