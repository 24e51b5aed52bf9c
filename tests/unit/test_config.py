"""Settings: where each comes from, and what is said of the ones that make no sense."""

import math

import msgspec
import pytest

from kvferry.config import Config, explain, load, override, port_range
from kvferry.errors import ConfigError

FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}
NUMBERS = [name for name, field in FIELDS.items() if field.type in {int, float}]
TIMES = [name for name in NUMBERS if name.endswith("_s")]


def test_overrides_go_before_variables_and_those_before_defaults():
    environ = {"KVFERRY_STALL_S": "7.5", "KVFERRY_TICK_S": "0.2", "KVFERRY_INSECURE": "true", "PATH": "/bin"}
    config = load(environ, tick_s=0.3)
    assert (config.stall_s, config.tick_s, config.insecure, config.heartbeat_s) == (7.5, 0.3, True, 1.0)
    found = explain(config, environ)
    assert found["stall_s"] == (7.5, "KVFERRY_STALL_S")
    assert found["tick_s"] == (0.3, "argument")
    assert found["heartbeat_s"] == (1.0, "default")
    assert set(found) == set(FIELDS)


def test_a_variable_and_an_override_are_judged_together():
    assert load({"KVFERRY_HEARTBEAT_S": "30"}, heartbeat_timeout_s=90.0).heartbeat_s == 30.0


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_variable_that_takes_its_default(name):
    default = FIELDS[name].default
    assert getattr(load({f"KVFERRY_{name.upper()}": str(default).lower()}), name) == default


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [("KVFERRY_STAL_S", "KVFERRY_STALL_S"), ("KVFERRY_HARTBEAT_S", "KVFERRY_HEARTBEAT_S"),
     ("KVFERRY_SECRETS", "KVFERRY_SECRET"), ("KVFERRY_BOOTSTRAP_TIMEOUT", "KVFERRY_BOOTSTRAP_TIMEOUT_S")],
)  # fmt: skip
def test_an_unknown_variable_names_the_nearest(variable, nearest):
    with pytest.raises(ConfigError, match=rf"unknown environment variable {variable} \(did you mean {nearest}\?\)"):
        load({variable: "1"})


def test_a_name_like_nothing_lists_all():
    with pytest.raises(ConfigError, match=r"known: .*KVFERRY_TICK_S"):
        load({"KVFERRY_ZZZZZZ": "1"})
    with pytest.raises(ConfigError, match=r"unknown setting tick \(did you mean tick_s\?\)"):
        load(tick=1)


def test_variables_of_others_and_reserved_ones_are_left_alone():
    assert load({"KVFERRY_SECRET": "s", "KVFERRY_ENGINE": "local", "NIXL_TICK_S": "x"}) == Config()


@pytest.mark.parametrize("text", ["", "soon", "1,5", "0x10", "1s", "[1]", "None"])
def test_a_value_that_is_no_number_is_refused_with_its_variable(text):
    with pytest.raises(ConfigError, match=r"environment variable KVFERRY_STALL_S = .* is not of type float"):
        load({"KVFERRY_STALL_S": text})
    with pytest.raises(ConfigError, match="KVFERRY_INSECURE = 'perhaps' is not of type bool"):
        load({"KVFERRY_INSECURE": "perhaps"})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, -math.inf, math.nan, math.inf, 2**40, 1e12])
def test_numbers_out_of_bounds_are_refused_wherever_they_come_from(name, value):
    words = rf"setting {name} = .* (must|is (not of|above))"
    for build in (
        lambda: Config(**{name: value}),
        lambda: load(**{name: value}),
        lambda: override(Config(), **{name: value}),
    ):
        with pytest.raises(ConfigError, match=words):
            build()


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "hold_limit_s"])
def test_only_the_hold_limit_may_be_zero(name):
    with pytest.raises(ConfigError, match=f"setting {name} = 0(.0)? must be above 0"):
        load(**{name: 0})
    assert load(hold_limit_s=0).hold_limit_s == 0


@pytest.mark.parametrize("name", FIELDS)
def test_a_config_that_is_made_directly_is_checked_as_well(name):
    with pytest.raises(ConfigError, match=rf"setting {name} = \[1\] is not of type"):
        Config(**{name: [1]})
    with pytest.raises(ConfigError, match="is not of type"):
        override(Config(), **{name: None})


def test_time_outs_that_contradict_each_other():
    with pytest.raises(ConfigError, match=r"heartbeat_timeout_s = 5 is below twice heartbeat_s = 3 \(one late"):
        load(heartbeat_s=3.0)
    for name in ("bootstrap_timeout_s", "claim_timeout_s", "stall_s", "drain_limit_s"):
        with pytest.raises(ConfigError, match=rf"{name} = 0.15 is below twice tick_s = 0.1"):
            load(**{name: 0.15})


@pytest.mark.parametrize("text", ["x", "", "-", "5000-", "1.5", "5000:5099", "70000", "-1", "9-8", "5000-70000"])
def test_ports_that_are_no_range(text):
    if text == "5000-":
        assert port_range(text, "data_ports") == (5000, 5000)
        return
    for name in ("control_ports", "data_ports"):
        with pytest.raises(ConfigError, match=f"{name}: .*(is neither a port nor a range|is not a range within)"):
            load(**{name: text})


def test_ports_that_are_one():
    assert port_range("0", "x") == (0, 0)
    assert port_range("5000", "x") == (5000, 5000)
    assert port_range("5000-5099", "x") == (5000, 5099)


def test_engine_options():
    assert load(engine_options=" mechanism = tcp, a=b=c ,").options() == {"mechanism": "tcp", "a": "b=c"}
    listed = "devices=mlx5_0,mlx5_1,,gpu=1, param.engine_config = TLS=tcp"
    assert load(engine_options=listed).options() == {
        "devices": "mlx5_0,mlx5_1", "gpu": "1", "param.engine_config": "TLS=tcp",
    }  # fmt: skip
    assert load(engine_options='devices={"0": "a,b", "1": "c"}').options() == {"devices": '{"0": "a,b", "1": "c"}'}
    with pytest.raises(ConfigError, match="engine_options: 'tcp' is not name=value"):
        load(engine_options="tcp")


def test_overrides_leave_the_original_alone():
    config = Config()
    assert override(config, stall_s=3).stall_s == 3.0
    assert config == Config()
    with pytest.raises(ConfigError, match="below twice"):
        override(config, heartbeat_s=4.9)
