"""SkyRL's data types with pydantic before Python 3.12, in SkyRL's test runs only."""

import sys

if sys.version_info < (3, 12):  # where pydantic requires typing_extensions' TypedDict
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
