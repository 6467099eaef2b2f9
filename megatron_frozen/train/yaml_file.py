"""YAML: the only file that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_frozen.errors import ConfigError


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that the file `path` holds. ConfigError for a missing file, bad syntax or anything but a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the config file {path} cannot be read ({why}); give the path of a YAML file") from None
    values = parse_yaml(text, source=str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} holds no `key: value` lines; see examples/lora_smollm2.yaml")
    return values


def parse_yaml(text: str, *, source: str) -> Any:
    """The value of `text`; `source` names it in a ConfigError. A key given twice is an error, no silent overwrite."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "a config needs pyyaml, which is not installed; pip install 'megatron-frozen[train]'"
        ) from None

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
            seen = set()
            for key_node, _ in node.value:
                if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                    key = self.construct_object(key_node, deep=True)
                else:  # `<<`, whose own keys may stand here too; a list or a mapping, refused below
                    continue
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise ConfigError(f"{source}, line {line}: the key '{key}' is given a second time; keep one")
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, a number or nesting too long
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or ("not readable" if mark else error)
        raise ConfigError(f"{source}{where}: this is no valid YAML ({what}); correct it") from None
