"""The configuration: what the tutorial shows is accepted, and every mistake is named with what was expected."""

import dataclasses
import json
from pathlib import Path

import numpy
import pytest

from penstock.config.configuration import Configuration, ConfigurationError
from penstock.schedule import schedule_names
from penstock.schedule.text import own_or_named

TUTORIAL_FILE = """// oslo-config.json

{
     "model_parallelism": {
          "enable": true,
          "pipeline_parallel_size": 4
      }
}
"""


def section(**keys: object) -> dict[str, object]:
    return {"model_parallelism": {"pipeline_parallel_size": 2, **keys}}


def test_the_tutorials_dicts_are_accepted() -> None:
    with_enable = Configuration.from_any({"model_parallelism": {"enable": True, "pipeline_parallel_size": 4}})
    without = Configuration.from_any({"model_parallelism": {"pipeline_parallel_size": 4}})
    assert with_enable == without == Configuration(pipeline_parallel_size=4)


@pytest.mark.parametrize("convert", [str, Path])
def test_the_tutorials_file_is_accepted_comment_included(tmp_path: Path, convert: type) -> None:
    file = tmp_path / "oslo-config.json"
    file.write_text(TUTORIAL_FILE)
    assert Configuration.from_any(convert(file)) == Configuration(pipeline_parallel_size=4)


def test_defaults_are_the_documented_ones() -> None:
    expected = {
        "enable": True,
        "pipeline_parallel_size": 3,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "microbatch_size": None,
        "num_microbatches": None,
        "schedule": "auto",
        "batch_dim": None,
        "loss_chunk_tokens": None,
        "sharded_optimizer": False,
        "stages": None,
        "split_points": None,
        "patience": 10.0,
        "timeout": None,
        "trace": None,
        "trace_steps": None,
    }
    configuration = Configuration.from_any({"model_parallelism": {"pipeline_parallel_size": 3}})
    assert dataclasses.asdict(configuration) == expected


def test_every_key_arrives() -> None:
    values = {"enable": False, "pipeline_parallel_size": 3, "tensor_parallel_size": 1, "microbatch_size": 2}
    values |= {"num_microbatches": None, "schedule": "gpipe", "patience": 2.5, "timeout": 60, "trace": "timeline.json"}
    values |= {"trace_steps": (3, 5), "stages": (("a", "b"), ("c",), ("d",)), "split_points": None}
    values |= {"loss_chunk_tokens": 512, "sharded_optimizer": True, "context_parallel_size": 2}
    values |= {"batch_dim": {"src": 1, "img_ids": None}}
    assert dataclasses.asdict(Configuration.from_any({"model_parallelism": values})) == values


def test_the_section_alone_and_keys_as_arguments_say_the_same(tmp_path: Path) -> None:
    flat = {"pipeline_parallel_size": 3, "num_microbatches": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(flat))
    expected = Configuration(pipeline_parallel_size=3, num_microbatches=2)
    for config in (flat, {"model_parallelism": flat}, file):
        assert Configuration.from_any(config) == Configuration.from_any(config, schedule=None) == expected
    assert Configuration.from_any(**flat) == expected
    assert Configuration.from_any({"num_microbatches": 2}, pipeline_parallel_size=3) == expected
    assert Configuration.from_any(Configuration(pipeline_parallel_size=3), num_microbatches=2) == expected
    for config in (flat, Configuration(**flat)):
        with pytest.raises(ConfigurationError, match="num_microbatches is given as an argument and as model_paral"):
            Configuration.from_any(config, num_microbatches=4)
    with pytest.raises(ConfigurationError, match=r"unknown key 'shedule' in .* mean .schedule."):
        Configuration.from_any(flat, shedule="gpipe")


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_that_can_be_built_can_be_asked_for(name: str) -> None:
    assert Configuration.from_any(section(schedule=name)).schedule == name


def test_a_disabled_section_needs_no_size() -> None:
    assert not Configuration.from_any({"model_parallelism": {"enable": False}}).enable


