"""The registry: settings are checked and parsed by the fields of each method's drafter."""

import pytest

from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError, rejected_values
from specjax.loading.methods import METHODS

REJECTED = [
    (method, name, value)
    for method, row in METHODS.items()
    for name, value in rejected_values(row.drafter)
    if name in row.settings
]


@pytest.mark.parametrize(("method", "name", "value"), REJECTED, ids=str)
def test_a_setting_outside_its_type_or_bounds_is_rejected(method, name, value):
    with pytest.raises(SettingError) as error:
        METHODS.check(method, {name: value})
    assert error.value.field == name


@pytest.mark.parametrize("method", METHODS)
def test_defaults_pass_and_survive_the_command_line(method):
    settings = {
        name: value
        for name, value in METHODS[method].settings.items()
        if isinstance(value, (bool, int, float, str, tuple))
    }
    texts = [f"{name.replace('_', '-')}={value}" for name, value in settings.items()]
    read = METHODS.read_settings(method, texts)
    assert read == settings
    assert list(map(type, read.values())) == list(map(type, settings.values()))


def test_settings_of_parts_are_those_of_the_methods_they_name():
    read = METHODS.read_settings("hybrid", ["copy=pld,copy.max_ngram=4", "head.depth=3"])
    assert read == {"copy": "pld", "copy.max_ngram": 4, "head.depth": 3}
    with pytest.raises(SettingError, match="`max_ngram` must be a whole number"):
        METHODS.read_settings("hybrid", ["copy=pld", "copy.max_ngram=few"])
    with pytest.raises(SpecjaxError, match="method 'pld' has no setting 'depth'"):
        METHODS.check("hybrid", {"copy": "pld", "copy.depth": 3})


@pytest.mark.parametrize("assignment", ["num_tokens", "=3", ""])
def test_an_assignment_has_a_name_and_a_value(assignment):
    with pytest.raises(SpecjaxError, match="is not NAME=VALUE"):
        METHODS.read_settings("pld", [assignment])
