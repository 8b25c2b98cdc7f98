"""What every other package of weft builds on: errors, files, the registry of tools, shapes, versions; imports none."""
