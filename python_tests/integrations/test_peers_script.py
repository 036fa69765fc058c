"""The comparison of SkyRL's tests with and without the drop-in."""

import pytest

from scripts import peers

pytestmark = pytest.mark.spec("dropin.suites")


@pytest.mark.parametrize(
    ("stock", "installed", "equal"),
    [
        ({"a": "passed", "b": "failed"}, {"a": "passed", "b": "failed"}, True),
        ({"a": "passed"}, {"a": "failed"}, False),
        ({"a": "passed"}, {}, False),
        ({"a": "error"}, {"a": "error"}, False),  # a collection that failed
        ({}, {}, False),
    ],
)
def test_results_are_equal_only_if_tests_were_run(
    stock: dict[str, str], installed: dict[str, str], equal: bool
) -> None:
    assert peers.are_equal(stock, installed) is equal


def test_packages_are_where_dill_pickles_their_classes_by_name() -> None:
    assert "site-packages" in peers.SITE.parts
