import pytest

from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin, names, resolve

HERE = __name__


def scaled(value: float, *, factor: float, clip: float | None = None) -> float:
    return value * factor


def anything(**options: object) -> dict[str, object]:
    return options


NUMBER = 3


def refusal(plugin: Plugin) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(plugin, home=HERE, field="my.field", given=("value",))
    return str(caught.value)


def test_short_and_long_forms_mean_the_same():
    assert Plugin.model_validate("grpo") == Plugin.model_validate({"name": "grpo"}) == Plugin(name="grpo")
    assert Plugin.model_validate({"name": "a", "factor": 2}) == Plugin(name="a", params={"factor": 2})
    assert Plugin(name="a", params={"factor": 2}).model_dump() == {"name": "a", "factor": 2}
    assert Plugin(name="a").model_dump() == "a"


def test_parameters_are_bound_and_converted():
    assert resolve(Plugin(name="scaled", params={"factor": "2"}), home=HERE, given=("value",))(3.0) == 6.0


def test_a_full_path_needs_no_home():
    assert resolve(Plugin(name="math:sqrt"), home="nowhere", given=("x",)).func(4.0) == 2.0


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Plugin(name="absent"), "my.field='absent' does not import: AttributeError"),
        (Plugin(name="no.such:thing"), "my.field='no.such:thing' does not import: ModuleNotFoundError"),
        (Plugin(name="scaled"), "my.field='scaled' needs factor; write my.field: {name: scaled, factor: ...}"),
        (Plugin(name="scaled", params={"factor": "wide"}), "my.field.factor='wide' is not valid"),
        (
            Plugin(name="scaled", params={"factor": 1, "speed": 2}),
            "my.field.speed=2 is not a parameter of 'scaled'; it takes: factor, clip",
        ),
        (Plugin(name="scaled", params={"factor": 1, "value": 2}), "my.field.value=2 is not a parameter"),
        (Plugin(name=f"{HERE}:NUMBER"), "is a int; it must be a function or a class"),
    ],
)
def test_a_mistake_names_field_value_and_way_out(plugin, message):
    assert message in refusal(plugin)


def test_a_function_of_any_keywords_takes_any():
    assert resolve(Plugin(name="anything", params={"x": 1}), home=HERE)() == {"x": 1}


def test_a_module_offers_its_own_functions():
    assert {"scaled", "anything"} <= set(names(HERE))
    assert "resolve" not in names(HERE)
