"""How bodies are read: strictly where a field has a meaning here, leniently where it has none.

A field is of one of four kinds. Those that a class declares are served, and checked. What others serve and this server
does not is `unserved`: it may say what is done anyway, and anything else is refused, for it would change the answer.
`hints` change no answer. All others nobody here knows: they are taken, counted, and a few of them named in the log.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
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


@dataclass(frozen=True, slots=True)
class UnknownFields:
    """Attributes: names: of the first MAX_NAMED, cut short."""

    num_fields: int = 0
    names: tuple[str, ...] = ()


def _describe(schema: dict[str, Any], model: type["LenientBody"]) -> None:
    """The unserved fields are part of a body's description."""
    properties = schema.setdefault("properties", {})
    for name, field in model.unserved.items():
        properties[name] = {"enum": [*field.taken, None], "description": f"Anything else is refused: {field.refusal}"}


class LenientBody(BaseModel):
    """An object of a body. A subclass declares what is served of it."""

    # In strict mode the string "1" is no number, and true is not 1.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_describe)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    hints: ClassVar[frozenset[str]] = frozenset()
    _known: ClassVar[frozenset[str]] = frozenset()
    _unknown: UnknownFields | None = PrivateAttr(None)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # As they are sent.
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        cls._known = frozenset(declared) | cls.unserved.keys() | cls.hints
        if both := declared & (cls.unserved.keys() | cls.hints):
            raise TypeError(f"{cls.__name__} serves {', '.join(both)}, and does not")

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        # Both are small but for what a client makes large: what it sends is not gone through name by name.
        for name in sorted(cls.unserved.keys() & data.keys()):
            if not cls.unserved[name].takes(data[name]):
                raise refusal_of(name, cls.unserved[name].refusal)
        body = handler(data)
        num_unknown = len(data) - len(cls._known & data.keys())
        if num_unknown:
            names = islice((name for name in data if name not in cls._known), MAX_NAMED)
            body._unknown = UnknownFields(num_unknown, tuple(name[:MAX_NAME_CHARACTERS] for name in names))
        return body


def refusal_of(name: str, message: str) -> PydanticCustomError:
    """The error of a field of an object, for what the object as a whole shows to be wrong."""
    return PydanticCustomError(UNSERVED, "{refusal}", {"name": name, "refusal": message})


def unknown_fields(body: LenientBody) -> UnknownFields:
    """Those of a body and of all objects in it that have a class here."""
    found = [unknown for part in _parts(body) if (unknown := part._unknown) is not None]
    names = islice(chain.from_iterable(unknown.names for unknown in found), MAX_NAMED)
    return UnknownFields(sum(unknown.num_fields for unknown in found), tuple(names))


def _parts(body: LenientBody) -> Iterator[LenientBody]:
    yield body
    for value in vars(body).values():
        if isinstance(value, LenientBody):
            yield from _parts(value)
        elif isinstance(value, list) and value and isinstance(value[0], LenientBody):
            for item in value:
                yield from _parts(item)
