"""Batches that are handed out without a copy: containers are new, tensors are aliases, and an edit is seen."""

from collections import UserDict, defaultdict

import numpy as np
import pytest
import torch
from data_cases import Pair, Plain, Sample, Slotted
from torchvision import tv_tensors

from lightning_echo.data.difference import LentBatch, rebuild, separate, tensors_in


class Encoding(UserDict):
    """As in transformers: ``to`` changes the object that it is called on, and pickling has rules of its own."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self

    def __getstate__(self):
        return {"data": self.data}

    def __setstate__(self, state):
        self.data = state["data"]


class Loud(dict):
    def values(self):
        raise AssertionError("its own code was run")


CONTAINERS = {
    "tensor": lambda x: x,
    "nested": lambda x: {"a": [({"x": x}, 3)]},
    "defaultdict": lambda x: defaultdict(list, x=x),
    "namedtuple": lambda x: Pair(x, 1),
    "set": lambda x: {x},
    "dataclass": Sample,
    "slots": Slotted,
    "slots of a base class, one without a value": type("MoreSlots", (Slotted,), {"__slots__": ("missing",)}),
    "plain object": Plain,
    "object with a rule for pickling": lambda x: Encoding(x=x),
}


@pytest.fixture(params=CONTAINERS)
def container(request):
    return CONTAINERS[request.param]


def test_each_use_has_containers_of_its_own_and_shares_the_memory(container):
    x = torch.arange(3.0)
    lent = LentBatch(container(x))
    uses = [lent.hand_out() for _ in range(2)]
    assert [type(use) for use in uses] == [type(lent.batch)] * 2
    assert len({id(lent.batch), *map(id, uses)}) == 3
    (first,), (second,) = map(tensors_in, uses)
    assert len({id(x), id(first), id(second)}) == 3
    assert first.data_ptr() == second.data_ptr() == x.data_ptr()
    assert first.tolist() == [0, 1, 2]


def test_what_is_popped_appended_or_edited_beside_the_tensors_comes_back():
    lent = LentBatch({"x": torch.zeros(2), "list": [1], "pair": ("a", {"b": 2}), "array": np.zeros(2), "bytes": bytearray(b"ab")})
    use = lent.hand_out()
    use.pop("x")
    use["list"].append(2)
    use["pair"][1].clear()
    use["new"] = 1
    use["array"][:] = 1
    use["bytes"].clear()
    again = lent.hand_out()
    assert list(again) == ["x", "list", "pair", "array", "bytes"]
    assert (again["list"], again["pair"]) == ([1], ("a", {"b": 2}))
    assert (again["array"].tolist(), again["bytes"]) == ([0, 0], b"ab")
    assert not lent.is_edited()


def test_a_tensor_that_is_held_twice_stays_one():
    x = torch.zeros(2)
    use = LentBatch({"a": x, "b": [x]}).hand_out()
    assert use["a"] is use["b"][0]


@pytest.mark.parametrize(
    "rebind",
    [
        lambda x: x.requires_grad_(),
        lambda x: setattr(x, "data", torch.ones(7)),
        lambda x: setattr(x, "note", "mine"),
        lambda x: setattr(x, "grad", torch.ones(2, 3)),
    ],
)
def test_what_is_only_rebound_stays_with_the_use(rebind):
    lent = LentBatch(torch.zeros(2, 3))
    rebind(lent.hand_out())
    assert not lent.is_edited()
    again = lent.hand_out()
    assert (again.shape, again.requires_grad, again.grad, vars(again)) == ((2, 3), False, None, {})
    assert again.sum() == 0


def test_a_use_may_be_reshaped_in_place():
    lent = LentBatch(torch.zeros(2, 3))
    lent.hand_out().unsqueeze_(0).resize_(2, 2)
    assert lent.hand_out().shape == (2, 3)


def test_gradients_and_graphs_stay_with_the_use():
    lent = LentBatch(torch.ones(2, requires_grad=True))
    use, again = lent.hand_out(), lent.hand_out()
    (use * torch.ones(2, requires_grad=True)).sum().backward()
    assert use.grad is not None
    assert again.grad is None
    assert all(each.requires_grad and each.is_leaf for each in (use, again))
    lent = LentBatch(torch.ones(2))
    lent.hand_out().mul_(torch.ones(2, requires_grad=True))
    assert not lent.hand_out().requires_grad


def test_subclasses_keep_class_and_metadata_and_are_watched():
    boxes = tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(5, 6))
    lent = LentBatch([boxes, tv_tensors.Image(torch.zeros(3, 2, 2)), torch.nn.Parameter(torch.zeros(2))])
    use = lent.hand_out()
    assert [type(each) for each in use] == [tv_tensors.BoundingBoxes, tv_tensors.Image, torch.nn.Parameter]
    assert (use[0].format, use[0].canvas_size) == (boxes.format, (5, 6))
    assert use[0].data_ptr() == boxes.data_ptr()
    use[0].canvas_size = (1, 1)
    assert not lent.is_edited()
    assert lent.hand_out()[0].canvas_size == (5, 6)
    use[1][0] += 1
    assert lent.is_edited()


def test_tensors_that_hang_on_a_tensor_are_aliases_too():
    x = torch.zeros(2)
    x.mask, x.notes = torch.ones(2), ["a"]
    lent = LentBatch([x])
    use = lent.hand_out()[0]
    assert use.mask is not x.mask
    assert use.mask.data_ptr() == x.mask.data_ptr()
    use.notes.append("b")
    assert lent.hand_out()[0].notes == ["a"]
    use.mask.zero_()
    assert lent.is_edited()


UNUSUAL = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "empty": lambda: torch.zeros(0),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors(kind):
    x = UNUSUAL[kind]()
    lent = LentBatch({"x": x})
    use = lent.hand_out()["x"]
    assert (type(use), use.layout, use.is_conj(), use.ndim) == (type(x), x.layout, x.is_conj(), x.ndim)
    assert not lent.is_edited()
    use.mul_(2)
    assert lent.is_edited()


def test_bytes_are_those_of_its_tensors():
    x = torch.zeros(4, 5)
    assert LentBatch({"x": x, "again": x, "y": torch.zeros(3, dtype=torch.int16), "s": "abc"}).nbytes == 86


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x[:, 0].mul_(2),
        lambda x: x.copy_(torch.ones(2, 3)),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.unbind()[0].zero_(),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_in_place_edits_of_a_use_are_seen_and_those_from_before_are_not(edit, mode):
    lent = LentBatch({"y": torch.zeros(1), "x": torch.zeros(2, 3).add_(1)})
    lent.hand_out()
    assert not lent.is_edited()
    with mode():
        edit(lent.hand_out()["x"])
    assert lent.is_edited()


@pytest.mark.parametrize("edit", [lambda x: x.data.add_(1), lambda x: x.numpy().fill(1)], ids=["data", "numpy"])
def test_edits_past_the_version_counter_are_not_seen_as_documented(edit):
    lent = LentBatch(torch.zeros(2))
    edit(lent.hand_out())
    assert not lent.is_edited()
    assert lent.hand_out().tolist() == [1, 1]


def test_inference_tensors_have_no_version_and_are_handed_out_all_the_same():
    with torch.inference_mode():
        x = torch.zeros(2)
    lent = LentBatch([x, torch.zeros(1)])
    assert not lent.is_edited()
    assert lent.hand_out()[0].data_ptr() == x.data_ptr()
    lent.hand_out()[1].add_(1)
    assert lent.is_edited()


def test_rebuilt_containers_are_new_and_tensors_the_same(container):
    x = torch.zeros(2)
    batch = container(x)
    rebuilt = rebuild(batch)
    assert [id(tensor) for tensor in tensors_in(rebuilt)] == [id(x)]
    assert (rebuilt is batch) == (batch is x)


def test_a_rebuilt_container_that_changes_itself_leaves_the_batch_alone():
    batch = Encoding(x=torch.zeros(2))
    rebuild(batch).to("meta")
    assert batch["x"].device.type == "cpu"


def test_of_two_batches_only_what_shares_memory_is_copied(container):
    shared, own = torch.zeros(4), torch.ones(2)
    batch = {"shared": container(shared), "own": own}
    apart = separate(batch, LentBatch([shared[1:], torch.ones(2)]))
    (copied,) = tensors_in(apart["shared"])
    assert copied.data_ptr() != shared.data_ptr()
    assert torch.equal(copied, shared)
    assert apart["own"] is own
    assert separate(batch, LentBatch({"x": torch.zeros(2)})) is batch


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_where_memory_cannot_be_asked_for_another_device_tells(kind):
    x = UNUSUAL[kind]()
    assert separate([x], LentBatch([x]))[0] is not x
    assert separate([x], LentBatch([torch.zeros(2, device="meta")]))[0] is x


def test_each_tensor_is_found_once_wherever_it_is_and_no_code_of_the_users_runs(container):
    x, y = torch.zeros(1), torch.zeros(2)
    batch = [container(x), {"x": x}, (y, None), Loud(y=y), "text", 3, b"bytes", torch.float32]
    batch.append(batch)
    found = tensors_in(batch)
    assert {id(tensor) for tensor in found} == {id(x), id(y)}
    assert len(found) == 2
    assert tensors_in(Loud(y=y)) == [y]


def test_many_short_lived_objects_are_not_taken_for_one():
    class Boxed(list):
        def __iter__(self):
            return ([each] for each in super().__iter__())  # lists that nobody else holds

    assert len(tensors_in([Boxed(torch.zeros(50, 1).unbind()) for _ in range(20)])) == 1000
