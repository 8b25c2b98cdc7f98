"""The ways to compute a layer of all tasks, by name: ``FORMS``. To add one, write its page and a line here."""

from __future__ import annotations

from weft_stitch.forms.base import Done, Form
from weft_stitch.forms.fused import Fused
from weft_stitch.forms.grouped import Grouped
from weft_stitch.forms.half import Half
from weft_stitch.forms.mts import Mts
from weft_stitch.forms.separate import Separate
from weft_stitch.forms.split import Split

FORMS: dict[str, Form] = {form.name: form for form in (Mts(), Grouped(), Split(), Half(), Separate(), Fused())}

__all__ = ["FORMS", "Done", "Form"]
