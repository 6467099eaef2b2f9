"""Checkpoints of a job: complete or not there, the same at any number of ranks, and a failure is everybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.checkpoint.train_state import (
    checkpoint_name,
    is_complete,
    load_optimizer,
    load_random_state,
    load_state,
    newest_complete,
    prune,
    save_checkpoint,
)
from megatron_frozen.comm import get_tensor_model_parallel_group, group_rank, group_size, initialize_model_parallel
from megatron_frozen.errors import CheckpointError
from megatron_frozen.params import set_tensor_model_parallel_attributes, shard_of
from megatron_frozen.testing import RankError, run_ranks

FULL = torch.arange(24.0).reshape(4, 6)


def make(world_size: int, *, rows: int = 4) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    """A replicated parameter, one cut along dim 1, and one whose rows are padded to a multiple of the ranks."""
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    padded = torch.zeros(-(-rows // world_size) * world_size, 2)
    padded[:rows] = 1.0
    parameters = {
        "replica": nn.Parameter(torch.ones(3)),
        "cut": nn.Parameter(shard_of(FULL.clone(), partition_dim=1, group=group)),
        "vocabulary": nn.Parameter(shard_of(padded, partition_dim=0, group=group)),
    }
    for name, dim in (("cut", 1), ("vocabulary", 0)):
        set_tensor_model_parallel_attributes(parameters[name], True, dim, 1)  # noqa: FBT003
    return parameters, torch.optim.AdamW(parameters.values())


def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def save(folder: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW, **options: Any) -> None:
    def save_model(temporary: Path) -> None:
        if group_rank(get_tensor_model_parallel_group()) == 0:
            (temporary / "model.txt").write_text("weights")

    values = {"save_model": save_model, "state": {"step": 1}, **options}
    save_checkpoint(
        folder, parameters=parameters, optimizer=optimizer, group=get_tensor_model_parallel_group(), **values
    )


def save_body(rank: int, world_size: int, folder: str) -> Tensor:
    parameters, optimizer = make(world_size)
    step(parameters, optimizer)
    torch.manual_seed(5)  # as the job does: tensor-parallel ranks draw the same
    save(Path(folder), parameters, optimizer)
    return torch.rand(3)


def load_body(rank: int, world_size: int, folder: str, rows: int) -> dict[str, Any]:
    parameters, optimizer = make(world_size, rows=rows)
    group = get_tensor_model_parallel_group()
    load_optimizer(Path(folder), parameters=parameters, optimizer=optimizer, group=group)
    restored = load_random_state(Path(folder))
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    assert all(states[name]["exp_avg"].shape == parameter.shape for name, parameter in parameters.items())
    return {"states": states, "restored": restored, "random": torch.rand(3)}


@pytest.mark.parametrize("saved_by", [1, 2])
def test_state_comes_back_at_any_size(tmp_path, saved_by):
    folder = tmp_path / checkpoint_name(1)
    random = run_ranks(saved_by, save_body, str(folder))
    assert load_state(folder) == {"step": 1}
    moment = 0.1 * FULL  # AdamW's first moment after one step
    for world_size in (1, 2, 3):
        results = run_ranks(world_size, load_body, str(folder), 4)
        cut = torch.cat([result["states"]["cut"]["exp_avg"] for result in results], dim=1)
        torch.testing.assert_close(cut, moment)
        vocabulary = torch.cat([result["states"]["vocabulary"]["exp_avg"] for result in results])
        torch.testing.assert_close(vocabulary[:4], torch.full((4, 2), 0.1))
        assert not vocabulary[4:].any()
        for result in results:
            assert float(result["states"]["replica"]["step"]) == 1.0
            assert result["restored"]
            assert torch.equal(result["random"], random[0])


def data_parallel_body(rank: int, world_size: int, folder: str, tensor_parallel: int) -> tuple[bool, Tensor]:
    """Saves on data-parallel ranks, each in its own random state; else loads."""
    initialize_model_parallel(tensor_parallel)
    if tensor_parallel == 1:
        torch.manual_seed(rank)
        save(Path(folder), {}, torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
        return True, torch.rand(3)
    torch.manual_seed(9)
    return load_random_state(Path(folder)), torch.rand(3)


def test_random_states_of_data_parallel_ranks_are_not_given_to_tensor_parallel_ones(tmp_path):
    """Those must draw one dropout mask together; the number of all ranks, 2 both times, does not tell."""
    folder = str(tmp_path / checkpoint_name(1))
    (_, one), (_, other) = run_ranks(2, data_parallel_body, folder, 1)
    assert not torch.equal(one, other)
    (restored, one), (_, other) = run_ranks(2, data_parallel_body, folder, 2)
    assert not restored
    assert torch.equal(one, other)


def partial_body(rank: int, world_size: int, folder: str) -> None:
    parameters, optimizer = make(world_size)
    step(parameters, optimizer)
    save(Path(folder), parameters, optimizer)


def test_partial_folder_of_the_same_name_is_replaced(tmp_path):
    folder = tmp_path / checkpoint_name(4)
    folder.mkdir()
    (folder / "optimizer.safetensors").write_bytes(b"cut")
    (folder / "left over").touch()
    assert newest_complete(tmp_path) == (None, [folder])
    run_ranks(2, partial_body, str(folder))
    assert newest_complete(tmp_path) == (folder, [])
    assert sorted(path.name for path in folder.iterdir()) == [
        "complete.json", "model.txt", "optimizer.safetensors", "random.safetensors", "state.json",
    ]  # fmt: skip


def failing_body(rank: int, world_size: int, folder: str, failing_rank: int) -> None:
    parameters, optimizer = make(world_size)
    step(parameters, optimizer)
    group = get_tensor_model_parallel_group()
    assert group_size(group) == 2

    def save_model(temporary: Path) -> None:
        if rank == 0:
            (temporary / "half").touch()
        raise OSError("the disk is full")

    def fine(temporary: Path) -> None:
        assert temporary.exists()

    save(
        Path(folder), parameters, optimizer, save_model=save_model if failing_rank == 2 else fine, state={"step": set()}
    )


@pytest.mark.parametrize(("failing_rank", "cause"), [(2, "the disk is full"), (0, "not JSON serializable")])
def test_failure_ends_every_rank_and_leaves_nothing(tmp_path, failing_rank, cause):
    """Failing rank 2 stands for both in the model's own save; 0 is work that the first rank does alone."""
    with pytest.raises(RankError) as caught:
        run_ranks(2, failing_body, str(tmp_path / "checkpoints/step_00000004"), failing_rank)
    assert set(caught.value.failures) == {0, 1}
    assert all(cause in text for text in caught.value.failures.values())
    if failing_rank == 0:
        assert "rank 0 failed while saving the checkpoint" in caught.value.failures[1]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_mark_names_the_size_of_every_file(tmp_path):
    folder = tmp_path / checkpoint_name(1)
    run_ranks(1, partial_body, str(folder))
    assert is_complete(folder)
    (folder / "model.txt").write_text("weight")
    assert not is_complete(folder)
    with pytest.raises(CheckpointError, match="is no complete checkpoint; give a folder step_NNNNNNNN that holds"):
        load_state(folder)
    (folder / "model.txt").write_text("weights")
    assert is_complete(folder)
    (folder / "notes.txt").write_text("what somebody laid beside it")
    assert is_complete(folder)
    (folder / "complete.json").write_text("{}")
    assert not is_complete(folder)
    (folder / "complete.json").write_text("{")
    assert not is_complete(folder)
    assert not is_complete(tmp_path / "nowhere")