def test_paths_may_be_paths(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0,0B0\n")
    given = Configuration.from_any(section(schedule=tmp_path / "own.csv", trace=tmp_path / "trace.json"))
    assert (given.schedule, given.trace) == (str(tmp_path / "own.csv"), str(tmp_path / "trace.json"))


def test_lists_and_tuples_say_the_same() -> None:
    rows, other = section(schedule=["0F0,0B0"]), section(schedule=("0F0,0B0",))
    assert Configuration.from_any(rows) == Configuration.from_any(other)
    assert Configuration.from_any(section(split_points=["a"])) == Configuration.from_any(section(split_points=("a",)))


def test_rows_of_a_schedule_may_be_lists_of_actions() -> None:
    given = Configuration.from_any(section(schedule=[["0F0", "0B0"], ["1F0", "1B0"]])).schedule
    assert own_or_named(given, 2)(1).actions == own_or_named(["0F0,0B0", "1F0,1B0"], 2)(1).actions


def test_numbers_of_numpy_are_numbers() -> None:
    given = Configuration.from_any(section(patience=numpy.int64(10), timeout=numpy.float32(0.5)))
    assert (given.patience, given.timeout) == (10, 0.5)
    assert type(given.patience) is int and type(given.timeout) is float
    for much in (1e15, 10**400):
        with pytest.raises(
            ConfigurationError, match=r"timeout must be a positive number of seconds, or null, got 1000"
        ):
            Configuration.from_any(section(timeout=much))


def test_integers_of_numpy_are_integers() -> None:
    configuration = Configuration.from_any(section(num_microbatches=numpy.int64(8)))
    assert json.loads(json.dumps(dataclasses.asdict(configuration)))["num_microbatches"] == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"pipeline_parallel_size is missing"),
        ({"num_microbatches": 2}, r"pipeline_parallel_size is missing"),
        ({"pipeline_paralel_size": 2}, r"unknown key 'pipeline_paralel_size'.*mean \"pipeline_parallel_size\"\?"),
        (
            {**section(), "num_microbatches": 2},
            r"key 'num_microbatches' stands beside model_parallelism: put it inside",
        ),
        (
            {"model_paralelism": {}},
            r"unknown key 'model_paralelism' in the config.*mean \"model_parallelism\"\?",
        ),
        ({"model_parallelism": 2}, r"model_parallelism must be a dict, got 2 \(int\)"),
        ({"model_parallelism": {}}, r"pipeline_parallel_size is missing"),
        (section(pipeline_paralel_size=2), r"unknown key 'pipeline_paralel_size'.*mean \"pipeline_parallel_size\"\?"),
        (
            section(frobnicate=2),
            r"unknown key 'frobnicate' in model_parallelism: known are enable, .*trace, trace_steps$",
        ),
        (section(enable=1), r"enable must be true or false, got 1 \(int\)"),
        (section(enable="true"), r"enable must be true or false, got 'true' \(str\)"),
        (
            section(pipeline_parallel_size=0),
            r"pipeline_parallel_size must be a positive integer or .auto., got 0 \(int\)",
        ),
        (section(pipeline_parallel_size=-2), r"must be a positive integer or .auto., got -2 \(int\)"),
        (section(pipeline_parallel_size=True), r"must be a positive integer or .auto., got True \(bool\)"),
        (section(pipeline_parallel_size=2.0), r"must be a positive integer or .auto., got 2.0 \(float\)"),
        (section(pipeline_parallel_size="2"), r"must be a positive integer or .auto., got '2' \(str\)"),
        (section(pipeline_parallel_size=None), r"must be a positive integer or .auto., got None"),
        (section(tensor_parallel_size=0), r"tensor_parallel_size must be a positive integer, got 0"),
        (section(microbatch_size=0), r"microbatch_size must be a positive integer or null, got 0"),
        (section(num_microbatches=1.5), r"num_microbatches must be a positive integer or null, got 1.5"),
        (section(num_microbatches=4, microbatch_size=2), r"microbatch_size \(2\) and .*\(4\).*give only one"),
        (section(schedule="1F1B"), r"schedule must be one of \"gpipe\", \"1f1b\".*got '1F1B'.*mean \"1f1b\"\?"),
        (section(schedule=None), r"schedule must be one of .*got None"),
        (section(batch_dim={"src": -1}), r"batch_dim must be a dict with a dimension, .* got \{'src': -1\}"),
        (section(batch_dim=1), r"batch_dim must be a dict with a dimension, .* got 1"),
        (section(patience=0), r"patience must be a positive number of seconds, got 0"),
        (section(patience="long"), r"patience must be a positive number of seconds, got 'long'"),
        (section(timeout=0), r"timeout must be a positive number of seconds, or null, got 0"),
        (section(timeout=True), r"timeout must be a positive number of seconds, or null, got True"),
        (section(trace=True), r"trace must be the path of an .svg or .json file, or null, got True"),
        (section(trace="steps.txt"), r"trace must be the path of an .svg or .json file, or null, got 'steps.txt'"),
        (section(trace="a.svg", trace_steps=[5, 3]), r"trace_steps must be the first and the last step, .*\[5, 3\]"),
        (section(trace="a.svg", trace_steps=3), r"trace_steps must be the first and the last step, .* got 3"),
        (section(trace_steps=[3, 5]), r"trace_steps needs model_parallelism.trace, the file for the timeline"),
    ],
)
def test_mistakes_are_named_with_what_was_expected(config: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Configuration.from_any(config)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"config\.json: .*" + message):
        Configuration.from_any(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"not valid JSON: Expecting value: line 1"),
        ('// comment\n{"model_parallelism": {"enable": yes}}', r"not valid JSON: .*line 2 column"),
        ("[1]", r"the configuration must be a JSON object, got list"),
        ('{"model_parallelism": {"enable": true, "enable": false}}', r"key 'enable' is given 2 times"),
    ],
)
def test_files_that_hold_no_configuration_are_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"broken\.json: " + message):
        Configuration.from_any(file)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json: cannot read .*No such file"):
        Configuration.from_any(tmp_path / "absent.json")
    with pytest.raises(ConfigurationError, match=r"cannot read .*Is a directory"):
        Configuration.from_any(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"binary\.json: .*not UTF-8"):
        Configuration.from_any(str(tmp_path / "binary.json"))


