"""The head of an engine on the CPU: logits in the type that was asked for, tile by tile as at once."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from rollout.cpu_worker import HEAD_WORDS, apply_head


@pytest.mark.parametrize("words", [7, HEAD_WORDS, 2 * HEAD_WORDS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_a_float32_head_multiplies_half_precision_exactly(words, biased):
    generator = torch.Generator().manual_seed(words)
    weight, hidden = (torch.randn(rows, 24, generator=generator).bfloat16() for rows in (words, 5))
    bias = torch.randn(words, generator=generator).bfloat16() if biased else None
    head = SimpleNamespace(weight=weight)
    logits = apply_head(SimpleNamespace(head_dtype=torch.float32), head, hidden, bias)  # type: ignore[arg-type]
    exact = functional.linear(hidden.double(), weight.double(), bias.double() if biased else None)
    assert logits.dtype == torch.float32 and logits.shape == (5, words)
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("head_dtype", [None, torch.bfloat16])
def test_a_head_of_the_models_type_is_vllms_own(head_dtype):
    hidden = torch.ones(2, 3, dtype=torch.bfloat16)
    own = SimpleNamespace(apply=lambda head, rows, bias: ("own", rows, bias))
    head = SimpleNamespace(quant_method=own)
    assert apply_head(SimpleNamespace(head_dtype=head_dtype), head, hidden, None) == ("own", hidden, None)  # type: ignore[arg-type]