def test_newest_is_by_number_and_old_ones_go(tmp_path):
    for number in (9, 10, 100):
        run_ranks(1, partial_body, str(tmp_path / checkpoint_name(number)))
    (tmp_path / "step_later").mkdir()
    assert newest_complete(tmp_path)[0] == tmp_path / checkpoint_name(100)
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000100", "step_later"]
    assert newest_complete(tmp_path / "nowhere") == (None, [])


def test_cut_checkpoint_pushes_out_none_that_can_be_used(tmp_path):
    for number in (2, 3, 4, 9):
        run_ranks(1, partial_body, str(tmp_path / checkpoint_name(number)))
    for number in (2, 9):
        (tmp_path / checkpoint_name(number) / "complete.json").unlink()
    prune(tmp_path, keep=3)
    assert len(list(tmp_path.iterdir())) == 4
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000009"]
    assert newest_complete(tmp_path)[0] == tmp_path / checkpoint_name(4)


def test_state_of_another_model_is_refused(tmp_path):
    folder = tmp_path / checkpoint_name(1)
    run_ranks(1, partial_body, str(folder))
    for parameters, message in [
        ({"other": nn.Parameter(torch.ones(3))}, "optimizer.safetensors lacks other.step; it belongs to another model"),
        ({"replica": nn.Parameter(torch.ones(4))}, r"has shape \[3\] instead of \[4\]; it belongs to another model"),
    ]:
        optimizer = torch.optim.AdamW(parameters.values())
        with pytest.raises(CheckpointError, match=message):
            load_optimizer(folder, parameters=parameters, optimizer=optimizer, group=None)
        assert not optimizer.state
