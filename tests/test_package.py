"""The package's front door: public names, and what importing it costs."""

import importlib

import penstock
from launch import run_python


def test_every_public_name_is_there() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name).__name__ == name
        assert name in dir(penstock)


def test_initialize_stays_the_function_when_its_module_is_imported() -> None:
    module = importlib.import_module("penstock.initialize")
    assert penstock.initialize is module.initialize


def test_schedules_and_the_command_line_start_without_torch() -> None:
    code = "import sys, penstock.schedule, penstock.config, penstock.cli; assert 'torch' not in sys.modules, 'torch'"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_unknown_names_are_attribute_errors() -> None:
    result = run_python("-c", "import penstock; penstock.initialise")
    assert "AttributeError: module 'penstock' has no attribute 'initialise'" in result.stderr
