"""Models of any operators that share whole weights, as one body: fine-tuned encoders above all.

Where ``stitching`` else looks at channels, a body leaves the nodes of its models as they are. ``body`` finds the nodes
that several models have, and the crews: models whose constants there are equal, for which a node runs once.
``nearness`` and ``orders`` make more of them equal: but for a low-rank part, some lines or a scale, or for the order of
heads; ``adapters`` are such parts by themselves. ``row_axes`` sees where rows and lengths lie in a value, ``joining``
writes the graph, ``narrowing`` leaves out what nobody reads, ``body_stitching`` runs all steps and compares.
"""