@pytest.mark.parametrize("config", [None, 2, ["model_parallelism"]])
def test_what_is_no_configuration_at_all_is_a_type_error(config: object) -> None:
    with pytest.raises(TypeError, match=r"config must be a dict or the path of a JSON file, got"):
        Configuration.from_any(config)  # type: ignore[arg-type]  # the point of the test


def test_a_key_is_accepted_under_its_old_name_with_a_warning() -> None:
    for config, keys in (
        ({"pipeline_parallel_size": 1, "micro_batch_size": 2}, {}),
        ({"model_parallelism": {"pipeline_parallel_size": 1, "micro_batch_size": 2}}, {}),
        ({"pipeline_parallel_size": 1}, {"micro_batch_size": 2}),
    ):
        with pytest.warns(FutureWarning, match="micro_batch_size is microbatch_size since 0.4"):
            configuration = Configuration.from_any(config, **keys)
        assert configuration.microbatch_size == 2
        with pytest.warns(FutureWarning, match="micro_batch_size is microbatch_size since 0.4"):
            assert configuration.micro_batch_size == 2
    both = {"pipeline_parallel_size": 1, "micro_batch_size": 2, "microbatch_size": 2}
    with pytest.warns(FutureWarning), pytest.raises(ConfigurationError, match="old name of microbatch_size"):
        Configuration.from_any(both)


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(Configuration)])
def test_every_key_has_a_check(key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        Configuration(**{key: object()})  # type: ignore[arg-type]
