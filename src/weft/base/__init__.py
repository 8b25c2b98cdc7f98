"""The foundation of all other packages of weft: errors, files, the registry of tools, shapes, versions.

It imports none of them.
"""
