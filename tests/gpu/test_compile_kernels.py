"""`compile_kernels.py`: every kind of batch that the other tests run is run once."""

import pytest
import torch

from tests.gpu.compile_kernels import list_kernels, run_once
from tests.gpu.side import Side


@pytest.mark.parametrize(("dtype", "kind"), list_kernels())
def test_each_kind_of_batch_runs(side: Side, dtype: str, kind: str) -> None:
    """Zeros are the mean of zeros."""
    output = run_once(side, dtype, kind)
    assert output.shape == ((20 if kind == "prefill" else 1), 4, 128)
    assert not torch.count_nonzero(output)
