"""A device for weft, as an example of a package that adds one: ``backend`` has all of it."""
