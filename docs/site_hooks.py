"""What ``make docs`` needs beside MkDocs: files outside ``docs`` that pages link to become part of the site.

A page links to ``../examples/serve.toml``, which is right in a checkout and on a forge. In the site the file lies below
its root, and the link leads there. Headings get the names that a forge gives them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
"""A link to a file beside the folder of the pages."""


def on_config(config: Any) -> Any:
    """Name headings as forges do, so that the same links hold in both."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Take in all files that pages link to outside of their folder."""
    pages = Path(config["docs_dir"])
    linked = {name for page in pages.glob("*.md") for name in OUTSIDE.findall(page.read_text("utf-8"))}
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(pages.parent / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Have links to such files lead to where they are in the site."""
    return OUTSIDE.sub(r"](\1", markdown)
