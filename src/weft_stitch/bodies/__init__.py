"""Models of any operators that share whole weights, as one body: fine-tuned encoders above all.

Where ``stitching`` else looks at channels, a body leaves the nodes of its models as they are. ``body`` finds the nodes
that several models have, and the crews: models whose constants there are equal, for which a node runs once.
``equal_weights`` finds more of them: weights that are equal except for a low-rank part, some lines or a scale, or for
the order of heads; ``adapters`` are such differences in files. ``probing`` runs the models to see where rows and
lengths lie in a value, ``joining`` writes the graph, ``narrowing`` removes unread positions, and ``body_stitching``
runs all steps and compares.
"""
