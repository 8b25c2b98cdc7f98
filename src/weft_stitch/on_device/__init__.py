"""Files of ``weft stitch`` on a GPU: registered as kinds of models, opened by the core's engine for CUDA.

``stitched_file`` opens stitched networks, of which ``fused_file`` has those in the form fused, with one kernel for each
layer of all models; ``body_file`` opens encoders with one body.
"""
