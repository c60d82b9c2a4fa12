"""fedveil.testing is there for users: one import, and a sentence where its extra is missing."""

from __future__ import annotations

import sys

import pytest

from fedveil import testing


def test_every_check_is_exported_and_says_what_it_cannot_show() -> None:
    assert set(testing.__all__) == set(dir(testing))
    for name in testing.__all__:
        check = getattr(testing, name)
        assert check.__name__ == name
        assert "\n\n" in check.__doc__  # what it proves, and what it does not


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "fedveil.testing.bounds", raising=False)
    with pytest.raises(ImportError, match=r"needs hypothesis, .*pip install 'fedveil\[test\]'"):
        from fedveil.testing import check_bound  # noqa: F401
    from fedveil.testing import check_cohort, check_recipe

    assert callable(check_cohort)
    assert callable(check_recipe)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'fedveil.testing' has no attribute 'check_luck'"):
        _ = testing.check_luck  # type: ignore[attr-defined]
