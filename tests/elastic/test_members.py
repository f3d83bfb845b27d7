"""Which processes are shards of one device to a run's members."""

from __future__ import annotations

import pytest

from penstock.elastic.generations import tensor_group


def group_of(monkeypatch: pytest.MonkeyPatch, size: int, port: str, local: str, agent: str = "0") -> tuple[str, int]:
    launched = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": port, "GROUP_RANK": agent, "LOCAL_RANK": local}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    return tensor_group(size)


def test_shards_are_of_one_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --rdzv-id all launchers of a machine give the same name, "none"."""
    first = [group_of(monkeypatch, 2, "29500", str(local)) for local in range(4)]
    assert [shard for _, shard in first] == [0, 1, 0, 1]
    assert first[0][0] == first[1][0] != first[2][0] == first[3][0]
    others = [group_of(monkeypatch, 2, "29501", "0"), group_of(monkeypatch, 2, "29500", "0", agent="1")]
    assert len({first[0], *others}) == 3


def test_with_tensor_parallelism_the_place_on_the_machine_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert tensor_group(1)[1] == 0
    with pytest.raises(ValueError, match="a launcher must set LOCAL_RANK"):
        tensor_group(2)
