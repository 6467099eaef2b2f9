"""Safetensors folders: values, slices that read no more than themselves, and every way a folder can be broken."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import textwrap

import pytest
import torch

from megatron_frozen.errors import CheckpointError
from megatron_frozen.io import SafetensorsFolder, read_safetensors, write_json, write_safetensors

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def sharded(folder):
    """Two shards and their index: `a` (4, 6) and `b` (3,) in the first, `c` () in the second."""
    write_safetensors(folder / "one.safetensors", {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3)})
    write_safetensors(folder / "two.safetensors", {"c": torch.tensor(7.0)})
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write_json(folder / INDEX, {"metadata": {"total_size": 112}, "weight_map": weight_map})
    return weight_map


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_one_file(tmp_path, dtype):
    full = torch.randn(6, 5).to(DTYPES[dtype])
    write_safetensors(tmp_path / "model.safetensors", {"w": full})
    folder = SafetensorsFolder(tmp_path)
    assert folder.keys() == ["w"]
    assert folder.shape("w") == (6, 5)
    assert folder.dtype("w") == dtype
    for value, reference in [
        (folder.read("w"), full),
        (folder.read("w", start=2, stop=5), full[2:5]),
        (folder.read("w", start=1, stop=4, dim=1), full[:, 1:4]),
        (folder.read("w", start=4, stop=99), full[4:]),
        (folder.read("w", start=3, stop=3), full[3:3]),
    ]:
        assert torch.equal(value, reference)
        assert value.is_contiguous()
        assert value.untyped_storage().nbytes() == reference.numel() * full.element_size()


def test_shards(tmp_path):
    sharded(tmp_path)
    folder = SafetensorsFolder(tmp_path)
    assert folder.keys() == ["a", "b", "c"]
    assert torch.equal(folder.read("a", start=1, stop=3, dim=1), torch.arange(24.0).view(4, 6)[:, 1:3])
    assert folder.shape("c") == ()
    assert folder.read("c") == 7


def test_a_slice_reads_only_itself(tmp_path):
    """A sparse 4 GB file in a process that may map it but must not load it: peak memory stays that of a slice."""
    rows, columns = 1_000_000, 1000
    entry = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, rows * columns * 4]}
    header = json.dumps({"w": entry}).encode()
    header += b" " * (-len(header) % 8)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * columns * 4)
    script = textwrap.dedent(f"""
        import re
        from megatron_frozen.io import SafetensorsFolder

        def peak_kib():
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))

        before = peak_kib()
        folder = SafetensorsFolder({str(tmp_path)!r})
        assert folder.read("w", start=500_000, stop=500_500).shape == (500, {columns})
        print(peak_kib() - before)
        folder.read("w", start=0, stop=25_000)
        print(peak_kib() - before)
    """)
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120).stdout
    small_kib, large_kib = map(int, output.split())
    assert small_kib < 40_000
    assert large_kib > 90_000  # the control: a slice of 100 MB does show


def test_write_takes_any_strides_and_leaves_the_mark_of_torch(tmp_path):
    tensors = {"t": torch.arange(6.0).view(2, 3).t(), "e": torch.ones(1, 2).expand(3, 2), "z": torch.empty(0, 4)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    back = read_safetensors(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    with open(tmp_path / "x.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        assert json.loads(file.read(length))["__metadata__"] == {"format": "pt"}


def test_no_space_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*x\.safetensors .*; free some space"):
            write_safetensors(tmp_path / "x.safetensors", {"w": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_not_a_checkpoint_folder(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a folder; give a Hugging Face checkpoint folder"):
        SafetensorsFolder(tmp_path / "nowhere")
    message = "holds no model.safetensors and no model.safetensors.index.json; give a Hugging Face checkpoint folder"
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_file_cut_short(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"w": torch.zeros(4, 4)})
    path.write_bytes(path.read_bytes()[:keep])
    message = r"model\.safetensors \(\d+ bytes\) is not a whole safetensors file .*; copy or download it again"
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(path)


def test_missing_single_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.safetensors is missing, and it was asked for"):
        read_safetensors(tmp_path / "x.safetensors")


def test_index_names_a_missing_file(tmp_path):
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing, and .*index\.json names it; copy"):
        SafetensorsFolder(tmp_path)


def test_index_names_a_missing_key(tmp_path):
    weight_map = sharded(tmp_path)
    write_json(tmp_path / INDEX, {"weight_map": {**weight_map, "d": "two.safetensors"}})
    with pytest.raises(CheckpointError, match=r"says that two\.safetensors holds d, and it does not"):
        SafetensorsFolder(tmp_path)


def test_index_names_the_wrong_shard(tmp_path):
    weight_map = sharded(tmp_path)
    write_json(tmp_path / INDEX, {"weight_map": {**weight_map, "b": "two.safetensors"}})
    with pytest.raises(CheckpointError, match=r"says that two\.safetensors holds b, and it does not"):
        SafetensorsFolder(tmp_path)


def test_key_in_two_shards(tmp_path):
    sharded(tmp_path)
    write_safetensors(tmp_path / "two.safetensors", {"c": torch.tensor(7.0), "b": torch.zeros(3)})
    message = r"holds b in both one\.safetensors and two\.safetensors; keep one of them"
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}])
def test_index_without_a_map(tmp_path, weight_map):
    write_json(tmp_path / INDEX, {"weight_map": weight_map})
    with pytest.raises(CheckpointError, match="has no weight_map from tensor names to file names"):
        SafetensorsFolder(tmp_path)


def test_index_that_leaves_the_folder(tmp_path):
    write_json(tmp_path / INDEX, {"weight_map": {"a": "../one.safetensors"}})
    with pytest.raises(CheckpointError, match=r"names \.\./one\.safetensors, and shards must lie in the same folder"):
        SafetensorsFolder(tmp_path)


def test_unknown_key_gets_the_nearest(tmp_path):
    sharded(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"model.norm.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"holds no tensor model\.norm\.wait, did you mean 'model\.norm\.weight'"):
        SafetensorsFolder(tmp_path).read("model.norm.wait")
