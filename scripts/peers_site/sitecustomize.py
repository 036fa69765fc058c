"""SkyRL's data types with pydantic before Python 3.12, in SkyRL's test runs alone."""

import sys

if sys.version_info < (3, 12):  # pydantic asks for typing_extensions' TypedDict there
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
