"""How bodies are read: strictly where a field has a meaning here, leniently where it has none.

A field is of one of four kinds. Those that a class declares are served, and checked. What others serve and this server
does not is `unserved`: it may say what is done anyway, and anything else is refused, for it would change the answer.
`hints` change no answer. All others nobody here knows: they are taken, counted, and a few of them named in the log.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

# So many unknown fields are named, each with so many characters of its name; a body may hold tens of thousands.
MAX_NAMED = 8
MAX_NAME_CHARACTERS = 64
# Errors of this type name the field that is wrong in their context, not in their path.
UNSERVED = "unserved_field"


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field of which only some values are taken.

    Attributes:
        refusal: what a client is told that sends another value.
        taken: the values that change nothing here, besides null. One may be [] or {}.
    """

    refusal: str
    taken: tuple[Any, ...] = ()

    def takes(self, value: Any) -> bool:
        if value is None:
            return True
        # To Python 0 and False, and 1 and True, are the same.
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.taken)


@dataclass(slots=True)
class UnknownFields:
    """Attributes: names: of the first MAX_NAMED, cut short."""

    num_fields: int = 0
    names: list[str] = field(default_factory=list)


# Of the body that is being read, which happens without a break.
_noted: ContextVar[UnknownFields | None] = ContextVar("unknown fields", default=None)


def _describe(schema: dict[str, Any], model: type["LenientBody"]) -> None:
    """The unserved fields are part of a body's description."""
    properties = schema.setdefault("properties", {})
    for name, known in model.unserved.items():
        properties[name] = {"enum": [*known.taken, None], "description": f"Anything else is refused: {known.refusal}"}


class LenientBody(BaseModel):
    """An object of a body. A subclass declares what is served of it."""

    # In strict mode the string "1" is no number, and true is not 1.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_describe)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    hints: ClassVar[frozenset[str]] = frozenset()
    _declared: ClassVar[frozenset[str]] = frozenset()
    _known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # As they are sent.
        cls._declared = frozenset(declared.alias or name for name, declared in cls.model_fields.items())
        cls._known = cls._declared | cls.unserved.keys() | cls.hints

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # A body may have thousands of objects, and an object tens of thousands of names: most have none but these, and
        # no object is gone through name by name.
        if not isinstance(data, dict) or data.keys() <= cls._declared:
            return handler(data)
        for name in sorted(cls.unserved.keys() & data.keys()):
            if not cls.unserved[name].takes(data[name]):
                raise refusal_of(name, cls.unserved[name].refusal)
        note_unknown(data, cls._known)
        return handler(data)


class LenientRequest(LenientBody):
    """A whole body. Attributes: unknown_fields: in all its objects."""

    _unknown: UnknownFields = PrivateAttr(default_factory=UnknownFields)

    @property
    def unknown_fields(self) -> UnknownFields:
        return self._unknown

    @model_validator(mode="wrap")
    @classmethod
    def _read_whole(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        noted = UnknownFields()
        token = _noted.set(noted)
        try:
            body = handler(data)
        finally:
            _noted.reset(token)
        body._unknown = noted
        return body


def note_unknown(data: dict[str, Any], known: frozenset[str]) -> None:
    """Counts the names of an object of the body that is being read, but for these."""
    num_unknown = len(data) - len(known & data.keys())
    noted = _noted.get()
    if num_unknown and noted is not None:
        noted.num_fields += num_unknown
        if (num_missing := MAX_NAMED - len(noted.names)) > 0:
            names = (name[:MAX_NAME_CHARACTERS] for name in data if name not in known)
            noted.names += islice(names, num_missing)


def refusal_of(name: str, message: str) -> PydanticCustomError:
    """The error of a field of an object, for what the object as a whole shows to be wrong."""
    return PydanticCustomError(UNSERVED, "{refusal}", {"name": name, "refusal": message})
