"""What a trace comes to: numbers, pictures, pages, and files for other tools.

``page.py`` makes self-contained pages of templates, one style and one script; a page lives in the package whose results
it shows. ``tables.py`` has tables that the terminal and a notebook show, ``shown.py`` results that show themselves,
``trace.py`` what happened in a run, ``words.py`` what names of layers mean, ``perfetto.py``, ``html.py`` and
``timeline.py`` traces for viewers.
"""
