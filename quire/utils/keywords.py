"""A metaclass for msgspec structs that users build by keywords: it names the keyword that was meant.

Parameter classes use it. msgspec builds structs in C and would only say "unexpected keyword". What is said of vLLM's
that Quire has not stands in keywords.txt.
"""

from pathlib import Path

import msgspec

from quire.errors import InvalidRequestError
from quire.utils.answers import take_anyway
from quire.utils.suggest import unknown_name_message

PARAMETERS = Path(__file__).with_name("keywords.txt")


class UnknownParameterError(InvalidRequestError, TypeError):
    """A keyword that a parameter class does not have (a TypeError too, as for any other call)."""


class NamesUnknownKeywords(type(msgspec.Struct)):
    """Metaclass of structs whose constructor raises UnknownParameterError; vLLM's keywords may ask for nothing."""

    def __call__(cls, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            unknown = [name for name in kwargs if name not in cls.__struct_fields__]
            if not unknown:
                raise
        if strange := [name for name in unknown if not take_anyway(PARAMETERS, name, kwargs[name])]:
            raise UnknownParameterError(unknown_name_message(cls.__name__, strange, cls.__struct_fields__), strange[0])
        return super().__call__(*args, **{name: kwargs[name] for name in kwargs if name not in unknown})
