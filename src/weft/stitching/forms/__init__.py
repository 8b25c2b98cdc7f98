"""The ways to compute a layer of all tasks, by name: ``FORMS``. To add one, write its page and a line here."""

from __future__ import annotations

from weft.stitching.forms.base import Done, Form
from weft.stitching.forms.fused import Fused
from weft.stitching.forms.grouped import Grouped
from weft.stitching.forms.half import Half
from weft.stitching.forms.mts import Mts
from weft.stitching.forms.separate import Separate
from weft.stitching.forms.split import Split

FORMS: dict[str, Form] = {form.name: form for form in (Mts(), Grouped(), Split(), Half(), Separate(), Fused())}

__all__ = ["FORMS", "Done", "Form"]
