"""A metaclass for msgspec structs that users build by keywords: it names the keyword that was meant.

Parameter classes use it. msgspec builds structs in C and would only say "unexpected keyword".
"""

import msgspec

from quire.errors import InvalidRequestError
from quire.utils.suggest import unknown_name_message


class UnknownParameterError(InvalidRequestError, TypeError):
    """A keyword that a parameter class does not have (a TypeError too, as for any other call)."""


class NamesUnknownKeywords(type(msgspec.Struct)):
    """Metaclass of structs whose constructor raises UnknownParameterError."""

    def __call__(cls, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            unknown = [name for name in kwargs if name not in cls.__struct_fields__]
            if not unknown:
                raise
        raise UnknownParameterError(unknown_name_message(cls.__name__, unknown, cls.__struct_fields__), unknown[0])
