"""Models of Hugging Face configurations (`config.json`), without a line of code.

A configuration names a family (`model_type`) and its sizes. `form` and `media` read the fields,
`decoder` builds language models. A field that no reader uses is an error that names it, so that a plan is
never about another model than the file's.
"""

from layoutopt.importers.huggingface.configuration import from_huggingface, module_of, names_of
from layoutopt.importers.huggingface.fields import is_configuration

__all__ = ["from_huggingface", "is_configuration", "module_of", "names_of"]
