"""Reading of bodies: strict for served fields, lenient for others.

Declared fields are served and checked. `unserved` fields accept only values that change nothing. `hints` change no
answer. Unknown fields are accepted and counted, and a few are named in the log.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

# Limits on logged names: a body may have tens of thousands.
MAX_NAMED = 8
MAX_NAME_CHARACTERS = 64
# Errors of this type name their field in the context, not in the path.
UNSERVED = "unserved_field"


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that accepts only some values.

    Attributes:
        taken: accepted values besides null.
    """

    refusal: str
    taken: tuple[Any, ...] = ()

    def takes(self, value: Any) -> bool:
        if value is None:
            return True
        # In Python 0 == False and 1 == True.
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.taken)


@dataclass(slots=True)
class UnknownFields:
    """Attributes: names: the first MAX_NAMED, shortened."""

    num_fields: int = 0
    names: list[str] = field(default_factory=list)


# Fields of the body being parsed, which happens without a break.
_noted: ContextVar[UnknownFields | None] = ContextVar("unknown fields", default=None)


def _describe(schema: dict[str, Any], model: type["LenientBody"]) -> None:
    properties = schema.setdefault("properties", {})
    for name, known in model.unserved.items():
        properties[name] = {"enum": [*known.taken, None], "description": f"Anything else is refused: {known.refusal}"}


class LenientBody(BaseModel):
    """An object in a body. Subclasses declare its served fields."""

    # Strict: the string "1" is no number, and true is not 1.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_describe)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    hints: ClassVar[frozenset[str]] = frozenset()
    _declared: ClassVar[frozenset[str]] = frozenset()
    _known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._declared = frozenset(declared.alias or name for name, declared in cls.model_fields.items())
        cls._known = cls._declared | cls.unserved.keys() | cls.hints

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Fast path: a body may have thousands of objects, mostly with declared names only.
        if not isinstance(data, dict) or data.keys() <= cls._declared:
            return handler(data)
        for name in sorted(cls.unserved.keys() & data.keys()):
            if not cls.unserved[name].takes(data[name]):
                raise refusal_of(name, cls.unserved[name].refusal)
        note_unknown(data, cls._known)
        return handler(data)


class LenientRequest(LenientBody):
    """A whole body, with the unknown fields of all its objects."""

    _unknown: UnknownFields = PrivateAttr(default_factory=UnknownFields)

    @property
    def unknown_fields(self) -> UnknownFields:
        return self._unknown

    @model_validator(mode="wrap")
    @classmethod
    def _read_whole(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            # Read before, beside the loop.
            return data
        noted = UnknownFields()
        token = _noted.set(noted)
        try:
            body = handler(data)
        finally:
            _noted.reset(token)
        body._unknown = noted
        return body


def note_unknown(data: dict[str, Any], known: frozenset[str]) -> None:
    num_unknown = len(data) - len(known & data.keys())
    noted = _noted.get()
    if num_unknown and noted is not None:
        noted.num_fields += num_unknown
        if (num_missing := MAX_NAMED - len(noted.names)) > 0:
            names = (name[:MAX_NAME_CHARACTERS] for name in data if name not in known)
            noted.names += islice(names, num_missing)


def refusal_of(name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(UNSERVED, "{refusal}", {"name": name, "refusal": message})
