"""Test that chapter 05 computes the loss in chunks, and trains a model too large for chapter 04."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import SCRIPTS, metrics
from harness import call


@pytest.mark.parametrize("chunk", [1, 7, 63, 1024])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_chunked_loss_equals_the_loss(load, monkeypatch, chunk, bias, frozen):
    """Compare the chunked loss and its gradients with cross_entropy() on all tokens at once."""
    chapter = load("05")
    monkeypatch.setattr(chapter, "CHUNK_SIZE", chunk)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=bias).requires_grad_(not frozen)
    hidden, labels = torch.randn(3, 22, 16, requires_grad=True), torch.randint(50, (3, 22))
    inputs = [hidden, *([] if frozen else head.parameters())]
    logits = head(hidden)[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    chunked_loss = partial(chapter.chunked_loss, head, chapter.loss_of_logits)
    chunked = chunked_loss(hidden, labels) / len(logits)
    with torch.no_grad():
        evaluated = chunked_loss(hidden.detach(), labels) / len(logits)
    assert abs(loss - chunked) < 2e-6 and abs(loss - evaluated) < 2e-6
    # Scale the loss by 3, because the gradients must also be right if a caller scales the loss.
    gradients, others = (torch.autograd.grad(3 * value, inputs) for value in (loss, chunked))
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient - other).abs().max() < 6e-6
    assert all(weight.grad is None for weight in head.parameters())


def test_head_computes_its_logits_once(load, monkeypatch):
    """Count the FLOPs of the head, which would be higher if it computed its logits twice."""
    chapter = load("05")
    monkeypatch.setattr(chapter, "CHUNK_SIZE", 8)
    head = torch.nn.Linear(16, 4096, bias=False)
    hidden = torch.randn(2, 32, 16, requires_grad=True)
    labels, loss_and_grad = torch.ones(2, 32).long(), chapter.loss_of_logits
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        chapter.chunked_loss(head, loss_and_grad, hidden, labels).backward()
    # One matrix product computes the logits, and two matrix products compute the gradients.
    assert counter.get_total_flops() == 3 * 2 * hidden.numel() * 4096


@pytest.mark.exhaustive
def test_model_too_large_for_chapter_04_trains_in_chapter_05(tmp_path):
    """Check that rank 0 of two ranks needs more than 3 GiB in chapter 04, but not in chapter 05."""
    peaks = {}
    for chapter, more in (("04", ""), ("05", "--recompute full")):
        words = f"""{more} --config num_hidden_layers=16 hidden_size=512 intermediate_size=1408
            num_attention_heads=8 num_key_value_heads=8 head_dim=64 vocab_size=16384
            --device cpu -s 512 --global-batch-size 8 -b 4 --num-steps 2 --log-every 1
            --checkpoint-every 99 --eval-every 99 --eval-samples 4 --save-dir {tmp_path}"""
        call([SCRIPTS[chapter], *words.split(), "-e", chapter], ranks=2)
        peaks[chapter] = metrics(tmp_path / chapter)[2]["peak_memory_gib"]
    assert peaks["05"] <= 3 < peaks["04"]
