"""What a runtime computes fastest, measured here: ``weft tune --target onnxruntime``.

``prepared`` is the model as the runtime simplifies it, ``ranges`` how large its tensors get. ``places`` says which
tensors become 8-bit integers, ``qdq`` writes them, ``halves`` writes float16. ``timing`` lets variants take turns,
``layer_times`` looks at single layers, ``scoring`` at answers, which ``answers`` collects; ``bench`` has all of that in
one hand. ``choice`` decides by what the bench says, ``result`` is what came out, ``fastest`` goes from options to
files.
"""
