"""Several inputs in one row of bytes."""

from __future__ import annotations

import pytest
import torch

from fedveil.data.federated import Dataset, Examples, Federated
from fedveil.data.fields import Layout
from fedveil.data.partition import Iid
from fedveil.errors import UserError

INPUTS = {
    "ids": torch.tensor([[1, 2**40, 3], [4, 5, 6]]),
    "mask": torch.tensor([[True, False, True], [True, True, True]]),
    "image": torch.tensor([[[0.1, torch.nan]], [[-torch.inf, 1e-45]]]),
    "half": torch.tensor([[1.5], [2.5]], dtype=torch.float16),
    "number": torch.tensor([7.0, 8.0], dtype=torch.float64),
}


def test_inputs_come_back_bit_by_bit() -> None:
    layout = Layout.of(INPUTS)
    found = layout.unpack(layout.pack(INPUTS))
    assert isinstance(found, dict)
    assert list(found) == list(INPUTS)
    for name, given in INPUTS.items():
        assert found[name].dtype == given.dtype
        assert found[name].shape == given.shape
        assert found[name].numpy().tobytes() == given.numpy().tobytes()


def test_inputs_in_order_come_back_in_order() -> None:
    parts = (INPUTS["image"], INPUTS["ids"])
    layout = Layout.of(parts)
    found = layout.unpack(layout.pack(parts)[1:])
    assert isinstance(found, tuple)
    assert torch.equal(found[1], INPUTS["ids"][1:])


def test_packed_rows_can_be_mapped_one_by_one() -> None:
    layout = Layout.of(INPUTS)
    mapped = torch.func.vmap(lambda row: layout.unpack(row[None])["ids"][0])(layout.pack(INPUTS))
    assert torch.equal(mapped, INPUTS["ids"])


def test_synthetic_examples_stay_in_the_range_of_the_data() -> None:
    """Integers beyond it would not be tokens, and a mask of zeros would mask everything."""
    layout = Layout.of({"ids": torch.tensor([[0, 9]]), "mask": torch.ones(1, 2).long()})
    made = layout.unpack(layout.synthetic(50, 1.0, torch.Generator().manual_seed(0)))
    assert isinstance(made, dict)
    assert int(made["ids"].max()) == 9
    assert bool((made["mask"][:, 0] == 1).all())
    assert set(made["mask"][:, 1].tolist()) == {0, 1}


def test_misfits_are_refused_with_a_sentence() -> None:
    with pytest.raises(UserError, match="every input for every example"):
        Layout.of({"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)})
    with pytest.raises(UserError, match="'a' is a list"):
        Layout.of({"a": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="at least one tensor"):
        Layout.of({})
    with pytest.raises(UserError, match=r"The inputs are a: \[\] float32"):
        Layout.of(INPUTS).pack({"a": torch.zeros(2)})
    labels = torch.tensor([0, 1])
    one, two = Examples.of(INPUTS, labels), Examples.of((torch.zeros(2, 1),), labels)
    with pytest.raises(UserError, match="Give both the same inputs"):
        Dataset("mixed", one, two, 2)


def test_data_keep_their_inputs_when_they_are_split() -> None:
    examples = Examples.of(INPUTS, torch.tensor([0, 1]))
    data = Dataset("several", examples, examples, 2).split(Iid(2))
    assert data.layout == examples.layout
    assert data.by_example().client(1).layout == examples.layout
    assert (
        data.fingerprint()
        != Federated(
            "several", data.inputs.clone().fill_(1), data.labels, data.offsets, examples, 2
        ).fingerprint()
    )


def test_labels_may_be_ignored_but_not_negative_otherwise() -> None:
    examples = Examples(torch.zeros(2, 3), torch.tensor([[0, -100, 1], [-100, -100, -100]]))
    Dataset("ignored", examples, examples, 2)
    wrong = Examples(torch.zeros(1, 3), torch.tensor([[0, -100, -1]]))
    with pytest.raises(UserError, match="labels from -1 to 0"):
        Dataset("wrong", wrong, wrong, 2)
