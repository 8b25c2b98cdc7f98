"""The ways to compute a layer of all tasks, by name: ``FORMS``. To add one, write its module and a line here."""

from __future__ import annotations

from weft_stitch.forms.base import Form
from weft_stitch.forms.split import Half, Split
from weft_stitch.forms.whole import Fused, Grouped, Mts, Separate

FORMS: dict[str, Form] = {form.name: form for form in (Mts(), Grouped(), Split(), Half(), Separate(), Fused())}

__all__ = ["FORMS", "Form"]
