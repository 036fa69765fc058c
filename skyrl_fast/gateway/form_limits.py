"""Limits of the form that a request may ask for: a schema, a pattern, choices, a grammar.

The engine checks a form in the event loop of all sessions, and falls back from one compiler to
others, some of which expand what they read. What they cannot expand without end is refused here,
by its place in the form.
"""

from __future__ import annotations

import json
import re
import re._constants as kinds  # the parser of `re`, without its compiler
import re._parser as patterns
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

MAX_NODES = 4_000  # of a schema, with all that its references refer to
MAX_DEPTH = 48
MAX_PROPERTIES = 500  # of one object
MAX_COUNTED = 1_000  # properties of an object, times the least or greatest number of them
MAX_VALUES = 2_000  # of an enumeration, or choices
MAX_INTEGER = (1 << 63) - 1  # of the messages to vLLM's engine
MAX_COUNT = 10_000  # of characters, items or properties
MAX_PATTERN = 500  # characters
MAX_ELEMENTS = 1_000  # of a grammar, or of a pattern whose repetitions are written out
UNICODE_ELEMENTS = 4  # that a class of characters beyond ASCII counts as: of its bytes
LAST_ASCII = 127
MAX_TEXT = 20_000  # characters of all choices or values, of a grammar, or of a text in a schema
MAX_JSON = 500_000  # characters of a schema or a tag given as text
GRAMMAR_ELEMENT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|[\w-]+')
_COUNTS = {f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties")}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {"const", "default", "examples"}
_SCHEMAS = {"json_schema", "schema"}  # in a structural tag


class FormError(ValueError):
    """A form is larger than the limits, or asks for something that no compiler reads quickly."""


def check_form(form: Mapping[str, Any]) -> None:
    for kind, value in form.items():
        if kind in ("json", "structural_tag"):
            schema = _read_json(kind, value)
            _check_node(kind, schema, 0, [MAX_NODES])
            _check_references(kind, schema)
        elif kind == "regex":
            _check_pattern(kind, value)
        elif kind == "choice":
            _check_values(kind, value)
        elif kind == "grammar":
            _check_grammar(kind, value)


def _check_grammar(kind: str, value: Any) -> None:
    if not isinstance(value, str):
        raise FormError(f"{kind}: expected text, got {type(value).__name__}")
    _check_value(kind, value)
    size = len(GRAMMAR_ELEMENT.findall(value))
    if size > MAX_ELEMENTS:
        raise FormError(f"{kind}: expected at most {MAX_ELEMENTS:,} elements, got {size:,}")


def _read_json(kind: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    _check_length(kind, len(value), MAX_JSON)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise FormError(f"{kind}: expected JSON, got {error}") from error


def _check_references(place: str, schema: Any) -> None:
    try:
        size = _count_expanded(schema, schema, {})
    except RecursionError:
        size = MAX_NODES + 1
    if size > MAX_NODES:
        expected = f"expected at most {MAX_NODES:,} values with what it refers to"
        raise FormError(f"{place:.200}: {expected}, got more")


def _check_node(place: str, node: Any, depth: int, left: list[int], *, of: str = "") -> None:
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        if depth <= MAX_DEPTH:
            what = f"{MAX_NODES:,} values"
        else:
            what = f"{MAX_DEPTH} levels"
        raise FormError(f"{place:.200}: expected at most {what} in a schema, got more")
    if isinstance(node, list):
        for number, value in enumerate(node):
            _check_node(f"{place}[{number}]", value, depth + 1, left, of=of if of in _DATA else "")
    _check_value(place, node)
    if not isinstance(node, Mapping):
        return
    if of in _BY_NAME and len(node) > MAX_PROPERTIES:
        got = f"got {len(node):,}"
        raise FormError(f"{place:.200}: expected at most {MAX_PROPERTIES} of them, {got}")
    if of not in _BY_NAME and of not in _DATA:
        _check_counted(place, node)
    for key, value in node.items():
        inner = f"{place}.{key}"
        if of == "patternProperties":
            _check_pattern(place, key)
        if of in _BY_NAME or of in _DATA:
            _check_node(inner, value, depth + 1, left, of=of if of in _DATA else "")
            continue
        if key in ("enum", "required") and isinstance(value, list):
            _check_values(inner, value)
            continue
        if key in _COUNTS:
            _check_count(inner, value)
        if key == "pattern" and isinstance(value, str):
            _check_pattern(inner, value)
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            raise FormError(f"{inner:.200}: expected a place in the schema, got {value!r:.80}")
        _check_node(inner, value, depth + 1, left, of=str(key))
        if key in _SCHEMAS and isinstance(value, Mapping):
            _check_references(inner, value)  # they begin at the schema in a tag


def _count_expanded(node: Any, root: Any, sizes: dict[int, int]) -> int:
    """Return the number of values with references written out; those to what contains them once."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = 1  # while it is counted
    size = 1
    for value in _inner(node, root):
        size += _count_expanded(value, root, sizes)
    sizes[id(node)] = size
    return size


def _inner(node: Any, root: Any) -> Iterator[Any]:
    """Yield the values in a value, and what it refers to."""
    if isinstance(node, Mapping):
        yield from (value for key, value in node.items() if key not in ("$defs", "definitions"))
        if isinstance(node.get("$ref"), str):
            yield from _resolve(node["$ref"], root)
    elif isinstance(node, list):
        yield from node


def _resolve(reference: str, root: Any) -> Iterator[Any]:
    node = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or name not in node:
            return
        node = node[name]
    yield node


def _check_values(place: str, values: Any) -> None:
    if len(values) > MAX_VALUES:
        raise FormError(
            f"{place:.200}: expected at most {MAX_VALUES:,} values, got {len(values):,}"
        )
    for value in values:
        _check_value(place, value)
    _check_length(place, sum(len(str(value)) for value in values), MAX_TEXT)


def _check_value(place: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        got = f"got one of {value.bit_length():,}"
        raise FormError(f"{place:.200}: expected an integer of 64 bits, {got}")
    if isinstance(value, str):
        _check_length(place, len(value), MAX_TEXT)


def _check_length(place: str, length: int, most: int) -> None:
    if length > most:
        raise FormError(f"{place:.200}: expected at most {most:,} characters, got {length:,}")


def _check_counted(place: str, node: Mapping[str, Any]) -> None:
    """Check the product with which the rules of a schema grow that counts its properties."""
    properties = node.get("properties")
    for key in ("minProperties", "maxProperties"):
        count = node.get(key)
        if not isinstance(properties, Mapping) or not isinstance(count, int | float):
            continue
        if len(properties) * min(count, len(properties)) > MAX_COUNTED:
            expected = f"expected at most {MAX_COUNTED:,} properties times {key}"
            raise FormError(f"{place:.200}: {expected}, got {len(properties):,} times {count:,}")


def _check_count(place: str, count: Any) -> None:
    if not isinstance(count, int | float) or not 0 <= count <= MAX_COUNT:
        raise FormError(f"{place:.200}: expected at most {MAX_COUNT:,}, got {count!r:.80}")


def _check_pattern(place: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise FormError(f"{place:.200}: expected a pattern of at most {MAX_PATTERN} characters")
    try:
        with warnings.catch_warnings(action="ignore"):
            size = _pattern_size(place, patterns.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise FormError(f"{place:.200}: expected a simple pattern: {error}") from error
    if size > MAX_ELEMENTS:
        raise FormError(
            f"{place:.200}: expected at most {MAX_ELEMENTS:,} elements with repetitions, got more"
        )


def _pattern_size(place: str, node: Any) -> int:
    """Return the number of elements with all repetitions written out; `*` counts as two."""
    if isinstance(node, patterns.SubPattern | list):
        return sum(_pattern_size(place, item) for item in node)
    if not isinstance(node, tuple):
        return 0
    kind, value = (*node, None)[:2]
    if kind in (kinds.ASSERT, kinds.ASSERT_NOT, kinds.GROUPREF, kinds.GROUPREF_EXISTS):
        if kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            what = "look-around"
        else:
            what = "back references"
        raise FormError(f"{place:.200}: expected a pattern without {what}")
    if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
        least, most, inner = value
        if most is not kinds.MAXREPEAT:
            times = most
        else:
            times = least + 1
        return max(int(times), 1) * max(_pattern_size(place, inner), 1)
    if kind is kinds.SUBPATTERN:
        return _pattern_size(place, value[-1])
    if kind is kinds.BRANCH:
        return sum(_pattern_size(place, branch) for branch in value[1])
    if kind is kinds.ATOMIC_GROUP:
        return _pattern_size(place, value)
    is_wide = kind is kinds.IN and any(
        item is kinds.RANGE and bounds[1] > LAST_ASCII for item, bounds in value
    )
    if is_wide or kind is kinds.ANY:
        return UNICODE_ELEMENTS
    return 1
