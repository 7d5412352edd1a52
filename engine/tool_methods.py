"""The methods of a task that no training needs: for tools, and for pictures of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from engine.errors import LockstepError

PerSample = Mapping[str, Tensor | Sequence[Any]]
"""Values by name, one for each sample: a tensor (B, ...), or a list of B tensors of any length,
texts or objects."""


class ToolMethods:
    """The optional methods of a task for tools; `engine.contract.Task` inherits the methods.

    split_keys  for tools/study.py: {a unit that no split divides, such as "subjects": own keys of
                the names to validate and to test on}; a sample's name is in the dataset's attribute
                of that name, or else in `sources`
    """

    split_keys: ClassVar[dict[str, tuple[str, str]]] = {}

    def predict(self, model: nn.Module, batch: Any) -> PerSample:
        """Return the columns that tools/predict.py writes for each sample: predictions, and an
        identification of the sample."""
        raise LockstepError("this task predicts nothing", "task", "give it a method `predict`")

    def full_dataset(self) -> Any:
        """Return, after `load_metadata`, all samples of the configured data as one dataset to
        score."""
        raise LockstepError(
            "this task has only its own two splits",
            "split all",
            "give it a method `full_dataset`",
        )

    def export_module(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[Any], Tensor | dict[str, Tensor]]]:
        """Return the module to export, with one input (raw values, the batch as leading axis) and a
        dict of tensors as output; and a function that turns a batch of `datasets` into the
        input."""
        raise LockstepError(
            "this task cannot be exported", "task", "give it a method `export_module`"
        )

    def pictures(self, model: nn.Module, batch: Any, sums: Any) -> dict[str, np.ndarray]:
        """Return pictures of an evaluation, uint8: (H, W) or (H, W, 3) still, (T, H, W) or (T, H,
        W, 3) moving."""
        return {}
