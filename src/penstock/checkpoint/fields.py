"""Reading data that somebody else may have written, field by field: what is absurd is named with its file."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any, NoReturn

from .errors import CheckpointError

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60


class Field:
    """A value in a file, and the way to it from the file's top."""

    __slots__ = ("_key", "_parent", "file", "value")

    def __init__(self, value: Any, file: str, parent: Field | None = None, key: Any = None) -> None:
        self.value, self.file, self._parent, self._key = value, file, parent, key

    def __getitem__(self, key: str) -> Field:
        """A field of an object, which must be there."""
        if key not in self._object():
            self.refuse(f"an object with {key!r}")
        return Field(self.value[key], self.file, self, key)

    def get(self, key: str) -> Field | None:
        """A field of an object, if it is there and not null."""
        return None if self._object().get(key) is None else self[key]

    def items(self) -> Iterator[tuple[str, Field]]:
        """Keys and fields of an object, whose keys must be such that they can be shown."""
        for key, value in self._object().items():
            if not isinstance(key, str) or not key.isprintable():
                self.refuse(f"an object with printable keys, not {_shorten.repr(key)}")
            yield key, Field(value, self.file, self, key)

    def elements(self) -> Iterator[Field]:
        """The fields of a list."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        for index, value in enumerate(self.value):
            yield Field(value, self.file, self, index)

    def text(self) -> str:
        """The value, which must be text that can be shown."""
        if not isinstance(self.value, str) or not self.value.isprintable():
            self.refuse("printable text")
        found: str = self.value
        return found

    def integer(self, least: int, most: int) -> int:
        """The value, which must be an integer within these bounds; true and false are none."""
        if type(self.value) is not int or not least <= self.value <= most:
            self.refuse(f"an integer from {least} to {most}")
        found: int = self.value
        return found

    def refuse(self, expected: str) -> NoReturn:
        """Raise CheckpointError, naming field, value and file."""
        where = self._name()
        shown = _shorten.repr(self.value)
        raise CheckpointError(f"{self.file} is damaged: {where or 'its content'} is {shown}, expected {expected}")

    def _object(self) -> dict[Any, Any]:
        if not isinstance(self.value, dict):
            self.refuse("an object")
        found: dict[Any, Any] = self.value
        return found

    def _name(self) -> str:
        if self._parent is None:
            return ""
        before = self._parent._name()
        if isinstance(self._key, str) and self._key.isidentifier():
            return f"{before}.{self._key}" if before else self._key
        return f"{before}[{_shorten.repr(self._key)}]"
