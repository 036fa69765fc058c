from typing import Any

cuda_archs: str | None
compiler: str

def __getattr__(name: str) -> Any: ...
