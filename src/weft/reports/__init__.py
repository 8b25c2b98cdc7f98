"""Presentation of results: tables, pictures, pages, traces and their exports.

``page.py`` makes self-contained pages of templates, one style and one script; a page lives in the package whose results
it shows. ``tables.py`` has tables for the terminal and notebooks, ``pictures.py`` figures and results that show
themselves, ``exhibits.py`` pictures as data, ``trace.py`` traces of a run and the weight buffer over time,
``trace_exports.py`` traces as a page and for Perfetto, ``timeline.py`` a trace as a picture, ``words.py`` meanings of
layer names.
"""
