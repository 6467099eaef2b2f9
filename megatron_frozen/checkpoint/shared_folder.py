"""A folder that all ranks of a group fill together, through its first rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_frozen.comm import WORLD, AnyGroup, on_first_rank
from megatron_frozen.io import atomic_folder


@contextmanager
def shared_folder(folder: Path, *, group: AnyGroup = WORLD, replace: bool = False) -> Iterator[Path]:
    """Yield to every rank the temporary folder of the first rank's `atomic_folder`; it gets its name at the end.

    Every rank of `group` calls it; if the first rank cannot open or rename the folder, all raise. Collectives: small
    objects.
    """
    doing = f"writing {folder}"
    with ExitStack() as stack:  # entered on the first rank only
        yield on_first_rank(
            lambda: stack.enter_context(atomic_folder(folder, replace=replace)), group=group, doing=doing
        )
        on_first_rank(lambda: stack.pop_all().close(), group=group, doing=doing)
