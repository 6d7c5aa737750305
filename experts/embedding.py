"""`QuantizedEmbedding`: an embedding whose table is bit planes, in place of `nn.Embedding`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels import PlaneMatrix, matrix_rows


class QuantizedEmbedding(nn.Module):
    """Rows of a table as a file had it quantised; its state is ``plane0``, ... and ``scales``.

    Args:
        matrix: the table, (rows, columns).
        dtype: of the rows that it gives.

    Attributes:
        num_embeddings, embedding_dim: as of `torch.nn.Embedding`.
        given: the dtype of the rows.
    """

    def __init__(self, matrix: PlaneMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.layout = matrix.layout
        self.given: torch.dtype = dtype
        self.num_embeddings, self.embedding_dim = matrix.layout.rows, matrix.layout.columns
        self._planes = [f"plane{plane}" for plane in range(len(matrix.planes))]
        for name, blob in zip(self._planes, matrix.planes, strict=True):
            self.register_buffer(name, blob)
        self.register_buffer("scales", matrix.scales)
        self._matrix = matrix

    @property
    def matrix(self) -> PlaneMatrix:
        """The table; the same object while the tensors are the same, as kernels cache by it."""
        scales = self._buffers["scales"]
        assert scales is not None
        if self._matrix.scales is not scales:
            planes = tuple(getattr(self, name) for name in self._planes)
            self._matrix = PlaneMatrix(self.layout, planes, scales)
        return self._matrix

    def forward(self, input: Tensor) -> Tensor:
        rows = matrix_rows(input.flatten(), self.matrix)
        return rows.view(*input.shape, -1).to(self.given)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.matrix.bits}"
