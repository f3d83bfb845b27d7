"""`penstock.Elastic`: what cannot be used is named with its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import Elastic
from penstock.config.elastic import parse_address


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"store": 29400}, TypeError, "store must be a string such as tcp://host:29400, got 29400"),
        ({"store": "file://here"}, ValueError, "store must be tcp://host:port or file:///folder, got 'file://here'"),
        ({"copies": 2.0}, TypeError, r"copies must be an integer, got 2.0 \(float\)"),
        ({"copies": None}, TypeError, r"copies must be an integer, got None \(NoneType\)"),
        ({"start": True}, TypeError, r"start must be an integer, got True \(bool\)"),
        ({"start": 0}, ValueError, "start must be at least 1, got 0"),
        ({"gather": 0}, ValueError, "gather must be positive, got 0"),
        ({"hang_timeout": float("nan")}, ValueError, "hang_timeout must be positive, got nan"),
        *(
            ({name: None}, TypeError, rf"{name} must be a number, got None \(NoneType\)")
            for name in ("gather", "hang_timeout", "bandwidth", "horizon")
        ),
        ({"memory": -1e9}, ValueError, "memory must be positive, got -1000000000.0"),
        ({"templates": ["1x3"]}, TypeError, "templates must be PipelineTemplates, got '1x3'"),
        ({"run": ""}, ValueError, "run must be a name, got ''"),
    ],
)
def test_wrong_settings_of_an_elastic_run_are_named(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Elastic(**{"store": "tcp://head:29400", **settings})
    assert Elastic("tcp://head:29400", memory=None).start is None


def test_the_address_of_a_folder_may_have_a_space() -> None:
    assert parse_address(Path("/data/my run").as_uri()) == Path("/data/my run")
