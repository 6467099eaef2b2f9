"""Files: written whole or not at all, and read in slices. Nothing here communicates."""

from __future__ import annotations

from megatron_frozen.io.atomic import atomic_folder as atomic_folder
from megatron_frozen.io.atomic import atomic_write as atomic_write
from megatron_frozen.io.atomic import exclusive_lock as exclusive_lock
from megatron_frozen.io.json_files import read_json as read_json
from megatron_frozen.io.json_files import write_json as write_json
from megatron_frozen.io.picture import write_panels as write_panels
from megatron_frozen.io.picture import write_picture as write_picture
from megatron_frozen.io.safetensors_folder import SafetensorsFolder as SafetensorsFolder
from megatron_frozen.io.safetensors_folder import read_safetensors as read_safetensors
from megatron_frozen.io.safetensors_folder import write_safetensors as write_safetensors
