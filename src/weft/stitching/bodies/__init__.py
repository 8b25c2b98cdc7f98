"""Models of any operators that share whole weights, as one body: fine-tuned encoders above all.

Where ``stitching`` else looks at channels, a body leaves the nodes of its models as they are. ``body`` finds the nodes
that several models have, and the crews: models whose constants there are equal, for which a node runs once. ``places``
sees where rows and lengths lie in a value, ``joining`` writes the graph, ``whole_run`` does all of it and compares.
"""
